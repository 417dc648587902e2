"""Transfers over RDMA, with NICs in memory: everything but the verbs themselves."""

import socket
import threading
from contextlib import suppress
from itertools import count
from typing import TypeVar

import pytest

from tests.transport.helpers import PATIENCE_S, SECRET, Memory, wait_for
from tests.transport.proxy import Proxy
from tests.transport.raw_sender import RawSender
from tests.transport.rdma.worlds import PinnedMemory, RdmaWorld, rdma_world
from transport.errors import LocalProtocolError
from transport.rdma.device import RECEIVE_DEPTH
from transport.rdma.peer_memory import BUFFER_BYTES
from transport.rdma.topology import format_nics
from transport.receive.options import ServerOptions
from transport.send.client import ClientOptions, TransferClient
from transport.send.spec import TransferSpec, Via
from transport.wire.checksum import DIGEST_BYTES, Integrity
from transport.wire.connection import Connection, ConnectionRole
from transport.wire.frames import (
    Accept,
    AskRails,
    Chunk,
    Code,
    Frame,
    Grant,
    LandingBuffers,
    Nack,
    Nics,
    Open,
    RailAnswer,
    RailBuffer,
    RailOffer,
)

pytestmark = pytest.mark.long

SIZES = [300_000, 0, 20_480, 1, 3_000_000] * 3
MIB = 1 << 20
HeardFrame = TypeVar("HeardFrame", bound=Frame)


def no_fallback(world: RdmaWorld) -> bool:
    return not world.client.fallback_bytes()


BOTH_WAYS = pytest.mark.parametrize("direct", [False, True], ids=["buffers", "direct"])


@BOTH_WAYS
@pytest.mark.parametrize("rails", [("a",), ("a", "b")], ids=["one rail", "two rails"])
@pytest.mark.parametrize("integrity", [Integrity.CHECKSUM, Integrity.NONE])
def test_bytes_are_written_into_the_pages(rails: tuple[str, ...], integrity: Integrity, direct: bool) -> None:
    with rdma_world(rails, options=ServerOptions(integrity=integrity), direct=direct) as world:
        delivery = world.deliver(SIZES)
        assert delivery.wait().ok
        assert delivery.landing_result().ok
        assert delivery.equal
        assert sum(rail.bytes_total for rail in world.client.rails()) == sum(SIZES)
        assert no_fallback(world)


def test_ranges_leave_as_they_become_ready() -> None:
    with rdma_world() as world:
        delivery = world.deliver([MIB] * 8, ready=False)
        for index in reversed(range(8)):
            delivery.push.ready(index)
            wait_for(lambda index=index: delivery.push.landed(index))
        assert delivery.wait().ok
        assert delivery.equal


@BOTH_WAYS
def test_many_transfers_share_the_rails(direct: bool) -> None:
    with rdma_world(direct=direct) as world:
        deliveries = [world.deliver(SIZES, transfer_id=f"t{i}") for i in range(12)]
        results = [delivery.wait() for delivery in deliveries]
        assert all(result.ok for result in results), results
        assert all(delivery.equal for delivery in deliveries)
        assert no_fallback(world)


@BOTH_WAYS
def test_never_more_chunks_are_out_than_the_receiver_has_receives(direct: bool) -> None:
    with rdma_world(["a"], direct=direct) as world:
        sizes = [2000] * 300
        delivery = world.deliver(sizes, ready=False)
        wait_for(lambda: [rail.up for rail in world.client.rails()] == [True])
        delivery.push.ready(range(0, 300, 2))  # ranges that do not touch are chunks of their own
        wait_for(lambda: delivery.push.stats.bytes_acked == sum(sizes) / 2)
        delivery.push.ready_all()
        assert delivery.wait().ok
        assert delivery.equal
        assert not world.rail("a0").failures
        assert no_fallback(world)


def test_both_rails_carry() -> None:
    with rdma_world() as world:
        deliveries = [world.deliver([16 * MIB], transfer_id=f"t{i}", ready=False) for i in range(2)]
        wait_for(lambda: [rail.up for rail in world.client.rails()] == [True, True])
        for delivery in deliveries:
            delivery.push.ready_all()
        assert all(delivery.wait().ok and delivery.equal for delivery in deliveries)
        assert all(rail.bytes_total for rail in world.client.rails())


@pytest.mark.parametrize("cut", ["swallow near", "swallow far", "unplug near", "unplug far", "stick near"])
@BOTH_WAYS
def test_a_rail_that_fails_is_replaced_by_the_other_and_comes_back(cut: str, direct: bool) -> None:
    how, where = cut.split()
    nic = "a0" if where == "near" else "a1"
    with rdma_world(direct=direct) as world:
        first = world.deliver([12 * MIB], ready=False)
        wait_for(lambda: [rail.up for rail in world.client.rails()] == [True, True])
        if how == "swallow":
            world.fabric.swallow(nic, after_writes=3 if where == "near" else 0)
        else:
            {"unplug": world.fabric.unplug, "stick": world.fabric.stick}[how](nic)
        first.push.ready_all()
        assert first.wait().ok
        assert first.equal
        assert no_fallback(world)
        assert world.rail("b0").bytes_total > world.rail("a0").bytes_total
        wait_for(lambda: bool(world.rail("a0").failures))

        world.fabric.mend(nic)
        wait_for(lambda: world.rail("a0").up)
        before = world.rail("a0").bytes_total
        second = world.deliver([12 * MIB], transfer_id="second")
        assert second.wait().ok
        assert second.equal
        assert world.rail("a0").times_up >= 2
        assert world.rail("a0").bytes_total > before


def test_without_any_rail_the_bytes_go_over_tcp_and_come_back_to_rdma() -> None:
    with rdma_world() as world:
        for nic in ("a0", "b1"):
            world.fabric.swallow(nic)
        first = world.deliver(SIZES)
        assert first.wait().ok
        assert first.equal
        assert world.client.fallback_bytes() == {"no_rail": sum(SIZES)}

        for nic in ("a0", "b1"):
            world.fabric.mend(nic)
        wait_for(lambda: any(rail.up for rail in world.client.rails()))
        second = world.deliver(SIZES, transfer_id="second")
        assert second.wait().ok
        assert second.equal
        assert world.client.fallback_bytes() == {"no_rail": sum(SIZES)}


def test_nics_without_a_common_fabric_and_memory_that_is_not_registered() -> None:
    with rdma_world(("a",), receiver_rails=("b",)) as world:
        delivery = world.deliver(SIZES)
        assert delivery.wait().ok
        assert delivery.equal
        assert world.client.fallback_bytes() == {"no_common_fabric": sum(SIZES)}
    with rdma_world(direct=True) as world:
        delivery = world.deliver(SIZES, register=False)
        assert delivery.wait().ok
        assert delivery.equal
        assert set(world.client.fallback_bytes()) <= {"not_granted", "peer_has_no_rdma"}


def test_a_landing_needs_no_registered_memory_where_there_are_buffers() -> None:
    with rdma_world() as world:
        delivery = world.deliver(SIZES, register=False)
        assert delivery.wait().ok
        assert delivery.equal
        assert no_fallback(world)


def test_without_room_for_buffers_the_bytes_go_over_tcp() -> None:
    options = ServerOptions(max_chunk_bytes=MIB, buffer_bytes=2 * BUFFER_BYTES - 1)  # one address has half of it
    with rdma_world(options=options) as world:
        delivery = world.deliver(SIZES)
        assert delivery.wait().ok
        assert delivery.equal
        assert world.client.fallback_bytes() == {"no_rail": sum(SIZES)}
        assert world.server.counters["rail_refused"] >= 2
        assert world.server.counters["rail_opened"] == 0


def test_rails_that_stay_leave_room_for_the_chunks_of_others() -> None:
    """Bytes without a place are read past, into a buffer."""
    options = ServerOptions(max_chunk_bytes=MIB, buffer_bytes=4 * BUFFER_BYTES)  # one address may have two of them
    with rdma_world(options=options) as world:
        delivery = world.deliver([MIB], ready=False)
        wait_for(lambda: world.server.counters["rail_opened"] + world.server.counters["rail_refused"] >= 2)
        world.server.expect("over TCP", SECRET, [2], Memory([2]))
        with RawSender.to(world.server.address) as sender:
            sender.say(sender.opening(0, "over TCP", [2]))
            sender.hear(Accept)
            world.server.cancel("over TCP")
            sender.say(Chunk(slot=0, offset=0, length=2), bytes(2 + DIGEST_BYTES))
            assert sender.hear(Nack) == Nack(slot=0, offset=0, length=2, code=Code.CANCELLED)
        delivery.push.ready_all()
        assert delivery.wait().ok


def test_a_receiver_without_nics_gets_the_bytes_over_tcp() -> None:
    with rdma_world(("a",), receiver_rails=()) as world:
        delivery = world.deliver(SIZES)
        assert delivery.wait().ok
        assert delivery.equal
        assert world.client.fallback_bytes() == {"peer_has_no_rdma": sum(SIZES)}


def test_cancelled_transfers_over_tcp_leave_room_for_later_ones() -> None:
    with rdma_world(("a",), receiver_rails=(), window_bytes=2 * MIB) as world:
        for n in range(4):
            delivery = world.deliver([16 * MIB], transfer_id=str(n))
            wait_for(lambda delivery=delivery: delivery.landing.bytes_landed > 0)
            world.server.cancel(str(n))
            delivery.wait()
        last = world.deliver(SIZES, transfer_id="last")
        assert last.wait().ok
        assert last.equal


def test_a_wrong_secret_gets_neither_memory_nor_rails() -> None:
    with rdma_world() as world:
        delivery = world.deliver(SIZES, secret=b"a wrong one")
        assert delivery.wait().reason == "bad_secret"
        assert world.client.rails() == []
        assert world.server.counters["rail_opened"] == 0
        assert delivery.landing.bytes_landed == 0


@BOTH_WAYS
def test_a_byte_that_changed_on_the_way_is_written_again(direct: bool) -> None:
    with rdma_world(direct=direct) as world:
        world.fabric.corrupt_writes = 2
        delivery = world.deliver(SIZES)
        assert delivery.wait().ok
        assert delivery.equal
        assert 1 <= world.server.counters["rejected:checksum"] <= 2


@BOTH_WAYS
def test_a_wrong_key_breaks_the_rail_not_the_transfer(direct: bool) -> None:
    with rdma_world(direct=direct) as world:
        delivery = world.deliver([8 * MIB], ready=False)
        wait_for(lambda: [rail.up for rail in world.client.rails()] == [True, True])
        with world.fabric.lock:
            world.far_nics[0].memory.clear()  # no key is good any more at a1
        delivery.push.ready_all()
        assert delivery.wait().ok
        assert delivery.equal
        assert world.rail("a0").failures["rem_access_err"] >= 1


@BOTH_WAYS
def test_cancel_frees_the_memory_once_the_sender_has_let_go(direct: bool) -> None:
    asked, gate = count(), threading.Event()  # what is left when it is cancelled does not leave before
    with rdma_world(direct=direct) as world:
        delivery = world.deliver(
            [16 * MIB] * 4, ready=False, before_segments=lambda: next(asked) == 0 or gate.wait(PATIENCE_S)
        )
        wait_for(lambda: any(rail.up for rail in world.client.rails()))
        delivery.push.ready_all()
        world.server.cancel("t", "changed my mind")
        gate.set()
        result = delivery.landing_result()
        after = bytes(delivery.target.buffer)
        assert result.reason == "cancelled"
        assert delivery.wait().reason == "cancelled"
        assert bytes(delivery.target.buffer) == after  # nothing came after on_done


def test_a_sender_that_does_not_let_go_holds_up_no_landing_and_keeps_its_buffer() -> None:
    reached, gate = threading.Event(), threading.Event()
    with rdma_world() as world:
        delivery = world.deliver([MIB] * 2, ready=False, before_segments=lambda: (reached.set(), gate.wait()))
        wait_for(lambda: any(rail.up for rail in world.client.rails()))
        delivery.push.ready_all()
        assert reached.wait(PATIENCE_S)  # the sender hangs: it cannot confirm
        before = bytes(delivery.target.buffer)
        world.server.cancel("t", "changed my mind")
        assert delivery.landing_result().reason == "cancelled"
        assert any(nic.open_queue_pairs for nic in world.far_nics)
        gate.set()
        assert delivery.wait().reason == "cancelled"
        assert world.deliver(SIZES, transfer_id="next").wait().ok
        assert bytes(delivery.target.buffer) == before  # what it wrote since then lies in the buffer


def test_in_direct_mode_a_sender_that_does_not_let_go_loses_its_queue_pairs() -> None:
    reached, gate = threading.Event(), threading.Event()
    with rdma_world(direct=True) as world:
        delivery = world.deliver([MIB] * 2, ready=False, before_segments=lambda: (reached.set(), gate.wait()))
        wait_for(lambda: any(rail.up for rail in world.client.rails()))
        delivery.push.ready_all()
        assert reached.wait(PATIENCE_S)  # the sender hangs: it cannot confirm
        world.server.cancel("t", "changed my mind")
        assert delivery.landing_result().reason == "cancelled"
        assert not any(nic.open_queue_pairs for nic in world.far_nics)
        gate.set()


def test_abort_with_writes_under_way_waits_for_them() -> None:
    with rdma_world() as world:
        delivery = world.deliver([64 * MIB], ready=False)
        wait_for(lambda: any(rail.up for rail in world.client.rails()))
        world.fabric.swallow("a1")
        world.fabric.swallow("b1")
        delivery.push.ready_all()
        delivery.push.abort("no longer needed")
        assert delivery.wait().reason == "aborted"
        assert delivery.landing_result().reason == "aborted"


@BOTH_WAYS
def test_a_lost_connection_takes_its_rails_along_and_the_transfer_resumes(direct: bool) -> None:
    with rdma_world(direct=direct) as world, Proxy(world.server.address) as proxy:
        delivery = world.deliver([MIB] * 16, ready=False, address=proxy.address)
        delivery.push.ready(range(8))
        wait_for(lambda: all(delivery.push.landed(i) for i in range(8)))
        for index in range(len(proxy.pairs)):
            proxy.cut(index)
        delivery.push.ready_all()
        assert delivery.wait().ok
        assert delivery.equal
        assert delivery.landing_result().duplicate_bytes == 0


@BOTH_WAYS
def test_another_sender_with_the_ticket_takes_over(direct: bool) -> None:
    with rdma_world(direct=direct) as world, TransferClient() as second:
        delivery = world.deliver([MIB] * 4, ready=False)
        delivery.push.ready([0, 1])
        wait_for(lambda: delivery.push.landed(0) and delivery.push.landed(1))
        delivery.push.abort("leaving", keep_landing=True)
        assert not delivery.wait().ok
        takeover = second.open(TransferSpec(world.server.address, "t", SECRET, [MIB] * 4), delivery.source)
        takeover.ready_all()
        result = takeover.wait(PATIENCE_S)
        assert result is not None
        assert result.ok
        assert result.stats.bytes_resumed == 2 * MIB
        assert delivery.equal


def test_closing_either_end_in_mid_transfer_leaves_nothing() -> None:
    for first in ("client", "server"):
        with rdma_world() as world:
            delivery = world.deliver([MIB] * 64)
            getattr(world, first).close()
            assert not delivery.wait().ok or delivery.equal


FEW_BYTES = tuple((4096 * n, 1024) for n in range(700))
WRONG = {
    "NICs twice": lambda slot, nics: [Nics(nics=nics[:1])],
    "more bytes than it gets": lambda slot, nics: [Grant(slot=slot, address=0, keys=(), extents=FEW_BYTES)] * 2,
    "memory beyond all": lambda slot, nics: [Grant(slot=slot, address=(1 << 64) - 1, keys=(), extents=((1, 1),))],
    "buffers too late": lambda slot, nics: [LandingBuffers(places=1, place_bytes=1 << 20)],
}


class OddReceiver:
    """A receiver that says what a test wants it to say, to a sender that pushes one range to it."""

    def __init__(self, world: RdmaWorld, listener: socket.socket) -> None:
        source = PinnedMemory([MIB], fill=True)
        address = "{}:{}".format(*listener.getsockname())
        self.push = world.client.open(TransferSpec(address, "t", SECRET, [MIB], via=Via.RDMA), source.source)
        self.sock, _ = listener.accept()
        self.sock.settimeout(PATIENCE_S)
        self._connection = Connection(
            ConnectionRole.RECEIVER, integrity=Integrity.CHECKSUM, nonce=b"n" * 16, now=0.0, max_chunk_bytes=MIB
        )
        self._heard: list[Frame] = []

    def say(self, *frames: Frame) -> None:
        for frame in frames:
            self.sock.sendall(self._connection.send(frame))

    def hear(self, kind: type[HeardFrame]) -> HeardFrame:
        """The next frame of a kind; those before it are passed over."""
        while True:
            while self._heard:
                if isinstance(frame := self._heard.pop(0), kind):
                    return frame
            self._connection.receive_data(self.sock.recv(1 << 16), 0.0)
            while (event := self._connection.next_event()) is not None:
                self._heard.append(event)
            if said := self._connection.data_to_send():
                self.sock.sendall(said)

    def is_left(self) -> bool:
        with suppress(ConnectionResetError):
            while self.sock.recv(1 << 16):
                pass
        return True


@pytest.mark.parametrize("what", WRONG)
def test_a_receiver_that_tells_nonsense_is_left_and_so_are_its_rails(what: str) -> None:
    with rdma_world() as world, socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = OddReceiver(world, listener)
        with receiver.sock:
            receiver.hear(AskRails)
            receiver.say(Nics(nics=format_nics(world.far.nics)))
            slot = receiver.hear(Open).slot
            for _ in range(2):
                receiver.hear(RailOffer)
            receiver.say(*WRONG[what](slot, format_nics(world.far.nics)))
            assert receiver.is_left()
            wait_for(lambda: not any(nic.open_queue_pairs for nic in world.near_nics))
        receiver.push.abort()


NEVER_BUFFERS = (0, MIB), (RECEIVE_DEPTH + 1, MIB), (16, MIB - 1), (16, 1 << 31)


@pytest.mark.parametrize(("places", "place_bytes"), NEVER_BUFFERS)
def test_a_receiver_whose_buffers_cannot_be_used_is_left(places: int, place_bytes: int) -> None:
    with rdma_world() as world, socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = OddReceiver(world, listener)
        with receiver.sock:
            receiver.hear(AskRails)
            receiver.say(LandingBuffers(places=places, place_bytes=place_bytes))
            assert receiver.is_left()
        receiver.push.abort()


@pytest.mark.parametrize("address", [(1 << 64) - 1, (1 << 64) - 2 * MIB + 1])
def test_a_receiver_whose_buffer_lies_beyond_all_memory_is_left(address: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "transport.send.lane.outlet")
    with rdma_world() as world, socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = OddReceiver(world, listener)
        with receiver.sock:
            receiver.hear(AskRails)
            receiver.say(LandingBuffers(places=2, place_bytes=MIB), Nics(nics=format_nics(world.far.nics)))
            offer = receiver.hear(RailOffer)
            receiver.say(RailBuffer(rail=offer.rail, attempt=offer.attempt, address=address, key=1))
            assert receiver.is_left()
            assert "beyond all memory" in caplog.text
        receiver.push.abort()


@pytest.mark.parametrize("announced", [False, True])
def test_a_rail_has_a_buffer_where_there_are_buffers_and_only_there(announced: bool) -> None:
    with rdma_world() as world, socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = OddReceiver(world, listener)
        with receiver.sock:
            receiver.hear(AskRails)
            if announced:
                receiver.say(LandingBuffers(places=1, place_bytes=MIB))
            receiver.say(Nics(nics=format_nics(world.far.nics)))
            offer = receiver.hear(RailOffer)
            if not announced:
                receiver.say(RailBuffer(rail=offer.rail, attempt=offer.attempt, address=0, key=1))
            receiver.say(
                RailAnswer(
                    rail=offer.rail, attempt=offer.attempt, queue_pair=1, packet_number=0, gid="", mtu=4096,
                    depth=RECEIVE_DEPTH,
                )
            )  # fmt: skip
            assert receiver.is_left()
        receiver.push.abort()


def test_a_sender_of_version_1_sends_over_tcp_and_one_meets_a_receiver_of_version_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fleet is replaced node by node."""
    monkeypatch.setattr("transport.wire.greeting.VERSION_MAX", 1)
    with rdma_world() as world:
        delivery = world.deliver(SIZES)
        assert delivery.wait().ok
        assert delivery.equal
        assert world.client.fallback_bytes() == {"peer_has_no_rdma": sum(SIZES)}
        assert world.server.counters["rail_opened"] == 0
    with rdma_world(direct=True) as world:  # as all receivers of version 1 are
        delivery = world.deliver(SIZES)
        assert delivery.wait().ok
        assert delivery.equal
        assert no_fallback(world)


def test_rdma_needs_nics_and_an_arena() -> None:
    with TransferClient(options=ClientOptions()) as client, pytest.raises(LocalProtocolError):
        client.open(TransferSpec("127.0.0.1:1", "t", SECRET, [1], via=Via.RDMA), Memory([1]))

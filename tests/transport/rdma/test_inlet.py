"""The receiving ends of rails: a number that arrives waits for its Written, and only so many of them do."""

import os
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.transport.helpers import wait_for
from transport.errors import RemoteProtocolError
from transport.rdma.device import (
    RDMA_CHUNK_BYTES,
    RECEIVE_DEPTH,
    QueuePair,
    QueuePairEnd,
    RdmaDevices,
    WorkCompletion,
    address_of,
)
from transport.rdma.inlet import NUMBER_S, RailEnds
from transport.rdma.loopback import LoopbackDevice, LoopbackFabric
from transport.rdma.peer_memory import BUFFER_BYTES
from transport.rdma.rails import Posting, RailWrite
from transport.receive.buffers import BufferRoom, RoomOfPeer
from transport.wire.frames import LandingBuffers, Nics, RailAnswer, RailBuffer, RailClosed, RailOffer, Written

PAGE = 4096


class Receiver:
    """One NIC, an arena that is registered with it, and room for two buffers."""

    def __init__(self, fabric: LoopbackFabric | None = None, *, direct: bool = False) -> None:
        self.fabric = fabric or LoopbackFabric()
        self.nic = self.fabric.device("far")
        self.devices = RdmaDevices([self.nic], direct=direct)
        self.arena = bytearray(PAGE)
        self.region = self.devices.register(memoryview(self.arena))
        self.room = BufferRoom(4 * BUFFER_BYTES)


class World:
    """A sender's queue pair, connected."""

    def __init__(self, number_s: float = NUMBER_S, *, receiver: Receiver | None = None, near: str = "near") -> None:
        self.receiver = receiver or Receiver()
        self.counted: list[str] = []
        room = RoomOfPeer(self.receiver.room, "127.0.0.1")
        self.ends = RailEnds(self.receiver.devices, room, self.counted.append, number_s=number_s)
        self.introduced = self.ends.introduction(self.receiver.region, knows_buffers=True)
        self.device: LoopbackDevice = self.receiver.fabric.device(near)
        self.source = bytearray(os.urandom(PAGE))
        self.keys = self.device.register(address_of(memoryview(self.source)), PAGE, open_to_peers=False)
        self.queue_pair: QueuePair = self.device.queue_pair()
        said = self.offer(0)
        self.buffer = next((frame for frame in said if isinstance(frame, RailBuffer)), None)
        answer = said[-1]
        assert isinstance(answer, RailAnswer)
        self.queue_pair.connect(QueuePairEnd(number=answer.queue_pair, packet_number=0, gid=answer.gid, mtu=answer.mtu))

    def offer(self, rail: int) -> list[RailBuffer | RailAnswer | RailClosed]:
        near = self.queue_pair.end
        return self.ends.offer(
            RailOffer(
                rail=rail, attempt=1, nic=0, queue_pair=near.number, packet_number=0, gid=near.gid, mtu=near.mtu
            )
        )  # fmt: skip

    def attack(self, address: int, key: int) -> str:
        """Writes a page of noise there; what the NIC says of it."""
        write = RailWrite(address_of(memoryview(self.source)), address, PAGE)
        self.queue_pair.write(Posting(1, write, True), self.keys.local, key)
        found: list[WorkCompletion] = []

        def is_over() -> bool:
            found.extend(self.queue_pair.poll())
            return bool(found)

        wait_for(is_over)
        return found[0].error

    def write(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.queue_pair.write(Posting(number, RailWrite(0, 0, 0), True, number), 0, 0)
        self.queue_pair.poll()

    def named(self, number: int) -> bool:
        return self.ends.has_arrived(Written(slot=0, offset=0, length=0, checksum=0, rail=0, attempt=1, number=number))


WorldOf = Callable[..., World]


@pytest.fixture
def world_of() -> Iterator[WorldOf]:
    made: list[World] = []

    def make(number_s: float = NUMBER_S, *, receiver: Receiver | None = None, near: str = "near") -> World:
        made.append(World(number_s, receiver=receiver, near=near))
        return made[-1]

    yield make
    for world in made:
        world.ends.close()


def test_numbers_are_named_in_any_order(world_of: WorldOf) -> None:
    world = world_of()
    for first in range(0, 4 * RECEIVE_DEPTH, RECEIVE_DEPTH):
        numbers = range(first, first + RECEIVE_DEPTH)
        world.write(numbers)
        assert all(world.named(number) for number in reversed(numbers))
    assert world.counted == ["rail_opened"]


def test_a_peer_that_does_not_say_what_it_has_written_is_not_kept_in_mind_without_end(world_of: WorldOf) -> None:
    world = world_of()
    world.write(range(RECEIVE_DEPTH))
    assert world.named(0)
    world.write(range(RECEIVE_DEPTH, RECEIVE_DEPTH + 2))  # one more than there are receives for
    with pytest.raises(RemoteProtocolError, match=f"more than {RECEIVE_DEPTH} chunks"):
        world.named(RECEIVE_DEPTH)


def test_a_number_that_does_not_come_costs_the_rail(world_of: WorldOf) -> None:
    world = world_of(number_s=0.01)
    assert not world.named(7)
    assert world.counted == ["rail_opened", "rail_lost"]


# What a sender may write into


def test_a_sender_gets_a_buffer_of_its_own_and_no_key_of_the_arena(world_of: WorldOf) -> None:
    world = world_of()
    assert world.introduced == [
        LandingBuffers(places=BUFFER_BYTES // RDMA_CHUNK_BYTES, place_bytes=RDMA_CHUNK_BYTES),
        Nics(nics="far loop -1 1"),
    ]
    assert world.buffer is not None
    assert world.attack(world.buffer.address + 3 * RDMA_CHUNK_BYTES, world.buffer.key) == ""
    fd, start = world.ends.written(Written(slot=0, offset=0, length=PAGE, checksum=0, rail=0, attempt=1, number=19))
    assert os.pread(fd, PAGE, start) == world.source
    assert not any(world.receiver.arena)


@pytest.mark.parametrize("beyond", [-1, BUFFER_BYTES - PAGE + 1], ids=["before", "behind"])
def test_nothing_beside_the_buffer_is_written(world_of: WorldOf, beyond: int) -> None:
    world = world_of()
    assert world.buffer is not None
    assert world.attack(world.buffer.address + beyond, world.buffer.key) == "rem_access_err"


def test_no_key_of_a_buffer_opens_the_arena_and_a_guess_of_its_key_does_neither(world_of: WorldOf) -> None:
    for stolen in (False, True):
        world = world_of()
        assert world.buffer is not None
        key = world.receiver.region.keys["far"].remote if stolen else world.buffer.key
        assert world.attack(world.receiver.region.address, key) == "rem_access_err"
        assert not any(world.receiver.arena)


def test_a_key_is_of_no_use_to_another_peer(world_of: WorldOf) -> None:
    receiver = Receiver()
    first, second = world_of(receiver=receiver), world_of(receiver=receiver, near="other")
    assert first.buffer is not None
    assert second.attack(first.buffer.address, first.buffer.key) == "rem_access_err"
    fd, _ = first.ends.written(Written(slot=0, offset=0, length=PAGE, checksum=0, rail=0, attempt=1, number=0))
    assert not any(os.pread(fd, PAGE, 0))


def test_a_key_is_void_once_its_rail_is_closed_whatever_the_sender_does(world_of: WorldOf) -> None:
    receiver = Receiver()
    gone, other = world_of(receiver=receiver), world_of(receiver=receiver, near="other")
    assert gone.buffer is not None
    gone.ends.closed(RailClosed(rail=0, attempt=1))
    assert gone.attack(gone.buffer.address, gone.buffer.key) == "retry_exc_err"  # there is no answer any more
    assert other.attack(gone.buffer.address, gone.buffer.key) == "rem_access_err"
    assert not receiver.nic.memory.keys() & {gone.buffer.key}


def test_a_receiver_cannot_write_into_the_memory_of_its_sender(world_of: WorldOf) -> None:
    """Over the sender's queue pair, with the right key of the sender's own memory."""
    world = world_of()
    content = bytes(world.source)
    end = world.receiver.nic.direct_queue_pair()
    end.connect(world.queue_pair.end)
    noise = bytearray(PAGE)
    address = address_of(memoryview(noise))
    keys = world.receiver.nic.register(address, PAGE, open_to_peers=False)
    target = address_of(memoryview(world.source))
    end.write(Posting(1, RailWrite(address, target, PAGE), True), keys.local, world.keys.remote)
    assert end.poll()[0].error == "rem_inv_req_err"
    assert world.source == content


def test_in_direct_mode_the_arena_is_open(world_of: WorldOf) -> None:
    world = world_of(receiver=Receiver(direct=True))
    assert world.introduced == [Nics(nics="far loop -1 1")]
    assert world.buffer is None
    assert world.attack(world.receiver.region.address, world.receiver.region.keys["far"].remote) == ""
    assert world.receiver.arena == world.source


def test_buffers_have_a_bound_and_are_given_back(world_of: WorldOf) -> None:
    world = world_of()
    assert world.receiver.room.lent_bytes == BUFFER_BYTES
    assert len(world.offer(1)) == 2
    refused = world.offer(2)  # one address has half of the budget
    assert [type(frame) for frame in refused] == [RailClosed]
    assert world.counted == ["rail_opened", "rail_opened", "rail_refused"]
    world.ends.closed(RailClosed(rail=1, attempt=1))
    assert len(world.offer(2)) == 2
    world.ends.close()
    assert not world.receiver.room.lent_bytes
    assert world.receiver.nic.open_queue_pairs == 0


def test_a_rail_that_cannot_be_connected_leaves_no_buffer(world_of: WorldOf) -> None:
    world = world_of()
    world.receiver.devices.device("far").close()
    with pytest.raises(RemoteProtocolError, match="NIC 7 of 1"):
        world.ends.offer(RailOffer(rail=1, attempt=1, nic=7, queue_pair=1, packet_number=0, gid="", mtu=0))
    assert world.receiver.room.lent_bytes == BUFFER_BYTES


def test_what_was_written_before_a_rail_broke_can_still_be_read(world_of: WorldOf) -> None:
    world = world_of(number_s=0.01)
    assert world.buffer is not None
    assert world.attack(world.buffer.address, world.buffer.key) == ""
    assert not world.named(0)  # its number never came
    fd, start = world.ends.written(Written(slot=0, offset=0, length=PAGE, checksum=0, rail=0, attempt=1, number=0))
    assert os.pread(fd, PAGE, start) == world.source
    assert world.receiver.nic.open_queue_pairs == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rail": 3}, "rail 3, which is not open"),
        ({"attempt": 2}, "rail 0, which is not open"),
        ({"length": RDMA_CHUNK_BYTES + 1}, "bytes: 1 to"),
        ({"length": 0}, "bytes: 1 to"),
    ],
)
def test_a_chunk_that_no_buffer_has_ends_the_connection(world_of: WorldOf, changes: dict[str, int], why: str) -> None:
    told = {"slot": 0, "offset": 0, "length": 1, "checksum": 0, "rail": 0, "attempt": 1, "number": 0} | changes
    with pytest.raises(RemoteProtocolError, match=why):
        world_of().ends.written(Written(**told))


def test_a_sender_that_knows_no_buffers_gets_no_rails() -> None:
    receiver = Receiver()
    ends = RailEnds(receiver.devices, RoomOfPeer(receiver.room, "127.0.0.1"), lambda _: None)
    assert ends.introduction(receiver.region, knows_buffers=False) == [Nics(nics="")]
    assert ends.introduction(receiver.region, knows_buffers=True) == []  # said once
    with pytest.raises(RemoteProtocolError, match="without a grant"):
        ends.offer(RailOffer(rail=0, attempt=1, nic=0, queue_pair=1, packet_number=0, gid="near", mtu=4096))

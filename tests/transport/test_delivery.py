"""Transfers from end to end, over real sockets: what lands, what is refused, what ends them."""

import socket
import threading
from collections.abc import Callable
from math import inf

import pytest

from tests.transport.helpers import PATIENCE_S, SECRET, Memory, client_of, deliver, wait_for
from tests.transport.proxy import Proxy
from tests.transport.raw_sender import RawSender
from transport.errors import LocalProtocolError
from transport.path.tcp import TcpOptions, parse_address
from transport.receive.connection.inlet import ReceiverThread
from transport.receive.options import Limits, ServerOptions
from transport.receive.registry.landing import LandingResult
from transport.receive.server import TransferServer
from transport.send.spec import TransferSpec
from transport.wire.checksum import DIGEST_BYTES, Integrity
from transport.wire.frames import Accept, Chunk, Nack, Refuse

pytestmark = pytest.mark.long

MIXED = [300_000, 0, 20_480, 1, 3_000_000, 70_000] * 3
MB = 1 << 20


@pytest.mark.parametrize("integrity", [Integrity.NONE, Integrity.CHECKSUM])
@pytest.mark.parametrize("connections", [1, 4])
def test_ranges_land_in_their_pages(integrity: Integrity, connections: int) -> None:
    options = ServerOptions(integrity=integrity)
    with TransferServer(options=options) as server, client_of(connections, integrity=integrity) as client:
        delivery = deliver(server, client, MIXED)
        pushed, landed = delivery.wait()
        assert delivery.equal
        assert pushed is not None
        assert landed is not None
        assert pushed.ok
        assert landed.ok
        assert landed.bytes_landed == pushed.stats.bytes_sent == sum(MIXED)
        assert not delivery.landing.missing()
        assert server.num_connections <= connections


def test_bytes_leave_as_ranges_become_ready() -> None:
    sizes = [100_000] * 8
    with TransferServer() as server, client_of() as client:
        delivery = deliver(server, client, sizes, ready=False)
        for i in (3, 0, 7, 1, 2, 6, 5, 4):
            delivery.push.ready(i)
            delivery.push.ready(i)
            wait_for(lambda i=i: delivery.push.landed(i))
        pushed, _ = delivery.wait()
        assert pushed is not None
        assert pushed.ok
        assert delivery.equal


def test_many_small_ranges_out_of_order_share_system_calls() -> None:
    sizes = [20_480] * 600
    with TransferServer() as server, client_of(2) as client:
        delivery = deliver(server, client, sizes, ready=False)
        delivery.push.ready([*range(0, 600, 2), *range(1, 600, 2)])
        pushed, _ = delivery.wait()
        assert pushed is not None
        assert pushed.ok
        assert pushed.stats.chunks >= 600
        assert delivery.equal


def test_transfers_share_their_connections() -> None:
    with TransferServer() as server, client_of(3) as client:
        deliveries = [deliver(server, client, [200_000] * 5, transfer_id=f"t{i}") for i in range(20)]
        assert all(result is not None and result.ok for d in deliveries for result in d.wait())
        assert all(d.equal for d in deliveries)
        assert server.num_connections <= 3
        assert server.counters["landed"] == 20


def test_a_cut_connection_costs_its_chunks_only() -> None:
    sizes = [MB] * 48
    with TransferServer() as server, Proxy(server.address, 60e6, passes=12 * MB) as proxy, client_of() as client:
        delivery = deliver(server, client, sizes, address=proxy.address)
        proxy.wait_for(12 * MB)
        proxy.cut(0)
        proxy.passes = inf
        pushed, landed = delivery.wait()
        assert pushed is not None
        assert landed is not None
        assert pushed.ok
        assert landed.ok
        assert 0 < pushed.stats.bytes_resent < 16 * MB
        assert delivery.equal


def test_all_connections_cut_and_the_rest_is_resumed() -> None:
    sizes = [MB] * 32
    with TransferServer() as server, Proxy(server.address, 50e6, passes=8 * MB) as proxy, client_of(2) as client:
        delivery = deliver(server, client, sizes, address=proxy.address)
        for size, then in ((8 * MB, 20 * MB), (20 * MB, inf)):
            proxy.wait_for(size)
            for index in range(len(proxy.pairs)):
                proxy.cut(index)
            proxy.passes = then
        pushed, _ = delivery.wait()
        assert pushed is not None
        assert pushed.ok
        assert len(proxy.pairs) >= 4
        assert delivery.equal


def test_another_sender_finishes_what_the_first_left() -> None:
    sizes = [MB] * 24
    with TransferServer() as server, Proxy(server.address, 10e6, passes=8 * MB) as proxy:
        with client_of(2) as first:
            delivery = deliver(server, first, sizes, address=proxy.address)
            proxy.wait_for(8 * MB)
        pushed = delivery.push.wait(PATIENCE_S)
        assert pushed is not None
        assert pushed.reason == "closing"
        assert delivery.landing.outcome is None
        with client_of(2) as second:
            push = second.open(TransferSpec(server.address, "t", SECRET, sizes), delivery.source)
            push.ready_all()
            result = push.wait(PATIENCE_S)
            assert result is not None
            assert result.ok
            assert 0 < result.stats.bytes_resumed == 24 * MB - result.stats.bytes_sent
        assert delivery.landed.wait(PATIENCE_S)
        assert delivery.equal


def test_cancel_gives_the_memory_back_at_once_though_the_link_is_stuck() -> None:
    patient = TcpOptions(dead_after_s=2 * PATIENCE_S)  # it is no loss of the connection that ends the waiting
    with (
        TransferServer(options=ServerOptions(tcp=patient)) as server,
        Proxy(server.address, 5e6, passes=2 * MB) as proxy,
        client_of(2, tcp=patient, peer_timeout_s=2 * PATIENCE_S) as client,
    ):
        delivery = deliver(server, client, [4 * MB] * 4, address=proxy.address)
        proxy.wait_for(2 * MB)
        proxy.stalled |= {0, 1}
        server.cancel("t", "client went away")
        assert delivery.landed.wait(PATIENCE_S)
        assert delivery.results[0].reason == "cancelled"
        proxy.stalled.clear()
        proxy.passes = inf
        pushed = delivery.push.wait(PATIENCE_S)
        assert pushed is not None
        assert (pushed.reason, pushed.detail) == ("cancelled", "client went away")
        again = deliver(server, client, MIXED, transfer_id="u", address=proxy.address)
        assert all(result is not None and result.ok for result in again.wait())
        assert again.equal


@pytest.mark.parametrize("integrity", [Integrity.NONE, Integrity.CHECKSUM])
def test_cancelled_transfers_leave_room_for_later_ones(integrity: Integrity) -> None:
    with (
        TransferServer(options=ServerOptions(integrity=integrity)) as server,
        Proxy(server.address, bytes_per_s=20e6) as proxy,
        client_of(1, integrity=integrity, window_bytes=2 * MB, chunk_bytes=MB) as client,
    ):
        for n in range(6):
            before = proxy.total
            delivery = deliver(server, client, [MB] * 8, transfer_id=str(n), address=proxy.address)
            proxy.wait_for(before + MB // 2)
            server.cancel(str(n))
            assert delivery.wait()[0] is not None
            assert delivery.push.stats.rejected_chunks == 0
        last = deliver(server, client, [MB] * 8, transfer_id="last", address=proxy.address)
        assert all(result is not None and result.ok for result in last.wait())
        assert last.equal
        assert len(proxy.pairs) == 1


@pytest.mark.parametrize("let_in", [False, True], ids=["stranger", "sender"])
def test_chunks_that_nobody_waits_for_are_answered_up_to_a_limit(let_in: bool) -> None:
    with TransferServer(options=ServerOptions(limits=Limits(max_passed_chunks=50))) as server:
        server.expect("t", SECRET, [1], Memory([1]))
        with RawSender.to(server.address) as peer:
            if let_in:
                peer.say(peer.opening(1, "t", [1]))
                assert isinstance(peer.answer(), Accept)
            peer.say(peer.opening(9, "?", [60]))
            assert isinstance(peer.answer(), Refuse)
            chunks = [Chunk(slot=9, offset=offset, length=1) for offset in range(60)]
            peer.sock.sendall(b"".join(peer.encoded(chunk) + bytes(1 + DIGEST_BYTES) for chunk in chunks))
            answers = [peer.hear(Nack) for _ in range(50)]
            assert answers == [Nack(slot=9, offset=offset, length=1, code="cancelled") for offset in range(50)]
            assert "50 unexpected chunks" in peer.told().detail


def test_abort_gives_the_memory_back_at_once_though_the_link_is_stuck() -> None:
    patient = TcpOptions(dead_after_s=2 * PATIENCE_S)  # it is no loss of the connection that ends the waiting
    with (
        TransferServer(options=ServerOptions(tcp=patient)) as server,
        Proxy(server.address, 5e6, passes=2 * MB) as proxy,
        client_of(2, tcp=patient, peer_timeout_s=2 * PATIENCE_S) as client,
    ):
        delivery = deliver(server, client, [4 * MB] * 4, address=proxy.address)
        proxy.wait_for(2 * MB)
        proxy.stalled |= {0, 1}
        delivery.push.abort("no more")
        pushed = delivery.push.wait(PATIENCE_S)
        assert pushed is not None
        assert pushed.reason == "aborted"
        proxy.stalled.clear()
        proxy.passes = inf


def test_what_was_promised_when_a_push_was_aborted_is_what_lands() -> None:
    """Without checksums nothing but the sender keeps wrong bytes out of a landing that another sender finishes."""
    sizes, options = [MB] * 8, {"integrity": Integrity.NONE}
    with (
        TransferServer(options=ServerOptions(integrity=Integrity.NONE)) as server,
        Proxy(server.address, 5e6, passes=MB) as proxy,
        client_of(2, **options) as first,
        client_of(2, **options) as second,
    ):
        delivery = deliver(server, first, sizes, address=proxy.address)
        sent = delivery.source.content()
        proxy.wait_for(MB)
        delivery.push.abort("another sender takes over", keep_landing=True)
        assert delivery.push.wait(PATIENCE_S) is not None
        delivery.source.buffer[:] = bytes(len(delivery.source.buffer))  # its owner uses the memory for something else
        proxy.passes = inf
        proxy.wait_for(2 * MB)  # the rest of what was promised
        push = second.open(TransferSpec(server.address, "t", SECRET, sizes), Memory(sizes, fill=True, seed=1))
        push.ready_all()
        assert delivery.landed.wait(PATIENCE_S)
        assert delivery.results[0].ok
        assert delivery.target.content() == sent


def test_abort_ends_both_sides_and_the_connections_live_on() -> None:
    with TransferServer() as server, Proxy(server.address, 5e6, passes=2 * MB) as proxy, client_of(2) as client:
        delivery = deliver(server, client, [4 * MB] * 4, address=proxy.address)
        proxy.wait_for(2 * MB)
        delivery.push.abort("no more")
        proxy.passes = inf
        pushed, landed = delivery.wait(PATIENCE_S)
        assert pushed is not None
        assert landed is not None
        assert (pushed.reason, landed.reason) == ("aborted", "aborted")
        assert deliver(server, client, MIXED, transfer_id="u", address=proxy.address).wait()[1] is not None
        assert len(proxy.pairs) == 2


def test_wrong_secret_unknown_transfer_and_wrong_sizes_are_refused_and_counted() -> None:
    with TransferServer() as server, client_of() as client:
        delivery = deliver(server, client, MIXED, secret=b"guess")
        pushed = delivery.push.wait(PATIENCE_S)
        assert pushed is not None
        assert pushed.reason == "bad_secret"
        for transfer_id, sizes, reason in (("x", MIXED, "unknown_transfer"), ("t", [5], "manifest_mismatch")):
            push = client.open(TransferSpec(server.address, transfer_id, SECRET, sizes), Memory(sizes))
            result = push.wait(PATIENCE_S)
            assert result is not None
            assert result.reason == reason
            assert server.counters[f"refused:{reason}"] == 1
        assert server.counters["refused:bad_secret"] == 1
        assert delivery.landing.bytes_landed == 0


def test_integrity_modes_must_agree() -> None:
    with TransferServer() as server, client_of(integrity=Integrity.NONE) as client:
        pushed = deliver(server, client, MIXED).push.wait(PATIENCE_S)
        assert pushed is not None
        assert pushed.reason == "integrity_mode"


@pytest.mark.parametrize(
    ("targets", "error"), [(lambda i: [memoryview(bytearray(5))], "short"), (lambda i: {}[i], "KeyError")]
)
def test_a_target_that_is_not_there_ends_its_landing_only(
    targets: Callable[[int], list[memoryview]], error: str
) -> None:
    with TransferServer() as server, client_of(2) as client:
        done: list[LandingResult] = []
        server.expect("t", SECRET, [1000], targets, on_done=done.append)
        push = client.open(TransferSpec(server.address, "t", SECRET, [1000]), Memory([1000]))
        push.ready_all()
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert result.reason == "target"
        assert error in result.detail
        assert server.counters["failed:target"] == 1
        assert all(
            result is not None and result.ok for result in deliver(server, client, MIXED, transfer_id="u").wait()
        )
        assert [result.reason for result in done] == ["target"]
        assert not server.counters["lost_connections"]


def test_a_peer_that_falls_silent_is_noticed_by_both_ends() -> None:
    tcp = TcpOptions(dead_after_s=0.6)
    with (
        TransferServer(options=ServerOptions(tcp=tcp)) as server,
        Proxy(server.address, 5e6, passes=2 * MB) as proxy,
        client_of(2, tcp=tcp, peer_timeout_s=1.0) as client,
    ):
        delivery = deliver(server, client, [4 * MB] * 4, address=proxy.address, orphan_timeout_s=0.3)
        proxy.wait_for(2 * MB)
        proxy.stalled |= set(range(100))
        pushed, landed = delivery.wait()
        assert pushed is not None
        assert landed is not None
        assert (pushed.reason, landed.reason) == ("peer_lost", "sender_lost")


def test_a_path_that_swallows_everything_costs_one_peer_timeout_and_is_used_again() -> None:
    patient = TcpOptions(dead_after_s=2 * PATIENCE_S)  # TCP would hope for longer
    with (
        TransferServer(options=ServerOptions(tcp=patient)) as server,
        Proxy(server.address, 5e6, passes=2 * MB) as proxy,
        client_of(2, tcp=patient, peer_timeout_s=1.0) as client,
    ):
        lost = deliver(server, client, [4 * MB] * 4, address=proxy.address, orphan_timeout_s=0.3)
        proxy.wait_for(2 * MB)
        swallowed = set(range(len(proxy.pairs)))
        proxy.stalled |= swallowed
        pushed = lost.push.wait(PATIENCE_S)  # the landing waits as long as TCP hopes
        assert pushed is not None
        assert (pushed.reason, "nothing acknowledged" in pushed.detail) == ("peer_lost", True)
        proxy.stalled.clear()
        proxy.passes = inf
        again = deliver(server, client, MIXED, transfer_id="u", address=proxy.address)
        assert all(result is not None and result.ok for result in again.wait())
        assert again.equal


def test_deadlines_hold_at_both_ends() -> None:
    done = threading.Event()
    with TransferServer() as server, client_of() as client:
        landing = server.expect("t", SECRET, [10], Memory([10]), on_done=lambda _: done.set(), deadline_s=1.5)
        push = client.open(TransferSpec(server.address, "t", SECRET, [10], deadline_s=60.0), Memory([10]))
        assert done.wait(PATIENCE_S)
        assert landing.result().reason == "deadline"
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert result.reason == "deadline"
        server.expect("u", SECRET, [10], Memory([10]))
        late = client.open(TransferSpec(server.address, "u", SECRET, [10], deadline_s=0.2), Memory([10])).wait(
            PATIENCE_S
        )
        assert late is not None
        assert late.reason == "deadline"


def test_strangers_and_babble_are_turned_away() -> None:
    with TransferServer() as server, client_of() as client:
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, bytes(range(256)) * 20):
            with socket.create_connection(parse_address(server.address), timeout=PATIENCE_S) as sock:
                sock.sendall(words)
                while sock.recv(1000):
                    pass
        assert server.counters["lost_connections"] == 3
        assert all(result is not None and result.ok for result in deliver(server, client, MIXED).wait())


def test_an_id_is_expected_once() -> None:
    with TransferServer() as server:
        server.expect("t", SECRET, [1], Memory([1]))
        with pytest.raises(LocalProtocolError, match="expected already"):
            server.expect("t", SECRET, [1], Memory([1]))


def test_a_listener_survives_a_connection_that_gets_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start, calls = ReceiverThread.start, iter(range(1000))

    def failing_first(inlet: ReceiverThread) -> None:
        if next(calls) < 2:
            raise RuntimeError("can't start new thread")
        start(inlet)

    monkeypatch.setattr(ReceiverThread, "start", failing_first)
    with TransferServer() as server, client_of(1) as client:
        assert all(result is not None and result.ok for result in deliver(server, client, MIXED).wait())
        assert server.counters["internal_errors"] == 2
        assert server.num_connections == 1

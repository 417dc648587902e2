"""Server and client over real sockets."""

import socket
import threading
import time
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.transport.helpers import PATIENCE_S, SECRET, Memory, deliver
from tests.transport.proxy import Proxy
from transport.checksum import DIGEST_BYTES, Integrity
from transport.client import ClientOptions, TransferClient
from transport.connection import Connection, Role
from transport.errors import Closed, ConnectionRefused, LocalProtocolError
from transport.frames import Frame, Nack, Open, Refuse
from transport.inlet import Inlet
from transport.landings import LandingResult
from transport.lanes import Urgency
from transport.metrics import TransportCollector
from transport.peer import Peer
from transport.server import ServerOptions, TransferServer
from transport.tcp import TcpOptions, format_address, parse_address
from transport.transfer import Manifest

MIXED = [300_000, 0, 20_480, 1, 3_000_000, 70_000] * 3
MB = 1 << 20


def client_of(connections: int = 4, **options: object) -> TransferClient:
    return TransferClient(options=ClientOptions(connections=connections, **options))  # type: ignore[arg-type]


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
            deadline = time.monotonic() + PATIENCE_S
            while not delivery.landing.inbox.landed.covers(i * 100_000, (i + 1) * 100_000):
                assert time.monotonic() < deadline
                time.sleep(0.001)
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
    with TransferServer() as server, Proxy(server.address, bytes_per_s=60e6) as proxy, client_of() as client:
        delivery = deliver(server, client, sizes, address=proxy.address)
        proxy.wait_for(12 * MB)
        proxy.cut(0)
        pushed, landed = delivery.wait()
        assert pushed is not None
        assert landed is not None
        assert pushed.ok
        assert landed.ok
        assert 0 < pushed.stats.bytes_resent < 16 * MB
        assert delivery.equal


def test_all_connections_cut_and_the_rest_is_resumed() -> None:
    sizes = [MB] * 32
    with TransferServer() as server, Proxy(server.address, bytes_per_s=50e6) as proxy, client_of(2) as client:
        delivery = deliver(server, client, sizes, address=proxy.address)
        for size in (8 * MB, 20 * MB):
            proxy.wait_for(size)
            for index in range(len(proxy.pairs)):
                proxy.cut(index)
        pushed, _ = delivery.wait()
        assert pushed is not None
        assert pushed.ok
        assert len(proxy.pairs) >= 4
        assert delivery.equal


def test_another_sender_finishes_what_the_first_left() -> None:
    sizes = [MB] * 24
    with TransferServer() as server, Proxy(server.address, bytes_per_s=10e6) as proxy:
        with client_of(2) as first:
            delivery = deliver(server, first, sizes, address=proxy.address)
            proxy.wait_for(8 * MB)
        pushed = delivery.push.wait(PATIENCE_S)
        assert pushed is not None
        assert pushed.reason == "closing"
        assert delivery.landing.outcome is None
        with client_of(2) as second:
            push = second.open(server.address, "t", SECRET, sizes, delivery.source)
            push.ready_all()
            result = push.wait(PATIENCE_S)
            assert result is not None
            assert result.ok
            assert 0 < result.stats.bytes_resumed == 24 * MB - result.stats.bytes_sent
        assert delivery.landed.wait(PATIENCE_S)
        assert delivery.equal


def test_cancel_gives_the_memory_back_at_once_though_the_link_is_stuck() -> None:
    with TransferServer() as server, Proxy(server.address, bytes_per_s=5e6) as proxy, client_of(2) as client:
        delivery = deliver(server, client, [4 * MB] * 4, address=proxy.address)
        proxy.wait_for(2 * MB)
        proxy.stalled |= {0, 1}
        time.sleep(0.1)
        started = time.monotonic()
        server.cancel("t", "client went away")
        assert delivery.landed.wait(PATIENCE_S)
        assert time.monotonic() - started < 5  # and the link is stuck for good
        assert delivery.results[0].reason == "cancelled"
        proxy.stalled.clear()
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


def test_chunks_that_nobody_waits_for_are_answered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.inlet.MAX_PASSED_CHUNKS", 50)
    stranger = Connection(Role.SENDER, integrity=Integrity.CHECKSUM, nonce=b"n" * 16, now=0.0, max_chunk_bytes=MB)
    with (
        TransferServer() as server,
        socket.create_connection(parse_address(server.address), timeout=PATIENCE_S) as sock,
    ):

        def hear() -> Frame:
            while (frame := stranger.next_event()) is None:
                stranger.received(sock.recv_into(stranger.receive_buffer()), 0.0)
            return frame

        sock.sendall(stranger.data_to_send())
        hear()
        where = Open(
            slot=9, transfer_id="?", proof=b"", total_bytes=60, num_ranges=1, manifest_digest=Manifest([60]).digest
        )
        sock.sendall(stranger.send(where))
        assert isinstance(hear(), Refuse)
        sock.sendall(b"".join(stranger.chunk_header(9, offset, 1, 0) + bytes(1 + DIGEST_BYTES) for offset in range(60)))
        answers = [hear() for _ in range(50)]
        with pytest.raises(ConnectionRefused, match="50 chunks"):
            hear()
        assert answers == [Nack(slot=9, offset=offset, length=1, code="cancelled") for offset in range(50)]


def test_abort_gives_the_memory_back_at_once_though_the_link_is_stuck() -> None:
    with TransferServer() as server, Proxy(server.address, bytes_per_s=5e6) as proxy, client_of(2) as client:
        delivery = deliver(server, client, [4 * MB] * 4, address=proxy.address)
        proxy.wait_for(2 * MB)
        proxy.stalled |= {0, 1}
        started = time.monotonic()
        delivery.push.abort("no more")
        pushed = delivery.push.wait(PATIENCE_S)
        assert pushed is not None
        assert pushed.reason == "aborted"
        assert time.monotonic() - started < 5  # and the link is stuck for good
        proxy.stalled.clear()


def test_what_was_promised_when_a_push_was_aborted_is_what_lands() -> None:
    """Without checksums nothing but the sender keeps wrong bytes out of a landing that another sender finishes."""
    sizes, options = [MB] * 8, {"integrity": Integrity.NONE}
    with (
        TransferServer(options=ServerOptions(integrity=Integrity.NONE)) as server,
        Proxy(server.address, bytes_per_s=5e6) as proxy,
        client_of(2, **options) as first,
        client_of(2, **options) as second,
    ):
        delivery = deliver(server, first, sizes, address=proxy.address)
        sent = delivery.source.content()
        proxy.wait_for(MB)
        delivery.push.abort("another sender takes over", keep_landing=True)
        assert delivery.push.wait(PATIENCE_S) is not None
        delivery.source.buffer[:] = bytes(len(delivery.source.buffer))  # its owner uses the memory for something else
        proxy.wait_for(2 * MB)  # the rest of what was promised
        push = second.open(server.address, "t", SECRET, sizes, Memory(sizes, fill=True, seed=1))
        push.ready_all()
        assert delivery.landed.wait(PATIENCE_S)
        assert delivery.results[0].ok
        assert delivery.target.content() == sent


def test_abort_ends_both_sides_and_the_connections_live_on() -> None:
    with TransferServer() as server, Proxy(server.address, bytes_per_s=5e6) as proxy, client_of(2) as client:
        delivery = deliver(server, client, [4 * MB] * 4, address=proxy.address)
        proxy.wait_for(2 * MB)
        delivery.push.abort("no more")
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
            push = client.open(server.address, transfer_id, SECRET, sizes, Memory(sizes))
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


def test_nobody_there_is_said_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = format_address(*probe.getsockname()[:2])
    with client_of(peer_timeout_s=0.5) as client:
        started = time.monotonic()
        push = client.open(address, "t", SECRET, [10], Memory([10]))
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert result.reason == "peer_lost"
        assert "refused" in result.detail
        assert 0.4 < time.monotonic() - started < PATIENCE_S


def test_a_peer_that_breaks_with_every_first_chunk_is_given_up() -> None:
    class Guillotine(Proxy):
        """Lets greetings pass, and cuts the connection in its first chunk."""

        def _relay(self, index: int, source: socket.socket, sink: socket.socket, forward: bool) -> None:
            class Cutting:
                def sendall(_, data: memoryview) -> None:
                    if forward and len(data) > 10_000:
                        self.cut(index)
                    else:
                        sink.sendall(data)

                shutdown = sink.shutdown

            super()._relay(index, source, Cutting(), forward)  # type: ignore[arg-type]

    with (
        TransferServer() as server,
        Guillotine(server.address) as proxy,
        client_of(1, peer_timeout_s=1.5) as client,
    ):
        delivery = deliver(server, client, [MB] * 2, address=proxy.address)
        result = delivery.push.wait(PATIENCE_S)
        assert result is not None
        assert result.reason == "peer_lost"
        assert len(proxy.pairs) < 10  # each attempt waits longer


def test_connections_lost_while_nothing_is_ready_do_not_count_against_the_peer() -> None:
    with TransferServer() as server, Proxy(server.address) as proxy, client_of(1, peer_timeout_s=0.5) as client:
        delivery = deliver(server, client, MIXED, ready=False, address=proxy.address)
        for index in range(2):
            deadline = time.monotonic() + PATIENCE_S
            while len(proxy.pairs) <= index or client.link(proxy.address).connections < 1:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(0.6)  # longer than the timeout: that is a connection, not an attempt
            proxy.cut(index)
        delivery.push.ready_all()
        assert all(result is not None and result.ok for result in delivery.wait())


@pytest.mark.parametrize(
    ("targets", "error"), [(lambda i: [memoryview(bytearray(5))], "short"), (lambda i: {}[i], "KeyError")]
)
def test_a_target_that_is_not_there_ends_its_landing_only(
    targets: Callable[[int], list[memoryview]], error: str
) -> None:
    with TransferServer() as server, client_of(2) as client:
        done: list[LandingResult] = []
        server.expect("t", SECRET, [1000], targets, on_done=done.append)
        push = client.open(server.address, "t", SECRET, [1000], Memory([1000]))
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
        Proxy(server.address, bytes_per_s=5e6) as proxy,
        client_of(2, tcp=tcp, peer_timeout_s=0.3) as client,
    ):
        delivery = deliver(server, client, [4 * MB] * 4, address=proxy.address, orphan_timeout_s=0.3)
        proxy.wait_for(2 * MB)
        proxy.stalled |= set(range(100))
        pushed, landed = delivery.wait()
        assert pushed is not None
        assert landed is not None
        assert (pushed.reason, landed.reason) == ("peer_lost", "sender_lost")


def test_deadlines_hold_at_both_ends() -> None:
    done = threading.Event()
    with TransferServer() as server, client_of() as client:
        landing = server.expect("t", SECRET, [10], Memory([10]), on_done=lambda _: done.set(), deadline_s=0.2)
        push = client.open(server.address, "t", SECRET, [10], Memory([10]), deadline_s=5.0)
        assert done.wait(PATIENCE_S)
        assert landing.result().reason == "deadline"
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert result.reason == "deadline"
        server.expect("u", SECRET, [10], Memory([10]))
        late = client.open(server.address, "u", SECRET, [10], Memory([10]), deadline_s=0.2).wait(PATIENCE_S)
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


def test_the_budget_is_kept_and_may_change() -> None:
    with TransferServer() as server, client_of(2, egress_bytes_per_s=20e6) as client:
        started = time.monotonic()
        delivery = deliver(server, client, [MB] * 10)
        assert all(result is not None and result.ok for result in delivery.wait())
        # A loaded machine may well send less than it is allowed to; never more.
        assert 10 * MB / (time.monotonic() - started) < 24e6
        client.set_egress_budget(60e6)
        started = time.monotonic()
        deliver(server, client, [MB] * 20, transfer_id="u").wait()
        assert 20 * MB / (time.monotonic() - started) < 70e6


def test_peers_of_one_link_share_its_budget() -> None:
    with TransferServer() as one, TransferServer() as other, client_of(2) as client:
        client.set_egress_budget(20e6, "west")
        started = time.monotonic()
        targets = [(server, Memory([MB] * 5, seed=i)) for i, server in enumerate((one, other))]
        pushes = []
        for server, target in targets:
            server.expect("t", SECRET, [MB] * 5, target)
            push = client.open(server.address, "t", SECRET, [MB] * 5, Memory([MB] * 5, fill=True), link="west")
            push.ready_all()
            pushes.append(push)
        assert all((result := push.wait(PATIENCE_S)) is not None and result.ok for push in pushes)
        assert 10 * MB / (time.monotonic() - started) < 24e6
        assert {state.link: state.budget_bytes_per_s for state in client.links()} == {"west": 20e6}


def test_the_link_is_described_while_it_works() -> None:
    with TransferServer() as server, client_of(2, egress_bytes_per_s=30e6) as client:
        delivery = deliver(server, client, [MB] * 64)
        deadline = time.monotonic() + PATIENCE_S
        while (state := client.link(server.address)).goodput_bytes_per_s < 1e6 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state.connections == 2
        assert state.congestion_control
        assert 1e6 < state.goodput_bytes_per_s < 60e6
        assert 0 < state.queued_bytes <= 64 * MB
        assert state.estimate_s(0) > 0.1
        delivery.wait()
        assert [link.peer for link in client.links()] == [server.address]


def test_urgent_overtakes_bulk() -> None:
    order: list[str] = []
    with TransferServer() as server, client_of(2, egress_bytes_per_s=20e6) as client:
        for name, urgency, count in (("bulk", Urgency.BULK, 40), ("urgent", Urgency.URGENT, 4)):
            sizes = [MB] * count
            server.expect(name, SECRET, sizes, Memory(sizes))
            push = client.open(
                server.address, name, SECRET, sizes, Memory(sizes), urgency=urgency,
                on_done=lambda result: order.append(result.transfer_id),
            )  # fmt: skip
            push.ready_all()
        push.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while len(order) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert order == ["urgent", "bulk"]


def test_callbacks_may_raise_and_call_back() -> None:
    with TransferServer() as server, client_of() as client:
        for name in "ab":
            server.expect(name, SECRET, [10], Memory([10]), on_done=lambda _: server.cancel("nothing"))
        second: list[object] = []

        def then(_: object) -> None:
            push = client.open(server.address, "b", SECRET, [10], Memory([10]), on_done=second.append)
            push.ready(0)
            raise RuntimeError("a callback's own fault")

        client.open(server.address, "a", SECRET, [10], Memory([10]), on_done=then).ready(0)
        deadline = time.monotonic() + PATIENCE_S
        while not second and time.monotonic() < deadline:
            time.sleep(0.01)
    assert second


def test_a_source_that_fails_leaves_the_window_free() -> None:
    with TransferServer() as server, client_of(1, window_bytes=MB) as client:
        for n in range(4):
            server.expect(str(n), SECRET, [MB], Memory([MB]))
            push = client.open(server.address, str(n), SECRET, [MB], lambda i: [][i])
            push.ready_all()
            failed = push.wait(PATIENCE_S)
            assert failed is not None
            assert failed.reason == "aborted"
        last = deliver(server, client, [MB], transfer_id="last")
        assert all(result is not None and result.ok for result in last.wait())


def test_a_source_that_fails_ends_its_push_only() -> None:
    with TransferServer() as server, client_of() as client:
        server.expect("t", SECRET, [10], Memory([10]))
        push = client.open(server.address, "t", SECRET, [10], lambda i: [memoryview(b"short")])
        push.ready(0)
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert result.reason == "aborted"
        assert all(r is not None and r.ok for r in deliver(server, client, MIXED, transfer_id="u").wait())


def test_a_long_reason_is_cut_and_a_long_id_refused() -> None:
    with TransferServer() as server, client_of(2) as client:
        delivery = deliver(server, client, MIXED, ready=False)
        deliver(server, client, MIXED, transfer_id="first").wait()
        delivery.push.abort("r" * 2000)
        pushed, landed = delivery.wait()
        assert pushed is not None
        assert landed is not None
        assert (pushed.detail, landed.detail) == ("r" * 2000, "r" * 1024)
        with pytest.raises(ValueError, match="2000 bytes"):
            client.open(server.address, "x" * 2000, SECRET, [10], Memory([10]))
        with pytest.raises(ValueError, match="placement"):
            client.open(server.address, "x", SECRET, [1] * 4000, Memory([10]), placement=[(0, 1)] * 4000)
        assert all(
            result is not None and result.ok for result in deliver(server, client, MIXED, transfer_id="u").wait()
        )
        assert not client.internal_errors


def test_a_lane_survives_what_nobody_foresaw() -> None:
    """An option of the wrong type: every attempt to connect raises what no clause expects."""
    options = TcpOptions(congestion=5)  # type: ignore[arg-type]
    with TransferServer() as server, client_of(1, peer_timeout_s=0.3, tcp=options) as client:
        for n in range(2):
            push = client.open(server.address, str(n), SECRET, [10], Memory([10]))
            result = push.wait(PATIENCE_S)
            assert result is not None
            assert (result.reason, "an error of ours" in result.detail) == ("peer_lost", True)
        assert client.internal_errors["lane"] >= 2


def test_deadlines_hold_though_keeping_a_peer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    keep, calls = Peer.keep, iter(range(1000))

    def failing_first(peer: Peer, now: float, idle_cores: float) -> None:
        if next(calls) < 3:
            raise OSError("too many open files")
        keep(peer, now, idle_cores)

    monkeypatch.setattr(Peer, "keep", failing_first)
    with TransferServer() as server, client_of() as client:
        server.expect("t", SECRET, [10], Memory([10]))
        late = client.open(server.address, "t", SECRET, [10], Memory([10]), deadline_s=0.05).wait(PATIENCE_S)
        assert late is not None
        assert late.reason == "deadline"
        assert client.internal_errors["keeper"] == 3


def test_a_listener_survives_a_connection_that_gets_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start, calls = Inlet.start, iter(range(1000))

    def failing_first(inlet: Inlet) -> None:
        if next(calls) < 2:
            raise RuntimeError("can't start new thread")
        start(inlet)

    monkeypatch.setattr(Inlet, "start", failing_first)
    with TransferServer() as server, client_of(1) as client:
        assert all(result is not None and result.ok for result in deliver(server, client, MIXED).wait())
        assert server.counters["internal_errors"] == 2
        assert server.num_connections == 1


def test_closed_means_closed() -> None:
    server, client = TransferServer().start(), client_of()
    delivery = deliver(server, client, [MB] * 4, ready=False)
    time.sleep(0.05)
    client.close()
    client.close()
    server.close()
    server.close()
    pushed, landed = delivery.wait(PATIENCE_S)
    assert pushed is not None
    assert landed is not None
    assert (pushed.reason, landed.reason) == ("closing", "cancelled")
    with pytest.raises(Closed):
        client.open(server.address, "t", SECRET, [1], Memory([1]))
    with pytest.raises(Closed):
        server.expect("t", SECRET, [1], Memory([1]))


def test_an_id_is_expected_once() -> None:
    with TransferServer() as server:
        server.expect("t", SECRET, [1], Memory([1]))
        with pytest.raises(LocalProtocolError, match="expected already"):
            server.expect("t", SECRET, [1], Memory([1]))


@pytest.mark.parametrize("address", ["localhost", ":80", "host:", "host:99999", "host:-1"])
def test_refuses_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="not host:port"):
        parse_address(address)


def test_ipv6_addresses_keep_their_brackets() -> None:
    assert parse_address("[::1]:80") == ("::1", 80)
    assert format_address("::1", 80) == "[::1]:80"


def test_peers_beyond_the_cap_are_closed_unless_busy() -> None:
    servers = [TransferServer().start() for _ in range(4)]
    try:
        with client_of(2, max_peers=2) as client:
            for i, server in enumerate(servers):
                assert all(r is not None and r.ok for r in deliver(server, client, MIXED, transfer_id=str(i)).wait())
            assert len(client.links()) == 2
            deadline = time.monotonic() + PATIENCE_S
            while servers[0].num_connections and time.monotonic() < deadline:
                time.sleep(0.01)
            assert servers[0].num_connections == 0
            assert all(r is not None and r.ok for r in deliver(servers[0], client, MIXED, transfer_id="x").wait())
    finally:
        for server in servers:
            server.close()


def test_idle_peers_are_closed_and_come_back() -> None:
    with TransferServer() as server, client_of(2, idle_timeout_s=0.2) as client:
        deliver(server, client, MIXED).wait()
        deadline = time.monotonic() + PATIENCE_S
        while server.num_connections and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.num_connections == 0
        assert all(r is not None and r.ok for r in deliver(server, client, MIXED, transfer_id="u").wait())


def test_what_was_sent_is_still_counted_when_its_peer_is_gone() -> None:
    with TransferServer() as server, client_of(1, idle_timeout_s=0.1) as client:
        assert all(result is not None and result.ok for result in deliver(server, client, [MB]).wait())
        deadline = time.monotonic() + PATIENCE_S
        while not client.gone():
            assert client.delivered()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert not client.links()
        assert client.delivered() == client.gone()
        assert client.gone()[server.address][0] >= MB
        assert f'prfaas_link_sent_bytes_total{{link="{server.address}",peer=""}}' in told(client)


def test_an_address_behind_two_links_keeps_the_budget_of_each() -> None:
    with TransferServer() as server, client_of(1) as client:
        client.set_egress_budget(5e6, "west")
        seconds = {}
        for link in ("east", "west"):
            server.expect(link, SECRET, [2 * MB], Memory([2 * MB]))
            push = client.open(server.address, link, SECRET, [2 * MB], Memory([2 * MB]), link=link)
            push.ready_all()
            result = push.wait(PATIENCE_S)
            assert result is not None
            assert result.ok
            seconds[link] = result.seconds
        assert 2 * MB / seconds["west"] < 8e6
        assert {link.link for link in client.links()} == {"east", "west"}


def told(client: TransferClient) -> str:
    registry = CollectorRegistry()
    registry.register(TransportCollector(client))
    return generate_latest(registry).decode()


def test_work_that_comes_when_a_peer_is_about_to_be_closed_as_idle_keeps_it() -> None:
    with TransferServer() as server, client_of(2) as client:
        assert all(r is not None and r.ok for r in deliver(server, client, MIXED).wait())
        (peer,) = client._peers.values()
        peer.busy_at = float("-inf")
        assert all(r is not None and r.ok for r in deliver(server, client, MIXED, transfer_id="u").wait())

"""A client with its peers: budgets, urgency, accounts, which peers are given up and which closed."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.transport.helpers import PATIENCE_S, SECRET, Memory, client_of, deliver, wait_for
from tests.transport.proxy import Proxy
from transport.errors import Closed
from transport.metrics import TransportCollector
from transport.path.link import LinkState
from transport.path.tcp import TcpOptions, format_address, parse_address
from transport.receive.server import TransferServer
from transport.send.client import TransferClient
from transport.send.peer import Peer
from transport.send.spec import TransferSpec, Urgency

pytestmark = pytest.mark.long

MIXED = [300_000, 0, 20_480, 1, 3_000_000, 70_000] * 3
MB = 1 << 20


def test_nobody_there_is_said_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = format_address(*probe.getsockname()[:2])
    with client_of(peer_timeout_s=0.5) as client:
        started = time.monotonic()
        push = client.open(TransferSpec(address, "t", SECRET, [10]), Memory([10]))
        result = push.wait(PATIENCE_S)
        assert result is not None
        assert result.reason == "peer_lost"
        assert "refused" in result.detail
        assert time.monotonic() - started > 0.4


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
    with TransferServer() as server, Proxy(server.address) as proxy, client_of(1, peer_timeout_s=1.5) as client:
        delivery = deliver(server, client, MIXED, ready=False, address=proxy.address)
        for index in range(2):
            wait_for(lambda index=index: len(proxy.pairs) > index and client.link(proxy.address).connections)
            up_at = time.monotonic()
            wait_for(lambda up_at=up_at: time.monotonic() > up_at + 1.6)
            # Longer than the timeout: that was a connection, not an attempt.
            proxy.cut(index)
        delivery.push.ready_all()
        assert all(result is not None and result.ok for result in delivery.wait())


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
            push = client.open(
                TransferSpec(server.address, "t", SECRET, [MB] * 5, link="west"), Memory([MB] * 5, fill=True)
            )
            push.ready_all()
            pushes.append(push)
        assert all((result := push.wait(PATIENCE_S)) is not None and result.ok for push in pushes)
        assert 10 * MB / (time.monotonic() - started) < 24e6
        assert {state.link: state.budget_bytes_per_s for state in client.links()} == {"west": 20e6}


def test_the_link_is_described_while_it_works() -> None:
    with TransferServer() as server, client_of(2, egress_bytes_per_s=3e6) as client:
        delivery = deliver(server, client, [MB] * 24)
        seen: list[LinkState] = []

        def described() -> bool:
            seen[:] = [client.link(server.address)]
            return seen[0].goodput_bytes_per_s >= 1e6

        wait_for(described)
        (state,) = seen
        assert state.connections == 2
        assert state.congestion_control
        assert state.goodput_bytes_per_s < 30e6  # of a moment, in which more may come than the budget has
        assert 0 < state.queued_bytes <= 24 * MB
        assert state.estimate_s(0) > 0.1
        client.set_egress_budget(None)
        delivery.wait()
        assert [link.peer for link in client.links()] == [server.address]


def test_urgent_overtakes_bulk() -> None:
    order: list[str] = []
    with TransferServer() as server, client_of(2, egress_bytes_per_s=1e6) as client:
        for name, urgency, count in (("bulk", Urgency.BULK, 20), ("urgent", Urgency.URGENT, 2)):
            sizes = [MB] * count
            server.expect(name, SECRET, sizes, Memory(sizes))
            spec = TransferSpec(server.address, name, SECRET, sizes, urgency=urgency)
            push = client.open(spec, Memory(sizes), on_done=lambda result: order.append(result.transfer_id))
            push.ready_all()
        client.set_egress_budget(20e6)
        push.wait(PATIENCE_S)
        wait_for(lambda: len(order) == 2)
    assert order == ["urgent", "bulk"]


def test_callbacks_may_raise_and_call_back() -> None:
    with TransferServer() as server, client_of() as client:
        for name in "ab":
            server.expect(name, SECRET, [10], Memory([10]), on_done=lambda _: server.cancel("nothing"))
        second: list[object] = []

        def then(_: object) -> None:
            push = client.open(TransferSpec(server.address, "b", SECRET, [10]), Memory([10]), on_done=second.append)
            push.ready(0)
            raise RuntimeError("a callback's own fault")

        client.open(TransferSpec(server.address, "a", SECRET, [10]), Memory([10]), on_done=then).ready(0)
        wait_for(lambda: second)
    assert second


def test_a_source_that_fails_leaves_the_window_free() -> None:
    with TransferServer() as server, client_of(1, window_bytes=MB) as client:
        for n in range(4):
            server.expect(str(n), SECRET, [MB], Memory([MB]))
            push = client.open(TransferSpec(server.address, str(n), SECRET, [MB]), lambda i: [][i])
            push.ready_all()
            failed = push.wait(PATIENCE_S)
            assert failed is not None
            assert failed.reason == "aborted"
        last = deliver(server, client, [MB], transfer_id="last")
        assert all(result is not None and result.ok for result in last.wait())


def test_a_source_that_fails_ends_its_push_only() -> None:
    with TransferServer() as server, client_of() as client:
        server.expect("t", SECRET, [10], Memory([10]))
        push = client.open(TransferSpec(server.address, "t", SECRET, [10]), lambda i: [memoryview(b"short")])
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
            client.open(TransferSpec(server.address, "x" * 2000, SECRET, [10]), Memory([10]))
        with pytest.raises(ValueError, match="placement"):
            client.open(TransferSpec(server.address, "x", SECRET, [1] * 4000, placement=[(0, 1)] * 4000), Memory([10]))
        assert all(
            result is not None and result.ok for result in deliver(server, client, MIXED, transfer_id="u").wait()
        )
        assert not client.internal_errors


def test_a_lane_survives_what_nobody_foresaw() -> None:
    """An option of the wrong type: every attempt to connect raises what no clause expects."""
    options = TcpOptions(congestion=5)  # type: ignore[arg-type]
    with TransferServer() as server, client_of(1, peer_timeout_s=0.3, tcp=options) as client:
        for n in range(2):
            push = client.open(TransferSpec(server.address, str(n), SECRET, [10]), Memory([10]))
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
        late = client.open(TransferSpec(server.address, "t", SECRET, [10], deadline_s=0.05), Memory([10])).wait(
            PATIENCE_S
        )
        assert late is not None
        assert late.reason == "deadline"
        assert client.internal_errors["keeper"] == 3


def test_closed_means_closed() -> None:
    server, client = TransferServer().start(), client_of()
    delivery = deliver(server, client, [MB] * 4, ready=False)
    wait_for(lambda: server.num_connections)
    client.close()
    client.close()
    server.close()
    server.close()
    pushed, landed = delivery.wait(PATIENCE_S)
    assert pushed is not None
    assert landed is not None
    assert (pushed.reason, landed.reason) == ("closing", "cancelled")
    with pytest.raises(Closed):
        client.open(TransferSpec(server.address, "t", SECRET, [1]), Memory([1]))
    with pytest.raises(Closed):
        server.expect("t", SECRET, [1], Memory([1]))


def test_peers_beyond_the_cap_are_closed_unless_busy() -> None:
    servers = [TransferServer().start() for _ in range(4)]
    try:
        with client_of(2, max_peers=2) as client:
            for i, server in enumerate(servers):
                assert all(r is not None and r.ok for r in deliver(server, client, MIXED, transfer_id=str(i)).wait())
            assert len(client.links()) == 2
            wait_for(lambda: not servers[0].num_connections)
            assert servers[0].num_connections == 0
            assert all(r is not None and r.ok for r in deliver(servers[0], client, MIXED, transfer_id="x").wait())
    finally:
        for server in servers:
            server.close()


def test_idle_peers_are_closed_and_come_back() -> None:
    with TransferServer() as server, client_of(2, idle_timeout_s=0.2) as client:
        deliver(server, client, MIXED).wait()
        wait_for(lambda: not server.num_connections)
        assert server.num_connections == 0
        assert all(r is not None and r.ok for r in deliver(server, client, MIXED, transfer_id="u").wait())


def test_what_was_sent_is_still_counted_when_its_peer_is_gone() -> None:
    with TransferServer() as server, client_of(1, idle_timeout_s=0.1) as client:
        assert all(result is not None and result.ok for result in deliver(server, client, [MB]).wait())
        wait_for(lambda: not client.delivered() or client.gone())
        assert client.gone()
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
            push = client.open(TransferSpec(server.address, link, SECRET, [2 * MB], link=link), Memory([2 * MB]))
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
    with TransferServer() as server, client_of(2, idle_timeout_s=0.0) as client:
        for n in range(50):  # the keeper is woken by each of them
            assert all(r is not None and r.ok for r in deliver(server, client, [1000], transfer_id=str(n)).wait())


@contextmanager
def busy_listener() -> Iterator[str]:
    """An address that takes no connection, and does not say so: its backlog is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield format_address(*listener.getsockname())


def connecting_to(address: str) -> int:
    """Sockets of this machine that have sent a SYN there and heard nothing (proc(5), /proc/net/tcp: state 02)."""
    remote = f"0100007F:{parse_address(address)[1]:04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2] == remote and row[3] == "02" for row in rows)


def test_a_dial_that_takes_its_time_does_not_hold_up_the_others() -> None:
    """A peer is closed as idle while one of its lanes is still dialling: the keeper does not wait for that."""
    tcp = TcpOptions(connect_timeout_s=PATIENCE_S / 3)
    with TransferServer() as server, client_of(1, tcp=tcp, idle_timeout_s=0.0) as client, busy_listener() as address:

        def dialling() -> bool:
            return any(thread.name == f"kv-lane-0-{address}" for thread in threading.enumerate())

        before = connecting_to(address)
        stuck = client.open(TransferSpec(address, "t", SECRET, [10]), Memory([10]))
        wait_for(lambda: connecting_to(address) > before)
        stuck.abort()
        assert stuck.wait(PATIENCE_S) is not None
        wait_for(lambda: address not in {state.peer for state in client.links()})
        server.expect("t", SECRET, [10], Memory([10]))
        late = client.open(TransferSpec(server.address, "t", SECRET, [10], deadline_s=0.05), Memory([10]))
        result = late.wait(PATIENCE_S)
        assert result is not None
        assert (result.reason, dialling()) == ("deadline", True)

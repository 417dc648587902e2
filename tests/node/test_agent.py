"""A node as the gateway knows it: over gRPC, with an engine that works, dies, misbehaves or never comes."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from math import nan
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from hybrid_cache.cache.events import BlocksStored
from hybrid_cache.hashing.block_hash import block_hashes
from tests.node.running import BLOCK, RunningNode, alone, bounded, config, new_runner, refused, running_node, until
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb

T = TypeVar("T")
NUM_TOKENS = 6 * BLOCK


class Bench:
    """One node for all tests of this file that leave it as it was."""

    def __init__(self, runner: asyncio.Runner, node: RunningNode) -> None:
        self._runner = runner
        self.node = node

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(bounded(scenario))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with new_runner() as runner:
        stack = AsyncExitStack()
        node = runner.run(stack.enter_async_context(running_node(config(tmp_path_factory.mktemp("node")))))
        yield Bench(runner, node)
        runner.run(stack.aclose())


def prompt(first: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Equal `first`, equal beginning."""
    return [100 + (first * 31 + i * 7) % 150 for i in range(num_tokens)]


def reserve_request(first: int, num_tokens: int = NUM_TOKENS, **changes: Any) -> pb.ReserveRequest:
    hashes = b"".join(block_hashes(prompt(first, num_tokens), BLOCK, b""))
    return pb.ReserveRequest(num_tokens=num_tokens, block_hashes=hashes, tokens_digest=b"d", **changes)


async def reservations(node: RunningNode) -> int:
    description = await node.describe()
    assert not description.integrity_error
    return description.pool.reservations


async def all_free(node: RunningNode) -> None:
    async def is_free() -> bool:
        return await reservations(node) == 0

    await until(is_free)


def test_describe(bench: Bench) -> None:
    description = bench.run(bench.node.describe())
    assert (description.role, description.state, description.block_size) == ("decode", pb.NODE_STATE_READY, BLOCK)
    assert description.engine_pid == bench.node.agent.supervisor.pid
    assert description.pool.pages_total == description.pool.pages_free > 0
    assert description.layout_fingerprint
    assert (description.HasField("own_cache"), description.own_cache) == (True, False)
    assert description.integrity_error == ""


def test_watch_begins_with_all_there_is_and_goes_on_without_a_gap(bench: Bench) -> None:
    async def scenario() -> None:
        stream = bench.node.stub.Watch(pb.WatchRequest(load_interval_s=0.05))
        first = [await stream.read() for _ in range(2)]
        assert [event.WhichOneof("event") for event in first] == ["description", "snapshot"]
        await bench.node.prefill(prompt(1, NUM_TOKENS + 1))
        events: list[pb.NodeEvent] = first
        stored: set[bytes] = set()
        while len(stored) < NUM_TOKENS // BLOCK or events[-1].WhichOneof("event") != "load":
            events.append(await stream.read())
            if events[-1].stored.group == 0:
                joined = events[-1].stored.hashes
                stored |= {joined[i : i + 32] for i in range(0, len(joined), 32)}
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        stream.cancel()
        again = bench.node.stub.Watch(pb.WatchRequest(load_interval_s=nan))
        snapshot = [await again.read() for _ in range(2)][1].snapshot
        joined = snapshot.groups[0].hashes
        assert {joined[i : i + 32] for i in range(0, len(joined), 32)} == stored
        assert (await again.read()).WhichOneof("event") == "load"  # as often as it likes
        again.cancel()

    bench.run(scenario())


def test_a_watcher_that_leaves_is_forgotten(bench: Bench) -> None:
    async def scenario() -> None:
        stream = bench.node.stub.Watch(pb.WatchRequest())
        await stream.read()
        stream.cancel()

        async def is_forgotten() -> bool:
            return not bench.node.agent.events.watching

        await until(is_forgotten)

    bench.run(scenario())


def test_reserve_and_abort(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        ticket = await node.stub.Reserve(reserve_request(2, ttl_s=60.0))
        assert (ticket.num_tokens, ticket.have_tokens, len(ticket.secret)) == (NUM_TOKENS, 0, 32)
        assert [endpoint.kind for endpoint in ticket.endpoints] == ["shm", "tcp"]
        description = await node.describe()
        assert (description.pool.reservations, description.load.landing) == (1, 1)
        for reason in ("", "unknown"):  # the second time it is no error
            done = await node.stub.Abort(pb.AbortRequest(transfer_id=ticket.transfer_id, reason="client_gone"))
            assert (done.ok, done.reason) == (True, reason)
            await all_free(node)

    bench.run(scenario())


def test_load_and_commit_put_a_prefix_into_the_cache(bench: Bench) -> None:
    """A node that sends to itself: the state travels, full attention is there already."""

    async def scenario() -> None:
        node = bench.node
        await node.prefill(prompt(3, NUM_TOKENS + 1))
        salted = [bytes(node_hash) for node_hash in _cached_hashes(node)][-NUM_TOKENS // BLOCK :]
        request = pb.ReserveRequest(num_tokens=NUM_TOKENS, block_hashes=b"".join(salted), prefix_only=True)
        ticket = await node.stub.Reserve(request)
        assert ticket.have_tokens == NUM_TOKENS
        loaded = await node.stub.Load(pb.LoadRequest(block_hashes=request.block_hashes, ticket=ticket))
        assert loaded.num_tokens == NUM_TOKENS
        assert loaded.bytes_sent > 0
        for _ in range(2):
            done = await node.stub.Commit(pb.TransferRef(transfer_id=ticket.transfer_id))
            assert (done.ok, done.reason) == (True, "")
        await all_free(node)
        done = await node.stub.Commit(pb.TransferRef(transfer_id="nobody's"))
        assert not done.ok
        assert "unknown_transfer" in done.reason

    bench.run(scenario())


def test_a_cold_copy_is_given_up_and_computed_again(bench: Bench) -> None:
    async def scenario() -> None:
        node, drop = bench.node, pb.DropPrefixRequest
        for _ in range(2):  # the second one finds it
            await node.prefill(prompt(8, NUM_TOKENS + 1))
        await all_free(node)
        hashes = b"".join(_cached_hashes(node)[-NUM_TOKENS // BLOCK :])
        assert (await node.stub.DropPrefix(drop(block_hashes=hashes, unused_s=3600.0))).pages == 0
        assert (await node.stub.DropPrefix(drop(block_hashes=hashes, keep_tokens=2 * BLOCK))).pages > 0
        assert hashes[: 2 * 32] == b"".join(_cached_hashes(node)[-2:])
        await node.prefill(prompt(8, NUM_TOKENS + 1))
        assert hashes in b"".join(_cached_hashes(node))

    bench.run(scenario())


def _cached_hashes(node: RunningNode) -> list[bytes]:
    return [
        each
        for part in node.agent.snapshot()
        if isinstance(part, BlocksStored) and not part.group
        for each in part.hashes
    ]


def test_refusals_carry_a_status_and_a_reason(bench: Bench) -> None:
    async def scenario() -> None:
        stub = bench.node.stub
        fingerprint = (await bench.node.describe()).layout_fingerprint
        ticket = pb.Ticket(num_tokens=BLOCK, layout_fingerprint=fingerprint)
        hashes = b"".join(block_hashes(prompt(4, BLOCK), BLOCK, b""))
        wrong = pb.Ticket(num_tokens=BLOCK, layout_fingerprint="other")
        code = grpc.StatusCode
        for call, status, reason in (
            (stub.Reserve(pb.ReserveRequest()), code.INVALID_ARGUMENT, "bad_request"),
            (stub.Reserve(pb.ReserveRequest(num_tokens=1 << 63)), code.INVALID_ARGUMENT, "bad_request"),
            (stub.Reserve(pb.ReserveRequest(num_tokens=1 << 20)), code.RESOURCE_EXHAUSTED, "no_capacity"),
            (stub.Load(pb.LoadRequest(ticket=ticket, block_hashes=hashes)), code.NOT_FOUND, "not_cached"),
            (stub.Load(pb.LoadRequest(ticket=ticket, block_hashes=b"x")), code.INVALID_ARGUMENT, "bad_request"),
            (stub.DropPrefix(pb.DropPrefixRequest(block_hashes=b"x")), code.INVALID_ARGUMENT, "bad_request"),
            (stub.DropPrefix(pb.DropPrefixRequest(unused_s=float("nan"))), code.INVALID_ARGUMENT, "bad_request"),
            (stub.Load(pb.LoadRequest(ticket=wrong)), code.FAILED_PRECONDITION, "layout_mismatch"),
        ):
            assert await refused(call) == (status, reason)
        assert await reservations(bench.node) == 0

    bench.run(scenario())


def test_a_call_that_is_given_up_leaves_nothing(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        await node.prefill(prompt(5, NUM_TOKENS + 1))
        hashes = b"".join(_cached_hashes(node)[-NUM_TOKENS // BLOCK :])
        unreachable = [pb.Endpoint(kind="tcp", address="127.0.0.1:1")]
        fingerprint = (await node.describe()).layout_fingerprint
        ticket = pb.Ticket(num_tokens=NUM_TOKENS, layout_fingerprint=fingerprint, endpoints=unreachable)
        load = node.stub.Load(pb.LoadRequest(ticket=ticket, block_hashes=hashes), timeout=0.2)
        assert (await refused(load))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
        commit = await node.stub.Reserve(reserve_request(6, prefix_only=True))
        waiting = node.stub.Commit(pb.TransferRef(transfer_id=commit.transfer_id), timeout=0.1)
        assert (await refused(waiting))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
        assert await reservations(node) >= 1
        await node.stub.Abort(pb.AbortRequest(transfer_id=commit.transfer_id))
        await all_free(node)

        async def is_idle() -> bool:
            return node.agent.is_idle()

        await until(is_idle)  # the push, too, has heard that its call was given up

    bench.run(scenario())


HELLO = m.Hello(engine_pid=1, model_id="m", layout_json="{}", max_model_len=1, http_url="")


@pytest.mark.parametrize(
    "said",
    [
        m.encode(HELLO),
        m.encode(m.EndJob(job="j")),
        m.encode(m.LoadReport(running=9, waiting=9, queued_tokens=9)),
        b"\x05\x00\x00\x00\xff\xff\xff\xff\xff",
        b"\xff\xff\xff\xff",
        m.encode(m.EndJob(job="xy")).replace(b"xy", b"\xff\xfe"),
    ],
    ids=["a second engine", "no Hello", "a load without Hello", "no message", "too long", "no text"],
)
def test_who_is_not_the_engine_is_hung_up_on(bench: Bench, said: bytes) -> None:
    async def scenario() -> None:
        before = await bench.node.describe()
        reader, writer = await asyncio.open_unix_connection(bench.node.agent.socket.path)
        writer.write(said)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        after = await bench.node.describe()
        assert (after.state, after.engine_pid) == (pb.NODE_STATE_READY, before.engine_pid)
        assert after.load.running == 0

    bench.run(scenario())


async def _say_nonsense(address: str) -> None:
    """What a listener for KVCache hangs up on."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(bytes(range(64)))
    await reader.read()  # until it has hung up
    writer.close()
    await writer.wait_closed()


def test_metrics_and_health(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.node.prefill(prompt(7, NUM_TOKENS + 1))
        await _say_nonsense(bench.node.agent.listener.endpoints()[-1].address)
        status, text = await bench.node.get("/metrics")
        assert status == 200
        assert 'prfaas_landing_events_total{cluster="west",event="rejected:protocol"} 1.0' in text
        assert 'prfaas_node_ready{cluster="west"} 1.0' in text
        assert 'prfaas_prefill_tokens_total{cluster="west",source="computed"}' in text
        assert 'prfaas_engine_jobs_total{cluster="west",kind="local",outcome="ok"}' in text
        assert 'prfaas_pool_pages{cluster="west",state="prefix"}' in text
        status, text = await bench.node.get("/health")
        assert (status, '"ready"' in text) == (200, True)

    bench.run(scenario())


def test_an_engine_that_is_killed_comes_back_and_finds_its_cache(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        await node.prefill(prompt(8, NUM_TOKENS + 1))
        held = await node.stub.Reserve(reserve_request(9))
        before = await node.describe()
        stream = node.stub.Watch(pb.WatchRequest())
        await stream.read()
        os.kill(before.engine_pid, signal.SIGKILL)
        down = await _next_state(stream, pb.NODE_STATE_ENGINE_DOWN)
        assert down.engine_pid == 0
        assert await refused(node.stub.Reserve(reserve_request(10))) == (grpc.StatusCode.UNAVAILABLE, "engine_down")
        assert (await node.get("/health"))[0] == 503
        up = await _next_state(stream, pb.NODE_STATE_READY)
        stream.cancel()
        assert (up.boot_id, up.engine_pid != before.engine_pid) == (before.boot_id, True)
        assert node.agent.supervisor.restarts == 1
        assert await node.prefill(prompt(8, NUM_TOKENS + 1)) == NUM_TOKENS
        # A reservation without a claim outlives the engine.
        assert (await node.stub.Abort(pb.AbortRequest(transfer_id=held.transfer_id))).reason == ""
        await all_free(node)

    bench.run(scenario())


async def _next_state(stream: Any, state: int) -> pb.NodeDescription:
    while (event := await stream.read()).description.state != state:
        pass
    description: pb.NodeDescription = event.description
    return description


def test_drain_refuses_what_is_new_and_waits_for_what_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_node(config(tmp_path)) as node:
            prefix = await node.stub.Reserve(reserve_request(1, prefix_only=True))
            done = await node.stub.Drain(pb.DrainRequest(timeout_s=0.1))
            assert (done.ok, done.reason) == (False, "requests still run")
            assert await refused(node.stub.Reserve(reserve_request(2))) == (grpc.StatusCode.UNAVAILABLE, "draining")
            assert (await node.get("/health"))[0] == 503
            drained = asyncio.create_task(_drain(node))
            commit = asyncio.create_task(_commit(node, prefix.transfer_id))
            await node.describe()  # asked after them, and answered
            assert not drained.done()
            assert not commit.done(), "what may still land is waited for, not refused"
            await node.stub.Abort(pb.AbortRequest(transfer_id=prefix.transfer_id))
            assert (await drained).ok
            assert not (await commit).ok

    alone(scenario())


async def _drain(node: RunningNode) -> pb.Done:
    done: pb.Done = await node.stub.Drain(pb.DrainRequest(timeout_s=60.0))
    return done


async def _commit(node: RunningNode, transfer_id: str) -> pb.Done:
    done: pb.Done = await node.stub.Commit(pb.TransferRef(transfer_id=transfer_id))
    return done


def test_a_context_is_kept_extended_and_ended(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        await node.prefill(prompt(21, NUM_TOKENS + 1))
        hashes = b"".join(_cached_hashes(node)[-NUM_TOKENS // BLOCK :])
        request = pb.ContextRequest(context_id="c", block_hashes=hashes, num_tokens=NUM_TOKENS, ttl_s=60.0)
        made = await node.stub.CreateContext(request)
        assert (made.num_tokens, 0 < made.ttl_s <= 60.0) == (NUM_TOKENS, True)
        description = await node.describe()
        assert [context.context_id for context in description.contexts] == ["c"]
        assert description.pool.pages_locked > 0
        assert f'prfaas_context_tokens{{cluster="west"}} {float(NUM_TOKENS)}' in (await node.get("/metrics"))[1]
        code = grpc.StatusCode
        again = await node.stub.CreateContext(request)
        assert (again.num_tokens, again.added_tokens, made.added_tokens) == (NUM_TOKENS, 0, NUM_TOKENS)
        request.owner, request.budget_tokens = "another", 1
        assert await refused(node.stub.CreateContext(request)) == (code.ALREADY_EXISTS, "context_exists")
        assert (await node.stub.DeleteContext(request)).reason == "unknown"
        request.context_id = "d"
        assert await refused(node.stub.CreateContext(request)) == (code.RESOURCE_EXHAUSTED, "over_budget")

        async def is_idle() -> bool:
            return node.agent.is_idle()

        await until(is_idle)  # a context is no work to wait for
        assert (await node.stub.ExtendContext(pb.ContextRequest(context_id="c", ttl_s=3600.0))).ttl_s > 60.0
        for reason in ("", "unknown"):
            done = await node.stub.DeleteContext(pb.ContextRequest(context_id="c"))
            assert (done.ok, done.reason) == (True, reason)
        await all_free(node)
        short = pb.ContextRequest(context_id="short", block_hashes=hashes, num_tokens=NUM_TOKENS, ttl_s=0.01)
        await node.stub.CreateContext(short)
        await all_free(node)  # by housekeeping
        endless = pb.ContextRequest(context_id="c", block_hashes=hashes, num_tokens=NUM_TOKENS)
        nameless = pb.ContextRequest(block_hashes=hashes, num_tokens=NUM_TOKENS, ttl_s=1.0)
        for wrong in (endless, nameless):
            assert await refused(node.stub.CreateContext(wrong)) == (code.INVALID_ARGUMENT, "bad_request")
        uncached = pb.ContextRequest(context_id="c", block_hashes=bytes(32), num_tokens=BLOCK, ttl_s=1.0)
        assert await refused(node.stub.CreateContext(uncached)) == (code.NOT_FOUND, "not_cached")
        unknown = pb.ContextRequest(context_id="nobody's", ttl_s=1.0)
        assert await refused(node.stub.ExtendContext(unknown)) == (code.NOT_FOUND, "unknown_context")

    bench.run(scenario())


def test_watchers_hear_at_once_of_many_reservations_and_whose_they_are(bench: Bench) -> None:
    async def scenario() -> None:
        node = bench.node
        stream = node.stub.Watch(pb.WatchRequest(load_interval_s=60.0, holder="one.a"))
        for _ in range(2):  # what there is
            await stream.read()
        # Bookings of earlier tests may count, too: of eight, the last report leaves three untold at most.
        names = ("one.a", "one.b", *["other"] * 6)
        tickets = [
            await node.stub.Reserve(reserve_request(40 + number, holder=name)) for number, name in enumerate(names)
        ]
        # The answers have told the last of each: what the other gateways have.
        assert [ticket.others.requests for ticket in tickets] == [0, 0] + [2] * 6
        clocks = [ticket.others.clock_s for ticket in tickets]
        assert clocks == sorted(clocks)
        told = (0, 0)
        while told[1] < 3:  # the engine reports as well
            load = (await stream.read()).load
            told = load.booked_by_own, load.booked_by_others
        assert (told[0], told[1] in range(3, 7)) == (2, True)
        stream.cancel()
        prefix = await node.stub.Reserve(reserve_request(50, holder="third", prefix_only=True))
        assert prefix.others.requests == 8
        for ticket in (*tickets, prefix):
            await node.stub.Abort(pb.AbortRequest(transfer_id=ticket.transfer_id))
        await all_free(node)
        assert node.agent.holders.booked_by_others("fourth") == 0

    bench.run(scenario())

"""Prefixes that routing wants elsewhere are moved, and a move that fails costs nothing but the computing."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from gateway.cluster.node import NodeWork
from gateway.config.gateway import RoutingConfig
from gateway.prompt.prompt import Prompt
from gateway.routing.prefix_transfers import PrefixTransfer, PrefixTransfers
from gateway.routing.replication import Replicas
from gateway.tasks import TaskSet
from gateway.telemetry.metrics import Metrics
from hybrid_cache.index.store import StoreConfig
from hybrid_cache.layout.layout import ModelLayout
from planner.decisions.routing.offload import Reason
from planner.decisions.views import Role
from tests.gateway.layouts import BLOCK_SIZE, LAYOUT
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.scripted import ScriptedNode
from tests.gateway.views import ABUNDANT, Watched, deciding, watched
from tests.gateway.worlds import PATIENCE_S, on_loop, until
from transport.control.proto import node_pb2 as pb

LONG = "the quick brown fox jumps over the lazy dog " * 40
LONGER = LONG * 2
OTHER = "a lazy cat sat on the mat while it rained all day " * 40
SLOW_TOKENS_PER_S = 50.0  # computing takes seconds: any move that is made is waited for
SHARED = RoutingConfig(cross_cluster_cache=True, prefill_tokens_per_s=SLOW_TOKENS_PER_S)


async def holds(
    w: Pipelined, node: ScriptedNode, texts: Sequence[str], medium: "pb.Medium.ValueType" = pb.MEDIUM_MEMORY
) -> None:
    """The gateway hears that `node` has the prefixes of `texts` cached, and that there is bandwidth to spare."""
    for each in w.nodes.remote:
        each.load = ABUNDANT
    clusters = w.clusters
    for text in texts:
        hashes = b"".join(w.hashes_of(text))
        for group in (0, 1):
            node.tell(pb.NodeEvent(stored=pb.BlocksStored(group=group, hashes=hashes, medium=medium)))

    def is_known() -> bool:
        index = clusters.index
        assert index is not None
        hits = [index.match(node.node_id, w.hashes_of(text), 10_000).num_tokens for text in texts]
        return all(hits) and all(link.available_bytes_per_s for link in w.links.views())

    await until(is_known)


@on_memory_loop
async def test_a_prefix_of_the_other_cluster_is_fetched_first() -> None:
    async with pipeline(routing=SHARED) as w:
        await holds(w, w.nodes.remote[0], [LONG])
        response = await w.complete(LONG)
        assert response.headers["x-prfaas-route"].startswith("local; node=p0; uncached=")
        (record,) = await w.records()
        assert (record["fetched_from"], record["fallbacks"]) == ("r0", [])
        blocks = len(w.hashes_of(LONG))
        assert w.nodes.remote[0].loads == [("p0", blocks * BLOCK_SIZE, blocks)]
        await w.settled()
        assert 'prfaas_prefix_moves_total{outcome="ok",reason="request"} 1.0' in await w.metrics()


@on_loop
async def test_what_only_an_engine_has_cached_is_used_where_it_is() -> None:
    async with deciding(routing=SHARED) as d:
        await d.holds(d.nodes.remote[0], LONG, pb.MEDIUM_ENGINE)
        way = d.route(LONG)
        assert (way.prefill_node, way.fetch_from, way.reason) == ("r0", None, Reason.REMOTE_PREFIX)


@on_loop
async def test_nothing_moves_unless_configured() -> None:
    async with deciding() as d:
        await d.holds(d.nodes.remote[0], LONG)
        way = d.route(LONG)
        assert (way.prefill_node, way.fetch_from) == ("r0", None)


@on_loop
async def test_nothing_moves_over_a_busy_link() -> None:
    async with deciding(routing=SHARED) as d:
        await d.holds(d.nodes.remote[0], LONG)
        assert d.route(LONG).fetch_from == "r0"
        busy = pb.Link(peer="west", available_bytes_per_s=1e9, utilisation=0.7)
        await d.reports(d.nodes.remote[0], pb.Load(links=[busy]))
        assert d.route(LONG).fetch_from is None


@dataclass
class Moving(Watched):
    """Moves between nodes that a gateway sees, without the gateway."""

    moves: PrefixTransfers
    metrics: Metrics

    def prompt(self, text: str) -> Prompt:
        return self.request(text).prompt

    def move(self, text: str, source: str = "r0", target: str = "p0") -> PrefixTransfer:
        """The blocks of a plain prompt go from one node to another."""
        hashes = tuple(self.prompt(text).hashes)
        nodes = self.clusters.by_id(source), self.clusters.by_id(target)
        return PrefixTransfer(*nodes, hashes, len(hashes) * BLOCK_SIZE, LAYOUT.kv_bytes(len(hashes) * BLOCK_SIZE))

    def counts(self, series: str) -> bool:
        return series in self.metrics.render().decode()


@asynccontextmanager
async def moving(
    remote: int = 1, *, limit: int = 4, timeout_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[Moving]:
    async with watched(remote, clock=clock) as w:
        metrics, tasks = Metrics(), TaskSet(w.errors.append)
        moves = PrefixTransfers(metrics, tasks, clock, limit=limit, timeout_s=timeout_s)
        try:
            yield Moving(w.clusters, w.nodes, w.errors, moves, metrics)
        finally:
            await tasks.join(PATIENCE_S)
        assert not w.errors


@pytest.mark.parametrize(("fault", "reason"), [("hang", "timeout"), ("NOT_FOUND", "not_found")])
@on_loop
async def test_a_move_that_fails_is_counted_and_what_was_reserved_for_it_given_back(fault: str, reason: str) -> None:
    async with moving(timeout_s=1.0 if fault == "hang" else PATIENCE_S) as m:
        m.nodes.remote[0].script.load = [fault]
        assert await m.moves.make(m.move(LONG), PATIENCE_S) == reason
        await until(lambda: [why for _, why in m.nodes.local[0].aborts] == ["prefix_not_moved"])
        assert m.counts(f'prfaas_prefix_moves_total{{outcome="{reason}",reason="request"}} 1.0')
        assert not m.nodes.leftovers()


@on_memory_loop
async def test_moves_that_time_out_are_soon_made_no_more() -> None:
    routing = RoutingConfig(prefill_tokens_per_s=SLOW_TOKENS_PER_S, move_timeout_s=0.5)
    async with pipeline(remote=0, local=2, decode=1, routing=routing) as w:
        source, target = w.nodes.local
        source.script.load = ["hang"] * 8
        source.script.tokens_per_s = target.script.tokens_per_s = SLOW_TOKENS_PER_S
        await holds(w, source, [LONG])
        w.clusters.by_id("p0").take(NodeWork(tokens=100_000))
        for _ in range(8):
            assert (await w.complete(LONG)).headers["x-prfaas-route"].startswith("local; node=p1; ")
        assert len(target.bodies) == 8
        # Moves are feared to take 1, 2, 4, 8 and 16 s. Computing takes some 7 s, and half as much again on a busy node.
        fallbacks = [record["fallbacks"] for record in await w.records()]
        tried = 8 - fallbacks.count([])
        assert 1 <= tried <= 5
        assert len(source.loads) <= tried  # on a busy machine the time of a move may be over before its source is asked


@on_memory_loop
async def test_a_request_waits_for_a_move_no_longer_than_computing_takes() -> None:
    async with pipeline(routing=replace(SHARED, prefill_tokens_per_s=10_000.0)) as w:
        source = w.nodes.remote[0]
        source.script.load = ["hang"]
        await holds(w, source, [LONG])
        assert (await w.complete(LONG)).status == 200
        (record,) = await w.records()
        assert (record["fetched_from"], record["fallbacks"]) == ("", ["fetch_late"])


@on_memory_loop
async def test_a_target_without_room_is_no_error() -> None:
    async with pipeline(routing=SHARED) as w:
        await holds(w, w.nodes.remote[0], [LONG])
        w.nodes.local[0].script.reserve = ["RESOURCE_EXHAUSTED"]
        assert (await w.complete(LONG)).status == 200
        (record,) = await w.records()
        assert record["fallbacks"] == ["fetch_no_capacity"]


@on_loop
async def test_requests_for_one_prefix_make_one_move_and_one_too_many_is_refused() -> None:
    async with moving(limit=1) as m:
        source = m.nodes.remote[0]
        source.script.load, source.script.hang_s = ["hang"], 1.0
        first = asyncio.create_task(m.moves.make(m.move(LONG), PATIENCE_S))
        await until(lambda: source.loads)
        assert await m.moves.make(m.move(OTHER), PATIENCE_S) == "busy"
        assert await m.moves.make(m.move(LONG), 0.0) == "late"
        assert [await m.moves.make(m.move(LONG), PATIENCE_S), await first] == ["ok", "ok"]
        assert len(source.loads) == 1


def replicas_of(m: Moving, clock: Callable[[], float] = time.monotonic) -> Replicas:
    return Replicas(m.clusters, m.moves, clock)


def many_want(m: Moving, replicas: Replicas, text: str, times: int = 5) -> None:
    for _ in range(times):
        replicas.wanted(m.prompt(text), "r0")


@on_loop
async def test_a_prefix_that_many_want_at_once_is_copied_inside_its_cluster() -> None:
    async with moving(remote=2) as m:
        replicas = replicas_of(m)
        await m.holds(m.nodes.remote[0], LONGER)
        assert len(m.prompt(LONGER).hashes) * BLOCK_SIZE >= StoreConfig().min_tokens
        many_want(m, replicas, LONGER, times=1)
        replicas.tick()
        assert m.nodes.remote[0].loads == []  # one request is no demand
        many_want(m, replicas, LONGER)
        replicas.tick()
        await until(lambda: m.counts('outcome="ok",reason="hot"'))
        assert [to for to, _, _ in m.nodes.remote[0].loads] == ["r1"]


@on_loop
async def test_nothing_is_copied_to_a_node_of_another_model() -> None:
    async with moving(remote=3) as m:
        replicas, (source, other, _) = replicas_of(m), m.nodes.remote
        other.layout = ModelLayout("other", "float32", BLOCK_SIZE, LAYOUT.groups)
        other.become(pb.NODE_STATE_READY)
        await until(lambda: "r1" not in {node.id for node in m.clusters.ready(Role.PREFILL)})
        await m.holds(source, LONGER)
        many_want(m, replicas, LONGER)
        replicas.tick()
        await until(lambda: m.counts('outcome="ok",reason="hot"'))
        assert [to for to, _, _ in source.loads] == ["r2"]


@pytest.mark.parametrize(("faults", "outcome"), [([], "ok"), (["UNAVAILABLE"], "unreachable")])
@on_loop
async def test_a_copy_that_is_cold_is_dropped_once_nobody_waits_at_its_node(faults: list[str], outcome: str) -> None:
    ahead_s = [0.0]

    def clock() -> float:
        return time.monotonic() + ahead_s[0]

    async with moving(remote=2, clock=clock) as m:
        replicas, (source, target) = replicas_of(m, clock), m.nodes.remote
        await m.holds(source, LONGER)
        many_want(m, replicas, LONGER)
        replicas.tick()
        await until(lambda: m.counts('outcome="ok",reason="hot"'))
        await m.holds(target, LONGER)
        replicas.tick()  # it is young
        ahead_s[0] += 300.0
        known = m.clusters.by_id("r1")
        for waiting in (1, 0):
            target.load = pb.Load(waiting=waiting)
            target.tell(pb.NodeEvent(load=target.load))
            await until(lambda: known.load.waiting == waiting)  # noqa: B023
            assert target.drops == []
            target.script.drop = list(faults)
            replicas.tick()
        await until(lambda: m.counts(f'prfaas_prefix_drops_total{{outcome="{outcome}"}} 1.0'))
        assert target.drops == ([(len(m.prompt(LONGER).hashes), 0)] if outcome == "ok" else [])
        replicas.tick()  # it is known no more, whatever came of it
        assert len(target.drops) <= 1


@on_memory_loop
async def test_copies_are_left_out_where_computing_is_sooner() -> None:
    async with pipeline(remote=2, routing=RoutingConfig(replicate=True, fetch_bytes_per_s=1e3)) as w:
        replicas = w.replicas
        assert replicas is not None
        await holds(w, w.nodes.remote[0], [LONGER])
        await asyncio.gather(*(w.complete(LONGER) for _ in range(5)))
        replicas.tick()
        assert w.nodes.remote[0].loads == []
        assert 'outcome="not_worth_it",reason="hot"' in await w.metrics()

"""Prefixes that routing wants elsewhere are moved, and a move that fails costs nothing but the computing."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.cluster.node import Work
from gateway.config.gateway import RoutingConfig
from hybrid_cache.index.store import StoreConfig
from hybrid_cache.layout.layout import ModelLayout
from planner.decisions.views import Role
from tests.gateway.layouts import BLOCK_SIZE, LAYOUT
from tests.gateway.scripted import ScriptedNode
from tests.gateway.worlds import PATIENCE_S, World, on_loop, until, world
from transport.control.proto import node_pb2 as pb

LONG = "the quick brown fox jumps over the lazy dog " * 40
LONGER = LONG * 2
OTHER = "a lazy cat sat on the mat while it rained all day " * 40
ABUNDANT = pb.Load(links=[pb.Link(peer="west", available_bytes_per_s=1e9)])
SLOW_TOKENS_PER_S = 50.0  # computing takes seconds: any move that is made is waited for
SHARED = RoutingConfig(cross_cluster_cache=True, prefill_tokens_per_s=SLOW_TOKENS_PER_S)


async def holds(
    w: World, node: ScriptedNode, texts: Sequence[str], medium: "pb.Medium.ValueType" = pb.MEDIUM_MEMORY
) -> None:
    """The gateway hears that `node` has the prefixes of `texts` cached, and that there is bandwidth to spare."""
    for each in w.nodes.remote:
        each.load = ABUNDANT
    clusters = w.gateway.clusters
    for text in texts:
        hashes = b"".join(w.hashes_of(text))
        for group in (0, 1):
            node.tell(pb.NodeEvent(stored=pb.BlocksStored(group=group, hashes=hashes, medium=medium)))

    def is_known() -> bool:
        index = clusters.index
        assert index is not None
        hits = [index.match(node.node_id, w.hashes_of(text), 10_000).num_tokens for text in texts]
        return all(hits) and all(link.available_bytes_per_s for link in w.gateway.links.views())

    await until(is_known)


@on_loop
async def test_a_prefix_of_the_other_cluster_is_fetched_first() -> None:
    async with world(routing=SHARED) as w:
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
    async with world(routing=SHARED) as w:
        await holds(w, w.nodes.remote[0], [LONG], pb.MEDIUM_ENGINE)
        response = await w.complete(LONG)
        assert response.headers["x-prfaas-route"].startswith("remote; node=r0; uncached=")
        (record,) = await w.records()
        assert (record["fetched_from"], record["reason"], record["fallbacks"]) == ("", "remote_prefix", [])
        assert not w.nodes.remote[0].loads


@on_loop
async def test_nothing_moves_unless_configured() -> None:
    async with world() as w:
        await holds(w, w.nodes.remote[0], [LONG])
        response = await w.complete(LONG)
        assert response.headers["x-prfaas-route"].startswith("remote; node=r0")
        assert w.nodes.remote[0].loads == []


@on_loop
async def test_nothing_moves_over_a_busy_link() -> None:
    async with world(routing=SHARED) as w:
        await holds(w, w.nodes.remote[0], [LONG])
        links = [pb.Link(peer="west", available_bytes_per_s=1e9, utilisation=0.7)]
        w.nodes.remote[0].load = pb.Load(links=links)
        await until(lambda: any(link.utilisation for link in w.gateway.links.views()))
        await w.complete(LONG)
        assert w.nodes.remote[0].loads == []


@pytest.mark.parametrize(("fault", "reason"), [("hang", "timeout"), ("NOT_FOUND", "not_found")])
def test_a_move_that_fails_is_counted_and_computed_instead(fault: str, reason: str) -> None:
    @on_loop
    async def scenario() -> None:
        timeout_s = 0.2 if fault == "hang" else PATIENCE_S
        async with world(routing=replace(SHARED, move_timeout_s=timeout_s)) as w:
            await holds(w, w.nodes.remote[0], [LONG])
            w.nodes.remote[0].script.load = [fault]
            response = await w.complete(LONG)
            assert response.status == 200
            (record,) = await w.records()
            assert (record["fetched_from"], record["fallbacks"]) == ("", [f"fetch_{reason}"])
            await w.settled()
            assert [why for _, why in w.nodes.local[0].aborts] == ["prefix_not_moved"]

    scenario()


@on_loop
async def test_moves_that_time_out_are_soon_made_no_more() -> None:
    routing = RoutingConfig(prefill_tokens_per_s=SLOW_TOKENS_PER_S, move_timeout_s=0.5)
    async with world(remote=0, local=2, decode=1, routing=routing) as w:
        source, target = w.nodes.local
        source.script.load = ["hang"] * 8
        source.script.tokens_per_s = target.script.tokens_per_s = SLOW_TOKENS_PER_S
        await holds(w, source, [LONG])
        w.gateway.clusters.by_id("p0").take(Work(tokens=100_000))
        for _ in range(8):
            assert (await w.complete(LONG)).headers["x-prfaas-route"].startswith("local; node=p1; ")
        assert len(target.bodies) == 8
        # Feared to take 1, 2, 4, 8 and 16 s, where computing takes some 7 and, with a node busy, counts for half as much again.
        fallbacks = [record["fallbacks"] for record in await w.records()]
        tried = 8 - fallbacks.count([])
        assert 1 <= tried <= 5
        assert len(source.loads) <= tried  # on a busy machine the time of a move may be over before its source is asked


@on_loop
async def test_a_request_waits_for_a_move_no_longer_than_computing_takes() -> None:
    async with world(routing=replace(SHARED, prefill_tokens_per_s=10_000.0)) as w:
        source = w.nodes.remote[0]
        source.script.load = ["hang"]
        await holds(w, source, [LONG])
        assert (await w.complete(LONG)).status == 200
        (record,) = await w.records()
        assert (record["fetched_from"], record["fallbacks"]) == ("", ["fetch_late"])


@on_loop
async def test_a_target_without_room_is_no_error() -> None:
    async with world(routing=SHARED) as w:
        await holds(w, w.nodes.remote[0], [LONG])
        w.nodes.local[0].script.reserve = ["RESOURCE_EXHAUSTED"]
        assert (await w.complete(LONG)).status == 200
        (record,) = await w.records()
        assert record["fallbacks"] == ["fetch_no_capacity"]


@on_loop
async def test_requests_for_one_prefix_make_one_move_and_one_too_many_is_refused() -> None:
    async with world(routing=replace(SHARED, max_moves=1)) as w:
        source = w.nodes.remote[0]
        await holds(w, source, [LONG, OTHER])
        source.script.load, source.script.hang_s = ["hang"], 1.0
        first = asyncio.create_task(w.complete(LONG))
        await until(lambda: source.loads)
        await asyncio.gather(first, w.complete(LONG), w.complete(OTHER))
        assert len(source.loads) == 1
        records = await w.records()
        # Who comes second waits for the first one's computing, on the same node, and has nothing to fetch.
        assert "r0" in [record["fetched_from"] for record in records]
        assert "fetch_busy" in [reason for record in records for reason in record["fallbacks"]]


@on_loop
async def test_a_prefix_that_many_want_at_once_is_copied_inside_its_cluster() -> None:
    async with world(remote=2, routing=RoutingConfig(replicate=True)) as w:
        replicas = w.gateway.replicas
        assert replicas is not None
        for node in w.nodes.remote:
            node.script.tokens_per_s = 5_000.0
        await holds(w, w.nodes.remote[0], [LONGER])
        assert len(w.hashes_of(LONGER)) * BLOCK_SIZE >= StoreConfig().min_tokens
        await w.complete(LONGER)
        replicas.tick()
        assert w.nodes.remote[0].loads == []  # one request is no demand
        await asyncio.gather(*(w.complete(LONGER) for _ in range(4)))
        replicas.tick()
        async with asyncio.timeout(PATIENCE_S):
            while 'outcome="ok",reason="hot"' not in await w.metrics():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert [to for to, _, _ in w.nodes.remote[0].loads] == ["r1"]


@on_loop
async def test_nothing_is_copied_to_a_node_of_another_model() -> None:
    async with world(remote=3, routing=RoutingConfig(replicate=True)) as w:
        replicas, (source, other, _) = w.gateway.replicas, w.nodes.remote
        assert replicas is not None
        for node in w.nodes.remote:
            node.script.tokens_per_s = 5_000.0
        other.layout = ModelLayout("other", "float32", BLOCK_SIZE, LAYOUT.groups)
        other.become(pb.NODE_STATE_READY)
        await until(lambda: "r1" not in {node.id for node in w.gateway.clusters.ready(Role.PREFILL)})
        await holds(w, source, [LONGER])
        await asyncio.gather(*(w.complete(LONGER) for _ in range(5)))
        replicas.tick()
        await counted(w, 'outcome="ok",reason="hot"')
        assert [to for to, _, _ in source.loads] == ["r2"]


async def counted(w: World, series: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while series not in await w.metrics():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("faults", "outcome"), [([], "ok"), (["UNAVAILABLE"], "unreachable")])
@on_loop
async def test_a_copy_that_is_cold_is_dropped_once_nobody_waits_at_its_node(faults: list[str], outcome: str) -> None:
    ahead_s = [0.0]
    routing = RoutingConfig(replicate=True)
    async with world(remote=2, routing=routing, clock=lambda: time.monotonic() + ahead_s[0]) as w:
        replicas, (source, target) = w.gateway.replicas, w.nodes.remote
        assert replicas is not None
        for node in w.nodes.remote:
            node.script.tokens_per_s = 5_000.0
        await holds(w, source, [LONGER])
        await asyncio.gather(*(w.complete(LONGER) for _ in range(5)))
        replicas.tick()
        await counted(w, 'outcome="ok",reason="hot"')
        await holds(w, target, [LONGER])
        replicas.tick()  # it is young
        ahead_s[0] += 300.0
        known = w.gateway.clusters.by_id("r1")
        for waiting in (1, 0):
            target.load = pb.Load(links=ABUNDANT.links, waiting=waiting)
            target.tell(pb.NodeEvent(load=target.load))
            await until(lambda: known.load.waiting == waiting)  # noqa: B023
            assert target.drops == []
            target.script.drop = list(faults)
            replicas.tick()
        await counted(w, f'prfaas_prefix_drops_total{{outcome="{outcome}"}} 1.0')
        assert target.drops == ([(len(w.hashes_of(LONGER)), 0)] if outcome == "ok" else [])
        replicas.tick()  # it is known no more, whatever came of it
        assert len(target.drops) <= 1


@on_loop
async def test_copies_are_left_out_where_computing_is_sooner() -> None:
    async with world(remote=2, routing=RoutingConfig(replicate=True, fetch_bytes_per_s=1e3)) as w:
        replicas = w.gateway.replicas
        assert replicas is not None
        await holds(w, w.nodes.remote[0], [LONGER])
        await asyncio.gather(*(w.complete(LONGER) for _ in range(5)))
        replicas.tick()
        assert w.nodes.remote[0].loads == []
        assert 'outcome="not_worth_it",reason="hot"' in await w.metrics()

"""What nodes do is learned and decides where the next prompt goes."""

import asyncio
import time
from collections import Counter
from dataclasses import replace

from gateway.cluster.agent_values import PrefillOutcome
from gateway.cluster.node import NodeWork
from gateway.config.gateway import RoutingConfig
from gateway.routing.prefix_transfers import PrefixTransfer
from planner.decisions.routing.offload import Reason, Target
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.routing.test_prefix_transfers import OTHER
from tests.gateway.views import deciding
from tests.gateway.worlds import on_loop

LONG = "the quick brown fox jumps over the lazy dog " * 40


@on_memory_loop
async def test_long_prompts_go_to_the_cluster_that_has_proved_quick() -> None:
    async with pipeline(remote=2, local=1, decode=1, remote_clusters=("east", "north")) as w:
        slow, quick = w.nodes.remote
        slow.script.tokens_per_s, quick.script.tokens_per_s = 500.0, 10_000.0
        for i in range(12):
            assert (await w.complete(f"{i} {LONG}")).headers["x-prfaas-route"].startswith("remote;")
        assert len(slow.bodies) <= 1  # the first may find that out
        answers = await asyncio.gather(*(w.complete(f"at once {i} {LONG}") for i in range(12)))
        assert {answer.status for answer in answers} == {200}
        assert len(slow.bodies) <= 2
        metrics = await w.metrics()
        errors = [line for line in metrics.splitlines() if line.startswith("prfaas_estimate_error_ratio{")]
        for what, of in (("prefill", "north"), ("transfer", "north to "), ("output", "answers")):
            assert any(f'what="{what}"' in line and f'of="{of}' in line and 'stat="p90"' in line for line in errors)


@on_memory_loop
async def test_of_two_nodes_of_a_cluster_the_quick_one_gets_most() -> None:
    async with pipeline(remote=0, local=2, decode=1) as w:
        slow, quick = w.nodes.local
        slow.script.tokens_per_s, quick.script.tokens_per_s = 500.0, 10_000.0
        await asyncio.gather(*(w.complete(f"first {i} {LONG}") for i in range(32)))  # until each is believed
        before = len(slow.bodies), len(quick.bodies)
        for i in range(12):
            await w.complete(f"{i} {LONG}")
        assert (len(slow.bodies), len(quick.bodies)) == (before[0], before[1] + 12)


@on_loop
async def test_what_was_learned_outlives_a_reload() -> None:
    async with deciding(remote=2, remote_clusters=("east", "north")) as d:
        rates, asked = {"r0": 500.0, "r1": 10_000.0}, Counter[str]()

        def computes(text: str) -> None:
            node = d.route(text).prefill_node
            assert node is not None
            asked[node] += 1
            tokens = d.request(text).prompt.num_tokens
            outcome = PrefillOutcome(num_tokens=tokens, prefill_end_s=tokens / rates[node])
            d.decider.learn(d.clusters.by_id(node), outcome)

        for i in range(4):
            computes(f"{i} {LONG}")
        d.decider.configure(replace(d.config, routing=replace(d.config.routing, prefill_tokens_per_s=1_000.0)))
        for i in range(4):
            computes(f"later {i} {LONG}")
        assert asked["r0"] <= 1
        assert asked["r1"] >= 7


@on_loop
async def test_a_conversation_that_began_remote_comes_home() -> None:
    async with deciding() as d:
        (remote,), (decode,) = d.nodes.remote, d.nodes.decode
        assert d.route(LONG).target is Target.REMOTE
        talk = LONG
        for turn in range(6):  # the decode node holds what landed and what it has answered, and so does the remote one
            await d.holds(decode, talk)
            await d.holds(remote, talk)
            talk += f"and {turn} the quick brown fox jumps over "
            way = d.route(talk)
            assert (way.decode_node, way.prefill_node or "d0", way.reason) == ("d0", "d0", Reason.HELD)


@on_loop
async def test_a_decode_node_is_spared_prompts_while_it_computes_too_many() -> None:
    async with deciding(
        routing=RoutingConfig(prefill_tokens_per_s=200.0)
    ) as d:  # so slow that a move may take its time
        (remote,), (decode,) = d.nodes.remote, d.nodes.decode
        await d.holds(decode, LONG)
        await d.holds(remote, LONG)
        d.clusters.by_id("d0").prefill_share.add(5.0, time.monotonic())
        way = d.route(f"{LONG} and so on")
        assert (way.prefill_node, way.fetch_from) == ("p0", "d0")  # what it holds is computed on, elsewhere


@on_loop
async def test_nothing_is_computed_or_fetched_at_home_where_the_configuration_says_so() -> None:
    async with deciding(routing=RoutingConfig(increment_tokens=0, fetch_bytes_per_s=0.0)) as d:
        (remote,), (decode,) = d.nodes.remote, d.nodes.decode
        await d.holds(decode, LONG)
        await d.holds(remote, LONG)
        assert d.route(f"{LONG} and so on").reason is Reason.REMOTE_PREFIX


@on_loop
async def test_a_prefix_is_fetched_inside_the_cluster_only_while_that_pays() -> None:
    async with deciding(remote=0, local=2, routing=RoutingConfig(prefill_tokens_per_s=200.0)) as d:
        holder, _ = d.nodes.local
        await d.holds(holder, LONG)
        d.clusters.by_id("p0").take(NodeWork(tokens=10_000))  # busy for some time
        way = d.route(f"{LONG} and so on")
        assert (way.prefill_node, way.fetch_from) == ("p1", "p0")
        move = PrefixTransfer(*d.clusters.nodes[:2], hashes=(b"",), num_tokens=1_000, num_bytes=1_000_000)
        for _ in range(20):  # moves turn out to take ten seconds each
            d.decider.learn_move(move, 1_000_000, 10.0)
        await d.holds(holder, OTHER)
        way = d.route(f"{OTHER} and so on")
        assert (way.prefill_node, way.fetch_from) == ("p1", None)


@on_loop
async def test_a_router_without_caches_sends_what_is_held_at_home_away() -> None:
    routing = RoutingConfig(increment_tokens=0)
    async with deciding(routing=routing) as d:
        await d.holds(d.nodes.local[0], LONG)
        assert d.route(f"{LONG} and").target is Target.LOCAL
        d.decider.configure(replace(d.config, routing=replace(routing, by_total_length=True)))
        assert d.route(f"{LONG} so on").target is Target.REMOTE

"""What nodes do is learned and decides where the next prompt goes."""

import asyncio
import time
from dataclasses import replace

from gateway.cluster.node import Work
from gateway.config.gateway import RoutingConfig
from gateway.routing.prefix_transfers import Move
from tests.gateway.routing.test_prefix_transfers import OTHER, holds
from tests.gateway.worlds import on_loop, world

LONG = "the quick brown fox jumps over the lazy dog " * 40


@on_loop
async def test_long_prompts_go_to_the_cluster_that_has_proved_quick() -> None:
    async with world(remote=2, local=1, decode=1, remote_clusters=("east", "north")) as w:
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


@on_loop
async def test_of_two_nodes_of_a_cluster_the_quick_one_gets_most() -> None:
    async with world(remote=0, local=2, decode=1) as w:
        slow, quick = w.nodes.local
        slow.script.tokens_per_s, quick.script.tokens_per_s = 500.0, 10_000.0
        await asyncio.gather(*(w.complete(f"first {i} {LONG}") for i in range(32)))  # until each is believed
        before = len(slow.bodies), len(quick.bodies)
        for i in range(12):
            await w.complete(f"{i} {LONG}")
        assert (len(slow.bodies), len(quick.bodies)) == (before[0], before[1] + 12)


@on_loop
async def test_what_was_learned_outlives_a_reload() -> None:
    async with world(remote=2, local=1, decode=1, remote_clusters=("east", "north")) as w:
        slow, quick = w.nodes.remote
        slow.script.tokens_per_s, quick.script.tokens_per_s = 500.0, 10_000.0
        for i in range(4):
            await w.complete(f"{i} {LONG}")
        config = w.gateway.config
        w.gateway.reload(replace(config, routing=replace(config.routing, prefill_tokens_per_s=1_000.0)))
        for i in range(4):
            await w.complete(f"later {i} {LONG}")
        assert len(slow.bodies) <= 1


@on_loop
async def test_a_conversation_that_began_remote_comes_home() -> None:
    async with world(decode=1) as w:
        (remote,), (decode,) = w.nodes.remote, w.nodes.decode
        first = await w.complete(LONG)
        assert first.headers["x-prfaas-route"].startswith("remote;")
        talk = LONG
        for turn in range(6):  # the decode node holds what landed and what it has answered, and so does the remote one
            await holds(w, decode, [talk])
            await holds(w, remote, [talk])
            talk += f"and {turn} the quick brown fox jumps over "
            answer = await w.complete(talk)
            assert answer.headers["x-prfaas-route"].startswith("local; node=d0; uncached=")
            assert answer.headers["x-prfaas-route"].endswith("reason=held")
        assert len(remote.bodies) == 1
        await w.settled()


@on_loop
async def test_a_decode_node_is_spared_prompts_while_it_computes_too_many() -> None:
    routing = RoutingConfig(prefill_tokens_per_s=200.0)  # so slow that a move may take its time
    async with world(decode=1, routing=routing) as w:
        (remote,), (decode,) = w.nodes.remote, w.nodes.decode
        await holds(w, decode, [LONG])
        await holds(w, remote, [LONG])
        w.gateway.clusters.by_id("d0").prefill_share.add(5.0, time.monotonic())
        answer = await w.complete(f"{LONG} and so on")
        assert answer.headers["x-prfaas-route"].startswith("local; node=p0; uncached=")
        assert [to for to, _, _ in decode.loads] == ["p0"]  # what it holds is computed on, elsewhere


@on_loop
async def test_nothing_is_computed_or_fetched_at_home_where_the_configuration_says_so() -> None:
    async with world(decode=1, routing=RoutingConfig(increment_tokens=0, fetch_bytes_per_s=0.0)) as w:
        (remote,), (decode,) = w.nodes.remote, w.nodes.decode
        await holds(w, decode, [LONG])
        await holds(w, remote, [LONG])
        answer = await w.complete(f"{LONG} and so on")
        assert answer.headers["x-prfaas-route"].endswith("reason=remote_prefix")


@on_loop
async def test_a_prefix_is_fetched_inside_the_cluster_only_while_that_pays() -> None:
    routing = RoutingConfig(prefill_tokens_per_s=200.0)
    async with world(remote=0, local=2, decode=1, routing=routing) as w:
        holder, other = w.nodes.local
        await holds(w, holder, [LONG])
        w.gateway.clusters.by_id("p0").take(Work(tokens=10_000))  # busy for some time
        await w.complete(f"{LONG} and so on")
        assert [to for to, _, _ in holder.loads] == ["p1"]
        move = Move(*w.gateway.clusters.nodes[:2], hashes=(b"",), num_tokens=1_000, num_bytes=1_000_000)
        for _ in range(20):  # moves turn out to take ten seconds each
            w.gateway.decider.learn_move(move, 1_000_000, 10.0)
        await holds(w, holder, [OTHER])
        await w.complete(f"{OTHER} and so on")
        assert len(holder.loads) == 1
        assert len(other.bodies) == 2


@on_loop
async def test_a_router_without_caches_sends_what_is_held_at_home_away() -> None:
    routing = RoutingConfig(increment_tokens=0)
    async with world(decode=1, routing=routing) as w:
        (local,) = w.nodes.local
        await holds(w, local, [LONG])
        assert (await w.complete(f"{LONG} and")).headers["x-prfaas-route"].startswith("local;")
        w.gateway.reload(replace(w.gateway.config, routing=replace(routing, by_total_length=True)))
        assert (await w.complete(f"{LONG} so on")).headers["x-prfaas-route"].startswith("remote;")

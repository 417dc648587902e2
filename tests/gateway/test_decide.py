"""What nodes do is learned and decides where the next prompt goes."""

import asyncio
from dataclasses import replace

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
        assert 'prfaas_prefill_estimate_error_ratio{cluster="north",stat="p90"}' in metrics


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

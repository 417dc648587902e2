"""Who goes on from a prompt that is being computed waits for it, and for nothing else."""

import asyncio
from collections.abc import Awaitable, Callable

from gateway.cluster.inflight_prefixes import UNTOLD_S, InflightPrefixes
from hybrid_cache.index.index import NOTHING
from tests.gateway.layouts import BLOCK_SIZE
from tests.gateway.memory.loop import memory_loop
from tests.gateway.memory.pipeline import Pipelined, on_memory_loop, pipeline
from tests.gateway.worlds import request_of, until

BEGINNING = "the quick brown fox jumps over the lazy dog " * 20
A, B, C = b"a", b"b", b"c"


def test_a_prompt_that_goes_on_finds_who_computes_its_beginning():
    underway = InflightPrefixes()
    first = underway.begin([A, B])
    again = underway.begin([A, B])
    assert underway.longest([A, B, C], 0) == 2
    assert underway.first([A, B, C], 2) is first
    assert underway.first([A, B, C], 1) is None
    underway.end(first)
    assert first.done.is_set()
    assert underway.first([A, B, C], 2) is again
    underway.end(again)
    assert underway.longest([A, B, C], 0) == 0
    assert underway.first([A, B, C], 2) is None
    assert not len(underway)


def test_what_was_computed_is_promised_until_its_node_has_told_of_it():
    underway = InflightPrefixes()
    first, again = underway.begin([A, B]), underway.begin([A, B])
    underway.computed(first, 1.0)
    assert first.done.is_set()
    underway.end(again)
    assert not len(underway)
    underway.settle(1.0 + UNTOLD_S / 2)
    assert underway.longest([A, B, C], 0) == 2
    assert underway.first([A, B, C], 2) is first  # and so no wait
    underway.computed(underway.begin([A, C]), 1.0 + UNTOLD_S / 2)
    underway.settle(1.0 + UNTOLD_S)
    assert underway.longest([A, B, C], 0) == 0
    assert underway.longest([A, C], 0) == 2
    underway.settle(1.0 + 2 * UNTOLD_S)
    assert not underway.by_end


def test_a_prompt_without_full_blocks_promises_nothing():
    underway = InflightPrefixes()
    short = underway.begin([])
    assert not len(underway)
    assert underway.first([], 0) is None
    underway.end(short)
    assert short.done.is_set()
    underway.computed(underway.begin([]), 0.0)
    assert not underway.by_end


async def both(w: Pipelined, meanwhile: Callable[[], Awaitable[None]]) -> None:
    """A prompt, and one that goes on from it while it is being computed."""
    (node,) = w.nodes.local
    node.script.prefill_gate = gate = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(w.complete(BEGINNING))
        await until(lambda: node.bodies)
        second = tasks.create_task(w.complete(f"{BEGINNING} and so on"))
        await until(lambda: w.clusters.by_id(node.node_id).pending_requests == 2)
        await meanwhile()
        gate.set()
    assert {first.result().status, second.result().status} == {200}


@on_memory_loop
async def test_what_goes_on_from_a_prompt_under_way_counts_it_as_held() -> None:
    async def go_on() -> None:
        pass

    async with pipeline(remote=0, local=1, decode=1) as w:
        await both(w, go_on)
        begun, follows = sorted(await w.records(), key=lambda record: record["total"])
        assert begun["target"] == follows["target"] == "local"
        await w.settled()
        assert not len(w.clusters.by_id("p0").underway)


@on_memory_loop
async def test_a_prompt_counts_as_held_from_its_end_on_though_its_node_has_not_told_of_it() -> None:
    async with pipeline(remote=0, local=1, decode=1) as w:
        assert (await w.complete(BEGINNING)).status == 200
        assert w.clusters.served is not None
        prompt, node = request_of(BEGINNING, w.clusters.served).prompt, w.clusters.by_id("p0")
        assert not len(node.underway)
        computed_at = memory_loop().time()
        assert node.promised_tokens(prompt.hashes, NOTHING, computed_at) == len(prompt.hashes) * BLOCK_SIZE > 0
        assert node.promised_tokens(prompt.hashes, NOTHING, computed_at + UNTOLD_S) == 0


@on_memory_loop
async def test_a_prompt_whose_prefill_failed_is_not_promised_on() -> None:
    async with pipeline(remote=0, local=1, decode=1) as w:
        w.nodes.local[0].script.prefill = ["502 peer_lost"]
        await w.complete(BEGINNING)
        assert not w.clusters.by_id("p0").underway.by_end


@on_memory_loop
async def test_nobody_waits_for_ever_for_a_prefix_under_way() -> None:
    async with pipeline(remote=0, local=1, decode=1) as w:
        (node,) = w.nodes.local

        async def it_is_asked_all_the_same() -> None:
            await until(lambda: len(node.bodies) == 2)

        await both(w, it_is_asked_all_the_same)
        assert (await w.fallbacks())["prefix_late"] == 1

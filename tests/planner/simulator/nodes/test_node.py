"""Decode nodes: what a batch remembers does not grow with the time that it stays busy."""

import random
import tracemalloc

from planner.decisions.views import ClusterKind
from planner.model.profile import DecodeProfile, KvSize, PrefillCurve
from planner.simulator.loop import Loop
from planner.simulator.nodes.caches import NodeCache, layout_of
from planner.simulator.nodes.node import DecodeNode, PrefillNode, SimulatedRequest
from planner.simulator.scenario import Pool

POOL = Pool(
    name="pd",
    kind=ClusterKind.PD,
    num_prefill=0,
    num_decode=1,
    prefill=PrefillCurve(coefficients=(0.0, 1e-3, 0.0), valid_tokens=(0, 1e9)),
    decode=DecodeProfile(max_running=4, step_s=0.01, step_s_per_request=0.01),
)


def test_an_idle_node_is_no_less_of_one():
    node = PrefillNode("p0", POOL, Loop(), None, lambda now, job: None, lambda now, job: None)
    assert not node.num_jobs
    assert node


def test_a_batch_that_never_empties_remembers_no_more():
    loop, ended, sizes = Loop(), [0], {}

    def next_one(now: float, job: SimulatedRequest) -> None:
        ended[0] += 1
        if ended[0] in (4_000, 24_000):
            sizes[ended[0]] = tracemalloc.get_traced_memory()[0]
        if ended[0] < 24_000:
            node.assign(1)
            node.put(now, SimulatedRequest(0, now, 100, 5.0 + ended[0] % 7, ()))

    node = DecodeNode("d0", POOL, loop, lambda now, job: None, next_one)
    tracemalloc.start()
    try:
        for output in (5.0, 6.0, 8.0):
            node.assign(1)
            node.put(0.0, SimulatedRequest(0, 0.0, 100, output, ()))
        loop.run()
    finally:
        tracemalloc.stop()
    assert node.running == 0
    assert sizes[24_000] - sizes[4_000] < 20_000


def test_a_decode_node_reports_its_room_as_real_ones_do():
    layout = layout_of(KvSize(bytes_per_token=1_000, fixed_bytes=16_000), 16)
    cache = NodeCache(layout, 100 * layout.page_bytes)
    node = DecodeNode("d0", POOL, Loop(), lambda now, job: None, lambda now, job: None, cache)
    hashes = [bytes([n]) * 32 for n in range(40)]
    assert node.view_for(hashes, 640, 0.0).room_tokens == layout.tokens_within(100)
    cache.expect("a", hashes, 640, 0.0)
    node.seen = None
    held = node.view_for([], 640, 0.0).room_tokens
    assert held == layout.tokens_within(cache.cache.free_pages) < layout.tokens_within(100)
    cache.end("a", 640, 1.0)  # evictable now, but for a prompt that has it as its prefix
    assert node.view_for([], 640, 2.0).room_tokens == layout.tokens_within(100)
    assert node.view_for(hashes, 640, 2.0).room_tokens == max(held, layout.tokens_within(100) - 640)


def test_the_room_of_a_cache_is_that_of_its_pages_now():
    layout, chance = layout_of(KvSize(bytes_per_token=1_000, fixed_bytes=16_000), 16), random.Random(0)
    cache, held = NodeCache(layout, 100 * layout.page_bytes), []
    hashes = [bytes([n]) * 32 for n in range(40)]
    for step in range(200):
        begin = [cache.begin, cache.expect][chance.randrange(2)]
        if len(held) < 3:
            held.append(str(step))
            begin(held[-1], hashes, chance.randint(1, 640), float(step))
        else:
            leave = chance.choice([cache.let_go, lambda name, now: cache.end(name, 640, now)])
            leave(held.pop(chance.randrange(3)), float(step))
        free = cache.cache.free_pages
        with_evictable = layout.tokens_within(free + cache.cache.evictable_pages)
        assert cache.room_tokens(320) == max(layout.tokens_within(free), with_evictable - 320)


def test_a_prefill_that_waits_for_a_prefix_starts_when_it_is_there():
    """Told of it before, the line would carry its KVCache in the future, and count it twice."""
    loop, started = Loop(), []
    node = PrefillNode("p0", POOL, loop, None, lambda now, job: started.append((now, loop.now)), lambda now, job: None)
    job = SimulatedRequest(0, 0.0, 100, 5.0, ())
    job.ready_at = 3.0
    node.put(0.0, job)
    assert not started
    loop.run()
    assert started == [(3.0, 3.0)]

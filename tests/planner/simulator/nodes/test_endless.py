"""A cache that never evicts finds what the real one finds that has room for everything."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.model.profile import KvSize, ProfileWindow
from planner.model.site import Site
from planner.model.workload import Trace, read_trace
from planner.simulator.nodes.caches import NodeCache, layout_of
from planner.simulator.nodes.endless import EndlessCache
from planner.simulator.scenario import Outage
from planner.simulator.trials.trial import DEPLOYED_TRIAL
from planner.simulator.world import simulate
from tests.planner.simulator.systems import PUBLISHED, case_study_scenario
from tests.planner.traces import MOONCAKE

SIZE = 4
WINDOW = ProfileWindow(bytes_per_token=8, window_tokens=7)
MODELS = {
    "attention": KvSize(bytes_per_token=8),
    "states": KvSize(bytes_per_token=8, fixed_bytes=40),
    "windows": KvSize(bytes_per_token=8, windows=(WINDOW,)),
    "all": KvSize(bytes_per_token=8, fixed_bytes=40, windows=(WINDOW,)),
    "states alone": KvSize(bytes_per_token=0, fixed_bytes=40),
}
# The beginning of a prompt is named by a few numbers, so that prompts share beginnings and part; then its length beyond
# full blocks, how it ends, and after how many others.
PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
        st.integers(0, SIZE - 1),
        st.sampled_from(["begin", "expect"]),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)


def hashes_of(path: list[int]) -> tuple[bytes, ...]:
    """Chained: a block's name is that of all before it, too."""
    return tuple(bytes([len(path[:end]), *path[:end]]).ljust(32, b"\0") for end in range(1, len(path) + 1))


@pytest.mark.parametrize("kv", MODELS.values(), ids=MODELS)
@settings(max_examples=30, deadline=None)
@given(prompts=PROMPTS)
def test_it_finds_what_a_real_cache_with_room_for_everything_finds(kv, prompts):
    layout = layout_of(kv, SIZE)
    real, endless = NodeCache(layout, 5_000 * layout.page_bytes), EndlessCache(layout)
    asked = [(hashes_of(path), len(path) * SIZE + more) for path, more, *_ in prompts]
    under_way: list[tuple[int, int, int]] = []  # (ends after, prompt, filled tokens)
    for index, (hashes, num_tokens) in enumerate(asked):
        _, _, purpose, filled, ends_after = prompts[index]
        found = [getattr(cache, purpose)(str(index), hashes, num_tokens, index) for cache in (real, endless)]
        assert found[0] == found[1]
        under_way.append((index + ends_after, index, int(filled * num_tokens)))
        for entry in [each for each in under_way if each[0] <= index]:
            under_way.remove(entry)
            _, ended, tokens = entry
            for cache in (real, endless):
                cache.fill(str(ended), tokens, index)
                cache.let_go(str(ended), index)
        for each in asked:
            assert real.match(*each) == endless.match(*each)


def shortened(trace: Trace, count: int) -> Trace:
    assert trace.blocks is not None
    return replace(
        trace,
        arrival_s=trace.arrival_s[:count],
        prompt_tokens=trace.prompt_tokens[:count],
        output_tokens=trace.output_tokens[:count],
        blocks=trace.blocks[:count],
    ).faster(20.0)


@pytest.mark.parametrize("outages", [(), (Outage(from_s=1.0, until_s=4.0),)], ids=["up", "down for a while"])
def test_a_simulation_is_the_same_with_it_as_with_real_caches_that_are_large_enough(case_study: Site, outages):
    trace = shortened(read_trace(MOONCAKE), 150)
    endless, real = (
        simulate(
            case_study_scenario(
                case_study, PUBLISHED, cache_gb=cache_gb, outages=outages, increment_tokens=1024,
                fetch_gbps=DEPLOYED_TRIAL.fetch_gbps, tail_share=DEPLOYED_TRIAL.tail_share,
            ),
            trace,
        )
        for cache_gb in (float("inf"), 400.0)
    )  # fmt: skip
    assert endless.report() == real.report()
    assert np.array_equal(endless.ttft_s, real.ttft_s, equal_nan=True)
    assert endless.report()["hit_ratio"] > 0.02

"""Reuse times and lifespans of blocks: by hand, and against a plain reckoning of any trace."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.model.fitting import fit
from planner.model.trace_files.blocks import BlockColumn
from planner.model.trace_files.categories import CategorySource, RequestCategories
from planner.model.trace_files.reuse import reuse_by_category, sampled_uses
from planner.model.workload import Trace

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def categories(*codes):
    return RequestCategories(("chat", "api"), np.array(codes, dtype=np.uint8), CategorySource.TRACE)


def in_columns(prompts):
    column = BlockColumn()
    for names in prompts:
        column.append(names)
    return column.ordered(np.arange(len(prompts)))


def test_reuse_times_and_lifespans_by_hand():
    arrival_s = np.array([0.0, 10.0, 40.0, 45.0])
    prompts = ((1, 2), (1, 3), (1, 2), (1,))
    found = reuse_by_category(arrival_s, prompts, categories(0, 1, 0, 0))
    chat, api, both = found["by_category"]
    # Block 1: 0 –10→ 10 –30→ 40 –5→ 45; block 2: 0 –40→ 40; block 3 once. A time is of the category of the former use.
    assert chat["reuse_s"] == {"p50": 10.0, "p90": 34.0, "p99": pytest.approx(39.4)}  # of 5, 10 and 40
    assert api["reuse_s"] == {"p50": 30.0, "p90": 30.0, "p99": 30.0}
    assert both["reuse_s"]["p50"] == 20.0  # of 5, 10, 30 and 40
    assert chat["lifespan_s"] == {"p50": 42.5, "p90": pytest.approx(44.5), "p99": pytest.approx(44.95)}  # of 40 and 45
    assert api["lifespan_s"] == {"p50": 0.0, "p90": 0.0, "p99": 0.0}  # block 3
    assert [row["sampled_blocks"] for row in found["by_category"]] == [2, 1, 3]
    assert [row["requests"] for row in found["by_category"]] == [3, 1, 4]
    assert [row["reused_share"] for row in found["by_category"]] == [3 / 5, 1 / 2, 4 / 7]
    assert found["sampled_blocks_share"] == 1


def test_a_prompt_that_names_a_block_twice_uses_it_once():
    found = reuse_by_category(np.array([0.0, 7.0]), ((4, 4), (4,)), categories(1, 1))
    assert found["by_category"][-1]["reuse_s"] == {"p50": 7.0, "p90": 7.0, "p99": 7.0}


def test_prompts_without_blocks_have_no_times():
    found = reuse_by_category(np.array([0.0, 7.0]), ((), ()), categories(0, 0))["by_category"][-1]
    assert (found["reuse_s"], found["lifespan_s"], found["reused_share"]) == (None, None, None)


def reckoned(arrival_s, prompts, codes, code):
    """Reuse times and lifespans of a category, use by use."""
    uses = defaultdict(list)
    for request, names in enumerate(prompts):
        for name in dict.fromkeys(names):
            uses[name].append(request)
    reuse = [arrival_s[b] - arrival_s[a] for each in uses.values() for a, b in pairwise(each) if codes[a] == code]
    return reuse, [arrival_s[each[-1]] - arrival_s[each[0]] for each in uses.values() if codes[each[0]] == code]


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.integers(0, 1), st.lists(st.integers(0, 9), max_size=6)),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([0, 1 << 40, 1 << 200]),
)
def test_any_trace_has_the_times_of_a_plain_reckoning(requests, offset):
    arrival_s = np.cumsum([gap for gap, _, _ in requests])
    codes = [code for _, code, _ in requests]
    prompts = [tuple(name + offset for name in names) for _, _, names in requests]
    for blocks in (in_columns(prompts), tuple(prompts)):
        for row in reuse_by_category(arrival_s, blocks, categories(*codes))["by_category"][:-1]:
            expected = reckoned(arrival_s, prompts, codes, ("chat", "api").index(row["category"]))
            for values, found in zip(expected, (row["reuse_s"], row["lifespan_s"]), strict=True):
                quantiles = (
                    {name: pytest.approx(np.quantile(values, at)) for name, at in QUANTILES.items()} if values else None
                )
                assert found == quantiles


def test_of_many_uses_those_of_a_sample_of_blocks_are_kept():
    rng = np.random.default_rng(1)
    prompts = [tuple(rng.choice(5_000, 10, replace=False).tolist()) for _ in range(4_000)]
    blocks, arrival_s = in_columns(prompts), np.arange(4_000.0)
    uses = sampled_uses(blocks, 12_000)
    assert uses.share == 0.25
    assert 8_000 < len(uses.hashes) <= 12_000
    whole = sampled_uses(blocks, 40_000)
    kept = np.isin(whole.hashes, uses.hashes)  # all uses of a block, or none
    assert kept.sum() == len(uses.hashes)
    few, every = (reuse_by_category(arrival_s, blocks, categories(*[0] * 4_000), most) for most in (12_000, 40_000))
    assert few["sampled_blocks_share"] == 0.25
    for at in QUANTILES:
        assert few["by_category"][0]["reuse_s"][at] == pytest.approx(every["by_category"][0]["reuse_s"][at], rel=0.05)


def trace(blocks):
    return Trace(
        name="t", arrival_s=np.arange(3.0), prompt_tokens=np.full(3, 1_000.0), output_tokens=np.ones(3), blocks=blocks
    )


def test_fit_infers_turns_and_knows_nothing_without_names():
    found = fit(trace(((1, 2), (1, 3), (7,))), None)["block_reuse"]
    assert found["categories_are"] == "turns, inferred from prompts"
    assert [(row["category"], row["requests"]) for row in found["by_category"]] == [
        ("first turn", 2), ("later turns", 1), ("all", 3)
    ]  # fmt: skip
    assert fit(trace(None), None)["block_reuse"] is None

"""Stages by the clock, beside the arithmetic and beside the rule itself."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.emulated.pipeline import EmulatedPipeline

seconds = st.floats(0.0, 100.0, allow_subnormal=False)


@given(stages=st.integers(1, 9), chunks=st.integers(1, 30), chunk_s=st.floats(0.001, 100.0))
def test_equal_chunks_are_through_after_the_time_that_arithmetic_says(stages: int, chunks: int, chunk_s: float) -> None:
    pipeline = EmulatedPipeline(stages)
    passages = [pipeline.take(0.0, chunk_s) for _ in range(chunks)]
    assert passages[-1].end_s(stages - 1) == pytest.approx((chunks + stages - 1) * chunk_s / stages)
    assert pipeline.ready_s == pytest.approx(chunks * chunk_s / stages)


@given(stages=st.integers(1, 6), chunks=st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12))
def test_a_stage_begins_when_the_one_before_and_the_chunk_before_are_done(
    stages: int, chunks: list[tuple[float, float]]
) -> None:
    pipeline, now, passages = EmulatedPipeline(stages), 0.0, []
    for wait_s, chunk_s in chunks:
        now += wait_s
        passages.append(pipeline.take(now, chunk_s))
        assert passages[-1].begins_s[0] == max(now, passages[-2].end_s(0) if len(passages) > 1 else now)
    for before, after in pairwise(passages):
        for stage in range(1, stages):
            assert after.begins_s[stage] == max(before.end_s(stage), after.end_s(stage - 1))


@given(stages=st.integers(1, 7), layers=st.integers(1, 60), chunk_s=seconds)
def test_layers_are_done_one_after_the_other_and_none_before_its_stage_has_begun(
    stages: int, layers: int, chunk_s: float
) -> None:
    pipeline = EmulatedPipeline(stages)
    first, second = pipeline.take(0.0, chunk_s), pipeline.take(0.0, chunk_s)
    for passage in (first, second):
        done = [passage.done_s(min(1.0, (layer + 1) * (1 / layers))) for layer in range(layers)]
        assert all(left <= right + 1e-9 for left, right in pairwise(done))
        assert done[-1] == pytest.approx(passage.end_s(stages - 1))
    for layer in range(layers):
        depth = min(1.0, (layer + 1) * (1 / layers))
        assert first.done_s(depth) <= second.done_s(depth)
        assert second.done_s(depth) - first.done_s(depth) == pytest.approx(chunk_s / stages, abs=1e-6)


def test_cleared_stages_are_free_at_once() -> None:
    pipeline = EmulatedPipeline(2)
    pipeline.take(0.0, 10.0)
    pipeline.clear(1.0)
    assert pipeline.take(1.0, 2.0).begins_s == (1.0, 2.0)

"""How the benchmark of disturbances judges a course: what came back when, and whether the controller overshot."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.system.disturbances import Course, DisturbedRequest, GatewaySample, table, turns

BEGIN_S, END_S, LAST_S = 20.0, 50.0, 80.0


def sample(at_s: float, version: int, threshold_tokens: float, split: tuple[int, int] = (3, 5)) -> GatewaySample:
    return GatewaySample(
        at_s=at_s, under_way=3, up=True, available_bytes_per_s=1e6, behind_bytes=0.0, version=version,
        threshold_tokens=threshold_tokens, num_prefill=split[0], num_decode=split[1],
    )  # fmt: skip


def course(samples: Sequence[GatewaySample] = (), slow_until_s: float = 0.0) -> Course:
    """Two requests a second; slow from the beginning of the disturbance on."""
    moments = [each / 2 for each in range(int(2 * LAST_S))]
    answers = [
        DisturbedRequest(at_s=at_s, ttft_s=9.0 if BEGIN_S <= at_s < slow_until_s else 1.0, outcome="local")
        for at_s in moments
    ]
    return Course(name="x", begin_s=BEGIN_S, end_s=END_S, calm_p90_s=1.0, answers=answers, samples=samples)


@pytest.mark.parametrize(
    ("thresholds", "times"),
    [([], 0), ([300, 300], 0), ([300, 150, 100], 0), ([300, 100, 100, 200], 1), ([1, 3, 2, 4], 2)],
)
def test_a_threshold_that_comes_back_has_turned(thresholds: list[float], times: int) -> None:
    assert turns(thresholds) == times


def test_a_threshold_may_follow_the_end_of_a_disturbance() -> None:
    ups_and_downs = [(1, 0, 300.0), (21, 1, 600.0), (40, 2, 500.0), (51, 3, 400.0), (60, 4, 300.0)]
    samples = [sample(*each) for each in ups_and_downs]
    assert course(samples).overshoots() == 1
    assert replace(course(samples), begin_s=45.0, end_s=45.0).overshoots() == 1  # a shift has no end
    assert course(samples[3:]).overshoots() == 0


def test_plans_and_splits_are_told_as_they_changed() -> None:
    samples = [sample(1, 0, 300), sample(2, 0, 300), sample(3, 1, 150, (2, 5)), sample(4, 1, 150, (2, 6))]
    found = course(samples).row()
    assert [(each["version"], each["threshold_tokens"]) for each in found["plans"]] == [(0, 300), (1, 150)]
    assert found["splits"] == ["3/5", "2/5", "2/6"]


@pytest.mark.parametrize(("slow_until_s", "recovered_s"), [(0.0, 0.0), (END_S, 0.0), (57.0, 7.0), (99.0, float("inf"))])
def test_a_p90_that_stays_high_has_not_come_back(slow_until_s: float, recovered_s: float) -> None:
    assert course(slow_until_s=slow_until_s).recovered_s() == pytest.approx(recovered_s)


def test_the_table_is_markdown() -> None:
    result = {"courses": [course([sample(1, 0, 300)]).row()], "load": 0.5, "rate_req_per_s": 8.0, "load_average": 1.0}
    head, rule, row, *_ = table(result).splitlines()
    assert {line.count("|") for line in (head, rule, row)} == {12}
    assert row == "| x | 160 | 0 | 0 | 0 | 1.00, 1.00, 1.00 | 0 | 3, 3 | 0 | 0 | 3/5 |"

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.model.demand.week import DAY_HOURS, HOUR_S, WEEK_HOURS, load_not_exceeded, mean_load, week_of


def of_hours(counts):
    """That many requests in each hour, from its beginning on."""
    return np.concatenate([hour * HOUR_S + np.arange(count) for hour, count in enumerate(counts)])


def test_a_trace_of_less_than_a_day_says_nothing_of_a_week():
    assert week_of(np.array([0.0])) == ()
    assert week_of(of_hours([5] * 23)) == ()


def test_days_are_whole():
    counts = [1, *range(2, 25), *[7] * 24, 9, 9]
    assert week_of(of_hours(counts)) == pytest.approx(np.array(counts[:48]) / HOUR_S)


def test_of_many_days_the_busiest_week_counts():
    counts = np.repeat([1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 1], DAY_HOURS)
    found = week_of(of_hours(counts))
    assert found == pytest.approx(np.full(WEEK_HOURS, 3 / HOUR_S))


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=300))
def test_loads_are_shares_of_the_busiest_one(loads):
    week = tuple(loads)
    assert 0 < mean_load(week) <= 1 + 1e-12
    within = load_not_exceeded(week, 0.95) * max(week)
    assert sum(load > within * (1 + 1e-12) for load in week) <= 0.05 * len(week)
    assert load_not_exceeded(week, 1.0) == 1

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.estimates.decoding import DecodeForecast, LearnedSteps, StepEstimate


def busy(running: int) -> DecodeForecast:
    forecast = DecodeForecast(20.0)
    forecast.running = running
    return forecast


def test_the_forecast_fades_and_fills():
    forecast = busy(10)
    assert forecast.running_at(100.0, 100.0) == 10
    assert forecast.running_at(120.0, 100.0) == pytest.approx(10 / 2.71828, rel=1e-4)
    forecast.on_accepted(120.0, 100.0)
    assert forecast.running_at(119.0, 100.0) < forecast.running_at(120.0, 100.0)
    forecast.on_started(120.0)
    assert forecast.running == 11
    forecast.on_ended(80.0, 120.0)
    assert (forecast.running, forecast.decode_s) == (10, pytest.approx(21.0))


def test_a_guess_without_samples_is_soon_forgotten():
    forecast = DecodeForecast(20.0, samples=0)
    forecast.running = 2
    forecast.on_ended(0.0, 3.0)
    assert forecast.decode_s == pytest.approx(3.0)


def test_a_dropped_request_joins_no_more():
    forecast = busy(0)
    forecast.on_accepted(5.0, 0.0)
    forecast.on_dropped(5.0)
    assert forecast.running_at(10.0, 0.0) == 0


def test_who_leaves_before_the_end_teaches_nothing():
    forecast = busy(2)
    forecast.on_left()
    assert (forecast.running, forecast.decode_s) == (1, 20.0)


def learned(constant: float, slope: float, batches: list[int]) -> StepEstimate:
    steps = StepEstimate()
    for running in batches:
        steps.observe(running, constant + slope * running)
    return steps


def test_steps_are_learned_by_the_batch():
    steps = learned(0.02, 0.005, [1, 4, 9, 3] * 5)
    assert steps.line == (pytest.approx(0.02), pytest.approx(0.005))
    assert steps.within(0.07, 16) == pytest.approx(10)
    assert steps.within(0.1001, 16) == 16
    assert steps.within(0.001, 16) == 1


def test_little_seen_says_nothing():
    assert learned(1.0, 1.0, [3] * 7).within(0.01, 16) == 16
    assert learned(1.0, 0.0, [3] * 8).within(0.01, 16) == 1


def test_one_slow_reader_does_not_close_a_node():
    steps = learned(0.02, 0.0, [4] * 64)
    steps.observe(4, 60.0)
    assert steps.within(0.05, 16) == 16


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 10)), max_size=80), st.floats(1e-4, 10))
def test_whatever_is_seen_a_node_has_room_for_one_and_no_more_than_its_slots(samples, tbt_s):
    steps = StepEstimate()
    for running, seconds in samples:
        steps.observe(running, seconds)
    constant, slope = steps.line
    assert constant >= 0
    assert slope >= 0
    assert 1 <= steps.within(tbt_s, 16) <= 16


def test_nodes_add_up_and_those_gone_are_forgotten():
    steps = LearnedSteps()
    for running in (1, 2, 4, 8, 1, 2, 4, 8):
        steps.observe("d0", running, 0.01 * running)
    assert steps.room(["d0", "d1"], 16, tbt_s=0.04) == pytest.approx(4 + 16)
    assert steps.room(["d0", "d1"], 16, tbt_s=inf) == 32
    steps.forget("d0")
    assert steps.room(["d0", "d1"], 16, tbt_s=0.04) == 32


def test_answers_that_come_all_at_once_say_nothing_of_steps_and_end_no_forecast():
    steps = StepEstimate()
    for seconds in [0.0] * 20 + [0.05] * 20:
        steps.observe(3, seconds)
    assert steps.at(3) == pytest.approx(0.05)
    forecast = DecodeForecast(10.0, samples=0)
    forecast.on_accepted(0.0, 0.0)
    forecast.on_started(0.0)
    forecast.on_ended(0.0, 0.0)
    assert forecast.running_at(1.0, 0.0) == 0

"""When an engine that dies is started again."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from node.process.restarts import FIRST_BACKOFF_S, MAX_BACKOFF_S, RESTART_WINDOW_S, Restarts


def test_the_pause_grows_until_it_is_given_up():
    restarts = Restarts(5)
    assert [restarts.on_death(float(now)) for now in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, None]
    assert restarts.deaths == 6


def test_starts_that_take_minutes_and_fail_are_given_up():
    restarts = Restarts(2)
    pauses = [restarts.on_death(now * 15 * RESTART_WINDOW_S) for now in range(3)]
    assert pauses == [0.5, 1.0, None]


def test_an_engine_that_served_begins_anew_when_the_window_is_over():
    restarts = Restarts(1)
    for number in range(10):
        restarts.on_ready()
        assert restarts.on_death(number * 1.5 * RESTART_WINDOW_S) == FIRST_BACKOFF_S


def test_an_engine_that_serves_and_dies_within_the_window_is_given_up():
    restarts = Restarts(1)
    for now, pause_s in ((0.0, 0.5), (RESTART_WINDOW_S / 2, None)):
        restarts.on_ready()
        assert restarts.on_death(now) == pause_s


def test_ends_from_outside_lengthen_the_pause_and_are_never_too_many():
    restarts = Restarts(0)
    assert [restarts.on_kill(float(now)) for now in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert restarts.on_kill(3 * RESTART_WINDOW_S) == 0.5
    assert restarts.deaths == 0


def test_none_allowed_is_none_made():
    assert Restarts(0).on_death(0.0) is None


@given(st.integers(0, 8), st.lists(st.tuples(st.floats(0.0, 1000.0), st.booleans()), max_size=40))
def test_no_run_of_failed_starts_is_longer_than_allowed(max_restarts: int, lives: list[tuple[float, bool]]) -> None:
    restarts, now, failed = Restarts(max_restarts), 0.0, count(1)
    for lived_s, was_ready in lives:
        now += lived_s
        if was_ready:
            restarts.on_ready()
            failed = count(1)
        pause_s = restarts.on_death(now)
        if next(failed) > max_restarts:
            assert pause_s is None
        if pause_s is None:
            return
        assert FIRST_BACKOFF_S <= pause_s <= MAX_BACKOFF_S

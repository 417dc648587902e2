"""Who may have a place on an engine."""

from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.turns import HALF_LIFE_S, may_begin
from transport.turns import LATELY_S, Turns, leaves_room


@given(st.integers(2, 300))
def test_of_one_flow_with_many_requests_an_eighth_of_the_places_are_left_and_at_least_one(places):
    held = 0
    while leaves_room(held, places - held):
        held += 1
    assert places - held >= 1
    assert abs((places - held) - places / 8) < 1


@given(st.integers(2, 300), st.integers(1, 12))
def test_however_many_flows_there_are_the_next_finds_a_place_until_each_has_one_only(places, count):
    held = [0] * count
    while taking := [number for number in range(count) if leaves_room(held[number], places - sum(held))]:
        held[min(taking, key=lambda number: held[number])] += 1
    assert sum(held) < places or max(held) == 1
    assert sum(held) <= places


def test_one_place_is_for_whoever_comes():
    assert leaves_room(0, 1)
    assert not leaves_room(1, 1)
    assert not leaves_room(0, 0)


def test_a_flow_that_is_alone_may_have_all_places_until_another_is_about():
    turns: Turns[str] = Turns(HALF_LIFE_S)
    assert may_begin(turns, ["a"], {"a": 63}, 1, 0.0) == ["a"]
    assert may_begin(turns, ["a"], {"a": 64}, 0, 0.0) == []
    assert may_begin(turns, ["a", "b"], {"a": 63}, 1, 0.0) == ["b"]
    assert may_begin(turns, ["a"], {"a": 62, "b": 1}, 1, 0.0) == []


def test_places_are_kept_for_who_was_served_lately():
    turns: Turns[str] = Turns(HALF_LIFE_S)
    turns.charge("light", 100, 0.0)
    turns.charge("heavy", 100, 50.0)
    assert may_begin(turns, ["heavy"], {"heavy": 60}, 4, LATELY_S) == []
    assert may_begin(turns, ["heavy"], {"heavy": 60}, 4, LATELY_S + 1.0) == ["heavy"]
    assert may_begin(turns, ["heavy"], {"heavy": 30}, 34, LATELY_S) == ["heavy"]

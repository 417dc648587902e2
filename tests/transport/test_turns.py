"""Whose turn it is, by what each flow has been served lately."""

from math import isfinite, log2
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples
from transport.turns import MAX_FLOWS, Turns

YEAR_S = 365 * 86_400.0
HALF_LIFE_S = 30.0


def new_turns() -> Turns[str]:
    return Turns(HALF_LIFE_S)


def test_who_has_been_served_less_by_weight_is_first():
    turns = new_turns()
    turns.charge("a", 100, 0.0)
    turns.charge("b", 200 / 4.0, 0.0)
    assert turns.first(["a", "b"], 0.0) == "b"
    turns.charge("b", 400 / 4.0, 0.0)
    assert turns.first(["a", "b"], 0.0) == "a"
    assert turns.first(["a", "b", "new"], 0.0) == "new"


def test_half_is_forgotten_in_a_half_life():
    turns = new_turns()
    turns.charge("a", 1000, 5.0)
    assert turns.served("a", 5.0) == pytest.approx(1000)
    assert turns.served("a", 5.0 + 2 * HALF_LIFE_S) == pytest.approx(250)
    turns.charge("a", 1000, 5.0 + HALF_LIFE_S)
    assert turns.served("a", 5.0 + HALF_LIFE_S) == pytest.approx(1500)


def test_with_less_than_a_token_all_are_alike_and_the_first_named_is_first():
    turns = new_turns()
    turns.charge("a", 1000, 0.0)
    assert turns.first(["a", "new"], HALF_LIFE_S * 9) == "new"
    assert turns.first(["a", "new"], HALF_LIFE_S * 11) == "a"


def test_work_that_costs_nothing_is_no_service():
    turns = new_turns()
    turns.charge("a", 0, 0.0)
    assert not len(turns)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 1e9), st.integers(0, 1 << 20)), max_size=40))
def test_any_pauses_up_to_the_end_of_clocks_leave_finite_numbers(charges):
    turns = new_turns()
    for flow, now, tokens in sorted(charges, key=lambda charge: charge[1]):
        turns.charge(flow, 1000.0 * tokens, now)
        assert isfinite(turns.served(flow, now))
        assert turns.served(flow, now) >= tokens
        assert turns.first("abcd", now) in "abcd"
    assert turns.served("a", 1e9 + 100 * YEAR_S) < 1


@pytest.mark.parametrize("step_s", [0.0, 0.1, 10.0])
def test_what_is_remembered_is_bounded(step_s):
    turns, chance = new_turns(), Random(1)
    for number in range(3 * MAX_FLOWS):
        turns.charge(str(chance.randrange(3 * MAX_FLOWS)), chance.randrange(1, 2000), number * step_s)
        assert len(turns) <= MAX_FLOWS


def test_beyond_the_bound_those_that_have_had_most_are_remembered():
    turns = new_turns()
    turns.charge("heavy", 1e6, 0.0)
    for number in range(2 * MAX_FLOWS):
        turns.charge(str(number), 10, 1.0)
    assert turns.served("heavy", 1.0) > 9e5


def test_a_flow_beyond_the_bound_takes_turns_too():
    """It has had the least of all, and is forgotten: that makes it no newcomer each time."""
    turns = new_turns()
    names = [str(number) for number in range(MAX_FLOWS)]
    for name in names:
        turns.charge(name, 1e6, 0.0)
    served = 0
    while turns.first([*names, "late"], 0.0) == "late":
        turns.charge("late", 1e5, 0.0)
        served += 1
        assert served <= 10


flows = st.integers(2, 6)
weights = st.sampled_from([0.01, 0.5, 1.0, 3.0, 100.0])


@given(st.data(), flows, st.floats(0, 1e9 - 1e6))
def test_nobody_waits_longer_than_it_takes_the_others_to_have_had_as_much(data, count, start):
    """All but `late` are served at will before; from then on all want everything.

    The engine computes a chunk of 512 tokens in 0.1 s. While others are served for `t` half-lives, what `late`
    has had falls to 2^-t of it. The others together have had the rest of what is served in equilibrium: each is past it
    when 2^t - 1 = (sum of their weights) / (its own).
    """
    weight = [data.draw(weights) for _ in range(count)]
    turns, now, chunk_s = new_turns(), start, 0.1
    for number in data.draw(st.lists(st.integers(0, count - 1), max_size=200)):
        turns.charge(str(number), 512 / weight[number], now)
        now += chunk_s
    late = data.draw(st.integers(0, count - 1))
    others = sum(weight) - weight[late]
    patience_s = HALF_LIFE_S * log2(1 + others / weight[late]) + count * chunk_s * (1 + max(1.0, 100.0 / weight[late]))
    names, waited_s = [str(number) for number in range(count)], 0.0
    while (flow := turns.first(names, now)) != str(late):
        turns.charge(flow, 512 / weight[int(flow)], now)
        now += chunk_s
        waited_s += chunk_s
        assert waited_s <= patience_s


@settings(max_examples=examples(20))
@given(st.integers(1, 1 << 20), st.integers(1, 8))
def test_not_even_ever_new_flows_keep_one_waiting_for_ever(tokens, newcomers_at_once):
    """Those that come later stand behind: an old flow is a newcomer again at last."""
    turns, now, waited = new_turns(), 0.0, 0
    turns.charge("old", tokens, now)
    in_line = ["old"]
    while True:
        in_line += [f"new {waited} {number}" for number in range(newcomers_at_once)]
        flow = turns.first(in_line, now)
        if flow == "old":
            break
        in_line.remove(flow)
        turns.charge(flow, 512, now)
        now, waited = now + 2.0, waited + 1
        assert now <= HALF_LIFE_S * (log2(tokens) + 1) + 2.0


def test_equal_flows_share_equally_and_weights_count():
    turns, now, had = new_turns(), 0.0, {"a": 0, "b": 0, "c": 0}
    weight = {"a": 1.0, "b": 1.0, "c": 2.0}
    for _ in range(4000):
        flow = turns.first(had, now)
        turns.charge(flow, 64 / weight[flow], now)
        had[flow] += 1
        now += 0.01
    assert had["a"] == pytest.approx(1000, abs=5)
    assert had["b"] == pytest.approx(1000, abs=5)
    assert had["c"] == pytest.approx(2000, abs=5)

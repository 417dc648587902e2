"""Shapes of requests that kill engines: which are refused, which are let through, and that what is known stays bounded."""

from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.failures.poison import MAX_RETRY_S, MAX_SHAPES, PROOF_S, RETRY_S, TRIAL_S, Poison


def test_what_kills_is_refused_and_tried_again_by_one() -> None:
    poison = Poison()
    assert poison.let_in("n, seed", 0.0) == 0
    assert poison.killed("n, seed", 10.0)
    assert poison.let_in("n, seed", 11.0) == RETRY_S - 1
    assert poison.let_in("seed", 11.0) == 0
    assert poison.let_in("n, seed", 10.0 + RETRY_S) == 0
    assert poison.let_in("n, seed", 10.0 + RETRY_S) == TRIAL_S  # one is enough
    assert poison.killed("n, seed", 100.0)
    assert poison.let_in("n, seed", 100.0) == 2 * RETRY_S
    assert poison.let_in("n, seed", 100.0 + 2 * RETRY_S) == 0
    poison.answered("n, seed", 300.0)
    assert (poison.let_in("n, seed", 300.0), len(poison)) == (0, 0)


def test_what_has_been_answered_is_not_to_blame() -> None:
    poison = Poison()
    poison.answered("chat", 0.0)
    assert not poison.killed("chat", PROOF_S - 1)
    assert poison.let_in("chat", PROOF_S) == 0
    assert poison.killed("chat", PROOF_S)


def test_several_that_were_under_way_at_once_count_once() -> None:
    poison = Poison()
    for now in (1.0, 2.0, 3.0):
        assert poison.killed("n", now)
    assert poison.let_in("n", 3.0) == RETRY_S - 2


def test_one_that_showed_nothing_leaves_its_turn_to_another() -> None:
    poison = Poison()
    poison.killed("n", 0.0)
    poison.ended("n", 1.0)
    assert poison.let_in("n", 1.0) > 0
    assert poison.let_in("n", RETRY_S) == 0
    poison.ended("n", RETRY_S + 1)
    assert poison.let_in("n", RETRY_S + 1) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["let_in", "answered", "killed", "ended"]), st.integers(0, 3), st.floats(0, 900))
    )
)
def test_nobody_waits_longer_than_the_longest_retry_time(steps: list[tuple[str, int, float]]) -> None:
    poison, now = Poison(), 0.0
    for what, shape, pause_s in steps:
        now += pause_s
        found = getattr(poison, what)(shape, now)
        if what == "let_in":
            assert 0 <= found <= MAX_RETRY_S
    assert all(poison.let_in(shape, now + MAX_RETRY_S) == 0 for shape in range(4))


def test_what_is_known_is_bounded() -> None:
    poison = Poison()
    for shape in range(2 * MAX_SHAPES):
        poison.answered(shape, 0.0)
        poison.killed(-shape - 1, 0.0)
    assert len(poison) == MAX_SHAPES
    assert poison.killed(0, 1.0)  # its answer is forgotten
    assert not poison.killed(2 * MAX_SHAPES - 1, 1.0)

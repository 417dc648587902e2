import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.batch import DecodeBatch


def by_size(running):
    return 0.02 + 0.005 * running


def test_all_who_are_in_step_together_have_tokens_together():
    batch = DecodeBatch(by_size)
    for name in "ab":
        batch.join(10.0, name)
    assert batch.due(10.0) == []
    assert batch.due_at() == pytest.approx(10.03)
    assert batch.due(batch.due_at()) == ["a", "b"]


def test_who_comes_in_the_middle_of_a_step_waits_for_the_next_and_slows_all():
    batch = DecodeBatch(by_size)
    batch.join(0.0, "a")
    batch.join(0.0125, "b")  # half of a's step of 25 ms; with two it takes 30
    assert batch.due_at() == pytest.approx(0.0275)
    assert batch.due(batch.due_at()) == ["a"]
    batch.go_on("a", 1.0)
    assert batch.due_at() == pytest.approx(0.0575)
    assert batch.due(batch.due_at()) == ["a", "b"]


def test_late_fetching_makes_nothing_later():
    batch = DecodeBatch(lambda running: 0.1)
    batch.join(0.0, "a")
    for count in range(1, 50):
        late = count * 0.1 + 0.03
        assert batch.due(late) == ["a"]
        batch.go_on("a", 1.0)
    assert batch.due_at() == pytest.approx(5.0)


def test_held_it_stands_still():
    batch = DecodeBatch(lambda running: 0.1)
    batch.join(0.0, "a")
    batch.hold(0.05, held=True)
    assert batch.due_at() == math.inf
    assert batch.due(9.0) == []
    batch.hold(10.0, held=False)
    assert batch.due_at() == pytest.approx(10.05)


def test_empty_it_is_never_due():
    batch = DecodeBatch(by_size)
    assert batch.due_at() == math.inf
    batch.join(1.0, "a")
    batch.leave(1.0, "a")
    assert batch.due_at() == math.inf
    assert len(batch) == 0


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 20)), min_size=1, max_size=20))
def test_everybody_gets_every_token_no_earlier_than_alone_and_no_later_than_in_a_full_batch(arrivals):
    batch, waiting, now = DecodeBatch(by_size), sorted(arrivals), 0.0
    left, since, ended = {}, {}, {}
    for number in itertools.count():
        assert number < 10_000
        if not waiting and not left:
            break
        now = min(batch.due_at(), waiting[0][0] if waiting else math.inf)
        while waiting and waiting[0][0] <= now:
            _, tokens = waiting.pop(0)
            key = len(since)
            batch.join(now, key)
            since[key], left[key] = (now, tokens), tokens
        for key in batch.due(now):
            left[key] -= 1
            if left[key]:
                batch.go_on(key, 1.0)
            else:
                batch.leave(now, key)
                del left[key]
                ended[key] = now
    for key, (start, tokens) in since.items():
        took = ended[key] - start
        assert took >= tokens * by_size(1) - 1e-6
        assert took <= (tokens + 1) * by_size(len(arrivals)) + 1e-6

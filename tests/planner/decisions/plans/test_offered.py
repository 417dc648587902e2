"""Samples that any number of readers may have."""

from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.plans.offered import SampleRing


def test_readers_do_not_take_samples_from_each_other():
    ring = SampleRing(4)
    for value in (1, 2, 3):
        ring.add(value)
    one = ring.after(0)
    assert one == ring.after(0)
    assert one.values == (1, 2, 3)
    ring.add(4)
    assert ring.after(one.last_seq).values == (4,)
    assert ring.after(4).values == ()


def test_who_comes_late_is_told_what_was_missed():
    ring = SampleRing(4)
    for value in range(10):
        ring.add(value)
    late = ring.after(2)
    assert (late.values, late.last_seq, late.missed) == ((6, 7, 8, 9), 10, 4)


def test_a_cursor_of_another_life_sees_everything():
    ring = SampleRing(4)
    ring.add(7)
    assert ring.after(1000).values == (7,)
    assert ring.after(-1).values == (7,)


@given(st.lists(st.one_of(st.integers(0, 9), st.just("read")), max_size=60), st.integers(1, 8))
def test_nothing_is_seen_twice_and_what_is_not_seen_is_counted(steps, limit):
    ring, cursor, seen, missed, added = SampleRing(limit), 0, [], 0, []
    for step in [*steps, "read"]:
        if step == "read":
            found = ring.after(cursor)
            cursor = found.last_seq
            missed += found.missed
            seen += found.values
        else:
            added.append(step)
            ring.add(step)
        assert len(ring) <= limit
    assert len(seen) + missed == len(added)
    assert not missed or len(seen) < len(added)
    assert missed or seen == added

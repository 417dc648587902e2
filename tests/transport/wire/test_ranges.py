import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.wire.ranges import RangeSet

spans = st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda t: (t[0], t[0] + t[1]))


def test_touching_ranges_become_one() -> None:
    assert list(RangeSet([(0, 4), (8, 12), (4, 8)])) == [(0, 12)]


def test_subtract_splits() -> None:
    ranges = RangeSet([(0, 10)])
    assert ranges.subtract(3, 5) == 2
    assert list(ranges) == [(0, 3), (5, 10)]
    assert ranges.num_bytes == 8


@pytest.mark.parametrize("span", [(-1, 2), (3, 2)])
def test_refuses_what_is_not_a_range(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not a range"):
        RangeSet().add(*span)


@given(st.lists(st.tuples(st.booleans(), spans)), spans)
def test_agrees_with_a_set_of_integers(steps: list[tuple[bool, tuple[int, int]]], probe: tuple[int, int]) -> None:
    ranges, model = RangeSet(), set[int]()
    for add, (start, stop) in steps:
        new = set(range(start, stop))
        changed = ranges.add(start, stop) if add else ranges.subtract(start, stop)
        assert changed == len(new - model if add else new & model)
        model = model | new if add else model - new
    assert {i for a, b in ranges for i in range(a, b)} == model
    assert ranges.num_bytes == len(model)
    assert all(b < c for (_, b), (c, _) in zip(list(ranges), list(ranges)[1:], strict=False))
    inside, probed = {i for a, b in ranges.overlap(*probe) for i in range(a, b)}, set(range(*probe))
    assert inside == probed & model
    assert {i for a, b in ranges.gaps(*probe) for i in range(a, b)} == probed - model
    assert ranges.covers(*probe) == (probed <= model)

"""Holders of certificates share their places: bounds hold, and small holders keep what they have."""

from hypothesis import given
from hypothesis import strategies as st

from transport.path.holders import IN_ALL, OF_HOLDER, HolderPlaces


def test_its_own_oldest_connection_makes_room_for_a_holder() -> None:
    places = HolderPlaces[int](in_all=10, of_holder=2)
    assert [places.enter(each, "gateway") for each in range(4)] == [None, None, 0, 1]
    assert places.enter(9, "operator") is None
    assert len(places) == 3


def test_the_holder_with_the_most_makes_room_where_all_places_are_taken() -> None:
    places = HolderPlaces[int](in_all=3, of_holder=3)
    assert places.enter(0, "operator") is None
    assert [places.enter(each, "gateway") for each in (1, 2, 3)] == [None, None, 1]
    assert places.enter(4, "another") == 2
    places.leave_if(lambda caller: caller == 3)
    places.leave(3)
    assert len(places) == 2


def test_a_process_with_few_descriptors_keeps_half_of_them_for_other_things() -> None:
    for descriptors, in_all, of_holder in ((64, 32, 8), (1 << 20, IN_ALL, OF_HOLDER)):
        places = HolderPlaces[int].within(descriptors)
        lost = [places.enter(each, f"gateway {each % 4}") for each in range(in_all + 4)]
        assert (lost.index(0), len(places)) == (in_all, in_all)
        assert [places.enter(-each, "one") for each in range(1, of_holder + 1)].count(None) == 0
        assert len(places) == in_all


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60), st.integers(1, 8), st.integers(1, 4))
def test_bounds_hold_and_nobody_loses_a_place_to_one_that_has_more(
    comers: list[tuple[str, bool]], in_all: int, of_holder: int
) -> None:
    places, inside = HolderPlaces[int](in_all, of_holder), dict[int, str]()
    for caller, (holder, leaves) in enumerate(comers):
        had = list(inside.values()).count(holder)
        if (lost := places.enter(caller, holder)) is not None:
            assert list(inside.values()).count(inside.pop(lost)) >= had
        inside[caller] = holder
        assert len(places) == len(inside) <= in_all
        assert list(inside.values()).count(holder) <= of_holder
        if leaves:
            places.leave(caller)
            del inside[caller]

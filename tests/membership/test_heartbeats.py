"""A node is stale when it does not refresh its entry, and a registry when no node does."""

from hypothesis import given
from hypothesis import strategies as st

from membership.heartbeats import MOST_PAUSE_S, Heartbeat, Heartbeats, StaleEntries

LEASE_S = 30.0
FRESH = StaleEntries()


def beats(**stamps: int) -> dict[str, Heartbeat]:
    return {name: Heartbeat(stamp, LEASE_S) for name, stamp in stamps.items()}


def test_an_entry_that_does_not_change_for_its_lease_is_stale() -> None:
    look = Heartbeats().look
    assert [look(beats(a=number, b=0), 5.0 * number) for number in range(7)] == [FRESH] * 7
    assert look(beats(a=7, b=0), 35.0).names == {"b"}
    assert look(beats(a=8, b=1), 40.0) == FRESH


def test_where_nothing_changes_any_more_it_is_the_registry_that_is_lost() -> None:
    look = Heartbeats().look
    for number in range(7):
        look(beats(a=0, b=0), 5.0 * number)
    assert look(beats(a=0, b=0), 35.0) == StaleEntries(all_since_s=35.0)
    # It is back: the others have their lease to say that they are there, too.
    assert look(beats(a=1, b=0), 36.0) == FRESH
    assert [look(beats(a=number, b=0), 36.0 + 5.0 * number) for number in range(2, 7)] == [FRESH] * 5
    assert look(beats(a=7, b=0), 71.0).names == {"b"}


def test_a_node_that_was_dead_before_a_registry_was_lost_is_not_back_with_it() -> None:
    look = Heartbeats().look
    for number in range(7):
        look(beats(a=number, b=0, c=number), 5.0 * number)
    assert look(beats(a=7, b=0, c=7), 35.0).names == {"b"}
    for number in range(1, 7):
        look(beats(a=7, b=0, c=7), 35.0 + 5.0 * number)
    assert look(beats(a=7, b=0, c=7), 66.0).all_since_s == 31.0
    assert look(beats(a=8, b=0, c=7), 67.0).names == {"b"}


def test_without_a_look_nothing_is_held_against_nodes() -> None:
    look = Heartbeats().look
    look(beats(a=0, b=0), 0.0)
    assert look(beats(a=1, b=0), 1_000.0) == FRESH
    for number in range(2, 9):
        found = look(beats(a=number, b=0), 1_000.0 + 5.0 * number)
    assert found.names == {"b"}


def test_an_entry_without_a_lease_never_is_stale() -> None:
    look = Heartbeats().look
    for number in range(100):
        assert look({"a": Heartbeat(0, 0.0), **beats(b=number)}, 5.0 * number) == FRESH


@given(st.lists(st.tuples(st.floats(0.1, MOST_PAUSE_S), st.sets(st.sampled_from("abcd"))), max_size=40))
def test_who_has_refreshed_within_its_lease_is_never_stale(steps: list[tuple[float, set[str]]]) -> None:
    look, now, stamps, at = Heartbeats().look, 0.0, dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 0.0)
    look(beats(**stamps), now)
    for pause_s, refreshed in steps:
        now += pause_s
        for name in refreshed:
            stamps[name] += 1
            at[name] = now
        for name in look(beats(**stamps), now).names:
            assert now - at[name] > LEASE_S

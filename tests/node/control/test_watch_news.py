"""A watcher hears all that it is to know, in few messages and soon."""

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.control.watch_news import APART_S, MANY, MANY_TOKENS, MOST_BYTES, MUCH_APART_S, Backlog, WatchNews
from transport.control.proto import node_pb2 as pb

INTERVAL_S = 0.25
LOAD = pb.NodeEvent(load=pb.Load())
NOTHING = Backlog(0, 0)
A, B, C = (bytes([number]) * 32 for number in range(3))


def stored(*hashes: bytes, group: int = 0, medium: pb.Medium = pb.MEDIUM_MEMORY) -> pb.NodeEvent:
    return pb.NodeEvent(stored=pb.BlocksStored(group=group, hashes=b"".join(hashes), medium=medium))


def removed(*hashes: bytes, group: int = 0, medium: pb.Medium = pb.MEDIUM_MEMORY) -> pb.NodeEvent:
    return pb.NodeEvent(removed=pb.BlocksRemoved(group=group, hashes=b"".join(hashes), medium=medium))


def cleared() -> pb.NodeEvent:
    return pb.NodeEvent(cleared=pb.CacheCleared())


def news() -> WatchNews:
    return WatchNews(INTERVAL_S, NOTHING, 0.0)


@pytest.mark.parametrize("event", [stored(A), removed(A), LOAD])
def test_what_comes_after_a_quiet_time_goes_at_once(event: pb.NodeEvent) -> None:
    quiet, now = news(), 2 * APART_S
    quiet.hear(event, Backlog(1, 0))
    assert quiet.due_at <= now


def test_what_comes_soon_after_a_message_goes_with_the_next_one() -> None:
    busy = news()
    busy.hear(stored(A), Backlog(1, 0))
    busy.hear(LOAD, Backlog(1, 0))
    busy.hear(stored(B, group=1), Backlog(1, 0))
    busy.hear(LOAD, Backlog(2, 0))
    busy.hear(stored(C), Backlog(2, 0))
    assert busy.due_at == pytest.approx(APART_S)
    assert busy.take(busy.due_at) == ([stored(A, C), stored(B, group=1)], True)


def test_blocks_that_went_and_came_are_told_in_this_order() -> None:
    busy = news()
    for event in (stored(A), removed(A), stored(A), stored(B), stored(A, medium=pb.MEDIUM_SSD)):
        busy.hear(event, NOTHING)
    told, _ = busy.take(APART_S)
    assert told == [stored(A), removed(A), stored(A, B), stored(A, medium=pb.MEDIUM_SSD)]


def test_what_is_neither_blocks_nor_load_goes_at_once_and_takes_along_what_waits() -> None:
    busy = news()
    busy.hear(stored(A), NOTHING)
    busy.hear(LOAD, Backlog(1, 0))
    busy.hear(cleared(), NOTHING)
    busy.hear(stored(B), NOTHING)
    assert busy.due_at <= 0.0
    assert busy.take(0.0) == ([stored(A), cleared(), stored(B)], True)


@pytest.mark.parametrize(("before", "now"), [(0, MANY), (MANY, 0), (3, 3 + MANY)])
def test_many_more_or_fewer_requests_are_told_soon(before: int, now: int) -> None:
    busy = news()
    busy.load_told(Backlog(before, 0), 0.0)
    busy.hear(LOAD, Backlog(now, 0))
    assert busy.due_at == pytest.approx(MUCH_APART_S)


@pytest.mark.parametrize(("before", "now"), [(0, MANY_TOKENS), (100_000, 0), (200_000, 200_000 - MANY_TOKENS)])
def test_much_more_or_less_to_compute_is_told_soon(before: int, now: int) -> None:
    busy = news()
    busy.load_told(Backlog(1, before), 0.0)
    busy.hear(LOAD, Backlog(1, now))
    assert busy.due_at == pytest.approx(MUCH_APART_S)


def test_a_long_prompt_under_way_costs_no_more_messages_than_a_short_one() -> None:
    """A node that computes 30,000 tokens in a second, told of after every chunk."""
    busy, now, left, messages = news(), 0.0, 1_000_000, 0
    busy.load_told(Backlog(1, left), now)
    while left:
        now, left = now + 0.033, max(0, left - 1_000)
        busy.hear(LOAD, Backlog(1, left))
        if busy.due_at <= now:
            busy.take(now)
            busy.load_told(Backlog(1, left), now)
            messages += 1
    assert messages <= now / APART_S


def test_a_load_is_told_though_nothing_changes_and_not_twice_in_a_row() -> None:
    quiet = news()
    assert quiet.due_at == INTERVAL_S
    quiet.hear(stored(A), NOTHING)
    _, is_load_due = quiet.take(APART_S)
    assert not is_load_due
    quiet.hear(stored(B), NOTHING)
    _, is_load_due = quiet.take(2 * APART_S)  # it would be due before the next message
    assert is_load_due
    quiet.load_told(NOTHING, 2 * APART_S)
    assert quiet.due_at == pytest.approx(2 * APART_S + INTERVAL_S)


def test_what_waits_is_bounded() -> None:
    busy = news()
    long = pb.NodeEvent(stored=pb.BlocksStored(hashes=bytes(MOST_BYTES // 4)))
    for _ in range(4):
        assert not busy.is_full
        busy.hear(long, NOTHING)
    assert busy.is_full
    assert busy.due_at <= 0.0
    busy.take(0.0)
    assert not busy.is_full


def test_events_of_the_node_are_not_changed() -> None:
    first, busy = stored(A), news()
    busy.hear(first, NOTHING)
    busy.hear(stored(B), NOTHING)
    busy.take(APART_S)
    assert first == stored(A)


@dataclass
class Held:
    """What a gateway takes a node to have."""

    blocks: set[tuple[int, int, bytes]] = field(default_factory=set)

    def hear(self, event: pb.NodeEvent) -> None:
        match event.WhichOneof("event"):
            case "stored":
                self.blocks |= self._named(event.stored)
            case "removed":
                self.blocks -= self._named(event.removed)
            case "cleared":
                self.blocks.clear()

    def _named(self, blocks: pb.BlocksStored | pb.BlocksRemoved) -> set[tuple[int, int, bytes]]:
        hashes = blocks.hashes
        return {(blocks.group, blocks.medium, hashes[at : at + 32]) for at in range(0, len(hashes), 32)}


SOME_BLOCKS = st.builds(
    lambda make, hashes, group, medium: make(*hashes, group=group, medium=medium),
    st.sampled_from([stored, removed]),
    st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=3),
    st.integers(0, 1),
    st.sampled_from([pb.MEDIUM_MEMORY, pb.MEDIUM_SSD]),
)
BACKLOGS = st.builds(Backlog, st.integers(0, 9), st.integers(0, 3 * MANY_TOKENS))
HAPPENS = st.tuples(st.floats(0.0, 0.2), st.one_of(SOME_BLOCKS, st.just(LOAD), st.builds(cleared)), BACKLOGS)


@given(st.lists(HAPPENS, max_size=60))
def test_everything_is_told_in_few_messages_and_soon(happens: list[tuple[float, pb.NodeEvent, Backlog]]) -> None:
    told_at, urgent_at = [0.0], list[float]()
    there, known, now = Held(), Held(), 0.0
    one, oldest = news(), inf

    def tell(at: float) -> None:
        nonlocal oldest
        assert at <= oldest + APART_S + 1e-9
        events, is_load_due = one.take(at)
        for event in events:
            known.hear(event)
        if is_load_due:
            one.load_told(backlog, at)
        told_at.append(at)
        oldest = inf
        assert known == there

    backlog = NOTHING
    for pause, event, later in happens:
        while one.due_at <= now + pause:
            tell(max(now, one.due_at))
            now, pause = told_at[-1], now + pause - told_at[-1]
        now, backlog = now + pause, later
        there.hear(event)
        one.hear(event, backlog)
        oldest = min(oldest, now)
        if event.HasField("cleared") or event.HasField("load"):
            urgent_at.append(now)
        if one.due_at <= now:
            tell(now)
    for before, after in pairwise(told_at):
        assert after - before >= APART_S - 1e-9 or any(before <= at <= after for at in urgent_at)

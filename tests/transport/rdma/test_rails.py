import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import LocalProtocolError
from transport.rdma.rails import (
    ANSWER_S,
    REST_FIRST_S,
    REST_MAX_S,
    MemoryPlacement,
    Posting,
    Rail,
    RailEvent,
    RailState,
    RailTable,
    RailWrite,
    SendQueue,
    plan_writes,
)
from transport.rdma.topology import RailPlan

sizes = st.lists(st.integers(0, 50), max_size=20)


def extents_of(lengths: list[int], gap: int) -> list[tuple[int, int]]:
    """Pieces of memory of these lengths, `gap` bytes apart."""
    starts = np.cumsum([0, *lengths]) + gap * np.arange(len(lengths) + 1)
    return [(int(start), length) for start, length in zip(starts, lengths, strict=False)]


def bytes_at(memory: bytes, extents: list[tuple[int, int]]) -> bytes:
    return b"".join(memory[start : start + length] for start, length in extents)


def table(*tiers: int) -> RailTable:
    return RailTable([RailPlan(f"near{i}", f"far{i}", "f", tier) for i, tier in enumerate(tiers)])


def bring_up(rails: RailTable, *indexes: int, now: float = 0.0) -> None:
    for index in indexes:
        rail = rails.rails[index]
        rails.offered(rail, now)
        rails.answered(rail, now)
        rails.proved(rail)


def indexes(rails: list[Rail]) -> list[int]:
    return [rail.index for rail in rails]


# Slicing


@given(sizes, sizes, st.integers(0, 3), st.integers(0, 3))
def test_writes_carry_one_layout_into_another(a: list[int], b: list[int], gap_a: int, gap_b: int) -> None:
    short = min(sum(a), sum(b))
    sources = MemoryPlacement(extents_of(a, gap_a)).slice(0, short)
    targets = MemoryPlacement(extents_of(b, gap_b)).slice(0, short)
    memory = np.random.default_rng(1).bytes(3000)
    landed = bytearray(3000)
    for write in plan_writes(sources, targets):
        assert write.length > 0
        landed[write.target : write.target + write.length] = memory[write.source : write.source + write.length]
    assert bytes_at(bytes(landed), targets) == bytes_at(memory, sources)


def test_memory_of_different_sizes_is_a_mistake() -> None:
    with pytest.raises(LocalProtocolError, match="more bytes"):
        plan_writes([(0, 10)], [(0, 9)])
    with pytest.raises(LocalProtocolError, match="more room"):
        plan_writes([(0, 9)], [(0, 10)])


@given(sizes, st.data())
def test_a_slice_is_the_same_as_cutting_the_line(lengths: list[int], data: st.DataObject) -> None:
    placement = MemoryPlacement(extents_of(lengths, 7))
    start = data.draw(st.integers(0, placement.num_bytes))
    stop = data.draw(st.integers(start, placement.num_bytes))
    memory = np.random.default_rng(2).bytes(3000)
    line = bytes_at(memory, extents_of(lengths, 7))
    assert bytes_at(memory, placement.slice(start, stop)) == line[start:stop]
    with pytest.raises(LocalProtocolError):
        placement.slice(0, placement.num_bytes + 1)


# The queue of one rail


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 16), st.integers(1, 8), st.randoms())
def test_every_chunk_completes_once_and_never_too_many_are_out(
    chunks: list[int], room: int, max_unanswered: int, random: "object"
) -> None:
    queue: SendQueue[int] = SendQueue(room=room, max_unanswered=max_unanswered)
    waiting, posted = list(enumerate(chunks)), list[Posting]()
    done: list[int] = []
    numbers: list[int] = []
    unanswered = 0
    for _ in range(10_000):
        if queue.wants_more and waiting:
            chunk, count = waiting.pop(0)
            queue.put(chunk, [RailWrite(0, 0, 1)] * count)
            unanswered += 1
        posted += [posting for posting, _ in queue.take_postings()]
        assert len(posted) <= room
        assert unanswered <= max_unanswered
        signalled = [posting for posting in posted if posting.signalled]
        if signalled:
            first = signalled[0]
            posted = [posting for posting in posted if posting.wr_id > first.wr_id]
            for number, chunk in queue.completed(first.wr_id):
                numbers.append(number)
                done.append(chunk)
        if unanswered > len(queue.pending) and random.random() < 0.5:  # type: ignore[attr-defined]
            queue.answered()
            unanswered -= 1
        if not waiting and not queue.pending:
            break
    assert done == list(range(len(chunks)))
    assert numbers == sorted(numbers)
    assert not posted


def test_only_the_last_write_of_a_chunk_carries_its_number() -> None:
    queue: SendQueue[str] = SendQueue(room=100, max_unanswered=4)
    queue.put("chunk", [RailWrite(0, 0, 1)] * 3)
    postings = [posting for posting, _ in queue.take_postings()]
    assert [(p.wr_id, p.signalled, p.number) for p in postings] == [(0, False, None), (1, False, None), (2, True, 0)]
    assert queue.pending == ["chunk"]
    assert queue.completed(2) == [(0, "chunk")]
    assert queue.pending == []


# Rails


@pytest.mark.parametrize("state", list(RailState))
@pytest.mark.parametrize("event", list(RailEvent))
def test_a_rail_goes_through_offer_answer_proof_and_nothing_else(state: RailState, event: RailEvent) -> None:
    allowed = {
        (RailState.RESTING, RailEvent.OFFER): RailState.OFFERED,
        (RailState.OFFERED, RailEvent.ANSWER): RailState.PROVING,
        (RailState.PROVING, RailEvent.PROOF): RailState.UP,
        (RailState.OFFERED, RailEvent.FAIL): RailState.RESTING,
        (RailState.PROVING, RailEvent.FAIL): RailState.RESTING,
        (RailState.UP, RailEvent.FAIL): RailState.RESTING,
    }
    rail = Rail(0, RailPlan("a", "b", "f", 0), state=state)
    if (state, event) in allowed:
        rail.enter(event)
        assert rail.state is allowed[state, event]
    else:
        with pytest.raises(LocalProtocolError):
            rail.enter(event)


def test_secondary_pairs_are_used_while_no_preferred_one_is_up() -> None:
    rails = table(0, 0, 1)
    assert indexes(rails.due(0.0)) == [0, 1, 2]
    bring_up(rails, 2)
    assert indexes(rails.carriers()) == [2]
    bring_up(rails, 1)
    assert indexes(rails.carriers()) == [1]
    rails.fail(rails.rails[2], "lost", 0.0)
    assert indexes(rails.due(10.0)) == [0]
    rails.fail(rails.rails[1], "lost", 10.0)
    assert indexes(rails.due(20.0)) == [0, 1, 2]


def test_a_rail_that_fails_rests_longer_each_time_until_it_has_carried_something() -> None:
    rails = table(0)
    rail, now, rests = rails.rails[0], 0.0, []
    for _ in range(8):
        bring_up(rails, 0, now=now)
        rails.fail(rail, "lost", now)
        assert rails.due(now) == []
        rests.append(rail.rest_until - now)
        assert rails.next_timer() == rail.rest_until
        now = rail.rest_until
    assert rests[0] == REST_FIRST_S
    assert rests == sorted(rests)
    assert rests[-1] == REST_MAX_S
    bring_up(rails, 0, now=now)
    rails.carried(rail, 100)
    rails.fail(rail, "lost", now)
    assert rail.rest_until == now + REST_FIRST_S
    assert rail.failed == {"lost": 9}
    assert rail.bytes_carried == 100


def test_answers_and_proofs_have_a_deadline() -> None:
    rails = table(0, 0)
    rails.offered(rails.rails[0], 1.0)
    rails.offered(rails.rails[1], 1.0)
    rails.answered(rails.rails[1], 2.0)
    assert rails.late(1.0 + ANSWER_S) == [rails.rails[0]]
    assert indexes(rails.late(2.0 + ANSWER_S)) == [0, 1]


def test_a_rail_with_chunks_on_it_has_to_move() -> None:
    rails = table(0, 0)
    bring_up(rails, 0, 1)
    assert rails.late(1e9) == []
    for now in (1.0, 2.0):  # the second time nothing has moved
        rails.watch(rails.rails[0], now, 2.0, busy=True, moved=False)
        assert rails.next_timer() == 3.0
    assert rails.late(2.9) == []
    assert indexes(rails.late(3.0)) == [0]
    rails.watch(rails.rails[0], 2.5, 2.0, busy=True, moved=True)
    assert rails.next_timer() == 4.5
    rails.watch(rails.rails[0], 2.6, 2.0, busy=False, moved=True)
    assert rails.late(1e9) == []


def test_exhausted_only_after_every_pair_has_failed_and_until_one_is_up() -> None:
    rails = table(0, 1)
    assert not rails.exhausted
    for rail in rails.rails:
        rails.offered(rail, 0.0)
        assert not rails.exhausted
        rails.fail(rail, "refused", 0.0)
    assert rails.exhausted
    rails.offered(rails.rails[0], 1.0)  # trying again is not yet a rail
    assert rails.exhausted
    rails.answered(rails.rails[0], 1.0)
    rails.proved(rails.rails[0])
    assert not rails.exhausted
    assert table().exhausted


def test_frames_about_an_earlier_queue_pair_are_of_the_past() -> None:
    rails = table(0)
    bring_up(rails, 0)
    first = rails.rails[0].attempt
    assert rails.find(0, first) is rails.rails[0]
    assert rails.find(7, first) is None
    rails.fail(rails.rails[0], "lost", 0.0)
    assert rails.find(0, first) is None
    bring_up(rails, 0)
    assert rails.find(0, first) is None
    assert rails.find(0, first + 1) is rails.rails[0]


def test_a_new_connection_begins_anew_and_the_accounts_go_on() -> None:
    rails = table(0)
    bring_up(rails, 0)
    rails.carried(rails.rails[0], 5)
    rails.restart()
    rails.plan([rails.rails[0].plan])
    (report,) = rails.reports("peer")
    assert (report.up, report.bytes_total, report.times_up) == (False, 5, 1)
    rails.plan([RailPlan("other", "far", "f", 0)])
    assert rails.reports("peer")[0].bytes_total == 0

"""The scheduler: whose bytes leave next, on which lane."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples
from transport.errors import RemoteProtocolError
from transport.send.schedule.fairness import HALF_LIFE_S
from transport.send.schedule.lanes import LaneScheduler, LaneTransfer
from transport.send.spec import Urgency
from transport.turns import LATELY_S
from transport.wire.frames import Abort, Accept, Ack, Cancel, Nack
from transport.wire.manifest import Manifest, Outbox
from transport.wire.outcome import MAX_REJECTED_CHUNKS

CHUNK = 1 << 20


def transfer(scheduler: LaneScheduler, slot: int, megabytes: int = 10, **more: object) -> LaneTransfer:
    made = LaneTransfer(
        slot=slot, transfer_id=f"t{slot}", secret=b"s", outbox=Outbox(Manifest([CHUNK] * megabytes)), **more
    )  # type: ignore[arg-type]  # fmt: skip
    scheduler.add(made)
    scheduler.ready(made, range(megabytes))
    made.outbox.accept([(0, megabytes * CHUNK)])
    return made


def scheduler_with(lanes: int = 1) -> LaneScheduler:
    scheduler = LaneScheduler(chunk_bytes=CHUNK, window_bytes=1 << 40)
    for lane in range(lanes):
        scheduler.lane_up(lane)
    return scheduler


def served(scheduler: LaneScheduler, batches: int, lane: int = 0) -> list[int]:
    """Slots in the order in which their bytes left."""
    return [piece.transfer.slot for _ in range(batches) for piece in scheduler.next_batch(lane).pieces]


def test_urgent_before_normal_before_bulk() -> None:
    scheduler = scheduler_with()
    for slot, urgency in enumerate((Urgency.BULK, Urgency.NORMAL, Urgency.URGENT)):
        transfer(scheduler, slot, 1, urgency=urgency)
    order = served(scheduler, 40)
    assert sorted(set(order), key=order.index) == [2, 1, 0]


def test_bulk_is_alone_when_nothing_else_could_leave() -> None:
    scheduler = scheduler_with()
    assert not scheduler.only_bulk
    transfer(scheduler, 0, 10, urgency=Urgency.BULK)
    assert scheduler.only_bulk
    transfer(scheduler, 1, 1)
    assert not scheduler.only_bulk
    while 1 in served(scheduler, 1):
        pass
    assert scheduler.only_bulk


def test_the_earliest_deadline_goes_first() -> None:
    scheduler = scheduler_with()
    for slot, deadline in enumerate((30.0, 10.0, 20.0)):
        transfer(scheduler, slot, 1, deadline=deadline)
    order = served(scheduler, 40)
    assert sorted(set(order), key=order.index) == [1, 2, 0]


def test_what_is_due_first_goes_first_and_is_not_given_up() -> None:
    scheduler = scheduler_with()
    late = transfer(scheduler, 0, 1, due=30.0)
    for slot, more in enumerate(({"due": 10.0}, {"deadline": 20.0}), start=1):
        transfer(scheduler, slot, 1, **more)
    scheduler.expire(15.0)
    order = served(scheduler, 40)
    assert sorted(set(order), key=order.index) == [1, 2, 0]
    scheduler.expire(1000.0)
    assert late.outcome is None


def test_tenants_share_by_weight() -> None:
    scheduler = scheduler_with()
    heavy = transfer(scheduler, 0, 100, tenant="a", weight=3.0)
    light = transfer(scheduler, 1, 100, tenant="b", weight=1.0)
    while heavy.outbox.bytes_sent < 60 * CHUNK:
        scheduler.next_batch(0)
    assert heavy.outbox.bytes_sent / light.outbox.bytes_sent == pytest.approx(3.0, rel=0.1)


def sent_by_two(scheduler: LaneScheduler, *transfers: LaneTransfer) -> list[int]:
    """Chunks of each that leave in the next 20."""
    before = [each.outbox.bytes_sent for each in transfers]
    for _ in range(20):
        scheduler.next_batch(0)
    return [(each.outbox.bytes_sent - was) // CHUNK for each, was in zip(transfers, before, strict=True)]


def test_a_tenant_that_has_sent_less_lately_goes_first_until_it_has_had_as_much() -> None:
    scheduler = scheduler_with()
    old = transfer(scheduler, 0, 100, tenant="a")
    while old.outbox.bytes_sent < 30 * CHUNK:
        scheduler.next_batch(0)
    new = transfer(scheduler, 1, 100, tenant="b")
    assert sent_by_two(scheduler, old, new) == [0, 20]
    assert sent_by_two(scheduler, old, new) == [5, 15]
    assert sent_by_two(scheduler, old, new) == [10, 10]


def test_a_tenant_that_has_just_sent_as_much_is_not_first_again_by_a_new_transfer() -> None:
    scheduler = scheduler_with()
    old = transfer(scheduler, 0, 100, tenant="a")
    first = transfer(scheduler, 1, 10, tenant="b")
    while old.outbox.bytes_sent < 10 * CHUNK or first.outbox.bytes_sent < 10 * CHUNK:
        scheduler.next_batch(0)
    scheduler.abort(first, "over")
    second = transfer(scheduler, 2, 100, tenant="b")
    assert sent_by_two(scheduler, old, second) == [10, 10]


@pytest.mark.parametrize("heavies", [1, 20, 200])
def test_a_light_tenant_sends_within_its_share_beside_any_number_of_full_ones(heavies: int) -> None:
    """A transfer of two chunks leaves within the time that its share of the lane takes, and one chunk more."""
    scheduler, rate = scheduler_with(), 40 * CHUNK
    scheduler.on_rates({0: rate})
    for number in range(heavies):
        transfer(scheduler, number, 100, tenant=f"t{number}")
    now, times = 0.0, []
    for number in range(3):
        came = now
        light = transfer(scheduler, 1000 + number, 2, tenant="light")
        while light.outbox.bytes_queued or now < came + 2 * 2 * CHUNK * (heavies + 1) / rate:
            scheduler.expire(now)
            had = light.outbox.bytes_queued
            now += sum(piece.stop - piece.start for piece in scheduler.next_batch(0).pieces) / rate
            if had and not light.outbox.bytes_queued:
                times.append(now - came)
    assert max(times) <= 2 * CHUNK * (heavies + 1) / rate + 0.1


def test_chunks_of_a_slow_lane_are_shorter_where_another_tenant_may_come() -> None:
    scheduler = scheduler_with()
    scheduler.on_rates({0: 4e6})
    transfer(scheduler, 0, 100, tenant="a")
    transfer(scheduler, 1, 1, tenant="a", urgency=Urgency.URGENT)
    while 1 in served(scheduler, 1):
        pass
    assert scheduler.next_batch(0).num_bytes == 400_000
    transfer(scheduler, 2, 1, tenant="b")
    while 2 in served(scheduler, 1):
        pass
    assert scheduler.next_batch(0).num_bytes == 100_000
    scheduler.expire(LATELY_S + 1.0)
    served(scheduler, 1)
    assert scheduler.next_batch(0).num_bytes == 400_000


def test_all_lanes_together_take_no_more_than_a_moment_of_the_budget_where_another_tenant_may_come() -> None:
    scheduler = scheduler_with(lanes=4)
    scheduler.budget_bytes_per_s = 16e6
    transfer(scheduler, 0, 100, tenant="a")
    transfer(scheduler, 1, 1, tenant="b")
    served(scheduler, 20)
    assert [scheduler.next_batch(lane).num_bytes for lane in range(4)] == [100_000] * 4


def test_what_was_sent_long_ago_is_forgotten() -> None:
    scheduler = scheduler_with()
    old = transfer(scheduler, 0, 100, tenant="a")
    while old.outbox.bytes_sent < 30 * CHUNK:
        scheduler.next_batch(0)
    scheduler.expire(40 * HALF_LIFE_S)
    new = transfer(scheduler, 1, 100, tenant="b")
    assert sent_by_two(scheduler, old, new) == [10, 10]


def test_a_lost_lane_gives_its_chunks_to_the_others() -> None:
    scheduler = scheduler_with(2)
    t = transfer(scheduler, 0, 4)
    first = scheduler.next_batch(0).pieces[0]
    scheduler.lane_down(0)
    again = scheduler.next_batch(1)
    assert again.pieces[0].start == first.start
    assert t.outbox.bytes_resent == first.stop - first.start


def test_answers_to_what_was_never_sent_are_refused() -> None:
    scheduler = scheduler_with()
    transfer(scheduler, 0)
    piece = scheduler.next_batch(0).pieces[0]
    for frame in (
        Ack(slot=0, ranges=((piece.start, piece.stop + 1),)),
        Nack(slot=0, offset=7, length=5, code="checksum"),
        Accept(slot=0, missing=((0, 1 << 40),)),
    ):
        with pytest.raises(RemoteProtocolError):
            scheduler.on_frame(0, frame)


def test_a_chunk_that_never_passes_ends_the_transfer() -> None:
    scheduler = scheduler_with()
    t = transfer(scheduler, 0, 1)
    for _ in range(1000):
        if t.outcome is not None:
            break
        for piece in scheduler.next_batch(0).pieces:
            if t.outcome is None:
                nack = Nack(slot=0, offset=piece.start, length=piece.stop - piece.start, code="checksum")
                scheduler.on_frame(0, nack)
    assert t.outcome is not None
    assert t.outcome.code == "checksum"
    assert t.outbox.rejected_chunks == MAX_REJECTED_CHUNKS + 1


def test_a_full_window_takes_no_more_until_it_is_acknowledged() -> None:
    scheduler = LaneScheduler(chunk_bytes=CHUNK, window_bytes=2 * CHUNK)
    scheduler.lane_up(0)
    t = transfer(scheduler, 0)
    sent = []
    while batch := scheduler.next_batch(0).pieces:
        sent += batch
    assert t.outbox.bytes_sent <= 2 * CHUNK
    scheduler.on_frame(0, Ack(slot=0, ranges=((sent[0].start, sent[0].stop),)))
    assert scheduler.next_batch(0).pieces


def test_a_receiver_owes_an_answer_to_an_opening_and_to_chunks_and_to_nothing_else() -> None:
    scheduler = scheduler_with()
    opened = LaneTransfer(slot=0, transfer_id="t0", secret=b"s", outbox=Outbox(Manifest([CHUNK])))
    scheduler.add(opened)
    assert not scheduler.unanswered
    assert scheduler.take_openings(0) == [opened]
    assert scheduler.unanswered
    scheduler.on_frame(0, Accept(slot=0, missing=((0, CHUNK),)))
    assert not scheduler.unanswered
    scheduler.ready(opened, [0])
    pieces = scheduler.next_batch(0).pieces
    assert scheduler.unanswered
    scheduler.on_frame(0, Ack(slot=0, ranges=tuple((piece.start, piece.stop) for piece in pieces)))
    assert not scheduler.unanswered


def test_a_chunk_that_has_no_place_any_more_is_not_sent_again_unless_its_lane_is_lost() -> None:
    scheduler = scheduler_with()
    t = transfer(scheduler, 0)
    piece = scheduler.next_batch(0).pieces[0]
    size, queued = piece.stop - piece.start, t.outbox.bytes_queued
    scheduler.on_frame(0, Nack(slot=0, offset=piece.start, length=size, code="cancelled"))
    assert (t.outbox.rejected_chunks, t.outbox.bytes_queued) == (0, queued)
    scheduler.lane_down(0)  # before the Cancel came
    assert (t.outbox.bytes_queued, scheduler.bytes_in_flight) == (queued + size, 0)


def test_answers_to_chunks_of_a_transfer_that_ended_free_their_room() -> None:
    scheduler = scheduler_with()
    t = transfer(scheduler, 0)
    piece = scheduler.next_batch(0).pieces[0]
    scheduler.on_frame(0, Cancel(slot=0, code="cancelled"))
    scheduler.on_frame(0, Nack(slot=0, offset=piece.start, length=piece.stop - piece.start, code="cancelled"))
    assert scheduler.bytes_in_flight == 0
    assert t.outbox.rejected_chunks == 0


def test_the_end_of_a_transfer_is_told_where_it_was_opened() -> None:
    scheduler = scheduler_with(2)
    t = transfer(scheduler, 0)
    scheduler.next_batch(0)
    scheduler.abort(t, "over")
    assert [type(n) for n in scheduler.next_batch(0).notices] == [Abort]
    assert not scheduler.next_batch(1).notices
    assert scheduler.take_settled() == [t]


def test_memory_in_use_is_not_reported_free() -> None:
    scheduler = scheduler_with()
    t = transfer(scheduler, 0)
    t.writing = 1
    scheduler.on_frame(0, Cancel(slot=0, code="cancelled"))
    assert scheduler.take_settled() == []
    t.writing = 0
    assert scheduler.take_settled() == [t]


def test_chunks_shrink_towards_the_end_and_on_slow_lanes() -> None:
    scheduler = scheduler_with(4)
    transfer(scheduler, 0, 4)
    assert scheduler.next_batch(0).num_bytes == CHUNK // 2
    scheduler = scheduler_with()
    scheduler.lane_bytes_per_s = 2e6
    transfer(scheduler, 0, 100)
    assert scheduler.next_batch(0).num_bytes == 200_000


def test_the_last_chunks_go_by_what_each_lane_carries_at_present() -> None:
    scheduler = LaneScheduler(chunk_bytes=4 * CHUNK)
    for lane in range(4):
        scheduler.lane_up(lane)
    scheduler.on_rates({0: 3e6, 1: 1e6, 2: 1e6, 3: 1e6, 9: 5e6})
    transfer(scheduler, 0, 1)
    slow, fast = scheduler.next_batch(1).num_bytes, scheduler.next_batch(0).num_bytes
    assert slow == int(CHUNK * 1 / 6 / 2)
    assert fast == int((CHUNK - slow) * 3 / 6 / 2)
    while scheduler.bytes_queued:
        last = scheduler.next_batch(1).num_bytes
    assert last <= 20_000


def test_the_end_is_near_when_the_lanes_soon_have_sent_what_is_queued() -> None:
    scheduler = scheduler_with(2)
    transfer(scheduler, 0, 2)
    assert not scheduler.ending  # nothing is known of the lanes, as within a host
    scheduler.on_rates({0: 3e6, 1: 3e6})
    assert not scheduler.ending
    while scheduler.bytes_queued > 1_800_000:
        scheduler.next_batch(0)
    assert scheduler.ending


def test_some_bytes_may_leave_before_the_receiver_has_answered() -> None:
    scheduler = scheduler_with(2)
    scheduler.eager_bytes = 3 * CHUNK // 2
    t = LaneTransfer(slot=0, transfer_id="t", secret=b"s", outbox=Outbox(Manifest([CHUNK] * 10)))
    scheduler.add(t)
    scheduler.ready(t, range(10))
    assert scheduler.lanes_wanted() > 2
    batches = [scheduler.next_batch(lane) for lane in (0, 1, 0)]
    assert [bool(batch.opens) for batch in batches] == [True, True, False]
    assert [batch.num_bytes for batch in batches] == [CHUNK, CHUNK, 0]
    first = batches[0].pieces[0]
    scheduler.on_frame(0, Accept(slot=0, missing=((5 * CHUNK, 10 * CHUNK),)))
    assert t.outbox.bytes_resumed == 3 * CHUNK  # what is on its way will be acknowledged by itself
    scheduler.on_frame(0, Ack(slot=0, ranges=((first.start, first.stop),)))
    assert scheduler.next_batch(0).pieces[0].start == 5 * CHUNK


def test_what_nobody_will_answer_leaves_the_window() -> None:
    scheduler = LaneScheduler(chunk_bytes=CHUNK, window_bytes=2 * CHUNK)
    scheduler.lane_up(0)
    for slot in range(3):
        t = transfer(scheduler, slot)
        piece = scheduler.next_batch(0).pieces[0]
        scheduler.on_frame(0, Cancel(slot=slot, code="cancelled"))
        assert scheduler.lane_in_flight(0) == 0
        scheduler.on_frame(0, Ack(slot=slot, ranges=((piece.start, piece.stop),)))  # it had landed just before
        assert t.outcome is not None


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["send", "ack", "nack", "down"])), max_size=60))
def test_no_byte_is_ever_forgotten(steps: list[tuple[int, str]]) -> None:
    scheduler = LaneScheduler(chunk_bytes=300_000)
    for lane in range(4):
        scheduler.lane_up(lane)
    t = transfer(scheduler, 0, 3)
    flying: dict[int, list[tuple[int, int]]] = {lane: [] for lane in range(4)}

    def step(lane: int, action: str) -> None:
        if action == "send":
            flying[lane] += [(piece.start, piece.stop) for piece in scheduler.next_batch(lane).pieces]
        elif action == "down":
            scheduler.lane_down(lane)
            scheduler.lane_up(lane)
            flying[lane] = []
        elif flying[lane]:
            start, stop = flying[lane].pop(0)
            answer = Ack(slot=0, ranges=((start, stop),)) if action == "ack" else None
            scheduler.on_frame(lane, answer or Nack(slot=0, offset=start, length=stop - start, code="checksum"))

    for lane, action in steps:
        step(lane, action)
        if t.outcome is None:
            box = t.outbox
            assert box.bytes_queued + box.bytes_in_flight + box.acked.num_bytes == 3 * CHUNK
    for _ in range(1000):
        if t.outcome is not None:
            break
        for lane in range(4):
            step(lane, "send")
            step(lane, "ack")
    assert t.outcome is not None
    assert t.outcome.ok

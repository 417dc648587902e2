"""What workers were asked for, as any of them tells it; here several of them in one process."""

from pathlib import Path

from gateway.telemetry.load_report import KEPT
from gateway.workers.process_scope import SingleProcess, tally_of
from gateway.workers.shared_samples import SharedSamples
from planner.decisions.plans.offered import SampleRing
from tests.gateway.worlds import on_loop, until, world


def created(directory: Path) -> Path:
    path = directory / "tally"
    SharedSamples.create(path)
    return path


def test_any_worker_tells_what_all_were_asked_for(tmp_path: Path) -> None:
    path = created(tmp_path)
    one, other, later = (
        SharedSamples(path),
        SharedSamples(path),
        SharedSamples(path),
    )  # the last one takes the place of one that died
    one.asked(100)
    other.asked(200)
    other.answered(7)
    one.refused_unread()
    other.refused_unread()
    for each in (one, other, later):
        assert each.boot == one.boot
        assert each.uncached.after(0).values == (100, 200)
        assert each.uncached.after(1).values == (200,)
        assert each.outputs.after(0).values == (7,)
        assert each.unread == 2
    for each in (one, other, later):
        each.close()


def test_another_life_of_the_gateway_has_another_name(tmp_path: Path) -> None:
    boots = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        tally = SharedSamples(created(tmp_path / name))
        boots.add(tally.boot)
        tally.close()
    assert len(boots) == 2


def test_a_ring_of_workers_says_what_that_of_one_process_says(tmp_path: Path) -> None:
    tally, own = SharedSamples(created(tmp_path)), SampleRing(KEPT)
    value = 0
    for more in (0, 1, 30, KEPT - 32, 1, 1, 40):  # before it is full, just full, and around once
        for _ in range(more):
            value += 1
            tally.uncached.add(value)
            own.add(value)
        for seq in (-1, 0, 1, value - KEPT, value - KEPT + 1, value - 3, value, value + 1):
            assert tally.uncached.after(seq) == own.after(seq), (value, seq)
    tally.close()


def test_samples_are_seen_by_others_when_published_when_read_and_when_there_are_many(tmp_path: Path) -> None:
    path = created(tmp_path)
    busy, other = SharedSamples(path, most_unwritten=3), SharedSamples(path)
    busy.asked(1)
    busy.asked(2)
    assert other.uncached.after(0).values == ()
    busy.publish()
    assert other.uncached.after(0).values == (1, 2)
    for value in (3, 4, 5, 6):
        busy.asked(value)
    assert other.uncached.after(2).values == (3, 4, 5)
    assert busy.uncached.after(2).values == (3, 4, 5, 6)
    other.asked(7)
    busy.answered(9)
    assert other.outputs.after(0).values == ()
    busy.close()
    assert other.outputs.after(0).values == (9,)
    assert other.uncached.after(5).values == (6, 7)
    other.close()


def test_a_ring_written_by_many_at_a_time_says_what_that_of_one_process_says(tmp_path: Path) -> None:
    tally, own = SharedSamples(created(tmp_path), most_unwritten=64), SampleRing(KEPT)
    for value in range(KEPT + 1000):
        tally.uncached.add(value)
        own.add(value)
    for seq in (0, 1, 1000, KEPT, KEPT + 999, KEPT + 1000):
        assert tally.uncached.after(seq) == own.after(seq)
    tally.close()


@on_loop
async def test_a_gateway_publishes_while_it_runs_and_when_it_ends(tmp_path: Path) -> None:
    path = created(tmp_path)
    seat, other = SingleProcess(), SharedSamples(path)
    seat.offered = SharedSamples(path, most_unwritten=64)
    async with world(seat=seat) as w:
        await w.complete()
        await until(lambda: len(other.outputs.after(0).values) == 1)
        await w.complete()
        await w.idle()
    assert len(other.uncached.after(0).values) == len(other.outputs.after(0).values) == 2
    seat.offered.close()
    other.close()


def test_workers_count_what_is_asked_for_of_each_model_in_one_file(tmp_path: Path) -> None:
    one, other = tally_of(tmp_path, "moon/a"), tally_of(tmp_path, "moon/a")
    another = tally_of(tmp_path, "b")
    one.asked(7)
    one.publish()
    assert other.uncached.after(0).values == (7,)
    assert (another.uncached.after(0).values, another.boot == one.boot) == ((), False)
    assert len(list(tmp_path.iterdir())) == 2
    for each in (one, other, another):
        each.close()

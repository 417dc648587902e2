"""What becomes of the counters of runs."""

from gateway.fleet.usage.counts import Counts
from gateway.fleet.usage.documents import MOST_FOLDED, FoldedUsage, RunUsage, folded_written, run_read, run_written
from gateway.fleet.usage.runs import (
    GAP_S,
    FoundUsage,
    OwnRun,
    RunSightings,
    StoredValue,
    next_state,
    resumed,
    with_folded,
)

ACME, SENT = ("acme", "requests_200", "", ""), ("acme", "kv_bytes_move", "east", "west")
OWN = OwnRun(id="one", began_unix_s=5, since_unix_s=5)


def run(number: int, counts: Counts, since_unix_s: int = 5) -> RunUsage:
    return RunUsage(gateway="g0", since_unix_s=since_unix_s, number=number, counts=counts)


def folded_of(**numbers: int) -> FoundUsage:
    data, _ = folded_written(FoldedUsage(since_unix_s=1, folded=numbers))
    return FoundUsage(StoredValue(data, 9))


def test_a_run_never_goes_back() -> None:
    state = next_state("g0", OWN, run(7, {ACME: 5, SENT: 9}), {ACME: 8}, has_ended=False)
    assert state == run(8, {ACME: 8, SENT: 9})


def test_a_write_has_another_number_than_all_before() -> None:
    own = OWN.about_to_write(4, b"four", {3: b"three"})
    assert own.written == {3: b"three", 4: b"four"}
    assert next_state("g0", own, run(3, {}), {}, has_ended=True).number == 5
    assert own.about_to_write(5, b"five", {3: b"three"}).written == {3: b"three", 5: b"five"}


def test_a_run_that_was_not_folded_goes_on() -> None:
    there = FoundUsage(runs={"one": StoredValue(b"", 3)})
    for found in (FoundUsage(), there, folded_of(two=3)):
        assert resumed(OWN, found, "new", 8, {}) is None


def test_a_run_that_was_folded_goes_on_with_the_rest() -> None:
    written = {number: run_written(run(number, {ACME: number})) for number in (3, 4)}
    own = OwnRun(id="one", began_unix_s=5, since_unix_s=5, written=written)
    again = resumed(own, folded_of(one=4), "new", 8, {ACME: 6})
    assert again is not None
    assert again.is_exact
    assert (again.run.id, again.run.began_unix_s, again.run.since_unix_s) == ("new", 5, 8)
    assert again.run.counts({ACME: 6}) == {ACME: 2}
    # Twice: both parts are folded.
    next_one = again.run.about_to_write(1, run_written(run(1, {ACME: 2})), {})
    third = resumed(next_one, folded_of(one=4, new=1), "third", 9, {ACME: 7})
    assert third is not None
    assert third.run.counts({ACME: 7}) == {ACME: 1}


def test_where_it_is_not_known_what_was_folded_nothing_counts_twice() -> None:
    again = resumed(OWN, folded_of(one=4), "new", 8, {ACME: 6})
    assert again is not None
    assert not again.is_exact
    assert again.run.counts({ACME: 9}) == {ACME: 3}


def test_of_a_run_that_was_folded_at_an_earlier_write_what_it_has_not_written_counts() -> None:
    own = OWN.about_to_write(7, run_written(run(7, {ACME: 6})), {})
    again = resumed(own, folded_of(one=4), "new", 8, {ACME: 9})  # of an etcd that was restored
    assert again is not None
    assert not again.is_exact
    assert again.run.counts({ACME: 9}) == {ACME: 3}


def test_a_run_whose_name_may_be_forgotten_does_not_count_twice() -> None:
    own = OWN.about_to_write(7, run_written(run(7, {ACME: 6})), {})
    many = {f"r{number}": 1 for number in range(MOST_FOLDED)}

    def found(folds: int) -> FoundUsage:
        data, _ = folded_written(FoldedUsage(since_unix_s=1, folds=folds, folded=many))
        return FoundUsage(StoredValue(data, 9))

    assert resumed(own, found(MOST_FOLDED), "new", 8, {ACME: 9}) is None
    again = resumed(own, found(MOST_FOLDED + 1), "new", 8, {ACME: 9})
    assert again is not None
    assert not again.is_exact
    assert again.run.counts({ACME: 9}) == {ACME: 3}


def test_a_sum_knows_the_latest_runs_that_it_has() -> None:
    total = None
    for number in range(MOST_FOLDED + 1):
        total = with_folded(total, {f"r{number}": run(number, {ACME: 1}, since_unix_s=100 - number % 7)})
    assert total is not None
    assert total.counts == {ACME: MOST_FOLDED + 1}
    assert total.since_unix_s == 94
    assert len(total.folded) == MOST_FOLDED
    assert "r0" not in total.folded
    assert total.folded[f"r{MOST_FOLDED}"] == MOST_FOLDED


def test_silence_is_counted_from_a_change_on_and_only_while_we_look() -> None:
    sightings = RunSightings()

    def silent(now: float, **revisions: int) -> dict[str, float]:
        return sightings.silent({name: StoredValue(b"", each) for name, each in revisions.items()}, now)

    assert silent(1000.0, a=1, b=1) == {"a": 0.0, "b": 0.0}
    assert silent(1100.0, a=1, b=2) == {"a": 100.0, "b": 0.0}
    assert silent(1200.0, a=1) == {"a": 200.0}
    assert silent(1200.0 + GAP_S + 1.0, a=1) == {"a": 0.0}


def test_a_document_of_a_run_is_read_as_written() -> None:
    assert run_read("one", run_written(run(3, {ACME: 1, SENT: 2}))) == run(3, {ACME: 1, SENT: 2})

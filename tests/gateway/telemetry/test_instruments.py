"""Values of instruments in files of a process, and what the library reads there."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest
from prometheus_client.mmap_dict import MmapedDict

from gateway.telemetry.added_up import added_up
from gateway.telemetry.instruments import FileValue, FileValues


class Begin(Protocol):
    def __call__(self, worker: int) -> FileValues: ...


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Begins a process that counts in this place."""
    with ExitStack() as ends:

        def begun(worker: int) -> FileValues:
            values = FileValues(tmp_path, worker)
            ends.callback(values.close)
            return values

        yield begun


def counted(values: FileValues, reason: str, kind: str = "counter") -> FileValue:
    return values(kind, "prfaas_x", "prfaas_x_total", ("reason",), (reason,), "What", multiprocess_mode="livesum")


def sums(directory: Path) -> dict[str, list[float]]:
    by_kind = added_up(directory, MmapedDict.read_all_values_from_file)
    return {kind: sorted(by_name.values()) for kind, by_name in by_kind.items()}


def test_what_a_process_counts_is_in_its_file_at_once(begin: Begin, tmp_path: Path) -> None:
    values = begin(0)
    one, other = counted(values, "one"), counted(values, "other")
    one.inc(1)
    one.inc(2.5)
    other.set(7)
    assert (one.get(), other.get()) == (3.5, 7)
    assert sums(tmp_path) == {"counter": [3.5, 7.0]}


def test_the_values_of_all_processes_add_up_and_stay_when_one_has_ended(begin: Begin, tmp_path: Path) -> None:
    for worker, amount in enumerate((1, 10, 100)):
        counted(begin(worker), "one").inc(amount)
    assert sums(tmp_path) == {"counter": [111.0]}


def test_a_process_in_the_place_of_one_that_ended_counts_on(begin: Begin, tmp_path: Path) -> None:
    counted(begin(3), "one").inc(4)
    again = counted(begin(3), "one")
    again.inc(1)
    assert again.get() == 5
    assert sums(tmp_path) == {"counter": [5.0]}


def test_values_made_before_the_file_grew_are_written_to_it_still(begin: Begin, tmp_path: Path) -> None:
    values = begin(0)
    first = counted(values, "first")
    many = [counted(values, f"{number:02000}") for number in range(100)]  # names of more than the file's first 64 KiB
    first.inc(5)
    many[-1].inc(6)
    assert sums(tmp_path)["counter"] == [0.0] * 99 + [5.0, 6.0]


def test_a_gauge_has_a_file_by_how_it_is_added_up(begin: Begin, tmp_path: Path) -> None:
    counted(begin(2), "one", "gauge").set(3)
    assert [path.name for path in tmp_path.iterdir()] == ["gauge_livesum_2.db"]

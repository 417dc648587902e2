"""What outlives the service."""

from pathlib import Path

import pytest

from planner.decisions.plans.live_plan import PlanSetting
from planner.errors import InputError
from planner.service.store import OLDER_LOGS, Lock, Store
from planner.solve.control.ledger import Ledger, LedgerEntry, PlanEvent


def entry(version: int) -> LedgerEntry:
    return LedgerEntry(
        at=1.0, change=PlanEvent.APPLIED, version=version, term=1, by="ann", after=PlanSetting(threshold_tokens=7.0)
    )


def test_the_ledger_is_as_it_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    assert store.read() == Ledger()
    ledger = Ledger(term=3, last_version=7, found=PlanSetting(threshold_tokens=5.0))
    store.write(ledger, entry(7))
    again = Store(tmp_path, 1000)
    assert again.read() == ledger
    assert again.last_entries(5) == [entry(7)]
    (tmp_path / "ledger.json").write_text('{"term"')
    with pytest.raises(InputError, match=r"ledger\.json: not a ledger"):
        again.read()
    (tmp_path / "ledger.json").write_bytes(b'{"conversions": {"n0": "\xff"}}')
    with pytest.raises(InputError, match=r"ledger\.json: not a ledger"):
        again.read()


def test_the_log_is_bounded_and_goes_on_over_its_files(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    for version in range(100):
        store.log(entry(version))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["audit.jsonl", *(f"audit.jsonl.{number}" for number in range(1, OLDER_LOGS + 1))]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert [each.version for each in store.last_entries(8)] == list(range(92, 100))
    assert len(store.last_entries(1000)) < 100


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    store.log(entry(1))
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(b'{"at": 1')
    assert store.last_entries(5) == [entry(1)]
    store.log(entry(2))
    assert store.last_entries(5) == [entry(1), entry(2)], "and takes nothing with it"


def test_a_change_that_the_log_has_no_room_for_has_happened_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").mkdir()
    store, ledger = Store(tmp_path, 1 << 20), Ledger(term=3)
    store.write(ledger, entry(1))
    assert store.read() == ledger


def test_one_leads_at_a_time(tmp_path: Path) -> None:
    one, other = Lock(tmp_path / "plan"), Lock(tmp_path / "plan")
    assert one.taken()
    assert not other.taken()
    one.close()
    assert other.taken()
    other.close()

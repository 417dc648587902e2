"""Logs of starts: each its own, a bounded number of them."""

from pathlib import Path

from node.process.log_rotation import KEPT_STARTS, earlier, start_log


def _start(path: Path, says: str) -> None:
    with start_log(path) as log:
        log.write(says.encode())


def test_the_latest_start_has_the_name_and_earlier_ones_count_back(tmp_path: Path) -> None:
    path = tmp_path / "far-engine.log"
    for says in ("first", "second", "third"):
        _start(path, says)
    assert [earlier(path, age).read_text() for age in range(3)] == ["third", "second", "first"]
    assert earlier(path, 1).name == "far-engine.log.1"


def test_a_bounded_number_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "far.log"
    for number in range(KEPT_STARTS + 4):
        _start(path, str(number))
    kept = [earlier(path, age) for age in range(KEPT_STARTS + 1)]
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert [log.read_text() for log in kept] == [str(KEPT_STARTS + 3 - age) for age in range(KEPT_STARTS + 1)]


def test_a_start_that_said_nothing_pushes_nothing_out(tmp_path: Path) -> None:
    path = tmp_path / "far.log"
    for says in ("why it died", "", "", "again"):
        _start(path, says)
    assert [log.read_text() for log in (path, earlier(path, 1))] == ["again", "why it died"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_missing_log_leaves_the_rest_in_order(tmp_path: Path) -> None:
    path = tmp_path / "far.log"
    for says in ("first", "second", "third"):
        _start(path, says)
    earlier(path, 1).unlink()
    _start(path, "fourth")
    assert [earlier(path, age).read_text() for age in (0, 1, 3)] == ["fourth", "third", "first"]


def test_who_still_writes_goes_on_in_his_own(tmp_path: Path) -> None:
    path = tmp_path / "far.log"
    with start_log(path) as old:
        old.write(b"said, ")
        old.flush()
        _start(path, "new")
        old.write(b"and said late")
    assert (path.read_text(), earlier(path, 1).read_text()) == ("new", "said, and said late")

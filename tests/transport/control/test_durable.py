"""A file is the one before or the new one, never between."""

import os
from pathlib import Path

import pytest

from transport.control.durable import state_path, write_durably


def test_what_is_written_lies_in_systemds_folder_or_beside_the_settings(tmp_path: Path) -> None:
    beside = tmp_path / "etc"
    assert state_path(beside, "plan", {}) == beside / "plan"
    assert state_path(beside, "plan", {"STATE_DIRECTORY": ""}) == beside / "plan"
    assert state_path(beside, "plan", {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}) == Path("/var/lib/a/plan")
    assert state_path(beside, "/srv/plan", {"STATE_DIRECTORY": "/var/lib/a"}) == Path("/srv/plan")


@pytest.mark.parametrize("name", ["plan", "followed.json", "."])
def test_what_was_written_beside_the_settings_stays_until_it_is_moved(tmp_path: Path, name: str) -> None:
    beside, own = tmp_path / "etc", tmp_path / "var"
    for folder in (beside, own):
        folder.mkdir()
    given = {"STATE_DIRECTORY": str(own)}
    written = beside / name / "ledger.json" if name != "followed.json" else beside / name
    written.parent.mkdir(exist_ok=True)
    write_durably(written, b"state")
    assert state_path(beside, name, given) == beside / name
    (own / written.relative_to(beside)).parent.mkdir(exist_ok=True)
    written.rename(own / written.relative_to(beside))
    assert state_path(beside, name, given) == own / name


@pytest.mark.skipif(os.access("/proc/self", os.W_OK), reason="this user may write anywhere")
def test_what_may_not_be_written_beside_the_settings_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = state_path(Path("/proc"), "self", {"STATE_DIRECTORY": str(tmp_path)})
    assert found == tmp_path / "self"
    assert (
        f"/proc/self may not be written to, so it is of no use: what should be kept belongs in {found}" in caplog.text
    )


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_durably(path, b"one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir()
    (path / "x").touch()
    with pytest.raises(OSError, match="state"):
        write_durably(path, b"one")
    assert [each.name for each in tmp_path.iterdir()] == ["state"]
    with pytest.raises(FileNotFoundError):
        write_durably(tmp_path / "none" / "state", b"one")

"""A file is the one before or the new one, never between."""

from pathlib import Path

import pytest

from transport.control.durable import state_folder, write_durably


def test_what_is_written_lies_in_systemds_folder_or_beside_the_settings() -> None:
    assert state_folder(Path("/etc/prfaas"), {}) == Path("/etc/prfaas")
    assert state_folder(Path("/etc/prfaas"), {"STATE_DIRECTORY": ""}) == Path("/etc/prfaas")
    assert state_folder(Path("/etc/prfaas"), {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}) == Path("/var/lib/a")


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

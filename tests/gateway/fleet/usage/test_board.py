"""What is known of a fleet's usage goes from process to process of a gateway."""

from pathlib import Path

import pytest

from gateway.fleet.errors import FleetFailed
from gateway.fleet.usage.board import LocalUsageBoard, SeenUsage, SharedUsageBoard
from gateway.fleet.usage.runs import OwnRun

OWN = OwnRun(id="one", began_unix_s=5, since_unix_s=7, base=b"base", written={3: b"three"})
SEEN = SeenUsage(own=OWN, folded=b"sum", runs={"one": b"1"}, read_at=9.5, due_s=5.0)


def test_all_processes_see_the_latest(tmp_path: Path) -> None:
    shared = SharedUsageBoard(tmp_path / "usage")
    for one, other in ((LocalUsageBoard(),) * 2, (shared, SharedUsageBoard(tmp_path / "usage"))):
        assert other.seen() is None
        one.show(SeenUsage(own=OWN))
        one.show(SEEN)
        assert other.seen() == SEEN
    assert [file.name for file in tmp_path.iterdir()] == ["usage"]


def test_what_cannot_be_read_is_no_new_beginning(tmp_path: Path) -> None:
    (tmp_path / "usage").write_bytes(b"\xc1")
    with pytest.raises(FleetFailed, match="cannot be read"):
        SharedUsageBoard(tmp_path / "usage").seen()


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        SharedUsageBoard(tmp_path / "gone" / "usage").show(SEEN)

import os
import subprocess
import sys
from pathlib import Path

import pytest

from node import arena as arena_module
from node.arena import Arena, arena_path


def test_pages_are_shared_by_path_and_gone_after_close(tmp_path: Path) -> None:
    with Arena(tmp_path / "arena", page_bytes=256, num_pages=4) as arena:
        arena.view(256, 3)[:] = b"abc"
        assert (tmp_path / "arena").read_bytes()[256:259] == b"abc"
        assert (tmp_path / "arena").stat().st_size == 1024
        assert (tmp_path / "arena").stat().st_mode & 0o077 == 0
    assert not (tmp_path / "arena").exists()


def test_close_survives_views_that_are_still_out(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", 256, 1)
    view = arena.view(0, 4)
    arena.close()
    view[:] = b"late"


def test_arenas_of_dead_predecessors_are_swept(tmp_path: Path, monkeypatch: object) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f"prfaas-n0-{dead.pid}").touch()
    (tmp_path / f"prfaas-n0-{os.getppid()}").touch()
    (tmp_path / f"prfaas-n1-{dead.pid}").touch()
    monkeypatch.setattr(arena_module, "SHM_DIR", tmp_path / "absent")  # type: ignore[attr-defined]
    assert arena_path("n0", tmp_path).name == f"prfaas-n0-{os.getpid()}"
    assert {path.name for path in tmp_path.iterdir()} == {f"prfaas-n0-{os.getppid()}", f"prfaas-n1-{dead.pid}"}


@pytest.mark.skipif(not arena_module.SHMEM_HUGEPAGES.exists(), reason="a kernel without transparent huge pages")
def test_hugepages_are_asked_for_and_refused_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setting = tmp_path / "shmem_enabled"
    monkeypatch.setattr(arena_module, "SHMEM_HUGEPAGES", setting)
    for mode, refused in [("always [advise] never", False), ("always advise [never]", True)]:
        caplog.clear()
        setting.write_text(f"{mode}\n")
        with Arena(tmp_path / "arena", 4096, 4, hugepages=True) as arena:
            arena.view(0, 3)[:] = b"abc"
            assert (tmp_path / "arena").read_bytes()[:3] == b"abc"
            assert arena.hugepages is not refused
        assert ("'advise' allows them" in caplog.text) == refused


def test_kernel_without_hugepages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arena_module, "SHMEM_HUGEPAGES", tmp_path / "absent")
    with Arena(tmp_path / "arena", 4096, 4, hugepages=True) as arena:
        assert not arena.hugepages
    assert "no huge pages" in caplog.text
    with Arena(tmp_path / "arena", 4096, 4) as arena:
        assert not arena.hugepages

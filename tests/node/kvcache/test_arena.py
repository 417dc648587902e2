import platform
from pathlib import Path

import pytest

from node.errors import NoArenaMemory
from node.kvcache.arena import MAPPED_AT_ONCE_BYTES, SHM_DIR, SHMEM_HUGEPAGES, Arena, arena_directory, arena_path


def test_pages_are_shared_by_path_and_gone_after_close(tmp_path: Path) -> None:
    with Arena(tmp_path / "arena", 1024) as arena:
        arena.view(256, 3)[:] = b"abc"
        assert (tmp_path / "arena").read_bytes()[256:259] == b"abc"
        assert (tmp_path / "arena").stat().st_size == 1024
        assert (tmp_path / "arena").stat().st_mode & 0o077 == 0
    assert not (tmp_path / "arena").exists()


def test_close_survives_views_that_are_still_out(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", 256)
    view = arena.view(0, 4)
    arena.close()
    view[:] = b"late"


def test_all_its_memory_is_taken_when_it_is_made(tmp_path: Path) -> None:
    with Arena(tmp_path / "arena", 1 << 20):
        assert (tmp_path / "arena").stat().st_blocks * 512 >= 1 << 20


@pytest.mark.skipif(not SHM_DIR.is_dir(), reason="no shared memory")
@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="cannot map pages ahead")
def test_all_its_pages_are_mapped_when_it_is_made(tmp_path: Path) -> None:
    num_bytes = 2 * MAPPED_AT_ONCE_BYTES + 4096
    with Arena(arena_path(arena_directory(tmp_path), tmp_path.name), num_bytes) as arena:
        assert _mapped_bytes(arena.path) == num_bytes


def _mapped_bytes(path: Path) -> int:
    """Bytes of a file that this process reaches without a page fault."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.endswith(str(path)))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024


def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with (
        Arena(tmp_path / "prfaas-other", 4096),
        pytest.raises(
            NoArenaMemory, match=rf"cache_bytes = {1 << 60}: {tmp_path} has \d+ bytes free; 1 other .* have 4096"
        ),
    ):
        Arena(tmp_path / "arena", 1 << 60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not SHMEM_HUGEPAGES.exists(), reason="a kernel without transparent huge pages")
def test_hugepages_are_asked_for_and_refused_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    setting = tmp_path / "shmem_enabled"
    for mode, refused in [("always [advise] never", False), ("always advise [never]", True)]:
        caplog.clear()
        setting.write_text(f"{mode}\n")
        with Arena(tmp_path / "arena", 16384, hugepages=True, hugepages_mode=setting) as arena:
            arena.view(0, 3)[:] = b"abc"
            assert (tmp_path / "arena").read_bytes()[:3] == b"abc"
            assert arena.hugepages is not refused
        assert ("'advise' allows them" in caplog.text) == refused


def test_kernel_without_hugepages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Arena(tmp_path / "arena", 16384, hugepages=True, hugepages_mode=tmp_path / "absent") as arena:
        assert not arena.hugepages
    assert "no huge pages" in caplog.text
    with Arena(tmp_path / "arena", 16384) as arena:
        assert not arena.hugepages

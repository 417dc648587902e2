from pathlib import Path

import pytest

from node.errors import NoArenaMemory
from node.kvcache.arena import SHMEM_HUGEPAGES, Arena


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

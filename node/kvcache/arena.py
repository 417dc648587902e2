"""The page arena: host memory that the agent and its engine both map.

It is a file in /dev/shm. So the engine can map it by path, as can the agent of another node for transfers inside one
host. It outlives an engine that dies, and goes when the agent closes it. All its memory is taken when the node starts:
a process that writes into a page of a sparse file that its file system has no room for dies of SIGBUS. So does every
engine that gets the same prompt after it. All of it is mapped then, too. A transfer that maps pages as it meets them
takes up to twice the processor time: the more, the more layers lie between two slabs of one layer.
"""

import contextlib
import errno
import logging
import mmap
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from node.config import NodeConfig
from node.errors import NoArenaMemory
from node.process.owned_names import PREFIX, create_file, sweep_directories, sweep_files

log = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
SHMEM_HUGEPAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
MADV_POPULATE_WRITE: Final = 23  # madvise(2), Linux 5.14
MAPPED_AT_ONCE_BYTES: Final = 4 << 20  # some milliseconds at most, in which no other thread of this process runs


class Arena:
    """`num_bytes` of shared memory, all of them there. Blocks while the kernel clears them. Raises NoArenaMemory, and OSError.

    `hugepages` asks the kernel for huge pages; where it has none for this mapping, `hugepages` says False afterwards.
    """

    def __init__(
        self, path: Path, num_bytes: int, *, hugepages: bool = False, hugepages_mode: Path = SHMEM_HUGEPAGES
    ) -> None:
        """`hugepages_mode` is the kernel's file that says whether shared memory may have huge pages."""
        self.path = path
        self.num_bytes = num_bytes
        _check_room(path.parent, num_bytes)
        self._fd = create_file(path)
        try:
            os.ftruncate(self._fd, num_bytes)
            self._map = mmap.mmap(self._fd, num_bytes)
            self.hugepages = hugepages and self._take_hugepages(hugepages_mode)
            self._take_pages()
            # Pages of another file system would be written to disk.
            if path.parent == SHM_DIR and not self.hugepages:
                self._map_pages()
        except BaseException:
            path.unlink()
            os.close(self._fd)
            raise
        self._view = memoryview(self._map)

    def view(self, start: int, length: int) -> memoryview:
        """Bytes [start, start + length) of the arena, writable."""
        return self._view[start : start + length]

    def close(self) -> None:
        """Unmaps and unlinks. Views that are still held keep the mapping alive, not the name."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._view.release()
        with contextlib.suppress(BufferError):  # a view is still out; the mapping goes with it
            self._map.close()

    def _take_pages(self) -> None:
        try:
            os.posix_fallocate(self._fd, 0, self.num_bytes)
        except OSError as exc:
            if exc.errno == errno.ENOSPC:  # another node was faster
                raise _no_room(self.path.parent, self.num_bytes) from exc
            raise

    def _map_pages(self) -> None:
        try:
            for start in range(0, self.num_bytes, MAPPED_AT_ONCE_BYTES):
                self._map.madvise(MADV_POPULATE_WRITE, start, min(MAPPED_AT_ONCE_BYTES, self.num_bytes - start))
        except OSError as exc:  # an older kernel
            log.info("pages of arena=%s are mapped when first used: %s", self.path, exc)

    def _take_hugepages(self, mode_file: Path) -> bool:
        # Of the shared file, so they serve all that map it. "never" and "deny" make madvise succeed without any effect.
        try:
            mode = mode_file.read_text()
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, AttributeError) as exc:
            reason = str(exc)
        else:
            if not any(word in mode for word in ("[never]", "[deny]")):
                with contextlib.suppress(OSError):  # an older kernel, or no room: the file takes what is missing
                    self._map.madvise(
                        MADV_POPULATE_WRITE
                    )  # through the mapping that asked: a file by itself takes small ones
                return True
            reason = f"{mode_file} says {mode.strip()}; 'advise' allows them"
        log.warning("no huge pages for arena=%s: %s", self.path, reason)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def arena_directory(fallback: Path) -> Path:
    """Where arenas are: shared memory if there is any, else `fallback`."""
    return SHM_DIR if os.access(SHM_DIR, os.W_OK) else fallback


def arena_path(directory: Path, node_id: str) -> Path:
    """The name of this process's arena."""
    return directory / f"{PREFIX}{node_id}-{os.getpid()}"


def take_arena(config: NodeConfig) -> Arena:
    """A node's arena. Blocks while memory is cleared; first it frees what dead nodes left. Raises NoArenaMemory, OSError."""
    directory = arena_directory(Path(config.run_dir))
    sweep_files(directory)
    sweep_directories(Path(tempfile.gettempdir()))
    return Arena(arena_path(directory, config.node_id), config.cache_bytes, hugepages=config.hugepages)


def _check_room(directory: Path, num_bytes: int) -> None:
    # What other arenas of this host promise is taken already, so what is free is free.
    if num_bytes > _free_bytes(directory):
        raise _no_room(directory, num_bytes)


def _all_bytes(directory: Path) -> int:
    room = os.statvfs(directory)
    return room.f_blocks * room.f_frsize


def _free_bytes(directory: Path) -> int:
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def _no_room(directory: Path, num_bytes: int) -> NoArenaMemory:
    arenas = [entry.stat().st_size for entry in directory.glob(f"{PREFIX}*") if entry.is_file()]
    return NoArenaMemory(
        f"cache_bytes = {num_bytes}: {directory} has {_free_bytes(directory)} bytes free; "
        f"{len(arenas)} other arenas there have {sum(arenas)}",
        is_final=num_bytes > _all_bytes(directory),
    )

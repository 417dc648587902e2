"""The page arena: host memory that the agent and its engine both map.

It is a file in /dev/shm, so that the engine (and, for transfers inside one host, the agent of another node) can map it by path,
and so that it outlives an engine that dies. The pages are the agent's to hand out; the file goes when the agent closes it.
"""

import contextlib
import errno
import logging
import mmap
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
SHMEM_HUGEPAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class Arena:
    """`num_pages` pages of `page_bytes` bytes in one shared mapping. Raises OSError where they do not fit.

    `hugepages` asks the kernel for huge pages; where it has none for this mapping, `hugepages` says False afterwards.
    """

    def __init__(self, path: Path, page_bytes: int, num_pages: int, *, hugepages: bool = False) -> None:
        self.path = path
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        _check_room(path.parent, page_bytes * num_pages)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Sparse: a page takes memory when it is first written.
            os.ftruncate(fd, page_bytes * num_pages)
            self._map = mmap.mmap(fd, page_bytes * num_pages)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self.hugepages = hugepages and self._ask_for_hugepages()
        self._view = memoryview(self._map)

    def view(self, start: int, length: int) -> memoryview:
        """Bytes [start, start + length) of the arena, writable."""
        return self._view[start : start + length]

    def close(self) -> None:
        """Unmaps and unlinks. Whoever still holds views keeps the mapping alive, not the name."""
        self.path.unlink(missing_ok=True)
        self._view.release()
        with contextlib.suppress(BufferError):  # a view is still out; the mapping goes with it
            self._map.close()

    def _ask_for_hugepages(self) -> bool:
        # Of the shared file, so they serve whoever maps it. "never" and "deny" make madvise succeed without any effect.
        try:
            mode = SHMEM_HUGEPAGES.read_text()
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, AttributeError) as exc:
            reason = str(exc)
        else:
            if not any(word in mode for word in ("[never]", "[deny]")):
                return True
            reason = f"{SHMEM_HUGEPAGES} says {mode.strip()}; 'advise' allows them"
        log.warning("no huge pages for arena=%s: %s", self.path, reason)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def arena_path(node_id: str, fallback_dir: Path) -> Path:
    """A fresh name for this process's arena; names of dead predecessors (kill -9) are swept away first."""
    directory = SHM_DIR if os.access(SHM_DIR, os.W_OK) else fallback_dir
    pattern = re.compile(rf"prfaas-{re.escape(node_id)}-(\d+)")
    for entry in directory.iterdir():
        if (match := pattern.fullmatch(entry.name)) and not _is_alive(int(match[1])):
            entry.unlink(missing_ok=True)
    return directory / f"prfaas-{node_id}-{os.getpid()}"


def _check_room(directory: Path, size: int) -> None:
    # A file beyond its file system's room can be made, but who writes into it one day dies of SIGBUS.
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    if not 0 < size <= free:
        raise OSError(errno.ENOSPC, f"an arena of {size} bytes; {directory} has {free} bytes free")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()

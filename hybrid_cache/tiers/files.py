"""The files of a disk tier, in a directory that one object uses at a time."""

import errno
import fcntl
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from hybrid_cache.errors import DiskInUse

LOCK_NAME: Final = "lock"
TIER_FILE: Final = re.compile(r"[0-9a-f]{24}-[0-9]+(\.[0-9a-f]{16})?\.kv(\.lru[01])?")
Buffer = bytes | bytearray | memoryview


class Disk(Protocol):
    """Files by name, read and written at offsets. All but `close` may raise OSError."""

    def size(self, name: str) -> int: ...

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int: ...

    def write(self, name: str, offset: int, parts: Sequence[Buffer]) -> None: ...

    def keep(self, most_bytes: Mapping[str, int]) -> int:
        """Cuts files to their most bytes, and removes a tier's other files; returns the bytes that this freed."""
        ...

    def close(self) -> None: ...


class FileDisk:
    """Files in a directory; this object is its only user until it is closed or its process ends."""

    def __init__(self, directory: Path) -> None:
        """Raises DiskInUse."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._files: dict[str, int] = {}
        try:
            fcntl.flock(self._file(LOCK_NAME), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            self.close()
            raise DiskInUse(directory) from exc

    def size(self, name: str) -> int:
        return os.fstat(self._file(name)).st_size

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        return _in_full(os.preadv, self._file(name), list(into), offset)

    def write(self, name: str, offset: int, parts: Sequence[Buffer]) -> None:
        views = [memoryview(part) for part in parts]
        written = _in_full(os.pwritev, self._file(name), views, offset)
        if written < sum(view.nbytes for view in views):
            raise OSError(errno.EIO, "short write")

    def keep(self, most_bytes: Mapping[str, int]) -> int:
        freed = 0
        for path in self._directory.iterdir():
            if not TIER_FILE.fullmatch(path.name):
                continue  # not ours, or the lock
            too_much = path.stat().st_size - most_bytes.get(path.name, 0)
            if path.name not in most_bytes:
                path.unlink()
            elif too_much > 0:
                os.truncate(path, most_bytes[path.name])
            freed += max(0, too_much)
        return freed

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _file(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(self._directory / name, os.O_RDWR | os.O_CREAT, 0o600)
        return self._files[name]


def _in_full(move: "_Move", file: int, views: list[memoryview], offset: int) -> int:
    """preadv and pwritev may move less than asked, and take at most IOV_MAX buffers."""
    done = 0
    while views:
        moved = move(file, views[:1024], offset + done)
        if moved == 0:
            break
        done += moved
        while views and moved >= views[0].nbytes:
            moved -= views.pop(0).nbytes
        if views and moved:
            views[0] = views[0][moved:]
    return done


class _Move(Protocol):
    def __call__(self, file: int, views: list[memoryview], offset: int, /) -> int: ...

"""Lines of JSON in files that stay, below a bound together: written by a thread, so that nothing waits for a disk.

Files are named by their prefix, their first second, their machine and their process, and are new: writers that share a
directory never share a file. The oldest goes as a whole where there is no more room.
"""

import errno
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final, Generic, TypeVar

log = logging.getLogger("prfaas.gateway.line_files")

INTERVAL_S: Final = 0.5
MAX_WAITING: Final = 4096  # entries; where the disk is that slow, lines are lost and counted
CLOSE_S: Final = 2.0
FILES: Final = 8  # that the bound is divided by
ATTEMPTS: Final = 100  # to find a free name, in one second

Entry = TypeVar("Entry")


def name_of(prefix: str, began: time.struct_time, host: str, pid: int) -> str:
    """What a file is named that a process begins then."""
    return f"{prefix}-{time.strftime('%Y%m%dT%H%M%SZ', began)}-{host}-{pid}"


def new_file(directory: Path, name: str) -> FileIO:
    """A file of that name, or one with a number behind it: none that was there before. Raises OSError."""
    for attempt in range(ATTEMPTS):
        path = directory / (f"{name}-{attempt}.jsonl" if attempt else f"{name}.jsonl")
        with suppress(FileExistsError):
            return FileIO(path, "ab", opener=_new_for_the_owner)
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


class LineFiles(Generic[Entry]):
    """Writes lines that `line_of` makes of entries. What cannot be written is lost, and counted by `on_lost`."""

    def __init__(
        self,
        directory: Path,
        prefix: str,
        max_bytes: int,
        line_of: Callable[[Entry], bytes],
        on_lost: Callable[[str, int], None],
        *,
        interval_s: float = INTERVAL_S,
        new_file: Callable[[Path, str], FileIO] = new_file,
    ) -> None:
        """Raises OSError where files cannot be made."""
        self._directory, self._prefix = directory, prefix
        self._file_bytes, self._max_bytes = max_bytes // FILES, max_bytes
        self._line_of = line_of
        self._on_lost = on_lost
        self._interval_s = interval_s
        self._new_file = new_file
        self._waiting: deque[Entry] = deque()
        self._is_closing = threading.Event()
        self._is_failing = False
        self._file = self._next_file()
        self._thread = threading.Thread(target=self._write_until_closed, name=f"{prefix} log", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Takes what becomes a line. Costs an append."""
        if len(self._waiting) >= MAX_WAITING:
            self._on_lost("slow_disk", 1)
            return
        self._waiting.append(entry)

    def close(self) -> None:
        """Writes what waits, for as long as a stop may take."""
        self._is_closing.set()
        self._thread.join(CLOSE_S)

    def _write_until_closed(self) -> None:
        while not self._is_closing.wait(self._interval_s):
            self._write()
        self._write()
        self._file.close()

    def _write(self) -> None:
        entries = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not entries:
            return
        try:
            # It is closed since the last try to open another one failed.
            if self._file.closed or not os.fstat(self._file.fileno()).st_nlink or self._file.tell() >= self._file_bytes:
                self._file.close()
                self._file = self._next_file()
            self._append(b"".join(map(self._line_of, entries)))
            self._is_failing = False
        except (OSError, ValueError) as error:
            self._on_lost("disk", len(entries))
            if not self._is_failing:
                self._is_failing = True
                log.error("the %s log cannot be written: %d lines and those that follow are lost: %s",
                          self._prefix, len(entries), error)  # fmt: skip

    def _append(self, lines: bytes) -> None:
        """All or nothing: no half line stays on a full disk."""
        before = self._file.tell()
        if self._file.write(lines) != len(lines):
            self._file.truncate(before)
            self._file.seek(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _next_file(self) -> FileIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        _make_room(self._directory, self._prefix, self._max_bytes - self._file_bytes)
        return self._new_file(self._directory, name_of(self._prefix, time.gmtime(), socket.gethostname(), os.getpid()))


def _new_for_the_owner(path: str, flags: int) -> int:
    """No file that is there already: containers of one name have one process id too, and append what the other may delete."""
    return os.open(path, flags | os.O_EXCL, 0o600)


def _make_room(directory: Path, prefix: str, max_bytes: int) -> None:
    """Deletes the files that were written to longest ago until the others have at most `max_bytes`."""
    files = sorted(
        (stat.st_mtime, stat.st_size, path) for path in directory.glob(f"{prefix}-*.jsonl") if (stat := _stat(path))
    )
    held = sum(size for _, size, _ in files)
    for _, size, path in files:
        if held <= max_bytes:
            return
        path.unlink(missing_ok=True)
        held -= size


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # another worker was faster
        return None

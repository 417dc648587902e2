"""Every finished request as a line of JSON in files that stay: what capacity planners fit and replay.

A line is the request's record, with the time of its arrival and names of its prompt's blocks, by which `prfaas-plan` sees what
prompts have in common. Nothing of what anybody wrote is in it. Files are named by their first second, their machine and their
process, and are new: writers that share a directory never share a file. All of a directory together stay below a bound.
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
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from gateway.config.request_log import RequestLogConfig
from gateway.request.request import Request, RequestRecord

log = logging.getLogger("prfaas.gateway.request_log")

INTERVAL_S: Final = 0.5
MAX_WAITING: Final = 4096  # requests; where the disk is that slow, lines are lost and counted
CLOSE_S: Final = 2.0
FILES: Final = 8  # that the bound is divided by: the oldest goes as a whole
BLOCK_TOKENS: Final = 512  # of the blocks that a line names, as in Mooncake's traces; larger where the model's are
NAME_BITS: Final = 53  # of a block's hash: whatever reads JSON holds them exactly
PATTERN: Final = "requests-*.jsonl"
ATTEMPTS: Final = 100  # to find a free name, in one second


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What a line is made of, off the hot path. `block_size` is that of `hashes`, in tokens."""

    record: RequestRecord
    unix_s: float
    hashes: list[bytes]
    digest: bytes
    block_size: int


class LogLine(RequestRecord, frozen=True, kw_only=True):
    """A record as it is written. `hash_ids` names full blocks of `block_tokens` tokens, and then what is left of the prompt."""

    unix_s: float
    block_tokens: int
    hash_ids: list[int]


def line_of(entry: LogEntry) -> bytes:
    """One line of JSON, with its end."""
    stride = max(1, BLOCK_TOKENS // entry.block_size)
    block_tokens = stride * entry.block_size
    # Hashes are chained: that of a block says what all before it hold. They are those of the first N−1 tokens.
    ids = [_name(each) for each in entry.hashes[stride - 1 :: stride]]
    if len(ids) * block_tokens < entry.record.total:
        ids.append(_name(entry.digest))
    record = {name: getattr(entry.record, name) for name in entry.record.__struct_fields__}
    line = LogLine(**record, unix_s=round(entry.unix_s, 6), block_tokens=block_tokens, hash_ids=ids)
    return msgspec.json.encode(line) + b"\n"


def _name(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") >> (64 - NAME_BITS)


def name_of(began: time.struct_time, host: str, pid: int) -> str:
    """What a file is named that a process begins then."""
    return f"requests-{time.strftime('%Y%m%dT%H%M%SZ', began)}-{host}-{pid}"


def new_file(directory: Path, name: str) -> FileIO:
    """A file of that name, or one with a number behind it: none that was there before. Raises OSError."""
    for attempt in range(ATTEMPTS):
        path = directory / (f"{name}-{attempt}.jsonl" if attempt else f"{name}.jsonl")
        with suppress(FileExistsError):
            return FileIO(path, "ab", opener=_new_for_the_owner)
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


class RequestLog:
    """Writes lines by a thread of its own: no request waits. What cannot be written is lost, and counted by `on_lost`."""

    def __init__(
        self,
        config: RequestLogConfig,
        on_lost: Callable[[str, int], None],
        *,
        interval_s: float = INTERVAL_S,
        new_file: Callable[[Path, str], FileIO] = new_file,
    ) -> None:
        """Raises OSError where files cannot be made."""
        assert config.directory is not None
        self._directory, self._file_bytes = config.directory, config.max_bytes // FILES
        self._max_bytes = config.max_bytes
        self._on_lost = on_lost
        self._interval_s = interval_s
        self._new_file = new_file
        self._waiting: deque[LogEntry] = deque()
        self._is_closing = threading.Event()
        self._is_failing = False
        self._file = self._next_file()
        self._thread = threading.Thread(target=self._write_until_closed, name="request log", daemon=True)
        self._thread.start()

    def ended(self, request: Request, record: RequestRecord, arrived_unix_s: float) -> None:
        """Takes the line of a request that is over. Costs an append."""
        if len(self._waiting) >= MAX_WAITING:
            self._on_lost("slow_disk", 1)
            return
        prompt, model = request.asked, request.model
        block_size = model.hashing.block_size if model is not None else BLOCK_TOKENS
        self._waiting.append(LogEntry(record, arrived_unix_s, prompt.hashes, prompt.digest, block_size))

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
            self._append(b"".join(map(line_of, entries)))
            self._is_failing = False
        except (OSError, ValueError) as error:
            self._on_lost("disk", len(entries))
            if not self._is_failing:
                self._is_failing = True
                log.error("%d requests are not in the request log, nor what follows until it can be written: %s",
                          len(entries), error)  # fmt: skip

    def _append(self, lines: bytes) -> None:
        """All or nothing: no half line stays on a full disk."""
        before = self._file.tell()
        if self._file.write(lines) != len(lines):
            self._file.truncate(before)
            self._file.seek(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _next_file(self) -> FileIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        _make_room(self._directory, self._max_bytes - self._file_bytes)
        return self._new_file(self._directory, name_of(time.gmtime(), socket.gethostname(), os.getpid()))


def _new_for_the_owner(path: str, flags: int) -> int:
    """No file that is there already: containers of one name have one process id too, and append what the other may delete."""
    return os.open(path, flags | os.O_EXCL, 0o600)


def _make_room(directory: Path, max_bytes: int) -> None:
    """Deletes the files that were written to longest ago until the others have at most `max_bytes`."""
    files = sorted((stat.st_mtime, stat.st_size, path) for path in directory.glob(PATTERN) if (stat := _stat(path)))
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

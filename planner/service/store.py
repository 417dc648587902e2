"""The files that outlive the service: the ledger, the audit log, and the lock that only one process holds.

lock          flock: its holder leads, it goes with the process however it ends
ledger.json   written durably before anybody is told
audit.jsonl   a line for every change; older ones in audit.jsonl.1 … .3
"""

import fcntl
import logging
import os
from pathlib import Path
from typing import BinaryIO, Final, TextIO

import msgspec

from planner.errors import InputError
from planner.solve.control.ledger import Ledger, LedgerEntry
from transport.control.durable import write_durably

log = logging.getLogger("prfaas.plan")

OLDER_LOGS: Final = 3


class Lock:
    """The right to lead, on this host. (A lock on a shared file system is not to be relied upon.)"""

    def __init__(self, state_dir: Path) -> None:
        state_dir.mkdir(parents=True, exist_ok=True)
        self._path = state_dir / "lock"
        self._file: TextIO | None = None

    def taken(self) -> bool:
        """Whether it could be had now, and is."""
        file = self._path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._file = file
        return True

    def close(self) -> None:
        """Lets another one lead."""
        if self._file is not None:
            self._file.close()


class Store:
    """The files. Methods block on the disk; OSErrors are the caller's."""

    def __init__(self, state_dir: Path, log_bytes: int) -> None:
        self._ledger = state_dir / "ledger.json"
        self._log = state_dir / "audit.jsonl"
        self._log_bytes = log_bytes

    def read(self) -> Ledger:
        """The ledger as it was last written, a blank one at first. Raises InputError for one that is damaged."""
        try:
            return msgspec.json.decode(self._ledger.read_bytes(), type=Ledger)
        except FileNotFoundError:
            return Ledger()
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise InputError(f"{self._ledger}: not a ledger ({exc}); move it away to start without one") from exc

    def write(self, ledger: Ledger, entry: LedgerEntry | None) -> None:
        """Keeps both, the ledger first: what the log says has happened. What only the log has no room for has happened, too."""
        write_durably(self._ledger, msgspec.json.encode(ledger))
        if entry is None:
            return
        try:
            self.log(entry)
        except OSError as exc:
            log.error("not in the log: %s version=%d by=%s: %s", entry.change, entry.version, entry.by, exc)

    def log(self, entry: LedgerEntry) -> None:
        """Adds a line; what is beyond the oldest file is forgotten."""
        line = msgspec.json.encode(entry) + b"\n"
        if self._log.exists() and self._log.stat().st_size + len(line) > self._log_bytes:
            for number in range(OLDER_LOGS - 1, 0, -1):
                if (older := self._older(number)).exists():
                    older.replace(self._older(number + 1))
            self._log.replace(self._older(1))
        with self._log.open("a+b") as file:
            file.write(line if _ends_whole(file) else b"\n" + line)
            file.flush()
            os.fsync(file.fileno())

    def _older(self, number: int) -> Path:
        return self._log.with_name(f"{self._log.name}.{number}")

    def last_entries(self, limit: int) -> list[LedgerEntry]:
        """The last lines of the log, oldest first. A line that the machine's end has cut off is left out."""
        lines: list[bytes] = []
        for path in (self._log, *(self._older(number) for number in range(1, OLDER_LOGS + 1))):
            if len(lines) >= limit or not path.exists():
                break
            lines = path.read_bytes().splitlines() + lines
        return [entry for line in lines[-limit:] if (entry := _entry(line)) is not None]


def _ends_whole(file: BinaryIO) -> bool:
    """Whether the last line is no part of one, which the next would be lost with."""
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _entry(line: bytes) -> LedgerEntry | None:
    try:
        return msgspec.json.decode(line, type=LedgerEntry)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None

"""Names in directories that all nodes of a host share (/dev/shm, /tmp), which belong to a process and go when it has ended.

A name is locked (flock) before it can be seen, and the lock goes with its process, however that ended. If another process can
lock a name, its owner is dead. A process id says less: it may mean another process in another container. Where a name ends
with the id of a process that lives, it stays all the same: only a little memory is lost, until that process ends.

Until it is locked a name is hidden (it begins with a dot). A sweeper may remove such a name before its process locks it; that
process then makes another one.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Self, TypeVar

log = logging.getLogger(__name__)

PREFIX: Final = "prfaas-"
OWNER: Final = "owner"  # the file of a directory that is locked
HIDDEN_DIRECTORY: Final = re.compile(rf"\.{PREFIX}[a-z0-9_]{{8}}")  # as tempfile names them
TRIES: Final = 10  # a sweeper would have to meet each within microseconds

T = TypeVar("T")


def create_file(path: Path) -> int:
    """Creates and locks a file for reading and writing; returns its descriptor, to be kept. Raises OSError."""
    return _though_others_sweep(lambda: _create_file(path))


def _though_others_sweep(create: Callable[[], T]) -> T:
    for _ in range(TRIES - 1):
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            return create()
    return create()


def _create_file(path: Path) -> int:
    hidden = path.with_name(f".{path.name}")
    hidden.unlink(missing_ok=True)
    fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(path)
    except BaseException:
        os.close(fd)
        hidden.unlink(missing_ok=True)
        raise
    return fd


class OwnedDirectory:
    """A fresh directory below `parent`, with a short name: the path of a socket in it has a limit of 107 bytes."""

    def __init__(self, parent: Path) -> None:
        """Creates and locks it. Raises OSError."""
        self.path, self.lock = _though_others_sweep(lambda: _create_directory(parent))

    @classmethod
    def joined(cls, path: Path, lock: int) -> Self:
        """One that another process has, too: `lock` is a copy of its lock's descriptor, which keeps the lock as well."""
        joined = cls.__new__(cls)
        joined.path, joined.lock = path, lock
        return joined

    def close(self) -> None:
        """Removes it, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)

    def let_go(self) -> None:
        """Leaves it to the others that have it."""
        os.close(self.lock)


def _create_directory(parent: Path) -> tuple[Path, int]:
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    path = hidden.with_name(hidden.name.removeprefix("."))
    try:
        lock = _create_file(hidden / OWNER)
        try:
            hidden.rename(path)
        except BaseException:
            os.close(lock)
            raise
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return path, lock


def sweep_directories(parent: Path) -> list[Path]:
    """Removes directories that dead nodes left in `parent`; returns which. What lives, or is another user's, stays."""
    hidden = (entry for entry in parent.glob(f".{PREFIX}*") if HIDDEN_DIRECTORY.fullmatch(entry.name))
    entries = (*parent.glob(f"{PREFIX}*"), *hidden)
    return _sweep(entry for entry in entries if entry.is_dir() and not entry.is_symlink())


def sweep_files(parent: Path) -> list[Path]:
    """The same for files, whose names end with the id of their process: no other process's may, nor may an operator's log."""
    entries = (*parent.glob(f"{PREFIX}*-*"), *parent.glob(f".{PREFIX}*-*"))
    return _sweep(entry for entry in entries if _pid_of(entry) is not None and entry.is_file())


def _sweep(entries: Iterable[Path]) -> list[Path]:
    swept = [entry for entry in entries if _remove_if_dead(entry)]
    for entry in swept:
        log.info("removed %s, left behind by a node that ended", entry)
    return swept


def _remove_if_dead(entry: Path) -> bool:
    if _names_a_living_process(entry):
        return False
    if entry.is_dir() and HIDDEN_DIRECTORY.fullmatch(entry.name) and _remove_empty(entry):
        return True
    try:
        fd = os.open(_locked_of(entry), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # not ours, or gone
        return False
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(entry)
            return True
        return False
    finally:
        os.close(fd)


def _locked_of(entry: Path) -> Path:
    if not entry.is_dir():
        return entry
    return next((each for each in (entry / OWNER, entry / f".{OWNER}") if each.exists()), entry / OWNER)


def _remove_empty(entry: Path) -> bool:
    try:
        entry.rmdir()
    except OSError:
        return False
    return True


def _pid_of(entry: Path) -> int | None:
    pid = entry.name.rpartition("-")[2]
    return int(pid) if pid.isascii() and pid.isdecimal() else None


def _names_a_living_process(entry: Path) -> bool:
    pid = _pid_of(entry)
    # Ours: in a container every start of a node may have the same one.
    return pid is not None and pid != os.getpid() and Path(f"/proc/{pid}").exists()


def _remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)

"""Registries that are files: one that lists all nodes, or a folder in which each node has its own."""

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from membership.documents import read_entry, read_members
from membership.errors import SourceFailed
from membership.heartbeats import Heartbeat, Heartbeats
from membership.member import Member
from membership.view import RegistryReading
from transport.control.settings import MAX_FILE_BYTES, SettingsError

MAX_ENTRY_BYTES: Final = 64 * 1024
MAX_ENTRIES: Final = 8192
ENTRY_SUFFIX: Final = ".json"

_Stamp = tuple[int, int, int, int]  # device, inode, size, time of the last change

NEVER: Final[_Stamp] = (0, 0, 0, 0)


class Source(Protocol):
    """A registry. It is asked from a thread: it may block."""

    @property
    def name(self) -> str:
        """As metrics and logs call it."""
        ...

    def look(self) -> RegistryReading | None:
        """What it says now; None: the same as the last time. Raises SourceFailed."""
        ...

    def close(self) -> None:
        """It is not asked any more; it may be asked at this moment."""
        ...


class FileSource:
    """One file that lists all nodes: TOML, or JSON by any other suffix. It is to be replaced as a whole, by a rename.

    A file that is written in place is read once it has stayed the same between two looks: the half of a list is a list, too.
    """

    name = "file"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._taken: _Stamp | None = None  # of what was read last, good or bad
        self._waiting: _Stamp | None = None
        self._failure: SourceFailed | None = None

    def look(self) -> RegistryReading | None:
        with _as_failure(self.path):
            stamp = _stamp(os.stat(self.path))
            if stamp == self._taken:
                if self._failure is not None:
                    raise self._failure.with_traceback(None)  # which grows with each look
                return None
            if self._taken is not None and stamp[1] == self._taken[1] and stamp != self._waiting:
                self._waiting = stamp
                return None
            self._taken, self._failure = stamp, None
            try:
                return self._read()
            except SourceFailed as failure:
                self._failure = failure
                raise

    def close(self) -> None:
        """Nothing is held between two looks."""

    def _read(self) -> RegistryReading:
        text = _read_file(self.path, MAX_FILE_BYTES)
        try:
            return read_members(text, is_toml=self.path.suffix == ".toml")
        except SettingsError as error:
            raise SourceFailed("malformed", f"{self.path}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Entry:
    """A node's file as it was read: its bytes, and what they say. `problem` is why it says nothing new.

    `text` is None where it could not be read: it is tried again.
    """

    stamp: _Stamp
    text: bytes | None
    member: Member | None
    lease_s: float
    problem: str = ""


class FolderSource:
    """A folder in which each node writes `NODE_ID.json`, and touches it while it lives.

    A file that cannot be used leaves its node as it was known. A node whose file has not been touched for its lease has left.
    The last file may be removed alone, from the same folder: where all files are gone at once, the folder is not believed.
    """

    name = "folder"

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._said: RegistryReading | None = None
        self._folder: tuple[int, int] | None = None
        self._heartbeats = Heartbeats()

    def look(self) -> RegistryReading | None:
        with _as_failure(self.path):
            folder = os.stat(self.path)
            names = [name for name in os.listdir(self.path) if name.endswith(ENTRY_SUFFIX) and name[0] != "."]
        if len(names) > MAX_ENTRIES:
            raise SourceFailed("too_many", f"{self.path}: more than {MAX_ENTRIES} nodes")
        found = {name: entry for name in sorted(names) if (entry := self._entry(name)) is not None}
        is_last_gone = len(self._entries) == 1 and self._folder == (folder.st_dev, folder.st_ino)
        self._entries, self._folder = found, (folder.st_dev, folder.st_ino)
        beats = {name: Heartbeat(entry.stamp, entry.lease_s) for name, entry in found.items()}
        stale = self._heartbeats.look(beats, self._clock())
        if stale.all_since_s:
            raise SourceFailed("silent", f"{self.path}: no node touches its file any more: can it be written?")
        alive = [entry for name, entry in found.items() if name not in stale.names]
        said = RegistryReading(
            members=tuple(entry.member for entry in alive if entry.member is not None),
            problems=tuple(entry.problem for entry in alive if entry.problem),
            is_empty_meant=not found and is_last_gone,
        )
        if said == self._said:
            return None
        self._said = said
        return said

    def close(self) -> None:
        """Nothing is held between two looks."""

    def _entry(self, name: str) -> _Entry | None:
        """What the file says, read again only if it was touched. None: it has just been removed."""
        path, known = self.path / name, self._entries.get(name)
        stamp = known.stamp if known is not None else NEVER
        try:
            with _as_failure(path):
                stamp = _stamp(os.stat(path))
                if known is not None and known.text is not None and known.stamp == stamp:
                    return known
                text = _read_file(path, MAX_ENTRY_BYTES)
        except SourceFailed as failure:
            return None if failure.reason == "missing" else _kept(known, stamp, None, str(failure))
        if known is not None and known.text == text:
            return _Entry(stamp, text, known.member, known.lease_s, known.problem)
        try:
            member, lease_s = read_entry(text)
            if member.id != name.removesuffix(ENTRY_SUFFIX):
                raise SettingsError(f"it is the file of another node: id = {member.id!r}")
        except SettingsError as error:
            return _kept(known, stamp, text, f"{path}: {error}")
        return _Entry(stamp, text, member, lease_s)


def _kept(known: _Entry | None, stamp: _Stamp, text: bytes | None, problem: str) -> _Entry:
    """What was known of the node stays: its file says nothing that can be used."""
    if known is None:
        return _Entry(stamp, text, None, 0.0, problem)
    return _Entry(stamp, text, known.member, known.lease_s, problem)


def sources_of(file: Path | None, folder: Path | None) -> list[Source]:
    """The registries at these places, the one that counts first."""
    found: list[Source] = []
    if file is not None:
        found.append(FileSource(file))
    if folder is not None:
        found.append(FolderSource(folder))
    return found


def listed_by(sources: Sequence[Source]) -> Iterator[tuple[str, RegistryReading | SourceFailed]]:
    """What each registry says, asked once, by its name."""
    for source in sources:
        try:
            yield source.name, source.look() or RegistryReading()
        except SourceFailed as failure:
            yield source.name, failure
        finally:
            source.close()


def _read_file(path: Path, most: int) -> bytes:
    """Raises OSError, SourceFailed."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would keep us
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SourceFailed("unreadable", f"{path}: no regular file")
        text = file.read(most + 1)
    if len(text) > most:
        raise SourceFailed("too_long", f"{path}: longer than {most} bytes")
    return text


def _stamp(found: os.stat_result) -> _Stamp:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def _as_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise SourceFailed("missing", f"{path}: it is not there") from error
    except OSError as error:
        raise SourceFailed("unreadable", f"{path}: {error.strerror or error}") from error

"""How a node says that it is there: by an entry of its own in a registry, refreshed while the node lives.

In a folder that gateways read, the entry is a file that the node touches; that of etcd is in `membership/etcd/entry.py`.

What nodes leave that were killed, living ones take away: a file that was written to long before theirs, by the file server's
clock alone. Gateways need not be able to write there. A file without a lease is an operator's, and stays.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol, TypeVar

import numpy as np

from membership.backoff import Backoff
from membership.documents import entry_text, read_entry
from membership.member import Member
from membership.sources import ENTRY_SUFFIX, MAX_ENTRY_BYTES
from transport.control.settings import SettingsError
from transport.threads import in_daemon_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

BEAT_S: Final = 10.0
LEASE_S: Final = 120.0  # clients of NFS may see a file as it was a minute ago; that a node is down is seen by its watch
RETRY_S: Final = 1.0  # after the first failure
STALE_S: Final = 86_400.0  # after which a killed node must have left a file; gateways forget the node after its lease
TIDY_BEATS: Final = 360  # between two looks for such files
PATIENCE_S: Final = 5.0  # with a file server: then it is logged, and no longer waited for if the node ends


class NodeEntry(Protocol):
    """What a node says of itself in a registry. Every method may block, and raises OSError."""

    @property
    def where(self) -> str:
        """As logs call it."""
        ...

    def write(self) -> None:
        """Registers the node; what is there is replaced."""
        ...

    def beat(self) -> bool:
        """The node lives. False: another process has registered under its name."""
        ...

    def remove(self) -> None:
        """The node has left, unless another process has registered under its name."""
        ...


class FolderEntry:
    """The file of one node. Every method may block, and raises OSError."""

    def __init__(self, folder: Path, member: Member, lease_s: float = LEASE_S) -> None:
        self.path = folder / f"{member.id}{ENTRY_SUFFIX}"
        self._text = entry_text(member, lease_s)
        self._written: tuple[int, int] | None = None  # which file it is
        self._beats = 0

    @property
    def where(self) -> str:
        return str(self.path)

    def write(self) -> None:
        """Puts the file there as a whole; what an earlier start has left is replaced."""
        hidden = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(hidden, "wb", opener=_for_its_owner) as file:
                file.write(self._text)
                file.flush()
                os.fsync(file.fileno())
                self._written = _which(os.fstat(file.fileno()))
            hidden.rename(self.path)
        except OSError:
            hidden.unlink(missing_ok=True)
            raise

    def beat(self) -> bool:
        """Touches the file, or writes it again if it is gone. False: another process has written its own.

        A file that says what ours does is ours: the folder was copied, restored, or mounted again.
        """
        try:
            found = _which(os.stat(self.path))
            if found != self._written:
                if self.path.read_bytes() != self._text:
                    return False
                self._written = found
            os.utime(self.path)
        except FileNotFoundError:
            self.write()
        self._beats += 1
        if self._beats % TIDY_BEATS == 1:
            self.tidy()
        return True

    def tidy(self) -> None:
        """Removes files of other nodes that were touched long before ours, which has just been."""
        now = os.stat(self.path).st_mtime
        for path in self.path.parent.glob(f"[!.]*{ENTRY_SUFFIX}"):
            with contextlib.suppress(OSError, SettingsError):
                age_s = now - _touched_at(path)
                if age_s > STALE_S and age_s > _lease_of(path) > 0.0:
                    path.unlink()
                    log.info("removed %s, left behind by a node that was killed", path)

    def remove(self) -> None:
        """The node has left, unless another process has registered under its name."""
        with contextlib.suppress(FileNotFoundError):
            if not self._is_anothers():
                self.path.unlink()

    def _is_anothers(self) -> bool:
        return _which(os.stat(self.path)) != self._written


def _for_its_owner(path: str, flags: int) -> int:
    """No other user may write what a node says of itself, whatever the umask."""
    return os.open(path, flags, 0o644)


def _touched_at(path: Path) -> float:
    return os.stat(path).st_mtime


def _lease_of(path: Path) -> float:
    with path.open("rb") as file:
        return read_entry(file.read(MAX_ENTRY_BYTES))[1]


def _which(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


@asynccontextmanager
async def registered(entry: NodeEntry, beat_s: float = BEAT_S, patience_s: float = PATIENCE_S) -> AsyncIterator[None]:
    """The node is registered inside the block. A registry that cannot be written now is tried again: the node serves anyway.

    At the end of the block a registry that does not answer is waited for no longer than `patience_s`.
    """
    beating = asyncio.create_task(_keep(entry, beat_s, patience_s), name="registration")
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.wait([beating])
        try:
            async with asyncio.timeout(patience_s):
                await in_daemon_thread("registration", entry.remove)
        except OSError as error:  # a timeout is one, too
            log.warning(
                "%s stays, and gateways forget it when its lease is over: %s", entry.where, str(error) or "no answer"
            )


async def _keep(entry: NodeEntry, beat_s: float, patience_s: float) -> None:
    is_there, is_failing, is_left_out = False, False, False
    pauses = Backoff(np.random.default_rng(), RETRY_S)
    while True:
        try:
            if not is_there:
                await _answer(entry, entry.write, patience_s)
                log.info("registered as %s", entry.where)
            elif not await _answer(entry, entry.beat, patience_s):
                if not is_left_out:
                    log.error(
                        "%s was written by another process: two nodes have one node_id, and this one is left out",
                        entry.where,
                    )
                is_left_out = True
            else:
                is_left_out = False
            is_there, is_failing = True, False
            pauses.succeeded()
        except OSError as error:
            if not is_failing:
                log.warning("cannot register as %s, and tries again: %s", entry.where, error)
            is_failing = True
        except Exception:  # whatever it is, the node serves, and tries again
            log.exception("cannot register as %s, and tries again", entry.where)
            is_failing = True
        await asyncio.sleep(pauses.failed() if is_failing else beat_s)


async def _answer(entry: NodeEntry, call: Callable[[], T], patience_s: float) -> T:
    """What a call returns. One that hangs is logged and waited for: another one would hang as well, on one more thread."""
    answer = in_daemon_thread("registration", call)
    try:
        done, _ = await asyncio.wait([answer], timeout=patience_s)
        if not done:
            log.warning("%s: it has not answered for %g s; gateways may forget this node", entry.where, patience_s)
        return await answer
    finally:
        answer.cancel()  # a node that ends does not hear how its last call failed

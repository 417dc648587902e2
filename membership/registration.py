"""How a node says that it is there: a file of its own in a folder that gateways read, touched while the node lives."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from membership.documents import entry_text
from membership.member import Member
from membership.sources import ENTRY_SUFFIX

log = logging.getLogger(__name__)

BEAT_S: Final = 10.0
LEASE_S: Final = 120.0  # clients of NFS may see a file as it was a minute ago; that a node is down is seen by its watch
RETRY_S: Final = 1.0


class FolderEntry:
    """The file of one node. Every method may block, and raises OSError."""

    def __init__(self, folder: Path, member: Member, lease_s: float = LEASE_S) -> None:
        self.path = folder / f"{member.id}{ENTRY_SUFFIX}"
        self._text = entry_text(member, lease_s)
        self._written: tuple[int, int] | None = None  # which file it is

    def write(self) -> None:
        """Puts the file there as a whole; what an earlier start has left is replaced."""
        hidden = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with hidden.open("wb") as file:
                file.write(self._text)
                file.flush()
                os.fsync(file.fileno())
                self._written = _which(os.fstat(file.fileno()))
            hidden.rename(self.path)
        except OSError:
            hidden.unlink(missing_ok=True)
            raise

    def beat(self) -> bool:
        """Touches the file, or writes it again if it is gone. False: another process has written its own."""
        try:
            if self._is_anothers():
                return False
            os.utime(self.path)
        except FileNotFoundError:
            self.write()
        return True

    def remove(self) -> None:
        """The node has left, unless another process has registered under its name."""
        with contextlib.suppress(FileNotFoundError):
            if not self._is_anothers():
                self.path.unlink()

    def _is_anothers(self) -> bool:
        return _which(os.stat(self.path)) != self._written


def _which(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


@asynccontextmanager
async def registered(entry: FolderEntry, beat_s: float = BEAT_S) -> AsyncIterator[None]:
    """The node is registered inside the block. A folder that cannot be written now is tried again: the node serves anyway."""
    beating = asyncio.create_task(_keep(entry, beat_s), name="registration")
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.wait([beating])
        try:
            await asyncio.to_thread(entry.remove)
        except OSError as error:
            log.warning("%s stays, and gateways forget it when its lease is over: %s", entry.path, error)


async def _keep(entry: FolderEntry, beat_s: float) -> None:
    is_there, is_failing = False, False
    while True:
        try:
            if is_there and not await asyncio.to_thread(entry.beat):
                log.error(
                    "%s was written by another process: two nodes have one node_id, and this one is left out",
                    entry.path,
                )
                return
            if not is_there:
                await asyncio.to_thread(entry.write)
                log.info("registered as %s", entry.path)
            is_there, is_failing = True, False
        except OSError as error:
            if not is_failing:
                log.warning("cannot register as %s, and tries again: %s", entry.path, error)
            is_failing = True
        await asyncio.sleep(RETRY_S if is_failing else beat_s)

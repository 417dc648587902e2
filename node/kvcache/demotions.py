"""Blocks that left memory and are still to be copied out of their pages, in the order in which they left."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, NamedTuple

from hybrid_cache.cache.reservation import Reservation

log = logging.getLogger(__name__)

UNAWAITED: Final = 8  # blocks copied at once that no request waits for; one that comes meanwhile waits for these


class EvictedBlock(NamedTuple):
    """A block, and the pages that still hold its bytes."""

    group: int
    block_hash: bytes
    pages: Sequence[int]


class Demotions:
    """The blocks, and the thread that copies them. Methods belong to the event loop."""

    def __init__(self, copy: Callable[[int, bytes, Sequence[int]], None]) -> None:
        """`copy` is called on the thread."""
        self._copy = copy
        self._left: deque[EvictedBlock] = deque()  # those that are being copied included
        self._num_copied = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # until so many are copied
        self._copying: asyncio.Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "ssd-copy")

    def add(self, group: int, block_hash: bytes, pages: Sequence[int]) -> None:
        """A block has left memory. Its pages keep its bytes until their next holder has waited."""
        self._left.append(EvictedBlock(group, block_hash, pages))

    async def settled(self, reservation: Reservation | None = None) -> None:
        """Returns when the reservation's pages may be written into; without one, when all blocks so far are copied.

        Blocks that leave later, or whose pages others have got, are not waited for unless they came before.
        """
        if not self._left:
            return
        until = self._num_copied + (len(self._left) if reservation is None else self._last_of(reservation))
        copied = asyncio.get_running_loop().create_future()
        if until > self._num_copied:
            self._waiting.append((until, copied))
        else:
            copied.set_result(None)
        self._begin()
        await copied

    async def close(self) -> None:
        """Copies what is left and ends the thread."""
        await self.settled()
        self._thread.shutdown()

    def _last_of(self, reservation: Reservation) -> int:
        """How many of the blocks must be copied until none of them has a page of the reservation's."""
        held = (*reservation.blocks, *(group.values() for group in reservation.states))
        own = {page for group in held for pages in group for page in pages}
        later = zip(range(len(self._left), 0, -1), reversed(self._left), strict=True)
        return next((number for number, each in later if not own.isdisjoint(each.pages)), 0)

    def _begin(self) -> None:
        if self._copying is not None or not self._left:
            return
        until = min((until for until, copied in self._waiting if not copied.done()), default=None)
        count = UNAWAITED if until is None else until - self._num_copied
        batch = list(islice(self._left, count))
        self._copying = asyncio.get_running_loop().run_in_executor(self._thread, self._copy_all, batch)
        self._copying.add_done_callback(lambda copying: self._copied(len(batch)))

    def _copy_all(self, batch: Sequence[EvictedBlock]) -> None:
        for each in batch:
            try:
                self._copy(*each)
            except Exception:  # this block is lost; the next holder of its pages must not wait for ever
                log.exception("a block that left memory could not be copied")

    def _copied(self, count: int) -> None:
        self._copying = None
        self._num_copied += count
        for _ in range(count):
            self._left.popleft()
        for until, copied in self._waiting:
            if until <= self._num_copied and not copied.done():
                copied.set_result(None)
        self._waiting = [(until, copied) for until, copied in self._waiting if not copied.done()]
        self._begin()

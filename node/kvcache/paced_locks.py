"""Locks long cached prefixes in steps, ahead of the reservations that take the locks over, and gives them back in steps."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.errors import UnchainedHashes
from node.errors import NodeRefusal

LOCK_BLOCKS: Final = 8192  # in one go: a millisecond


class PacedLocks:
    """Locks of prompts with more blocks than one turn of the loop should lock."""

    def __init__(self, cache: PrefixCache, now: Callable[[], float], changed: Callable[[], None]) -> None:
        """`changed` is told where others may find room that they did not find before."""
        self._cache = cache
        self._now = now
        self._changed = changed
        self._ids = itertools.count()

    @asynccontextmanager
    async def ahead(self, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose) -> AsyncIterator[str]:
        """Holds what a reservation could reuse: the name of the hold, for `PrefixCache.reserve` to take it over. Unless it
        does, the hold ends with the block. Short prompts need none: "". Raises NodeRefusal.
        """
        if len(hashes) <= LOCK_BLOCKS:
            yield ""
            return
        name = f"ahead-{next(self._ids)}"
        try:
            for _ in self._cache.pin_steps(name, hashes, num_tokens, purpose, LOCK_BLOCKS):
                await asyncio.sleep(0)
            yield name
        except UnchainedHashes as exc:
            raise NodeRefusal("bad_request", str(exc)) from exc
        finally:
            self._cache.release(name, self._now())
            self._changed()

    def release_steps(self, request_id: str) -> Iterator[None]:
        """Ends a reservation in steps."""
        for _ in self._cache.release_steps(request_id, self._now(), LOCK_BLOCKS):
            self._changed()
            yield

"""A check that takes long on a large pool: how often it is made, in steps between which other work has its turn."""

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Final

from hybrid_cache.errors import IntegrityError

log = logging.getLogger(__name__)

FREE_S: Final = 0.02  # a check that is faster than this may be made at any time
SHARE: Final = 0.01  # of the event loop's time that slower ones may take


class PacedCheck:
    """The answer of a check, a new one when enough time has gone by since the last."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._answer = ""
        self._next_at = 0.0
        self._is_made = asyncio.Lock()

    async def result(self, steps: Callable[[], Generator[None, None, None]]) -> str:
        """What a check says: empty when all is well. A step of it raises IntegrityError. Cancelled, it ends its check."""
        async with self._is_made:
            started_at = self._now()
            if started_at >= self._next_at:
                with closing(steps()) as check:
                    seconds = await self._make(check)
                self._next_at = started_at + seconds / SHARE if seconds > FREE_S else started_at
        return self._answer

    async def _make(self, steps: Generator[None, None, None]) -> float:
        """Makes a check; returns the seconds that its steps have taken."""
        seconds, answer, is_over = 0.0, "", False
        while not is_over:
            began_at = self._now()
            try:
                is_over = next(steps, self) is self
            except IntegrityError as exc:
                log.error("pool integrity: %s", exc)
                answer, is_over = str(exc), True
            seconds += self._now() - began_at
            await asyncio.sleep(0)
        self._answer = answer
        return seconds

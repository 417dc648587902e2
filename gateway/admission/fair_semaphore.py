"""A fair semaphore: at most N holders, round-robin by tenant, FIFO within one."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSemaphore:
    """`at_once` of them; all methods belong to one event loop."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next one's first

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Waits for one, and has it inside."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._hand_on()

    async def _wait(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(tenant, turn)
            else:  # it came at the same time
                self._hand_on()
            raise

    def _leave(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        waiting = self._waiting[tenant]
        waiting.remove(turn)
        if not waiting:
            del self._waiting[tenant]

    def _hand_on(self) -> None:
        for tenant in list(self._waiting):
            waiting = self._waiting.pop(tenant)
            self._waiting[tenant] = waiting  # the last one now
            for turn in waiting:
                if not turn.done():
                    waiting.remove(turn)
                    if not waiting:
                        del self._waiting[tenant]
                    turn.set_result(None)
                    return
        self._free += 1

"""A place among the requests being served. A request takes it when its body is there, not while the body is awaited."""

import asyncio
from collections.abc import Callable

from gateway.admission.slots import LocalSlots, Slots
from gateway.config.gateway import GatewayConfig
from gateway.errors import Overloaded, Unavailable


class ConcurrencyLimiter:
    """Counts the requests that are served. While it is draining, running requests end in peace and new ones are refused.

    `limit` holds for `places`, which other processes may share; `in_flight` are this one's.
    """

    def __init__(self, limit: int, on_change: Callable[[int], None], places: Slots | None = None) -> None:
        self.limit = limit
        self.in_flight = 0
        self._places = places or LocalSlots()
        self.is_draining = False
        self._on_change = on_change
        self._idle = asyncio.Event()
        self._idle.set()

    def configure(self, config: GatewayConfig) -> None:
        """Another limit for requests that come from now on."""
        self.limit = config.max_in_flight

    def check(self) -> None:
        """Raises ApiError when no further request would get a place now."""
        if self.is_draining:
            raise Unavailable("The gateway is shutting down.", "draining")
        if self._places.taken >= self.limit:
            raise self._overloaded()

    def take(self) -> None:
        """Takes a place, to be given back once. Raises ApiError."""
        self.check()
        if not self._places.take(self.limit):
            raise self._overloaded()
        self._changed(1)

    def give_back(self) -> None:
        """A place is free again."""
        self._places.give_back()
        self._changed(-1)

    async def drained(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the running ones."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_idle()
        except TimeoutError:
            return False
        return True

    async def wait_idle(self) -> None:
        """Waits until no request is in flight."""
        await self._idle.wait()

    def _overloaded(self) -> Overloaded:
        return Overloaded(f"The gateway already serves {self.limit} requests, its limit. Please retry.")

    def _changed(self, by: int) -> None:
        self.in_flight += by
        self._on_change(self.in_flight)
        if self.in_flight:
            self._idle.clear()
        else:
            self._idle.set()

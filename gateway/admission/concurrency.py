"""A place among the requests being served. A request takes it when its body is there, not while the body is awaited.

Tenants share the places as `planner.decisions.admission.places` says. A request that waits for one stands in this process's
line, in which tenants take turns. Its first one asks again when a request ends here, or after a moment: others end elsewhere.
Of the firsts of all processes, the one that has waited longest gets the next place.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from sys import maxsize
from typing import Final

from gateway.admission.slots import InFlightSlots, Slots
from gateway.config.gateway import GatewayConfig
from gateway.errors import Overloaded, Unavailable
from gateway.prompt.reader_queue import ReadingRoom
from gateway.ratelimit.limiter import TenantLimiters
from planner.decisions.admission.places import Entry, TenantPlaces, entry, most_places
from planner.decisions.admission.waiting import EVERYBODYS, TenantShare, WaitQueue

ASK_AGAIN_S: Final = 0.02  # a place that is free elsewhere may lie idle for so long


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A request that waits for a place."""

    since: float
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class ConcurrencyLimiter:
    """Counts the requests that are served. While it is draining, running requests end in peace and new ones are refused.
    While it is leaving, another gateway has its port: those that come on connections which it has still are served.

    `limit` holds for the places `taken`. Other processes may share them, the number `wanted` of requests that wait, and the
    `claims` of tenants; `in_flight` are this one's. A request waits `patience_s` at most, and its body has room among `bodies`.
    """

    def __init__(
        self,
        limit: int,
        on_change: Callable[[int], None],
        *,
        clock: Callable[[], float],
        patience_s: float,
        taken: InFlightSlots,
        wanted: Slots,
        claims: TenantLimiters,
        bodies: ReadingRoom,
    ) -> None:
        self.limit = limit
        self.in_flight = 0
        self.is_draining = False
        self.is_leaving = False
        self._clock = clock
        self._patience_s = patience_s
        self._taken = taken
        self._wanted = wanted
        self._claims = claims
        self._bodies = bodies
        self._line: WaitQueue[_Waiter] = WaitQueue(maxsize)
        self._on_change = on_change
        self._idle = asyncio.Event()
        self._idle.set()

    def configure(self, config: GatewayConfig) -> None:
        """Another limit for requests that come from now on."""
        self.limit = config.max_in_flight

    def most_of(self, share: TenantShare) -> int:
        """How many places one tenant may have."""
        return most_places(self.limit) if share.flow else self.limit

    def check(self, share: TenantShare = EVERYBODYS) -> None:
        """Raises ApiError when a further request of the tenant would be refused now."""
        self._check_draining()
        if self._taken.taken + self._wanted.taken < self.most_of(share):
            return
        if not share.flow or self._entry(self._claims.claims(share)) is Entry.REFUSED:
            raise self._overloaded()

    async def take(self, share: TenantShare = EVERYBODYS, num_bytes: int = 0) -> None:
        """Takes a place, to be given back once, and waits for one that the tenant's part has room for. Raises ApiError.

        `num_bytes` are those of the body that waits with it.
        """
        self._check_draining()
        match self._claimed(share):
            case Entry.REFUSED:
                raise self._overloaded()
            case Entry.WAITS:
                await self._wait(share, num_bytes)
        self._changed(1)

    def give_back(self, share: TenantShare = EVERYBODYS) -> None:
        """A place is free again."""
        self._taken.give_back()
        if share.flow:
            self._claims.give_up(share)
        self._changed(-1)
        self._wake_first()

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

    def _check_draining(self) -> None:
        if self.is_draining:
            raise Unavailable("The gateway is shutting down.", "draining")

    def _overloaded(self) -> Overloaded:
        return Overloaded(f"The gateway already serves {self.limit} requests, its limit. Please retry.")

    def _claimed(self, share: TenantShare) -> Entry:
        """What becomes of one more request; if it is not refused, it has a place, or is known to wait for one."""
        if not share.flow:
            return Entry.TAKES if self._taken.take(self.limit) else Entry.REFUSED
        return self._claims.claim(share, self._entered)

    def _entered(self, claims: TenantPlaces) -> Entry:
        decision = self._entry(claims)
        if decision is Entry.TAKES and not self._taken.take(self.limit):  # one that waited has taken it meanwhile
            decision = Entry.WAITS
        if decision is Entry.WAITS:
            self._wanted.take(maxsize)
        return decision

    def _entry(self, claims: TenantPlaces) -> Entry:
        return entry(self.limit, self._taken.taken, self._wanted.taken, claims)

    async def _wait(self, share: TenantShare, num_bytes: int) -> None:
        """Until there is a place for a request that has a claim to it. Raises ApiError; the claim is given up then."""
        waiter = _Waiter(self._clock())
        until = waiter.since + self._patience_s
        self._line.join(waiter, waiter.since, share=share)
        has_place = False
        try:
            with self._bodies.held(share.flow, num_bytes):
                while not has_place:
                    self._check_draining()
                    if (left_s := until - self._clock()) <= 0:
                        raise self._overloaded()
                    waiter.woken.clear()
                    is_first = self._first() is waiter
                    with suppress(TimeoutError):
                        async with asyncio.timeout(min(left_s, ASK_AGAIN_S) if is_first else left_s):
                            await waiter.woken.wait()
                    has_place = self._first() is waiter and self._taken.take_in_turn(self.limit)
            self._line.serve(waiter)
        finally:
            self._wanted.give_back()
            if not has_place:
                self._claims.give_up(share)
                self._line.leave(waiter)
            self._wake_first()

    def _wake_first(self) -> None:
        if (first := self._first()) is not None:
            first.woken.set()

    def _first(self) -> _Waiter | None:
        """The first of this process's line; the others see since when it waits."""
        first = self._line.first(self._clock())
        self._taken.first_waits(None if first is None else first.since)
        return first

    def _changed(self, by: int) -> None:
        self.in_flight += by
        self._on_change(self.in_flight)
        if self.in_flight:
            self._idle.clear()
        else:
            self._idle.set()

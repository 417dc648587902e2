"""The line of requests whose KVCache no decode node has room for. Nothing is reserved or computed for them yet.

The first asks again when another request's room is free, or after a moment: other gateways' requests end, too.
The line is bounded. A request that would not get through in time is refused and told when to come again.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Final, Self

from gateway.admission.slots import LocalSlots, Slots
from gateway.config.gateway import GatewayConfig
from gateway.errors import Overloaded
from planner.decisions.admission.classes import UNPROMISED, ServiceClass
from planner.decisions.admission.waiting import EVERYBODYS, DrainRate, TenantShare, WaitQueue

ASK_AGAIN_S: Final = 0.25
HELD_BACK_S: Final = 1.0  # a request refused for its tenant's part yields to others for so long, at least
HELD_BACK_MOST_S: Final = 30.0  # but until all others in line have been asked for, as long as that takes lately
ASKS_REMEMBERED: Final = 8


class WaitingLine:
    """By priority, then fairly by tenant, then by whose time is up. At most `limit` wait, each for `patience_s` in all.

    With workers, `room` is shared: `limit` holds for all their lines together, the order for each line.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        limit: int,
        patience_s: float,
        ageing_s: float = inf,
        on_change: Callable[[int], None] = lambda length: None,
        room: Slots | None = None,
    ) -> None:
        self.patience_s = patience_s
        self.drain = DrainRate()
        self._clock = clock
        self._on_change = on_change
        self._limit = limit
        self._room = room or LocalSlots()
        self._line: WaitQueue[QueueEntry] = WaitQueue(limit, ageing_s)
        self._freed = asyncio.Event()
        self._ask_s = 0.0  # from a turn to its refusal for its tenant's part, lately

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, place: object) -> bool:
        return place in self._line

    @property
    def limit(self) -> int:
        """How many may wait, in all lines that share this one's room."""
        return self._limit

    def configure(self, config: GatewayConfig) -> None:
        """Other rules for requests that come from now on."""
        self._limit, self._line.ageing_s = config.max_waiting, config.admission.ageing_s

    def place(
        self, service: ServiceClass = UNPROMISED, arrived: float | None = None, share: TenantShare = EVERYBODYS
    ) -> "QueueEntry":
        """For one request, as a `with` block: it stands in the line from its first `wait` on, until it leaves or that ends."""
        return QueueEntry(self, service, inf if arrived is None else arrived + service.deadline_s, share)

    def freed(self) -> None:
        """A request has ended: the first in line may ask again."""
        self._freed.set()

    def expected_s(self, service: ServiceClass, share: TenantShare = EVERYBODYS) -> float:
        """Predicted wait of a request of that class and tenant that joined now; 0 while none waits or nothing is known."""
        if not len(self) or not self.drain.is_known:
            return 0.0
        now = self._clock()
        return self.drain.wait_s(self._line.ahead_of(service.priority, now + self.patience_s, now, share))

    def must_wait(self, service: ServiceClass, share: TenantShare = EVERYBODYS) -> bool:
        """Whether another request would come before one of that class and tenant that joined now."""
        now = self._clock()
        return self._line.is_anyone_ahead(service.priority, now + self.patience_s, now, share)

    def hold_back(self, place: "QueueEntry") -> None:
        """The part of its tenant is full: requests of others, which may find room, are asked for first."""
        place.is_held_back = True
        now = self._clock()
        if place.asked_at < now:
            self._ask_s += (now - place.asked_at - self._ask_s) / ASKS_REMEMBERED
            place.asked_at = inf
        round_s = 2 * self._ask_s * self._line.num_flows
        self._line.hold_back(place.share.flow, now + min(HELD_BACK_MOST_S, max(HELD_BACK_S, round_s)))
        first = self._line.first(now)
        if first is not None and not self._line.is_held_back(first, now):
            self._freed.set()  # it is asked for at once: a moment each would be long behind many
        self._wake_first()

    def join(self, place: "QueueEntry") -> None:
        """At its place in the order. Raises Overloaded."""
        now = self._clock()
        place.due = min(now + self.patience_s, place.deadline)
        expected_s = self.drain.wait_s(self._line.ahead_of(place.service.priority, place.due, now, place.share))
        if self.drain.is_known and now + expected_s > place.due:
            raise self.refusal(place, expected_s)
        if not self._line:
            self.drain.on_line(now)
        # With no room left, here or in another line, only a place of a request in this one can be had.
        self._line.limit = len(self) + self._room.take(self._limit)
        joined = self._line.join(
            place, now, priority=place.service.priority, due=place.due, share=place.share, cost=max(1, place.tokens)
        )
        if not joined.accepted:
            raise self.refusal(place, expected_s)
        if joined.displaced is not None:
            joined.displaced.is_displaced = True
            joined.displaced.woken.set()
        if place.is_held_back:
            self.hold_back(place)
        self._on_change(len(self))

    async def turn(self, place: "QueueEntry") -> None:
        """Until `place` is the first and may ask again. Raises Overloaded when that will not be."""
        try:
            async with asyncio.timeout(place.due - self._clock()):
                while not await self._is_due(place):
                    pass
        except TimeoutError:
            self.leave(place)
            raise self.refusal(place, self.drain.wait_s(len(self))) from None
        if place.is_displaced:
            raise self.refusal(place, self.drain.wait_s(len(self)))
        place.asked_at = self._clock()

    async def _is_due(self, place: "QueueEntry") -> bool:
        """Whether `place`, once it was the first, is so still when room has become free or a moment has gone by.

        One that was held back meanwhile has waited for that moment already.
        """
        has_yielded = False
        while not place.is_displaced and not self._is_first(place):
            self._wake_first()
            place.woken.clear()
            await place.woken.wait()
            has_yielded = place.is_held_back
        if place.is_displaced:
            return True
        place.is_held_back = False
        if not has_yielded:
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_S):
                    await self._freed.wait()
        if self._is_first(place):  # no request of a higher priority has come meanwhile, whose room it would be
            self._freed.clear()
            return True
        return False

    def _is_first(self, place: "QueueEntry") -> bool:
        return self._line.first(self._clock()) is place

    def served(self, place: "QueueEntry") -> None:
        """It has got its room."""
        if place in self:
            self.drain.on_turn(self._clock())
            self._line.serve(place)
            self._left()

    def refusal(self, place: "QueueEntry", retry_after_s: float) -> Overloaded:
        """The error for a request that gets no place, or loses it."""
        waiting = f"{len(self)} requests wait for it"
        if place.is_displaced:
            others = "requests of a higher priority, or of tenants with fewer in line"
            message, code = f"No decode node has room and {others} have come; {waiting}", "displaced"
        elif place.due >= place.deadline:
            message, code = f"No decode node will have room before the deadline of its class; {waiting}", "deadline"
        else:
            message, code = f"No decode node has room and {waiting}", "no_room"
        return Overloaded(f"{message}. Please retry.", code, retry_after_s=retry_after_s)

    def leave(self, place: "QueueEntry") -> None:
        """It stands in the line no more, if it did."""
        if self._line.leave(place):
            self._left()

    def _left(self) -> None:
        self._room.give_back()
        self._on_change(len(self))
        self._freed.set()  # there may be room for one more
        self._wake_first()

    def _wake_first(self) -> None:
        if (first := self._line.first(self._clock())) is not None:
            first.woken.set()


class QueueEntry:
    """One request's place. `tokens`, which it would have computed, are what it takes of its tenant's part."""

    def __init__(self, line: WaitingLine, service: ServiceClass, deadline: float, share: TenantShare) -> None:
        self.service = service
        self.deadline = deadline
        self.share = share
        self.tokens = 0
        self.due = inf
        self.woken = asyncio.Event()
        self.is_displaced = False
        self.is_held_back = False
        self.asked_at = inf  # when it had its turn, until it is known what became of that
        self._line = line
        self._has_joined = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.leave(self)

    @property
    def stands(self) -> bool:
        """Whether it is in the line."""
        return self in self._line

    async def wait(self) -> None:
        """Until it is this request's turn to ask for room. Raises Overloaded, with the time after which to come again."""
        if not self._has_joined:
            self._line.join(self)
            self._has_joined = True
        await self._line.turn(self)

    def held_back(self) -> None:
        """It was refused what others may get."""
        self._line.hold_back(self)

    def served(self) -> None:
        """It has got its room; should that be lost, it joins anew."""
        self._line.served(self)
        self._has_joined = False
        self.asked_at = inf

"""Which body is read next: tenants take turns by bytes, so a short prompt does not wait for another tenant's long ones.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM '96) in two stages. Between tenants bytes are shared by weight; within a
tenant each class of sizes gets as much as any other, so its own short prompts pass its long ones, too; within a class who came
first is first.

    acme  ≤ 16 KiB   ▪▪▪           ┐
          ≤ 128 KiB                ├ by bytes ┐
          more       ████ ████ ███ ┘          ├ by bytes and weight ──► one of few places
    beta  ≤ 16 KiB   ▪             ─ by bytes ┘

A body that is being read is not put aside for a lighter tenant's. So beside the places for all, the shorter classes may have
places of their own, with a fair order of tenants by themselves: a short body waits for short ones only.

What waits and what is read is bounded, for a tenant and for all together. All methods belong to one event loop.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter
from typing import Final, NamedTuple

from gateway.errors import Overloaded
from planner.decisions.admission.waiting import PHASE, TenantShare

CLASS_BYTES: Final = (16 * 1024, 128 * 1024)
LEAST_BYTES: Final = 1024  # a body costs at least as much as one of so many
MAX_REMEMBERED: Final = 4096  # tenants that nothing waits of
TENANTS_PART: Final = 0.5  # of the bytes for all, for a tenant with a name
FULL: Final = "reading_overload"

FOR_ALL: Final = -1

Place = int  # the class of sizes whose own it is, or FOR_ALL
Turn = asyncio.Future[Place]


class _Waiting(NamedTuple):
    cost: float  # in bytes
    turn: Turn


@dataclass(slots=True)
class _Line:
    """Bodies of one class of sizes. `start` is the virtual time, in bytes, at which the next one begins."""

    start: float
    waiting: deque[_Waiting] = field(default_factory=deque)

    def first_wanted(self) -> _Waiting | None:
        """Takes out the first body whose client has not left, and those before it."""
        while self.waiting:
            first = self.waiting.popleft()
            if not first.turn.done():
                return first
        return None


@dataclass(slots=True)
class _Tenant:
    """What waits of a tenant, by class. `start` is as that of a line, between tenants; `now` is the time within this one."""

    weight: float
    start: float
    first_extra: float  # what its next turn costs beside its body: no two tenants keep step
    now: float = 0.0
    lines: dict[int, _Line] = field(default_factory=dict)


@dataclass(slots=True)
class _OwnPlaces:
    """The places of one class of sizes. What is read in them is charged to no tenant elsewhere."""

    free: int
    now: float = 0.0  # virtual: bytes by weight
    starts: dict[str, float] = field(default_factory=dict)  # of a tenant's next body, unless it is the present time

    def serve(self, name: str, cost: float) -> None:
        """A body of this tenant is read; `cost` by its weight."""
        self.free -= 1
        self.now = self.start_of(name)
        self.starts[name] = self.now + cost
        self.starts = _bounded(self.starts, self.now)

    def start_of(self, name: str) -> float:
        """When the tenant's next body begins."""
        return max(self.now, self.starts.get(name, 0.0))


class ReadingQueue:
    """Places for reading: `places` for all at first, and `own` for each class of sizes but the longest; in a fair order."""

    def __init__(self, places: int, own: int = 0) -> None:
        self._free = places
        self._own = [_OwnPlaces(own) for _ in CLASS_BYTES]
        self._now = 0.0  # virtual: bytes by weight
        self._waiting: dict[str, _Tenant] = {}
        self._joined = 0  # tenants that began at the present time
        self._ends: dict[str, float] = {}  # when what tenants have had ends

    def __len__(self) -> int:
        return sum(len(line.waiting) for tenant in self._waiting.values() for line in tenant.lines.values())

    @property
    def has_free(self) -> bool:
        """Whether the next body, of whatever size, gets a place at once."""
        return self._free > 0

    @property
    def num_remembered(self) -> int:
        """What tenants have had, by place: so many are known."""
        return len(self._ends) + sum(len(own.starts) for own in self._own)

    async def take(self, share: TenantShare, num_bytes: int) -> Place:
        """Waits for a place; to be given back once, by `give_back`."""
        cost = float(max(LEAST_BYTES, num_bytes))
        number = sum(num_bytes > limit for limit in CLASS_BYTES)
        if number < len(self._own) and self._own[number].free:
            self._own[number].serve(share.flow, cost / share.weight)
            return number
        if self._free:
            self._free -= 1
            start = self._start_of(share)
            self._now = max(self._now, start)
            self._has_had(share.flow, start + cost / share.weight)
            return FOR_ALL
        turn: Turn = asyncio.get_running_loop().create_future()
        tenant = self._waiting.get(share.flow)
        if tenant is None:
            tenant = self._waiting[share.flow] = self._joins(share, cost)
        tenant.weight = share.weight
        tenant.lines.setdefault(number, _Line(tenant.now)).waiting.append(_Waiting(cost, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came at the same time
                self.give_back(turn.result())
            raise

    def give_back(self, place: Place = FOR_ALL) -> None:
        """A place is free, or there is another one: whose turn it is has it."""
        turn = self._next() if place == FOR_ALL else self._next_of(place)
        if turn is not None:
            turn.set_result(place)
        elif place == FOR_ALL:
            self._free += 1

    def _next_of(self, number: int) -> Turn | None:
        """Whose turn it is for a class's own place, which is free then."""
        own = self._own[number]
        own.free += 1
        while able := [name for name, tenant in self._waiting.items() if number in tenant.lines]:
            name = min(able, key=own.start_of)
            tenant = self._waiting[name]
            first = tenant.lines[number].first_wanted()
            self._forget_empty(name, number)
            if first is not None:
                own.serve(name, first.cost / tenant.weight)
                return first.turn
        return None

    def _next(self) -> Turn | None:
        while self._waiting:
            name, tenant = min(self._waiting.items(), key=lambda each: each[1].start)
            number, line = min(tenant.lines.items(), key=lambda each: each[1].start)
            first = line.first_wanted()
            if first is not None:
                self._now, tenant.now = tenant.start, line.start
                tenant.start += first.cost / tenant.weight + tenant.first_extra
                tenant.first_extra = 0.0
                line.start += first.cost
            self._forget_empty(name, number)
            if first is not None:
                return first.turn
        return None

    def _forget_empty(self, name: str, number: int) -> None:
        tenant = self._waiting[name]
        if not tenant.lines[number].waiting:
            del tenant.lines[number]
        if not tenant.lines:
            del self._waiting[name]
            self._has_had(name, tenant.start)

    def _joins(self, share: TenantShare, cost: float) -> _Tenant:
        """Nothing else waits of it. One that is behind begins now, and pays a part of its first body once more."""
        start = self._start_of(share)
        extra = 0.0
        if start == self._now:
            self._joined += 1
            extra = self._joined * PHASE % 1.0 * cost / share.weight
        return _Tenant(share.weight, start, extra)

    def _start_of(self, share: TenantShare) -> float:
        return max(self._now, self._ends.get(share.flow, 0.0))

    def _has_had(self, name: str, end: float) -> None:
        self._ends[name] = end
        self._ends = _bounded(self._ends, self._now)


def _bounded(ends: dict[str, float], now: float) -> dict[str, float]:
    """What tenants have had, if too many are remembered: those who have had most beyond the present time."""
    if len(ends) <= MAX_REMEMBERED:
        return ends
    return dict(nlargest(MAX_REMEMBERED // 2, ((name, end) for name, end in ends.items() if end > now), itemgetter(1)))


class ReadingRoom:
    """Bytes of bodies that wait to be read, or are read: `max_bytes` for all, and a part of them for each tenant."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()

    @property
    def held_bytes(self) -> int:
        """Those of all tenants."""
        return self._held.total()

    @contextmanager
    def held(self, flow: str, num_bytes: int) -> Iterator[None]:
        """So many are held inside the block. Raises Overloaded."""
        if flow:
            self._check(flow, self._held[flow], num_bytes, int(self._max_bytes * TENANTS_PART))
        self._check("all", self.held_bytes, num_bytes, self._max_bytes)
        self._held[flow] += num_bytes
        try:
            yield
        finally:
            self._held[flow] -= num_bytes
            if not self._held[flow]:
                del self._held[flow]

    def _check(self, whose: str, held: int, more: int, limit: int) -> None:
        if held and held + more > limit:  # alone, a body may be of any size that is received
            raise Overloaded(
                f"Bodies of {whose} that wait to be read take {held} bytes; the limit is {limit}. Please retry.", FULL
            )

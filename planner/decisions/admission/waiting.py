"""The line of waiting requests: which is first, which is refused when the line is full, and how fast it moves.

first    the higher priority; of equals, the flow (a tenant's requests) that has had least for its weight; of one flow,
         the request with the earliest deadline; of these, the one that came first
fair     start-time fair queueing (Goyal, Vin, Cheng 1996): a flow that is served moves on in virtual time by cost / weight;
         a flow that joins the line begins at the line's present time, so turns cannot be saved up
ageing   every `ageing_s` of waiting count as one more priority, so that no request is overtaken for ever: a request that
         joins a waiter's (highest priority - its own + 1) * ageing_s after it, or later, comes behind it
held     a flow whose own part of the room is full yields to the others for a while: it blocks no other flow
full     a newcomer takes the last one's place in two cases: the last one's priority, ageing included, is lower; or
         priorities are equal, and the last one's flow has more places for its weight than the newcomer's will have
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

BELIEVED_TURNS: Final = 3
TURNS_REMEMBERED: Final = 8

Who = TypeVar("Who")
Rank = tuple[int, float, float, int]
Turn = tuple[bool, int, float, float, int]


class Joined(NamedTuple, Generic[Who]):
    """The outcome for a request that wanted to join; `displaced` has lost its place to it."""

    accepted: bool
    displaced: Who | None = None


class TenantShare(NamedTuple):
    """The flow that a request belongs to, and its share beside others (`weight` above 0)."""

    flow: str = ""
    weight: float = 1.0


EVERYBODYS: Final = TenantShare()


@dataclass(slots=True)
class _Flow:
    weight: float
    start: float  # of its next turn, in virtual time
    standing: int = 0
    back_until: float = -inf  # it yields to others

    @property
    def places(self) -> float:
        """Its places, divided by its weight."""
        return self.standing / self.weight


@dataclass(frozen=True, slots=True)
class _Standing:
    priority: int
    due: float
    since: float
    number: int
    flow: str
    cost: float

    def level(self, now: float, ageing_s: float) -> int:
        """Its priority, with what it has waited."""
        return self.priority + int(max(0.0, now - self.since) / ageing_s)


class WaitQueue(Generic[Who]):
    """At most `limit` who wait. Times are seconds, `now` never goes back; `Who` is anything that can be a key."""

    def __init__(self, limit: int, ageing_s: float = inf) -> None:
        self.limit = limit
        self.ageing_s = ageing_s
        self._standing: dict[Who, _Standing] = {}
        self._flows: dict[str, _Flow] = {}  # with a request in the line, or with turns that others have not had yet
        self._virtual = 0.0
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._standing)

    def __contains__(self, who: object) -> bool:
        return who in self._standing

    def join(
        self,
        who: Who,
        now: float,
        *,
        priority: int = 0,
        due: float = inf,
        share: TenantShare = EVERYBODYS,
        cost: float = 1.0,
    ) -> Joined[Who]:
        """`who`, not in it yet, takes a place until its time is `due`, if there is one for it. `cost`: what it will get."""
        displaced = None
        if len(self) >= self.limit:
            displaced = self._who_yields(priority, share, now)
            if displaced is None:
                return Joined(False)
            self.leave(displaced)
        flow = self._flows.setdefault(share.flow, _Flow(share.weight, self._virtual))
        flow.weight = share.weight
        if not flow.standing:
            flow.start = max(flow.start, self._virtual)
        flow.standing += 1
        self._standing[who] = _Standing(priority, due, now, next(self._numbers), share.flow, cost)
        return Joined(True, displaced)

    def leave(self, who: Who) -> bool:
        """Whether it stood there."""
        standing = self._standing.pop(who, None)
        if standing is None:
            return False
        self._flows[standing.flow].standing -= 1
        self._tidy()
        return True

    def serve(self, who: Who) -> bool:
        """It has got what it waited for, out of its flow's part. Whether it stood there."""
        standing = self._standing.get(who)
        if standing is None:
            return False
        flow = self._flows[standing.flow]
        self._virtual = max(self._virtual, flow.start)
        flow.start += standing.cost / flow.weight
        return self.leave(who)

    def hold_back(self, flow: str, until: float) -> None:
        """There is no room for those of a flow who stand there, whatever there is for others: they come last `until` then."""
        if flow in self._flows:
            self._flows[flow].back_until = until

    def is_held_back(self, who: Who, now: float) -> bool:
        """Whether `who`, of the line, yields to others by now."""
        return now < self._flows[self._standing[who].flow].back_until

    @property
    def num_flows(self) -> int:
        """With a request in the line, or with turns that others have not had yet."""
        return len(self._flows)

    def first(self, now: float) -> Who | None:
        """The request that is served next."""
        return min(self._standing, key=lambda who: self._turn(who, now), default=None)

    def ahead_of(self, priority: int, due: float, now: float, share: TenantShare = EVERYBODYS) -> int:
        """How many would come before a request that joined now; of other flows, without those that are held back."""
        flows: defaultdict[str, list[tuple[int, float, int, float]]] = defaultdict(list)
        for each in self._standing.values():
            flows[each.flow].append((-each.level(now, self.ageing_s), each.due, each.number, each.cost))
        own = [each for each in flows.pop(share.flow, ()) if each[:2] <= (-priority, due)]
        ahead, turn = len(own), (-priority, self._start(share.flow) + sum(each[-1] for each in own) / share.weight)
        for name, waiting in flows.items():
            if now < self._flows[name].back_until:
                continue
            start = self._start(name)
            for urgency, _, _, cost in sorted(waiting):
                ahead += (urgency, start) <= turn
                start += cost / self._flows[name].weight
        return ahead

    def is_anyone_ahead(self, priority: int, due: float, now: float, share: TenantShare = EVERYBODYS) -> bool:
        """Whether `ahead_of` would count anybody. In a long line the first that is looked at nearly always says so."""
        newcomer = -priority, self._start(share.flow)
        for each in self._standing.values():
            urgency = -each.level(now, self.ageing_s)
            if each.flow == share.flow:
                if (urgency, each.due) <= (-priority, due):
                    return True
            elif now >= self._flows[each.flow].back_until and (urgency, self._start(each.flow)) <= newcomer:
                return True
        return False

    def _start(self, flow: str) -> float:
        """Of the flow's next turn, if it has a request in the line."""
        known = self._flows.get(flow)
        return self._virtual if known is None else max(known.start, self._virtual)

    def _who_yields(self, priority: int, share: TenantShare, now: float) -> Who | None:
        """The last one, if a request of such a priority and flow may have its place."""
        last = max(self._standing, key=lambda who: self._yields(who, now), default=None)
        if last is None:
            return None
        standing = self._standing[last]
        level, theirs, own = standing.level(now, self.ageing_s), self._flows[standing.flow], self._flows.get(share.flow)
        places = ((own.standing if own else 0) + 1) / share.weight
        has_less = level == priority and theirs is not own and theirs.places > places
        return last if level < priority or has_less else None

    def _turn(self, who: Who, now: float) -> Turn:
        standing = self._standing[who]
        level, flow = standing.level(now, self.ageing_s), self._flows[standing.flow]
        return now < flow.back_until, -level, flow.start, standing.due, standing.number

    def _yields(self, who: Who, now: float) -> Rank:
        standing = self._standing[who]
        level = standing.level(now, self.ageing_s)
        return -level, self._flows[standing.flow].places, standing.due, standing.number

    def _tidy(self) -> None:
        """Forgets flows that are where a new one would begin; with an empty line, all."""
        if not self._standing:
            self._flows.clear()
            self._virtual = 0.0
            return
        for name in [name for name, flow in self._flows.items() if not flow.standing and flow.start <= self._virtual]:
            del self._flows[name]


class DrainRate:
    """How fast a line moves: the mean time between two of its turns, lately. Of a line that has not moved yet it is a guess."""

    def __init__(self, interval_s: float = 1.0) -> None:
        self.interval_s = interval_s
        self.turns = 0
        self._last = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it is more than a guess: no request is turned away for one."""
        return self.turns >= BELIEVED_TURNS

    def on_line(self, now: float) -> None:
        """A request has begun to wait where none did: what went before was no line."""
        self._last = now

    def on_turn(self, now: float) -> None:
        """The first of the line has got what it waited for."""
        self.turns += 1
        self.interval_s += (max(0.0, now - self._last) - self.interval_s) / min(self.turns, TURNS_REMEMBERED)
        self._last = now

    def wait_s(self, ahead: int) -> float:
        """Predicted time until a request has a turn that `ahead` others come before."""
        return (ahead + 1) * self.interval_s

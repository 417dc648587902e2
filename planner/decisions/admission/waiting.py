"""The line of waiting requests: which is first, which is refused when the line is full, and how fast it moves.

first    the higher priority; of equals, the flow (a tenant's requests) that has had least for its weight; of one flow,
         the request with the earliest deadline; of these, the one that came first
fair     start-time fair queueing (Goyal, Vin, Cheng 1996): a flow that is served moves on in virtual time by cost / weight;
         a flow that joins the line begins at the line's present time, so turns cannot be saved up
out of step   a flow that joins is charged for its first request up to twice, each flow by another part: else all flows with
         requests of one size begin together, and one with small requests waits for the large ones of all others
ageing   every `ageing_s` of waiting count as one more priority, so that no request is overtaken for ever: a request that
         joins a waiter's (highest priority - its own + 1) * ageing_s after it, or later, comes behind it
held     a flow whose own part of the room is full yields to the others for a while: it blocks no other flow
full     a newcomer takes the last one's place in two cases: the last one's priority, ageing included, is lower; or
         priorities are equal, and the last one's flow has more places for its weight than the newcomer's will have
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, count, takewhile
from math import inf, nextafter, ulp
from typing import Final, Generic, NamedTuple, TypeVar

BELIEVED_TURNS: Final = 3
TURNS_REMEMBERED: Final = 8
PHASE: Final = (5**0.5 - 1) / 2  # its multiples, modulo 1, lie evenly however many there are
LEFT_BEHIND: Final = 64  # requests that have left and whose rise is still awaited, beside as many as wait

Who = TypeVar("Who")
Place = tuple[float, int]  # in the order of one flow and level: when its time is up, then its number
Head = tuple[float, float, int, str]  # the start of a flow, its first place of a level, and its name


class Joined(NamedTuple, Generic[Who]):
    """The outcome for a request that wanted to join; `displaced` has lost its place to it."""

    accepted: bool
    displaced: Who | None = None


class TenantShare(NamedTuple):
    """The flow that a request belongs to, and its share beside others (`weight` above 0)."""

    flow: str = ""
    weight: float = 1.0


EVERYBODYS: Final = TenantShare()


class _Bucket(Generic[Who]):
    """The requests of one flow at one level, in their order: three lists side by side."""

    __slots__ = ("begins", "costs", "members", "places")

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.costs: list[float] = []
        self.members: list[Who] = []
        self.begins: list[float] = []  # once asked for, until the flow changes: when each begins, in virtual time

    def add(self, place: Place, cost: float, who: Who) -> None:
        at = bisect_left(self.places, place)
        self.places.insert(at, place)
        self.costs.insert(at, cost)
        self.members.insert(at, who)

    def remove(self, place: Place) -> None:
        at = bisect_left(self.places, place)
        del self.places[at], self.costs[at], self.members[at]

    def up_to(self, due: float) -> tuple[int, float]:
        """How many have their time up by `due`, and what they cost."""
        number = bisect_right(self.places, (due, inf))
        return number, sum(self.costs[:number])


class _Flow(Generic[Who]):
    """What is known of a flow with a request in the line, or with turns that others have not had yet."""

    __slots__ = ("back_until", "first_extra", "levels", "places", "standing", "start", "weight")

    def __init__(self, weight: float, start: float) -> None:
        self.weight = weight
        self.start = start  # virtual time at which its next turn begins
        self.first_extra = 0.0  # what its next turn costs beside its request
        self.standing = 0  # requests of it in the line
        self.places = 0.0  # the same for its weight
        self.back_until = -inf  # it yields to others
        self.levels: dict[int, _Bucket[Who]] = {}

    def stands(self, by: int) -> None:
        """So many more of it are in the line, or fewer."""
        self.standing += by
        self.places = self.standing / self.weight
        self.changed()

    def changed(self) -> None:
        """Its turns begin at other times than before."""
        for bucket in self.levels.values():
            bucket.begins = []

    def begins(self, level: int) -> list[float]:
        """When those of a level begin, in virtual time: after its requests of higher levels."""
        bucket = self.levels[level]
        if not bucket.begins:
            above = sum(sum(other.costs) for each, other in self.levels.items() if each > level)
            steps = [cost / self.weight for cost in bucket.costs[:-1]]
            if above:
                above += self.first_extra * self.weight
            elif steps:
                steps[0] += self.first_extra
            bucket.begins = list(accumulate(steps, initial=self.start + above / self.weight))
        return bucket.begins


@dataclass(slots=True)
class _Standing:
    priority: int
    due: float
    since: float
    number: int
    flow: str
    cost: float
    level: int  # its priority, with what it has waited

    @property
    def place(self) -> Place:
        return self.due, self.number


class WaitQueue(Generic[Who]):
    """At most `limit` who wait. Times are seconds, `now` never goes back; `Who` is anything that can be a key.

    Each flow keeps its requests in their order, by level; each level keeps its flows in the order of their turns. A request
    that joins or leaves moves the entries of its own flow only. A heap names the times at which requests reach a higher level.
    """

    def __init__(self, limit: int, ageing_s: float = inf) -> None:
        self.limit = limit
        self._ageing_s = ageing_s
        self._standing: dict[Who, _Standing] = {}
        self._flows: dict[str, _Flow[Who]] = {}
        self._heads: dict[int, list[Head]] = {}  # of the flows at a level, sorted
        self._sizes: Counter[int] = Counter()  # requests at a level
        self._back: set[str] = set()  # flows that are held back, or were
        self._served: set[str] = set()  # flows without a request in the line
        self._rises: list[tuple[float, int, Who]] = []  # a heap; it may hold some requests that have left
        self._virtual = 0.0
        self._numbers = count()
        self._joined = count()  # flows that began at the present time

    def __len__(self) -> int:
        return len(self._standing)

    def __contains__(self, who: object) -> bool:
        return who in self._standing

    @property
    def ageing_s(self) -> float:
        """Seconds of waiting that count as one more priority."""
        return self._ageing_s

    @ageing_s.setter
    def ageing_s(self, seconds: float) -> None:
        if seconds != self._ageing_s:
            self._ageing_s = seconds
            self._rises = [(-inf, each.number, who) for who, each in self._standing.items()]

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
        self._rise(now)
        displaced = None
        if len(self) >= self.limit:
            displaced = self._who_yields(priority, share)
            if displaced is None:
                return Joined(False)
            self.leave(displaced)
        flow = self._flows.setdefault(share.flow, _Flow(share.weight, self._virtual))
        flow.weight = share.weight
        if not flow.standing and flow.start <= self._virtual:
            flow.start = self._virtual
            flow.first_extra = next(self._joined) * PHASE % 1.0 * cost / share.weight
        self._served.discard(share.flow)
        standing = _Standing(priority, due, now, next(self._numbers), share.flow, cost, priority)
        self._standing[who] = standing
        self._enter(who, standing)
        self._await_rise(who, standing, now)
        return Joined(True, displaced)

    def leave(self, who: Who) -> bool:
        """Whether it stood there."""
        standing = self._standing.pop(who, None)
        if standing is None:
            return False
        self._exit(standing)
        if not self._flows[standing.flow].standing:
            self._served.add(standing.flow)
        self._tidy()
        return True

    def serve(self, who: Who) -> bool:
        """It has got what it waited for, out of its flow's part. Whether it stood there."""
        standing = self._standing.get(who)
        if standing is None:
            return False
        flow = self._flows[standing.flow]
        self._virtual = max(self._virtual, flow.start)
        for level in flow.levels:
            self._unlist(standing.flow, level)
        flow.start += standing.cost / flow.weight + flow.first_extra
        flow.first_extra = 0.0
        flow.changed()
        for level in flow.levels:
            self._list(standing.flow, level)
        return self.leave(who)

    def hold_back(self, flow: str, until: float) -> None:
        """There is no room for those of a flow who stand there, whatever there is for others: they come last `until` then."""
        if flow in self._flows:
            self._flows[flow].back_until = until
            self._back.add(flow)

    def is_held_back(self, who: Who, now: float) -> bool:
        """Whether `who`, of the line, yields to others by now."""
        return self._is_back(self._standing[who].flow, now)

    @property
    def num_flows(self) -> int:
        """With a request in the line, or with turns that others have not had yet."""
        return len(self._flows)

    def first(self, now: float) -> Who | None:
        """The request that is served next."""
        self._rise(now)
        levels = sorted(self._heads, reverse=True)
        for level in levels:
            for *_, name in self._heads[level]:
                if not self._is_back(name, now):
                    return self._flows[name].levels[level].members[0]
        if not levels:
            return None
        return self._flows[self._heads[levels[0]][0][-1]].levels[levels[0]].members[0]

    def ahead_of(self, priority: int, due: float, now: float, share: TenantShare = EVERYBODYS) -> int:
        """How many would come before a request that joined now; of other flows, without those that are held back."""
        self._rise(now)
        own, own_cost = self._own_ahead(priority, due, share)
        turn = self._turn(share, own, own_cost)
        left_out = self._left_out(now, share)
        ahead = own + self._others_above(priority, left_out)
        for start, _, _, name in self._heads.get(priority, ()):
            if start > turn:
                break
            if name not in left_out:
                flow = self._flows[name]
                ahead += bisect_right(flow.levels[priority].begins or flow.begins(priority), turn)
        return ahead

    def is_anyone_ahead(self, priority: int, due: float, now: float, share: TenantShare = EVERYBODYS) -> bool:
        """Whether `ahead_of` would count anybody."""
        self._rise(now)
        left_out = self._left_out(now, share)
        if self._own_ahead(priority, due, share)[0] or self._others_above(priority, left_out):
            return True
        turn = self._turn(share)
        heads = takewhile(lambda head: head[0] <= turn, self._heads.get(priority, ()))
        return any(name not in left_out for *_, name in heads)

    def _own_ahead(self, priority: int, due: float, share: TenantShare) -> tuple[int, float]:
        """Of the flow's own requests, how many come before, and what they cost."""
        flow = self._flows.get(share.flow)
        number, cost = 0, 0.0
        for level, bucket in flow.levels.items() if flow else ():
            if level >= priority:
                more, their_cost = bucket.up_to(due if level == priority else inf)
                number, cost = number + more, cost + their_cost
        return number, cost

    def _left_out(self, now: float, share: TenantShare) -> set[str]:
        """Flows that are counted apart, or not: the own one, and those that are held back."""
        return {share.flow, *(name for name in self._back if self._is_back(name, now))}

    def _others_above(self, priority: int, left_out: set[str]) -> int:
        """Requests of higher levels, of other flows than `left_out`."""
        levels = [level for level in self._sizes if level > priority]
        if not levels:
            return 0
        without = (self._flows[name].levels for name in left_out if name in self._flows)
        number = sum(self._sizes[level] for level in levels)
        return number - sum(len(each[level].members) for each in without for level in levels if level in each)

    def _turn(self, share: TenantShare, own: int = 0, own_cost: float = 0.0) -> float:
        """When a request of the flow begins that would come behind so many of its own."""
        known = self._flows.get(share.flow)
        if known is None:
            return self._virtual
        extra = known.first_extra if own else 0.0
        return max(known.start, self._virtual) + own_cost / share.weight + extra

    def _is_back(self, flow: str, now: float) -> bool:
        return flow in self._back and now < self._flows[flow].back_until

    def _who_yields(self, priority: int, share: TenantShare) -> Who | None:
        """The last one, if a request of such a priority and flow may have its place."""
        if not self._heads:
            return None
        level = min(self._heads)
        if level > priority:
            return None
        theirs = self._with_most_places(level)
        last, own = theirs.levels[level].members[-1], self._flows.get(share.flow)
        places = ((own.standing if own else 0) + 1) / share.weight
        has_less = level == priority and theirs is not own and theirs.places > places
        return last if level < priority or has_less else None

    def _with_most_places(self, level: int) -> _Flow[Who]:
        """Of the flows at a level; of equals, the one whose last request there comes last."""
        flows = [self._flows[name] for *_, name in self._heads[level]]
        most = max([flow.places for flow in flows])
        return max((flow for flow in flows if flow.places == most), key=lambda flow: flow.levels[level].places[-1])

    # The order

    def _enter(self, who: Who, standing: _Standing) -> None:
        flow = self._flows[standing.flow]
        self._unlist(standing.flow, standing.level)
        flow.levels.setdefault(standing.level, _Bucket()).add(standing.place, standing.cost, who)
        flow.stands(1)
        self._sizes[standing.level] += 1
        self._list(standing.flow, standing.level)

    def _exit(self, standing: _Standing) -> None:
        flow, level = self._flows[standing.flow], standing.level
        self._unlist(standing.flow, level)
        flow.levels[level].remove(standing.place)
        flow.stands(-1)
        self._sizes[level] -= 1
        if not flow.levels[level].members:
            del flow.levels[level]
        if not self._sizes[level]:
            del self._sizes[level]
        self._list(standing.flow, level)

    def _list(self, name: str, level: int) -> None:
        """Puts the flow among those of a level, if it has a request there."""
        if (head := self._head(name, level)) is not None:
            insort(self._heads.setdefault(level, []), head)

    def _unlist(self, name: str, level: int) -> None:
        if (head := self._head(name, level)) is None:
            return
        heads = self._heads[level]
        del heads[bisect_left(heads, head)]
        if not heads:
            del self._heads[level]

    def _head(self, name: str, level: int) -> Head | None:
        flow = self._flows[name]
        bucket = flow.levels.get(level)
        return None if bucket is None else (flow.start, *bucket.places[0], name)

    def _rise(self, now: float) -> None:
        """Moves requests to the levels that they have reached by now."""
        while self._rises and self._rises[0][0] <= now:
            _, number, who = heappop(self._rises)
            if not self._stands(who, number):
                continue
            standing = self._standing[who]
            level = standing.priority + int(max(0.0, now - standing.since) / self._ageing_s)
            if level != standing.level:
                self._exit(standing)
                standing.level = level
                self._enter(who, standing)
            self._await_rise(who, standing, now)

    def _await_rise(self, who: Who, standing: _Standing, now: float) -> None:
        at = standing.since + (standing.level - standing.priority + 1) * self._ageing_s
        if at < inf:  # a few roundings early, as it is looked at again then
            heappush(self._rises, (max(at - 4 * ulp(at), nextafter(now, inf)), standing.number, who))
            if len(self._rises) > 2 * len(self._standing) + LEFT_BEHIND:
                self._rises = [each for each in self._rises if self._stands(each[2], each[1])]
                heapify(self._rises)

    def _stands(self, who: Who, number: int) -> bool:
        standing = self._standing.get(who)
        return standing is not None and standing.number == number

    def _tidy(self) -> None:
        """Forgets flows that are where a new one would begin; with an empty line, all."""
        if not self._standing:
            self._flows.clear()
            self._back.clear()
            self._served.clear()
            self._rises.clear()
            self._virtual = 0.0
            return
        for name in [name for name in self._served if self._flows[name].start <= self._virtual]:
            del self._flows[name]
            self._served.discard(name)
            self._back.discard(name)


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

"""The line of those who cannot be served yet: who is first in it, who is sent away when it is full, how fast it moves.

first    the higher priority; of equals, whose time is up first; of these, who came first
ageing   every `ageing_s` of waiting count as one more priority, so that nobody is overtaken for ever: whoever joins a
         waiter's (highest priority - its own + 1) * ageing_s after it, or later, comes behind it
full     a newcomer takes the place of the last one, if that one's priority, ageing included, is below its own
"""

from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

BELIEVED_TURNS: Final = 3
TURNS_REMEMBERED: Final = 8

Who = TypeVar("Who")
Rank = tuple[int, float, int]


class Joined(NamedTuple, Generic[Who]):
    """What became of somebody who wanted to join; `displaced` has lost its place to them."""

    accepted: bool
    displaced: Who | None = None


@dataclass(frozen=True, slots=True)
class _Standing:
    priority: int
    due: float
    since: float
    number: int

    def rank(self, now: float, ageing_s: float) -> Rank:
        """Sorts as the line does."""
        return -(self.priority + int(max(0.0, now - self.since) / ageing_s)), self.due, self.number


class Line(Generic[Who]):
    """At most `limit` who wait. Times are seconds, `now` never goes back; `Who` is anything that can be a key."""

    def __init__(self, limit: int, ageing_s: float = inf) -> None:
        self.limit = limit
        self.ageing_s = ageing_s
        self._standing: dict[Who, _Standing] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._standing)

    def __contains__(self, who: object) -> bool:
        return who in self._standing

    def join(self, who: Who, now: float, *, priority: int = 0, due: float = inf) -> Joined[Who]:
        """`who`, not in it yet, takes a place until its time is `due`, if there is one for it."""
        displaced = None
        if len(self) >= self.limit:
            displaced = self._last_below(priority, now)
            if displaced is None:
                return Joined(False)
            self.leave(displaced)
        self._standing[who] = _Standing(priority, due, now, next(self._numbers))
        return Joined(True, displaced)

    def leave(self, who: Who) -> bool:
        """Whether it stood there."""
        return self._standing.pop(who, None) is not None

    def first(self, now: float) -> Who | None:
        """Who is to be served next."""
        return min(self._standing, key=lambda who: self._rank(who, now), default=None)

    def ahead_of(self, priority: int, due: float, now: float) -> int:
        """How many would come before somebody who joined now."""
        rank = (-priority, due, 0)
        return sum(self._rank(who, now)[:2] <= rank[:2] for who in self._standing)

    def _last_below(self, priority: int, now: float) -> Who | None:
        last = max(self._standing, key=lambda who: self._rank(who, now), default=None)
        return last if last is not None and -self._rank(last, now)[0] < priority else None

    def _rank(self, who: Who, now: float) -> Rank:
        return self._standing[who].rank(now, self.ageing_s)


class Drain:
    """How fast a line moves: the mean time between two of its turns, lately. Of a line that has not moved yet it is a guess."""

    def __init__(self, interval_s: float = 1.0) -> None:
        self.interval_s = interval_s
        self.turns = 0
        self._last = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it is more than a guess: nobody is turned away for one."""
        return self.turns >= BELIEVED_TURNS

    def on_line(self, now: float) -> None:
        """Somebody has begun to wait where nobody did: what went before was no line."""
        self._last = now

    def on_turn(self, now: float) -> None:
        """The first of the line has got what it waited for."""
        self.turns += 1
        self.interval_s += (max(0.0, now - self._last) - self.interval_s) / min(self.turns, TURNS_REMEMBERED)
        self._last = now

    def wait_s(self, ahead: int) -> float:
        """Predicted time until somebody has a turn whom `ahead` others come before."""
        return (ahead + 1) * self.interval_s

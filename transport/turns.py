"""Decides which flow is served next, and which one may take a place. Pure: `now` is given, in seconds, up to 1e9 and
beyond.

served   what a flow was charged; half of it is forgotten every half-life
turn     the flow with the least goes next; flows below one unit are equal, and the first that is named goes next
places   while other flows are active, a flow takes at most LEFT_FREE times the places that it leaves free (Choudhury and
         Hahne's dynamic threshold, 1998): the next flow finds a place, even if several flows want all of them

No flow starves: a flow that is not served becomes equal to newcomers and goes before flows that come later. Of two flows with
equal weights, the one that has had more goes next after a half-life at most. A flow that wants little goes first. Credit does
not outlast a few half-lives.

Each flow keeps one number, the logarithm of its service plus the half-lives since time 0. All flows fade alike, so the number
changes only with service, and flows compare without a clock:

    rank = log2(served at t) + t / half_life_s
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from math import inf, log2
from typing import Final, Generic, TypeVar

MAX_FLOWS: Final = 1024  # remembered; beyond, those that have been served least are forgotten
KEPT_FLOWS: Final = MAX_FLOWS * 3 // 4  # then: room for as many more as make it worth to look for them
MOST_LOG2: Final = 60.0  # a bound for exponents, far beyond what is computed or sent in some half-lives

LEFT_FREE: Final = 7  # all but an eighth, for one flow
LATELY_S: Final = 120.0  # a flow served within this is expected back: places are left for it

Flow = TypeVar("Flow", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Served:
    """The record of a flow."""

    rank: float
    at_s: float  # the last time


class Turns(Generic[Flow]):
    """The recent service of flows."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._flows: dict[Flow, Served] = {}  # in the order of their latest turns
        # The highest rank that was forgotten. Unknown flows get this rank. If they counted as newcomers, a flow that is
        # served and forgotten at once would always be next, before all remembered ones.
        self._forgotten = -inf

    def __len__(self) -> int:
        return len(self._flows)

    def charge(self, flow: Flow, amount: float, now: float) -> None:
        """The flow is served so much."""
        if amount <= 0:
            return
        served = min(2.0**MOST_LOG2, self.served(flow, now) + amount)
        self._flows.pop(flow, None)
        self._flows[flow] = Served(log2(served) + self._newcomer(now), now)
        if len(self._flows) > MAX_FLOWS:
            self._forget(now)

    def served(self, flow: Flow, now: float) -> float:
        """What of it is remembered."""
        rank = self._rank_of(flow)
        if rank == -inf:
            return 0.0
        return float(2.0 ** max(-MOST_LOG2, min(MOST_LOG2, rank - self._newcomer(now))))

    def rank(self, flow: Flow, now: float) -> float:
        """Orders flows at one time: the one with the least is first."""
        return max(self._newcomer(now), self._rank_of(flow))

    def first(self, flows: Iterable[Flow], now: float) -> Flow:
        """The next one of `flows` (at least one); of equals, the first."""
        return min(flows, key=lambda flow: self.rank(flow, now))

    def latest(self) -> Iterator[tuple[Flow, float]]:
        """Flows and when they were served last, the latest first."""
        return ((flow, served.at_s) for flow, served in reversed(self._flows.items()))

    def _newcomer(self, now: float) -> float:
        """The rank of a flow that has been served 1 now."""
        return now / self._half_life_s

    def _rank_of(self, flow: Flow) -> float:
        known = self._flows.get(flow)
        return self._forgotten if known is None else known.rank

    def _forget(self, now: float) -> None:
        """Forgets flows that are newcomers again, or, if those are few, the flows that have been served least."""
        newcomer = self._newcomer(now)
        self._flows = {flow: served for flow, served in self._flows.items() if served.rank >= newcomer}
        if len(self._flows) > KEPT_FLOWS:
            kept = set(nlargest(KEPT_FLOWS, self._flows, key=self._rank_of))
            self._forgotten = max(served.rank for flow, served in self._flows.items() if flow not in kept)
            self._flows = {flow: served for flow, served in self._flows.items() if flow in kept}


def leaves_room(held: int, free: int, wanted: int = 1) -> bool:
    """Whether a flow with `held` places may take `wanted` of the `free` ones. A flow without any may have the last one."""
    return wanted <= free and held <= LEFT_FREE * (free - wanted)

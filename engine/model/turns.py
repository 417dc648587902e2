"""Whose turn it is on an engine: tenants share it by what each has been served lately.

flow     a tenant's requests; those of nobody in particular are one flow
served   tokens of prompts computed and of answers decoded, by the flow's weight; half of it is forgotten every HALF_LIFE_S
turn     the flow that has been served least; with less than one token all are alike, and who is named first comes first

A flow that is served nothing is alike with newcomers at last, and before all that come later: nobody waits for ever. With
two flows of equal weight that is as soon as the other one has had as much lately: a half-life at most.

What is kept is the logarithm of what a flow has been served, plus the half-lives since time 0. Fading takes the same from
all, so it changes by service only, and flows are compared without a look at the clock:

    rank = log2(served at t) + t / HALF_LIFE_S
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from math import log2
from typing import Final, NamedTuple

HALF_LIFE_S: Final = 30.0
LATELY_S: Final = 120.0  # a flow that was served within it is expected to come back: places are kept for it
MAX_FLOWS: Final = 1024  # remembered; beyond, those that have been served least are forgotten
MOST_LOG2: Final = 60.0  # tokens; a bound for exponents, far beyond what an engine computes
LEFT_FREE: Final = 7  # a flow has at most so many times the places that it leaves free: alone, all but an eighth


class Part(NamedTuple):
    """Whose part work is served from, and how large that is beside the others' (`weight` above 0)."""

    flow: str = ""
    weight: float = 1.0


EVERYBODYS: Final = Part()


@dataclass(frozen=True, slots=True)
class _Served:
    rank: float
    at_s: float  # the last time


class Turns:
    """What flows have been served lately. Pure: `now` is given, in seconds."""

    def __init__(self) -> None:
        self._flows: dict[str, _Served] = {}  # who has been served last stands last

    def __len__(self) -> int:
        return len(self._flows)

    def charge(self, part: Part, tokens: float, now: float) -> None:
        """The flow is served so many tokens."""
        if tokens <= 0:
            return
        served = self.served(part.flow, now) + tokens / part.weight
        self._flows.pop(part.flow, None)
        self._flows[part.flow] = _Served(log2(served) + now / HALF_LIFE_S, now)
        if len(self._flows) > MAX_FLOWS:
            self._forget(now)

    def served(self, flow: str, now: float) -> float:
        """Tokens by weight, as far as they are remembered."""
        known = self._flows.get(flow)
        if known is None:
            return 0.0
        return float(2.0 ** max(-MOST_LOG2, min(MOST_LOG2, known.rank - now / HALF_LIFE_S)))

    def first(self, flows: Iterable[str], now: float) -> str:
        """Whose turn it is of `flows`, of which there is at least one; of equals, the first."""
        newcomer = now / HALF_LIFE_S  # the rank of one token now
        known = self._flows

        def rank(flow: str) -> float:
            served = known.get(flow)
            return newcomer if served is None or served.rank < newcomer else served.rank

        return min(flows, key=rank)

    def may_begin(self, waiting: Collection[str], held: Mapping[str, int], free: int, now: float) -> list[str]:
        """Flows, of those that wait, which may have one of the `free` places beside those that are held.

        A flow that is alone may have all of them. While others wait, hold some, or were served lately, none has all.
        """
        if free <= 0:
            return []
        return [
            flow
            for flow in waiting
            if leaves_room(held.get(flow, 0), free) or not self._are_others_about(flow, waiting, held, now)
        ]

    def _are_others_about(self, flow: str, waiting: Collection[str], held: Mapping[str, int], now: float) -> bool:
        if len(waiting) > 1 or any(other != flow for other in held):
            return True
        last = islice(reversed(self._flows.items()), 2)
        return any(other != flow and now - served.at_s <= LATELY_S for other, served in last)

    def _forget(self, now: float) -> None:
        """Those that are newcomers again, or if there are none, who has been served least."""
        newcomer = now / HALF_LIFE_S
        self._flows = {flow: served for flow, served in self._flows.items() if served.rank >= newcomer}
        if len(self._flows) > MAX_FLOWS:
            del self._flows[min(self._flows, key=lambda flow: self._flows[flow].rank)]


def leaves_room(held: int, free: int) -> bool:
    """Whether a flow that has `held` places may take one of the `free` while others are about.

    At most LEFT_FREE times as many as stay free (Choudhury and Hahne's dynamic threshold, 1998): whoever comes next finds
    one, be there one flow with many requests, or several. Who has none may have the last one.
    """
    return free > 0 and held <= LEFT_FREE * (free - 1)

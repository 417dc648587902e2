"""Requests that kill engines, known by their shape: which others of it are let through.

    never answered ──two engines died under one request──► REFUSED ──retry time──► one is let through ──answered──► forgotten
                                                              ▲                            │
                                                              └──────────it killed, too────┘  with a longer retry time

A shape says which fields a request sets and what kind of value they have, not what it says. One that has been answered
lately is not what kills: engines die of other things beside which innocent requests run, and those must not be
refused for it. Pure; times are seconds, `now` never goes back.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Final

RETRY_S: Final = 60.0
MAX_RETRY_S: Final = 3600.0
MAX_DOUBLINGS: Final = 6  # after which it is MAX_RETRY_S; powers of any number of kills are no floats
PROOF_S: Final = 600.0  # an answer speaks for its shape for so long: engines are updated, and begin to stumble
TRIAL_S: Final = 600.0  # one that was let through may take so long before another one is
MAX_SHAPES: Final = 1024  # of either kind; the oldest goes


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Of a shape: how often engines died of it, and from when on one request may show that they do no more."""

    kills: int
    until: float
    is_tried: bool = False


class Poison:
    """The record of all shapes."""

    def __init__(self) -> None:
        self._answered: OrderedDict[Hashable, float] = OrderedDict()
        self._suspected: OrderedDict[Hashable, Suspicion] = OrderedDict()

    def __len__(self) -> int:
        """Shapes that are suspected."""
        return len(self._suspected)

    def let_in(self, shape: Hashable, now: float) -> float:
        """0: a request of `shape` is let through, and may be the only one for a while; else how long none is, in seconds."""
        found = self._suspected.get(shape)
        if found is None:
            return 0.0
        if now < found.until:
            return found.until - now
        self._suspected[shape] = replace(found, until=now + TRIAL_S, is_tried=True)
        return 0.0

    def answered(self, shape: Hashable, now: float) -> None:
        """A request of `shape` has its whole answer."""
        self._suspected.pop(shape, None)
        self._answered[shape] = now
        self._answered.move_to_end(shape)
        while len(self._answered) > MAX_SHAPES:
            self._answered.popitem(last=False)

    def ended(self, shape: Hashable, now: float) -> None:
        """A request of `shape` has ended and showed nothing: it was refused for load, its client left. Another one may try."""
        found = self._suspected.get(shape)
        if found is not None and found.is_tried:
            self._suspected[shape] = replace(found, until=now)

    def killed(self, shape: Hashable, now: float) -> bool:
        """As many engines died under a request of `shape` as may; returns whether others are refused for it."""
        if now < self._answered.get(shape, -PROOF_S) + PROOF_S:
            return False
        found = self._suspected.pop(shape, Suspicion(0, now))
        if found.kills and not found.is_tried:  # it had left before the others were refused
            self._suspected[shape] = found
            return True
        retry_s = min(MAX_RETRY_S, RETRY_S * 2 ** min(found.kills, MAX_DOUBLINGS))
        self._suspected[shape] = Suspicion(found.kills + 1, now + retry_s)
        while len(self._suspected) > MAX_SHAPES:
            self._suspected.popitem(last=False)
        return True

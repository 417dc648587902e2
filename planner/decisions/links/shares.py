"""Shares one line's egress budget among its senders: by the bytes that wait at each, and never more than all may send.

Every sender has a budget of its own, and together these are the line's. An idle sender lends most of its own for some
seconds to the busy ones. They divide it by what waits at each. A busy sender gives nothing up, else two of them would take
turns at being the slow one. A lender that has something to send gets its own back as soon as the borrowers have let go of it.
Rates only ever move in this order:

    lower (lenders, and those who need less) ──answered──► what they gave up is free ──► give back, raise

and a raise ends before the lowering that made it possible: then everybody is back at a budget of its own, whatever has become of
the one who shared it out. What was not answered counts as not lowered; what was only sent counts as raised.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

DEAL_EVERY_S: Final = 1.0
FLOOR: Final = 0.25  # of its own that a sender keeps in any case: what comes to it next leaves at once
BUSY_S: Final = 0.25  # of its own budget must wait at a sender before others lend it theirs
LEASE_S: Final = 3.0
ALIKE: Final = 0.02  # of a rate: a smaller change does not count


@dataclass(frozen=True, slots=True)
class LineSender:
    """A sender of a line: its own budget, and what has to leave it."""

    node_id: str
    own_bytes_per_s: float
    queued_bytes: float

    @classmethod
    def of(cls, node_id: str, own_bytes_per_s: float, queued_bytes: float, promised_bytes: float) -> Self:
        """By what it reports as queued, and what was promised to it: what is computed now leaves soon."""
        return cls(node_id, own_bytes_per_s, max(queued_bytes, promised_bytes))


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that a sender may send until some time; then its own budget holds again."""

    bytes_per_s: float
    until: float
    own_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RateGrant:
    """A rate for a sender until some time."""

    node_id: str
    bytes_per_s: float
    own_bytes_per_s: float
    until: float

    @property
    def is_raise(self) -> bool:
        return self.bytes_per_s > self.own_bytes_per_s


def divide(senders: Sequence[LineSender]) -> dict[str, float]:
    """Bytes per second by sender, all of the line's budget; each its own where no sender is busy, or all are."""
    own = {sender.node_id: sender.own_bytes_per_s for sender in senders}
    busy = {s.node_id: s.queued_bytes for s in senders if s.queued_bytes > BUSY_S * s.own_bytes_per_s}
    if not busy or len(senders) < 2:
        return own
    spare = sum(rate for name, rate in own.items() if name not in busy) * (1.0 - FLOOR)
    total = sum(busy.values())
    return {
        name: rate + spare * busy[name] / total if name in busy else FLOOR * rate if spare else rate
        for name, rate in own.items()
    }


class SharedBudget:
    """The shares of one line's budget. `lower`, then `raise_` once those have answered (`answered`)."""

    def __init__(self) -> None:
        self._bounds: dict[str, Bound] = {}

    def holds(self, now: float) -> bool:
        """Whether a sender may still be sending by a share, even one that is not seen."""
        return any(now < each.until for each in self._bounds.values())

    def bound(self, sender: LineSender, now: float) -> float:
        """The most that it may be sending."""
        known = self._bounds.get(sender.node_id)
        return known.bytes_per_s if known is not None and now < known.until else sender.own_bytes_per_s

    def lower(self, senders: Sequence[LineSender], now: float) -> list[RateGrant]:
        """The shares to lower, or to keep lowered; these come first."""
        self._forget(now)
        wanted, until = divide(senders), now + LEASE_S
        grants = []
        for sender in senders:
            rate, own, bound = wanted[sender.node_id], sender.own_bytes_per_s, self.bound(sender, now)
            if rate < (1.0 - ALIKE) * own or (bound > own and rate < (1.0 - ALIKE) * bound):
                grants.append(RateGrant(sender.node_id, min(rate, bound), own, until))
        # A borrower that needs less, but more than its own, keeps to the end that its raise has.
        return [
            grant if not grant.is_raise else replace(grant, until=self._bounds[grant.node_id].until) for grant in grants
        ]

    def answered(self, grant: RateGrant) -> None:
        """The sender keeps to it."""
        self._bounds[grant.node_id] = Bound(grant.bytes_per_s, grant.until, grant.own_bytes_per_s)

    def raise_(self, senders: Sequence[LineSender], now: float) -> list[RateGrant]:
        """What can be had of what was given up. It counts as taken from now on, whether it will be answered or not.

        A lender is not raised above its own before its lease has ended: until then others may have what it lent.
        """
        wanted, bounds = divide(senders), {sender.node_id: self.bound(sender, now) for sender in senders}
        unseen = [known for name, known in self._bounds.items() if name not in bounds and now < known.until]
        lent_until = [self._bounds[s.node_id].until for s in senders if bounds[s.node_id] < s.own_bytes_per_s]
        ends = [*lent_until, *(each.until for each in unseen if each.bytes_per_s < each.own_bytes_per_s)]
        borrowers = [
            s for s in senders if max(wanted[s.node_id], bounds[s.node_id]) > (1.0 + ALIKE) * s.own_bytes_per_s
        ]
        borrowers = [sender for sender in borrowers if bounds[sender.node_id] >= sender.own_bytes_per_s]
        if not lent_until:
            return []
        away = sum(max(0.0, each.bytes_per_s - each.own_bytes_per_s) for each in unseen)
        free = max(0.0, sum(sender.own_bytes_per_s for sender in senders) - sum(bounds.values()) - away)
        returned = self._given_back([s for s in senders if bounds[s.node_id] < wanted[s.node_id]], free, now)
        free -= sum(grant.bytes_per_s - bounds[grant.node_id] for grant in returned)
        if not borrowers:
            return returned
        more = {s.node_id: max(0.0, wanted[s.node_id] - bounds[s.node_id]) for s in borrowers}
        part = min(1.0, free / sum(more.values())) if any(more.values()) else 0.0
        grants = []
        for sender in borrowers:
            rate = bounds[sender.node_id] + part * more[sender.node_id]
            grants.append(RateGrant(sender.node_id, rate, sender.own_bytes_per_s, min(ends)))
        for grant in grants:
            known = self._bounds.get(grant.node_id, Bound(0.0, now))
            until = max(grant.until, known.until)
            self._bounds[grant.node_id] = Bound(grant.bytes_per_s, until, grant.own_bytes_per_s)
        return returned + [grant for grant in grants if grant.is_raise]

    def _given_back(self, senders: Sequence[LineSender], free: float, now: float) -> list[RateGrant]:
        """To lenders that need it, as far as borrowers have let go of it; until their lease ends, as they may not hear of it."""
        grants = []
        for sender in senders:
            bound = self._bounds.get(sender.node_id)
            if bound is None or now >= bound.until or bound.bytes_per_s >= sender.own_bytes_per_s:
                continue
            rate = min(sender.own_bytes_per_s, bound.bytes_per_s + free)
            if rate <= (1.0 + ALIKE) * bound.bytes_per_s:
                continue
            free -= rate - bound.bytes_per_s
            self._bounds[sender.node_id] = replace(bound, bytes_per_s=rate)
            grants.append(RateGrant(sender.node_id, rate, sender.own_bytes_per_s, bound.until))
        return grants

    def _forget(self, now: float) -> None:
        """Drops only ended shares: a sender that is out of sight for a moment keeps its share, and may come back with
        it."""
        self._bounds = {name: each for name, each in self._bounds.items() if now < each.until}

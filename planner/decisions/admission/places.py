"""Which request in flight gets one of the last places: tenants within their part come before those beyond it.

part     a tenant's share of all places by weight, among the tenants that hold places or wait for some
kept     a few places, which only tenants within their part get: a tenant that is alone has all the others
within   a request gets any free place that none waits for; without one it waits for the next
beyond   a request gets a place that is neither kept nor waited for; without one it is refused

The parts of all tenants together are all places. So where a tenant within its part waits, another one is beyond its
own. That one gets no further place until the first has had its part. Requests without a tenant get any free place.

Several workers may share the places. Each has a line of its own, and of the first ones of all lines that which has waited
longest gets the next place. Only its own worker can give it one, and may notice a free place late. So for each first that
has waited longer one free place is left alone, and no more.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

PLACES_PER_KEPT: Final = 32


class Entry(Enum):
    """What becomes of a request that wants a place."""

    TAKES = auto()
    WAITS = auto()
    REFUSED = auto()


class TenantPlaces(NamedTuple):
    """A tenant's places: those that it holds and those that it waits for."""

    own: int = 0
    weight: float = 1.0
    others_weight: float = 0.0  # of the other tenants that have claims


def kept_places(limit: int) -> int:
    """How many of the places only tenants within their part get; of a few places none."""
    return limit // PLACES_PER_KEPT


def most_places(limit: int) -> int:
    """How many places one tenant gets that is alone."""
    return limit - kept_places(limit)


def part_of(limit: int, claims: TenantPlaces) -> float:
    """How many places the tenant may have while others want the rest."""
    return min(most_places(limit), limit * claims.weight / (claims.weight + claims.others_weight))


def entry(limit: int, taken: int, waited_for: int, claims: TenantPlaces) -> Entry:
    """What becomes of a tenant's next request where `taken` of the places are held and so many requests wait for one."""
    free = limit - taken - waited_for
    if free > kept_places(limit):
        return Entry.TAKES
    if claims.own and claims.own + 1 > part_of(limit, claims):
        return Entry.REFUSED
    if free > 0:
        return Entry.TAKES
    return Entry.WAITS if claims.others_weight else Entry.REFUSED  # then requests without a tenant hold the others


def is_turn(limit: int, taken: int, firsts: Sequence[int], own: int) -> bool:
    """Whether the first of line `own` gets a place where `taken` are held.

    `firsts` says for each line since when its first one waits; 0: none does. Of equals the lower line comes before.
    """
    mine = firsts[own], own
    return taken + sum(since > 0 and (since, line) < mine for line, since in enumerate(firsts)) < limit

"""Which part of a tenant's limits this gateway may give out, where other gateways give out the rest.

    held     a tenant's own parts, as claimed in the registry (`gateway.fleet.claims`)
    fair     the part of every tenant without parts of its own

They hold for `HOLD_S` after the claim was renewed. Then the registry counts as lost, and the smaller one of the two holds: what
was held may go to others. After `FAIR_S` everybody gives the fair part; all fair parts together are never above one.
Times are those of one clock of this machine; no clock of another machine is looked at.
"""

from dataclasses import dataclass
from math import floor
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.config.fleet import MOST_GATEWAYS
from planner.decisions.admission.limits import MINUTE_S, TenantLimits

HOLD_S: Final = 10.0  # four renewals may be missed
FAIR_S: Final = 60.0
LEAST_PART: Final = 0.02 / MOST_GATEWAYS  # a gateway that holds nothing lets a request in now and then
PLACES_TOLERANCE: Final = 1e-6


class Parts(NamedTuple):
    """Of each of a tenant's limits."""

    requests: float
    tokens: float
    at_once: float


WHOLE: Final = Parts(1.0, 1.0, 1.0)
LEAST_PARTS: Final = Parts(LEAST_PART, LEAST_PART, LEAST_PART)


def all_of(part: float) -> Parts:
    """The same part of each limit."""
    return Parts(part, part, part)


def smaller(one: Parts, other: Parts) -> Parts:
    """Limit by limit."""
    return Parts(*map(min, one, other))


def larger(one: Parts, other: Parts) -> Parts:
    """Limit by limit."""
    return Parts(*map(max, one, other))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """This gateway's among others. `at_start` is its part before it has first claimed any; `renewed_at` is 0 until then."""

    at_start: float
    fair: float = 0.0
    renewed_at: float = 0.0
    joined_at: float = 0.0  # beside gateways that may have given out what there was

    def parts(self, held: Parts | None, now: float) -> Parts:
        """Those of a tenant, with `held` of its own or none."""
        if not self.renewed_at:
            return all_of(self.at_start)
        fair = all_of(self.fair)
        if held is None or self.has_lapsed_to_fair(now):
            return fair
        return smaller(held, fair) if self.is_lapsed(now) else held

    def is_lapsed(self, now: float) -> bool:
        """Whether the registry counts as lost."""
        return bool(self.renewed_at) and now - self.renewed_at >= HOLD_S

    def has_lapsed_to_fair(self, now: float) -> bool:
        """Whether it has been lost for so long that every tenant gets the fair part."""
        return not self.renewed_at or now - self.renewed_at >= FAIR_S

    def full_at(self, now: float) -> float:
        """When a bucket that nothing was taken from is full: others may have taken all before this gateway came."""
        return max(now, self.joined_at + MINUTE_S) if self.joined_at else now


def limits_of(limits: TenantLimits, parts: Parts) -> TenantLimits:
    """What this gateway may give of the limits by the minute."""
    return TenantLimits(
        limits.requests and limits.requests.part(max(LEAST_PART, parts.requests)),
        limits.tokens and limits.tokens.part(max(LEAST_PART, parts.tokens)),
        limits.at_once,
    )


def places_elsewhere(limits: TenantLimits, parts: Parts) -> int:
    """Of its requests at once, those that only other gateways may have."""
    return limits.at_once - floor(limits.at_once * parts.at_once + PLACES_TOLERANCE)


def refitted(full_at: NDArray[np.float64], before: Any, part: Any, now: float) -> NDArray[np.float64]:
    """When buckets of these parts are full that were full at `full_at` as other parts: what was left stays, as far as it fits.

    Everything may be an array; a part is at least `LEAST_PART`.
    """
    left = np.minimum(before * (1.0 - np.maximum(0.0, full_at - now) / MINUTE_S), part)
    full: NDArray[np.float64] = now + MINUTE_S * (1.0 - left / part)
    return full

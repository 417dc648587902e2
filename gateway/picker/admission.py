"""Which requests are refused while servers are saturated: first those whose objective may wait, then those of tenants that
have more than their part.

While a server has room, nothing is refused but what is beyond all places.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.picker.asking import PickRequest
from gateway.picker.exchange import Refusal
from gateway.picker.headers import SATURATED
from gateway.picker.servers import ServerReport

RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PickLimits:
    """When a server is saturated: it has that many waiting, or that share of its KVCache in use.

    `max_in_flight` are the places of the picker. `priorities` are those of objectives by name; others have 0.
    """

    queue: int = 5
    kv_usage: float = 0.95
    max_in_flight: int = 10_000
    priorities: Mapping[str, int] = field(default_factory=dict)

    def is_saturated(self, report: ServerReport) -> bool:
        return report.waiting >= self.queue or report.kv_usage >= self.kv_usage


def refusal(
    asked: PickRequest,
    reports: Sequence[ServerReport],
    ttft_s: float,
    in_flight: Mapping[str, int],
    limits: PickLimits,
) -> Refusal | None:
    """Why a request is not taken, if it is not. `ttft_s` is predicted for it; `in_flight` are requests by tenant."""
    total = sum(in_flight.values())
    if total >= limits.max_in_flight:
        return shed(f"all {limits.max_in_flight} places are taken")
    may_wait = limits.priorities.get(asked.objective, 0) < 0
    if may_wait and asked.ttft_s and ttft_s > asked.ttft_s:
        return shed(f"no server would answer within {asked.ttft_s:g} s, and objective {asked.objective!r} may wait")
    if not all(map(limits.is_saturated, reports)):
        return None
    if may_wait:
        return shed(f"all servers are saturated, and objective {asked.objective!r} may wait")
    others = Counter(in_flight)
    others.setdefault(asked.tenant, 0)
    if len(others) > 1 and others[asked.tenant] + 1 > (total + 1) / len(others):
        return shed(f"all servers are saturated, and {asked.tenant or 'this client'!r} has its part of them")
    return None


def shed(text: str) -> Refusal:
    """429, for a moment."""
    return Refusal(status=429, text=text, reason=SATURATED, retry_after_s=RETRY_S)

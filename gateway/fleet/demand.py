"""What this gateway is asked for by each tenant, as a part of the tenant's limits: what `gateway.fleet.claims` divides by."""

from collections.abc import Mapping
from math import exp
from typing import Final, NamedTuple

from gateway.ratelimit.limiter import Asked
from gateway.ratelimit.parts import Parts
from planner.decisions.admission.limits import MINUTE_S, Bucket, TenantLimits

MEMORY_S: Final = 6.0  # requests come unevenly
UNKNOWN_READING: Final = 0.1  # of a limit by the minute: the tokens of a request that was refused before any was read
NEGLIGIBLE: Final = 1e-4


class _Rates(NamedTuple):
    """What a tenant has asked for, up to when, and lately by the second."""

    asked: Asked
    at: float
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0


class TenantDemand:
    """Follows counts that only grow, or begin anew."""

    def __init__(self) -> None:
        self._rates: dict[str, _Rates] = {}

    def wanted(self, asked: Mapping[str, Asked], limits: Mapping[str, TenantLimits], now: float) -> dict[str, Parts]:
        """By tenant, of those that have asked for something lately."""
        before = self._rates
        self._rates = {
            tenant: self._followed(before.get(tenant), counts, limits[tenant].tokens, now)
            for tenant, counts in asked.items()
        }
        found = {tenant: _parts(rates, before.get(tenant), limits[tenant]) for tenant, rates in self._rates.items()}
        return {tenant: parts for tenant, parts in found.items() if max(parts) > NEGLIGIBLE}

    def _followed(self, before: _Rates | None, asked: Asked, tokens: Bucket | None, now: float) -> _Rates:
        if before is None or asked.requests < before.asked.requests:  # its row began anew
            return _Rates(asked, now)
        span_s = now - before.at
        if span_s <= 0.0:
            return before
        counted = asked.tokens - before.asked.tokens  # what was not used was taken away again
        unread = asked.unread - before.asked.unread
        if unread and tokens is not None:
            mean = asked.tokens / asked.readings if asked.readings else UNKNOWN_READING * tokens.per_minute
            counted += unread * mean
        kept = exp(-span_s / MEMORY_S)
        return _Rates(
            asked,
            now,
            kept * before.requests_per_s + (1.0 - kept) * (asked.requests - before.asked.requests) / span_s,
            kept * before.tokens_per_s + (1.0 - kept) * counted / span_s,
        )


def _parts(rates: _Rates, before: _Rates | None, limits: TenantLimits) -> Parts:
    refused = max(0.0, rates.asked.unplaced - before.asked.unplaced) if before is not None else 0.0
    return Parts(
        rates.requests_per_s * MINUTE_S / limits.requests.per_minute if limits.requests else 0.0,
        max(0.0, rates.tokens_per_s) * MINUTE_S / limits.tokens.per_minute if limits.tokens else 0.0,
        (rates.asked.at_once + refused) / limits.at_once if limits.at_once else 0.0,
    )

"""A tenant's limits: requests and tokens by the minute, and requests at once.

requests   one is taken when a request comes
tokens     those of the prompt and as many as its answer may have are taken when it has been read; what was not used is given
           back when it is over. Tokens that were not known in advance are owed, for `MAX_DEBT_S` at most. No request enters
           before they are paid off
at once    a place, until the request is over

A bucket holds what is allowed in a minute and fills evenly. A bucket is one number: the time at which it will be full
again (the theoretical arrival time of GCRA, ITU-T I.371). So new limits hold at once. A request for more than a bucket
holds waits until it is full. Times are seconds, `now` never goes back.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import floor
from typing import Final, NamedTuple

MINUTE_S: Final = 60.0
MAX_DEBT_S: Final = 120.0  # within which what is owed has run in again
TOLERANCE: Final = 1e-3  # of one request or token: times of many days have no more digits
AT_ONCE_RETRY_S: Final = 1.0  # the end of the tenant's other requests is unknown


class Limit(StrEnum):
    """The exceeded limit, as clients see it."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    AT_ONCE = "concurrent_requests"


@dataclass(frozen=True, slots=True)
class Bucket:
    """So many (above 0) in a minute, and as many at once when none was taken for that long."""

    per_minute: float
    max_debt_s: float = MAX_DEBT_S

    def part(self, share: float) -> "Bucket":
        """A part (above 0) of it. In units, it may owe as much as the whole."""
        return self if share == 1.0 else Bucket(self.per_minute * share, self.max_debt_s / share)

    def left(self, full_at: float, now: float) -> float:
        """The amount that may be taken now; a debt is below 0."""
        return self.per_minute - max(0.0, full_at - now) * self.per_minute / MINUTE_S

    def wait_s(self, amount: float, full_at: float, now: float) -> float:
        """Until `amount` may be taken, or the bucket is full."""
        spare_s = MINUTE_S - self._fills_s(min(amount, self.per_minute))
        wait_s = full_at - now - spare_s
        return wait_s if wait_s > self._fills_s(TOLERANCE) else 0.0

    def taken(self, amount: float, full_at: float, now: float) -> float:
        """When it will be full again; `amount` below 0 is given back."""
        return max(now, max(now, full_at) + self._fills_s(amount))

    def owed(self, amount: float, full_at: float, now: float) -> float:
        """As `taken`, for tokens that were not known before they were used; a debt is paid off within `max_debt_s`."""
        return min(self.taken(amount, full_at, now), max(full_at, now + MINUTE_S + self.max_debt_s))

    def _fills_s(self, amount: float) -> float:
        return amount * MINUTE_S / self.per_minute


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """A tenant's; None and 0 are no limit."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    at_once: int = 0

    @property
    def are_any(self) -> bool:
        return bool(self.requests or self.tokens or self.at_once)


NO_LIMITS: Final = TenantLimits()


class Used(NamedTuple):
    """A tenant's use: when its buckets will be full again, and its requests under way."""

    requests_full_at: float = 0.0
    tokens_full_at: float = 0.0
    at_once: int = 0


class LimitRefusal(NamedTuple):
    """The limit that is exceeded, and when that will be over if no other request of the tenant takes anything."""

    limit: Limit
    wait_s: float


class Left(NamedTuple):
    """The rest of one bucket, in whole units, and the time until it is full."""

    limit: int
    remaining: int
    full_in_s: float


def entered(limits: TenantLimits, used: Used, now: float) -> Used | LimitRefusal:
    """A request has come. It is not let in while tokens of earlier ones are owed."""
    if limits.at_once and used.at_once >= limits.at_once:
        return LimitRefusal(Limit.AT_ONCE, AT_ONCE_RETRY_S)
    if limits.requests and (wait_s := limits.requests.wait_s(1, used.requests_full_at, now)):
        return LimitRefusal(Limit.REQUESTS, wait_s)
    if limits.tokens and (wait_s := limits.tokens.wait_s(1, used.tokens_full_at, now)):
        return LimitRefusal(Limit.TOKENS, wait_s)
    requests_full_at = limits.requests.taken(1, used.requests_full_at, now) if limits.requests else 0.0
    return used._replace(requests_full_at=requests_full_at, at_once=used.at_once + 1)


def solvent(limits: TenantLimits, used: Used, now: float) -> Used | LimitRefusal:
    """A request that has entered is about to be read. It is not while tokens of those read meanwhile are owed."""
    if limits.tokens and (wait_s := limits.tokens.wait_s(1, used.tokens_full_at, now)):
        return LimitRefusal(Limit.TOKENS, wait_s)
    return used


def read(limits: TenantLimits, used: Used, tokens: int, answers: int, now: float) -> Used | LimitRefusal:
    """A request that has entered has been read: it may use so many tokens, and is for so many `answers`, each one at once."""
    at_once = used.at_once + answers - 1
    if limits.at_once and at_once > limits.at_once and answers > 1:
        return LimitRefusal(Limit.AT_ONCE, AT_ONCE_RETRY_S)
    if limits.tokens and (wait_s := limits.tokens.wait_s(tokens, used.tokens_full_at, now)):
        return LimitRefusal(Limit.TOKENS, wait_s)
    used = used._replace(at_once=at_once)
    if not limits.tokens:
        return used
    return used._replace(tokens_full_at=limits.tokens.taken(tokens, used.tokens_full_at, now))


def settled(limits: TenantLimits, used: Used, tokens: int, now: float) -> Used:
    """So many tokens more than were taken were used; below 0: fewer."""
    if not limits.tokens:
        return used
    return used._replace(tokens_full_at=limits.tokens.owed(tokens, used.tokens_full_at, now))


def left(bucket: Bucket, full_at: float, now: float) -> Left:
    """As clients are told it."""
    return Left(floor(bucket.per_minute), max(0, floor(bucket.left(full_at, now) + TOLERANCE)), max(0.0, full_at - now))

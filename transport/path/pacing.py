"""Keeps a link within its egress budget, which may depend on the time of day."""

import threading
import time
from dataclasses import dataclass
from typing import Final, TypeAlias

DAY_S: Final = 86_400.0
BURST_S: Final = 0.02  # of the budget that may leave at once
LEAST_BURST_BYTES: Final = 128 << 10
BULK_LEAVES: Final = 0.5  # of the burst; other traffic does not let it become that much


@dataclass(frozen=True, slots=True)
class DailyBudget:
    """`steps` of (second of the day, bytes per second): each holds until the next one, the last one over midnight."""

    steps: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.steps]
        if not starts or starts != sorted(set(starts)) or starts[0] < 0 or starts[-1] >= DAY_S:
            raise ValueError(f"steps must begin at rising seconds of a day, 0 to {DAY_S:.0f}: {starts}")
        if any(rate <= 0 for _, rate in self.steps):
            raise ValueError(f"rates must be positive: {[rate for _, rate in self.steps]}")

    def at(self, second_of_day: float) -> float:
        begun = [rate for start, rate in self.steps if start <= second_of_day]
        return begun[-1] if begun else self.steps[-1][1]


Budget: TypeAlias = float | DailyBudget | None  # bytes per second; None: as fast as it goes


def rate_now(budget: Budget) -> float | None:
    """The rate that a budget allows at this time of the (local) day."""
    if not isinstance(budget, DailyBudget):
        return budget
    now = time.localtime()
    return budget.at(now.tm_hour * 3600 + now.tm_min * 60 + now.tm_sec)


@dataclass(frozen=True, slots=True)
class BudgetShare:
    """One sender's share of a line's budget, in place of its own, until `until` (monotonic).

    `own_bytes_per_s` is what its own budget was when the line's was shared out. Less than that holds whatever becomes of
    the budget meanwhile; more only while nothing has become of it.
    """

    bytes_per_s: float
    own_bytes_per_s: float
    until: float

    def of(self, own: float | None, now: float) -> float | None:
        """The rate that holds where the sender's own budget allows `own`."""
        if own is None or now >= self.until:
            return own
        if self.bytes_per_s <= self.own_bytes_per_s:
            return min(own, self.bytes_per_s)
        return self.bytes_per_s if own == self.own_bytes_per_s else own


class TokenBucket:
    """Bytes may leave as fast as `bytes_per_s` fills the bucket; `burst_bytes` is what it holds.

    A send may take the bucket below zero: it is charged as a whole, and the next one waits until the debt is paid. So a
    send larger than the bucket is possible, and the average holds.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: float) -> None:
        if bytes_per_s <= 0 or burst_bytes <= 0:
            raise ValueError(f"rate {bytes_per_s} and burst {burst_bytes} must be positive")
        self.bytes_per_s = bytes_per_s
        self.burst_bytes = burst_bytes
        self._available = burst_bytes
        self._updated_at: float | None = None

    def next_send_time(self, now: float, leaving_bytes: float = 0.0) -> float:
        """The earliest time at which bytes may leave, if nothing else takes any; so much must be in the bucket then."""
        self._refill(now)
        missing = leaving_bytes - self._available
        return now if missing <= 0 else now + missing / self.bytes_per_s

    def on_sent(self, size: int, now: float) -> None:
        self._refill(now)
        self._available -= size

    def set_rate(self, bytes_per_s: float, now: float) -> None:
        """Changes the budget; what has been earned or is owed so far stays."""
        if bytes_per_s <= 0:
            raise ValueError(f"rate {bytes_per_s} must be positive")
        self._refill(now)
        self.bytes_per_s = bytes_per_s

    def _refill(self, now: float) -> None:
        # A clock that jumps backwards earns nothing and costs nothing.
        elapsed = 0.0 if self._updated_at is None else max(0.0, now - self._updated_at)
        self._available = min(self.burst_bytes, self._available + elapsed * self.bytes_per_s)
        self._updated_at = now


class EgressBudget:
    """The budget of one link, kept by all connections of all peers behind it. May be used from any thread."""

    def __init__(self, budget: Budget = None) -> None:
        self._lock = threading.Lock()
        self._budget = budget
        self._share: BudgetShare | None = None
        self._bucket: TokenBucket | None = None
        self.follow(time.monotonic())

    @property
    def bytes_per_s(self) -> float | None:
        """The rate in force; None: no limit."""
        bucket = self._bucket
        return None if bucket is None else bucket.bytes_per_s

    @property
    def burst_bytes(self) -> float:
        bucket = self._bucket
        return float("inf") if bucket is None else bucket.burst_bytes

    def set(self, budget: Budget, now: float) -> None:
        """Changes the budget at once."""
        with self._lock:
            self._budget = budget
        self.follow(now)

    def take_share(self, share: BudgetShare, now: float) -> None:
        """Keeps to a share of the line's budget at once, until it ends."""
        with self._lock:
            self._share = share
        self.follow(now)

    def follow(self, now: float) -> None:
        """Brings a budget that depends on the time of day, or on a share that ends, up to date."""
        with self._lock:  # to the end: who worked it out earlier must not have the last word
            if self._share is not None and now >= self._share.until:
                self._share = None
            rate = rate_now(self._budget)
            if self._share is not None:
                rate = self._share.of(rate, now)
            burst_bytes = max((rate or 0) * BURST_S, LEAST_BURST_BYTES)
            if rate is None:
                self._bucket = None
            elif self._bucket is None:
                self._bucket = TokenBucket(rate, burst_bytes)
            elif self._bucket.bytes_per_s != rate:
                self._bucket.set_rate(rate, now)
                self._bucket.burst_bytes = burst_bytes

    def wait_s(self, now: float, leaves: float = 0.0) -> float:
        """How long the budget forbids to send; `leaves` is the share of the burst that others can have at any time.

        A sender that leaves more gives way to all that leave less, over all peers, and gets what they do not use.
        """
        share = self._share
        if share is not None and now >= share.until:
            self.follow(now)
        with self._lock:
            bucket = self._bucket
            return 0.0 if bucket is None else max(0.0, bucket.next_send_time(now, leaves * bucket.burst_bytes) - now)

    def charge(self, size: int, now: float) -> None:
        with self._lock:
            if self._bucket is not None:
                self._bucket.on_sent(size, now)

"""Keeps a link within its egress budget, which may depend on the time of day."""

from dataclasses import dataclass
from typing import Final

DAY_S: Final = 86_400.0


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

    def next_send_time(self, now: float) -> float:
        """The earliest time at which bytes may leave."""
        self._refill(now)
        return now if self._available >= 0 else now - self._available / self.bytes_per_s

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

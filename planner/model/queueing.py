"""Waiting times in closed form: what a plan's TTFT becomes under load, without simulating it.

Each stage is an M/G/k queue: Erlang's C, corrected for the service times' variance by Allen and Cunneen. The time waited is 0
or exponential, which is exact for M/M/k and a little pessimistic in the far tail of short-tailed services. The simulator is
the judge (tests compare the two); this is what makes `--objective slo` take a second instead of an hour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import isfinite
from typing import Final, Self

import numpy as np

from planner.model.profile import Floats

LATE: Final = 0.1  # of requests are later than P90
NO_WAIT_S: Final = 1e-3  # for a place in decode: more decode nodes would not be felt
# Of those who wait, in mean waits: the middles of eight equal parts.
WAITS: Final = -np.log(1.0 - (np.arange(8) + 0.5) / 8)


def erlang_b(servers: int, offered: float) -> float:
    """Probability that all servers are busy where there is no queue, given `offered` = λ·E[S] in servers' worth of work."""
    blocked = 1.0  # server by server: powers and factorials overflow from k = 100 on
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked


def erlang_c(servers: int, offered: float) -> float:
    """Probability that a request waits, given `offered` = λ·E[S] in servers' worth of work; 1 from saturation on."""
    if offered >= servers:
        return 1.0
    if offered <= 0:
        return 0.0
    blocked = erlang_b(servers, offered)
    return servers * blocked / (servers - offered * (1 - blocked))


@dataclass(frozen=True, slots=True)
class Wait:
    """Time in a queue: 0, or with probability `chance` exponential with mean `mean_if_s`."""

    chance: float
    mean_if_s: float

    @property
    def mean_s(self) -> float:
        return self.chance * self.mean_if_s if self.chance else 0.0

    def exceeds(self, seconds: Floats) -> Floats:
        """P(wait > seconds); 1 for negative ones."""
        if not np.isfinite(self.mean_if_s):
            return np.ones_like(seconds)
        tail = self.chance * np.exp(-np.maximum(seconds, 0.0) / max(self.mean_if_s, 1e-12))
        return np.where(seconds < 0, 1.0, tail)


def mgk_wait(rate: float, servers: int, mean_s: float, second_moment_s2: float, burst_index: float = 1.0) -> Wait:
    """The wait in M/G/k, or G/G/k: Allen–Cunneen, Wq = C(k, a) · (ca² + cs²)/2 · E[S] / (k − a).

    ca² is how bursty arrivals are, the variance over the mean of their number in some time: 1 for Poisson.
    """
    offered = rate * mean_s
    if offered <= 0:
        return Wait(0.0, 0.0)
    if offered >= servers:
        return Wait(1.0, float("inf"))
    variability = burst_index - 1.0 + second_moment_s2 / mean_s**2  # ca² + cs²
    return Wait(erlang_c(servers, offered), variability / 2 * mean_s / (servers - offered))


@dataclass(frozen=True, kw_only=True, eq=False)
class Station:
    """The requests of one way through the system: their weights, prefill times, and what follows (transfer)."""

    weights: Floats
    prefill_s: Floats
    after_s: Floats
    servers: int
    burst_index: float = 1.0

    @cached_property
    def share(self) -> float:
        """Of all requests."""
        return float(self.weights.sum())

    @cached_property
    def moments(self) -> tuple[float, float]:
        """The mean of its prefill times, and that of their squares; it has some requests."""
        return float(self.weights @ self.prefill_s) / self.share, float(self.weights @ self.prefill_s**2) / self.share

    def wait(self, rate: float) -> Wait:
        """The prefill queue when requests of all stations together arrive at `rate`."""
        share = self.share
        if not share:
            return Wait(0.0, 0.0)
        mean, second = self.moments
        # Part of a bursty stream is less so, down to a Poisson one.
        burst_index = 1.0 + (self.burst_index - 1.0) * share
        return mgk_wait(rate * share, self.servers, mean, second, burst_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ttft:
    """Predicted TTFT at one rate; infinite when a queue is unstable."""

    mean_s: float
    p90_s: float


@dataclass(frozen=True, slots=True, eq=False)
class LoadedStations:
    """All stations at one rate: TTFT is prefill wait + prefill + transfer + wait for a decode slot."""

    stations: Sequence[Station]
    waits: Sequence[Wait]
    decode: Wait

    @classmethod
    def at(cls, stations: Sequence[Station], decode: Wait, rate: float) -> Self:
        return cls(stations, [station.wait(rate) for station in stations], decode)

    def mean_s(self) -> float:
        """Infinite when a queue is unstable."""
        return self.decode.mean_s + sum(
            float(s.weights.sum()) * w.mean_s + float(s.weights @ (s.prefill_s + s.after_s))
            for s, w in zip(self.stations, self.waits, strict=True)
            if s.weights.sum()
        )

    def late(self, seconds: float, shares: Sequence[Floats] | None = None) -> float:
        """P(TTFT > seconds); with `shares`, only of those shares of each station's lengths, still over all requests.

        The wait for a place in decode counts as it is spread, not by its mean: few busy nodes make few requests very late.
        """
        weights = [station.weights for station in self.stations]
        if shares is not None:
            weights = [each * share for each, share in zip(weights, shares, strict=True)]
        return sum(map(self._late, self.stations, self.waits, weights, repeat(seconds)))

    def _late(self, station: Station, queue: Wait, weights: Floats, seconds: float) -> float:
        decode, share = self.decode, float(weights.sum())
        if not share or not isfinite(decode.mean_s):
            return share
        left_s = seconds - station.prefill_s - station.after_s
        at_once = float(weights @ queue.exceeds(left_s))
        if decode.mean_s < NO_WAIT_S:
            return at_once
        waited = float((queue.exceeds(left_s - decode.mean_if_s * WAITS[:, None]) @ weights).mean())
        return at_once + decode.chance * (waited - at_once)


def predict_ttft(stations: Sequence[Station], decode: Wait, rate: float) -> Ttft:
    """TTFT with queues."""
    loaded = LoadedStations.at(stations, decode, rate)
    mean = loaded.mean_s()
    if not isfinite(mean):
        return Ttft(mean_s=float("inf"), p90_s=float("inf"))
    low, high = 0.0, max(mean, 1e-6)
    while loaded.late(high) > LATE:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if loaded.late(middle) > LATE else (low, middle)
    return Ttft(mean_s=mean, p90_s=high)

"""Waiting times in closed form: what a plan's TTFT becomes under load, without simulating it.

Each stage is an M/G/k queue: Erlang's C, corrected for the service times' variance by Allen and Cunneen. The time waited is 0
or exponential, which is exact for M/M/k and a little pessimistic in the far tail of short-tailed services. The simulator is
the judge (tests compare the two); this is what makes `--objective slo` take a second instead of an hour.
"""

from dataclasses import dataclass
from math import exp, lgamma, log

import numpy as np

from planner.model.profile import Floats


def erlang_c(servers: int, offered: float) -> float:
    """Probability that a request waits, given `offered` = λ·E[S] in servers' worth of work; 1 from saturation on."""
    if offered >= servers:
        return 1.0
    if offered <= 0:
        return 0.0
    # log a^j/j!, summed from the largest term down: k = 100 overflows otherwise.
    logs = [j * log(offered) - lgamma(j + 1) for j in range(servers)]
    last = servers * log(offered) - lgamma(servers + 1) + log(servers / (servers - offered))
    top = max(*logs, last)
    return exp(last - top) / (sum(exp(x - top) for x in logs) + exp(last - top))


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


def mgk_wait(rate: float, servers: int, mean_s: float, second_moment_s2: float) -> Wait:
    """The wait in M/G/k: Allen–Cunneen, Wq = C(k, a) · (1 + cs²)/2 · E[S] / (k − a)."""
    offered = rate * mean_s
    if offered <= 0:
        return Wait(0.0, 0.0)
    if offered >= servers:
        return Wait(1.0, float("inf"))
    variability = second_moment_s2 / mean_s**2  # 1 + cs²
    return Wait(erlang_c(servers, offered), variability / 2 * mean_s / (servers - offered))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Station:
    """The requests of one way through the system: their weights, prefill times, and what follows (transfer)."""

    weights: Floats
    prefill_s: Floats
    after_s: Floats
    servers: int

    def wait(self, rate: float) -> Wait:
        """The prefill queue when requests of all stations together arrive at `rate`."""
        share = float(self.weights.sum())
        if not share:
            return Wait(0.0, 0.0)
        mean = float(self.weights @ self.prefill_s) / share
        second = float(self.weights @ self.prefill_s**2) / share
        return mgk_wait(rate * share, self.servers, mean, second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ttft:
    """Predicted TTFT at one rate; infinite when a queue is unstable."""

    mean_s: float
    p90_s: float


def predict_ttft(stations: list[Station], decode: Wait, rate: float) -> Ttft:
    """TTFT with queues: prefill wait + prefill + transfer + wait for a decode slot."""
    waits = [station.wait(rate) for station in stations]
    mean = sum(
        float(s.weights.sum()) * w.mean_s + float(s.weights @ (s.prefill_s + s.after_s))
        for s, w in zip(stations, waits, strict=True)
        if s.weights.sum()
    )
    mean += decode.mean_s
    if not np.isfinite(mean):
        return Ttft(mean_s=float("inf"), p90_s=float("inf"))

    def late(seconds: float) -> float:
        # The decode wait is added by its mean: near any sensible load it is milliseconds.
        return sum(
            float(s.weights @ w.exceeds(seconds - decode.mean_s - s.prefill_s - s.after_s))
            for s, w in zip(stations, waits, strict=True)
        )

    low, high = 0.0, max(mean, 1e-6)
    while late(high) > 0.1:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if late(middle) > 0.1 else (low, middle)
    return Ttft(mean_s=mean, p90_s=high)

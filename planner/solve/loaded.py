"""TTFT of a plan with queues in it, in closed form."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.model.profile import DecodeProfile
from planner.model.queueing import LATE, LoadedStations, Station, Ttft, Wait, mgk_wait, predict_ttft
from planner.solve.problem import Problem
from planner.solve.search import Cut, threshold_of

QUEUE_BINS: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTtft:
    """TTFT with queues, as a function of the rate, for one cut."""

    stations: list[Station]
    num_decode: int
    decode: DecodeProfile
    output_tokens: float

    def at(self, rate: float) -> Ttft:
        return predict_ttft(self.stations, self._decode_wait(rate), rate)

    def meets(self, rate: float, ttft_p90_s: float) -> bool:
        """Whether P90 TTFT at a rate is within a target: one look, where `at` takes forty."""
        return LoadedStations.at(self.stations, self._decode_wait(rate), rate).late(ttft_p90_s) <= LATE

    def _decode_wait(self, rate: float) -> Wait:
        service_s = self.decode.full_step_s * self.output_tokens
        slots = self.num_decode * self.decode.max_running
        return mgk_wait(rate, slots, service_s, service_s**2) if slots else Wait(1.0, float("inf"))

    def highest_rate(self, limit: float, ttft_p90_s: float) -> float:
        """The largest rate below `limit` whose P90 TTFT meets the target, 0 if none does."""
        if not self.meets(limit * 1e-6, ttft_p90_s):
            return 0.0
        low, high = 0.0, limit
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if self.meets(middle, ttft_p90_s) else (low, middle)
        return low


def loaded_ttft(problem: Problem, found: Cut, output_tokens: float, bins: int = QUEUE_BINS) -> LoadedTtft:
    """The queues of a plan; lengths are thinned to `bins`, which changes a P90 by less than 0.1 %."""
    threshold = threshold_of(problem.loads, found)
    thin = problem.lengths.thinned(bins)
    at = int(np.searchsorted(thin.tokens, threshold, side="right"))
    capacity = problem.capacity
    short = Station(
        weights=thin.weights[:at],
        prefill_s=problem.local.of(thin.tokens[:at]),
        after_s=np.zeros(at),
        servers=found.num_prefill,
    )
    rest = thin.tokens[at:]
    egress = capacity.egress_bytes_per_s
    transfer_s = problem.kv.of(rest) / egress if egress else np.full_like(rest, np.inf)
    far = Station(
        weights=thin.weights[at:],
        prefill_s=problem.remote.of(rest),
        after_s=transfer_s,
        servers=int(capacity.num_prfaas),
    )
    return LoadedTtft(
        stations=[short, far], num_decode=found.num_decode, decode=problem.decode, output_tokens=output_tokens
    )

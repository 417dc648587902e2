"""TTFT of a plan with queues in it, in closed form."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.model.profile import DecodeProfile, Floats
from planner.model.queueing import LoadedStations, Station, Ttft, Wait, mgk_wait, predict_ttft
from planner.model.traffic import Lengths
from planner.solve.problem import Problem
from planner.solve.search import Cut, threshold_of
from planner.solve.targets import Goal

QUEUE_BINS: Final = 2_000
NOTHING: Final = 1e-12  # of all requests


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTtft:
    """TTFT with queues, as a function of the rate, for one cut."""

    stations: list[Station]
    num_decode: int
    decode: DecodeProfile
    output_tokens: float
    goals: Sequence[tuple[Goal, Sequence[Floats]]] = ()  # each with its share of the requests of each station's lengths
    held_s: float = 0.0  # that prompts take of decode nodes, per request
    output_spread: float = 0.0
    burst_index: float = 1.0

    def at(self, rate: float) -> Ttft:
        return predict_ttft(self.stations, self._decode_wait(rate), rate)

    def meets(self, rate: float) -> bool:
        """Whether all goals are kept at a rate: one look for each, where `at` takes forty."""
        loaded = LoadedStations.at(self.stations, self._decode_wait(rate), rate)
        return all(
            loaded.late(goal.ttft_s, members) <= goal.late * self._share(members) + NOTHING
            for goal, members in self.goals
        )

    def in_time(self, rate: float) -> list[float]:
        """The share of each goal's requests whose first token is there in time; 1 of no requests."""
        loaded = LoadedStations.at(self.stations, self._decode_wait(rate), rate)
        return [
            1.0 - loaded.late(goal.ttft_s, members) / max(self._share(members), NOTHING) for goal, members in self.goals
        ]

    def _share(self, members: Sequence[Floats]) -> float:
        """Of all requests."""
        return sum(float(each.weights @ shares) for each, shares in zip(self.stations, members, strict=True))

    def _decode_wait(self, rate: float) -> Wait:
        # While prompts are computed the batch stands still, and its requests stay longer.
        answer_s = self.decode.full_step_s * self.output_tokens
        service_s = answer_s + self.held_s * self.decode.max_running
        second_moment_s2 = service_s**2 + (self.output_spread * answer_s) ** 2
        slots = self.num_decode * self.decode.max_running
        return (
            mgk_wait(rate, slots, service_s, second_moment_s2, self.burst_index) if slots else Wait(1.0, float("inf"))
        )

    def highest_rate(self, limit: float, kept: float = 0.0) -> float:
        """The largest rate below `limit` that keeps all goals, 0 if none does. Up to `kept` they are known to be."""
        if not kept and not self.meets(limit * 1e-6):
            return 0.0
        low, high = 0.0, limit
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if middle <= kept or self.meets(middle) else (low, middle)
        return low


def loaded_ttft(
    problem: Problem, found: Cut, output_tokens: float, thin: Lengths | None = None, goals: Sequence[Goal] = ()
) -> LoadedTtft:
    """The queues of a plan, by `thin` lengths: by default QUEUE_BINS of them, which change a P90 by less than 0.1 %."""
    threshold = threshold_of(problem.loads, found)
    thin = problem.lengths.thinned(QUEUE_BINS) if thin is None else thin
    at = int(np.searchsorted(thin.tokens, threshold, side="right"))
    capacity = problem.capacity
    short, rest = thin.part(slice(at)), thin.part(slice(at, None))
    near = Station(
        weights=short.prefilled,
        prefill_s=problem.local.after(short.uncached, short.cached),
        after_s=np.zeros(at),
        servers=found.num_prefill,
        burst_index=problem.burst_index,
    )
    egress = capacity.egress_bytes_per_s
    size = problem.kv.beyond(*rest.sent)
    transfer_s = size / egress if egress else np.full_like(size, np.inf)
    far = Station(
        weights=rest.prefilled,
        prefill_s=problem.remote.after(rest.uncached, rest.cached),
        after_s=transfer_s,
        servers=int(capacity.num_prfaas),
        burst_index=problem.burst_index,
    )
    parts = [short, rest, *([thin] if thin.held is not None else [])]
    return LoadedTtft(
        stations=[near, far, *_at_decode(problem, thin, found)],
        goals=[(goal, [goal.members(part) for part in parts]) for goal in goals],
        num_decode=found.num_decode,
        decode=problem.decode,
        output_tokens=output_tokens,
        held_s=problem.loads.held_s,
        output_spread=problem.output_spread,
        burst_index=problem.burst_index,
    )


def _at_decode(problem: Problem, lengths: Lengths, found: Cut) -> list[Station]:
    """The queue for prompts on decode nodes, where there are any: the server's part of each needs no GPU."""
    if lengths.held is None:
        return []
    at_server_s = problem.local(0)
    return [
        Station(
            weights=lengths.weights * lengths.held,
            prefill_s=problem.local.after(lengths.uncached, lengths.cached) - at_server_s,
            after_s=np.full_like(lengths.tokens, at_server_s),
            servers=found.num_decode,
            burst_index=problem.burst_index,
        )
    ]

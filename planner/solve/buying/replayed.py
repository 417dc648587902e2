"""Systems under the arrivals of a trace: what queues of independent requests take for enough may be too little."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from membership.lines import BYTES_PER_S_PER_GBPS
from planner.solve.buying.systems import HOME_GBPS, SizedSystem, Sought
from planner.solve.replay import Replay
from planner.solve.search import Cut, cuts_of

STEPS: Final = 4  # of a bisection, towards the rate that a system carries


class ReplayedSystems:
    """Replays each system at each rate once."""

    def __init__(self, sought: Sought) -> None:
        self._sought = sought
        self._kept: dict[tuple[SizedSystem, float], bool] = {}

    def keeps(self, system: SizedSystem, rate: float) -> bool:
        """Whether all goals are kept at a rate."""
        asked = (system, rate)
        if asked not in self._kept:
            self._kept[asked] = self._replay(system).keeps(rate, self._sought.goals)
        return self._kept[asked]

    def highest_rate(self, system: SizedSystem, missed: float) -> float:
        """About the highest rate below one that is missed, else 0."""
        replay, goals = self._replay(system), self._sought.goals
        low, high = 0.0, missed
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if replay.keeps(middle, goals) else (low, middle)
        return low

    def _replay(self, system: SizedSystem) -> Replay:
        assert self._sought.arrivals is not None
        problem = self._sought.problem
        gbps = system.line.gbps if system.line is not None else HOME_GBPS
        problem = replace(
            problem.with_capacity(
                num_prfaas=system.num_prfaas, num_pd=system.num_pd, egress_bytes_per_s=gbps * BYTES_PER_S_PER_GBPS
            ),
            decode=replace(problem.decode, max_running=system.decode_batch),
        )
        cut = int(cuts_of(problem.loads, np.array([system.threshold_tokens]))[0])
        found = Cut(rate=1.0, num_prefill=system.num_prefill, num_decode=system.num_decode, cut=cut)
        return Replay.of(problem, found, self._sought.arrivals)


def busy_at(systems: Sequence[SizedSystem], rate: float, sized: float) -> list[SizedSystem]:
    """Systems that were sized for another rate, as busy as they are at `rate`."""
    if rate == sized:
        return list(systems)
    return [replace(each, busy=tuple((stage, share * rate / sized) for stage, share in each.busy)) for each in systems]

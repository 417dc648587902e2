"""Plans for inputs that are only known roughly: the best worst case over scenarios.

A scenario is the same traffic and site with some numbers changed. For each candidate (threshold, split) its rate is
compared with the scenario's own optimum; the plan to keep has the best worst ratio (least regret). To promise a rate,
keep the plan with the best worst rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from planner.model.profile import Floats
from planner.solve.goals import Worst
from planner.solve.search import Capacity, Cut, Loads, cuts_of, rates

CANDIDATES: Final = 2_000  # thresholds tried per split; a step of 0.05 % of the requests


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanScenario:
    """One way the world may be. `loads` may be of another workload: thresholds, not cuts, are compared."""

    name: str
    loads: Loads
    capacity: Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Robust:
    """The most robust cut, its worst case, and that of the plan it is compared with."""

    cut: int
    num_prefill: int
    worst_ratio: float
    worst_rate: float
    worst_scenario: str
    plan_worst_ratio: float
    plan_worst_rate: float
    regrets: tuple[tuple[str, float, float, float], ...]  # scenario, its optimum, the robust plan's Λ, the plan's Λ


def most_robust(
    scenarios: Sequence[PlanScenario],
    base: Loads,
    *,
    plan: Cut,
    worst: Worst = Worst.RATIO,
    candidates: int = CANDIDATES,
) -> Robust:
    """The (threshold, split) of `base` with the best worst case over `scenarios`; `plan` is always among them."""
    size = len(base.lengths.tokens)
    cuts = np.unique(np.append(np.linspace(0, size, min(size, candidates) + 1).astype(np.int64), plan.cut))
    thresholds = np.where(cuts > 0, base.lengths.tokens[np.maximum(cuts - 1, 0)], 0.0)
    num_pd = plan.num_prefill + plan.num_decode
    # rates_of[s, split, candidate]
    rates_of = np.stack([_rates(scenario, thresholds, num_pd) for scenario in scenarios])
    best = rates_of.max(axis=(1, 2))
    score = rates_of / best[:, None, None] if worst is Worst.RATIO else rates_of
    split, at = np.unravel_index(int(score.min(axis=0).argmax()), score.shape[1:])
    own = int(np.searchsorted(cuts, plan.cut))
    chosen, planned = rates_of[:, split, at], rates_of[:, plan.num_prefill, own]
    return Robust(
        cut=int(cuts[at]),
        num_prefill=int(split),
        worst_ratio=float((chosen / best).min()),
        worst_rate=float(chosen.min()),
        worst_scenario=scenarios[int(score[:, split, at].argmin())].name,
        plan_worst_ratio=float((planned / best).min()),
        plan_worst_rate=float(planned.min()),
        regrets=tuple(
            (s.name, float(b), float(c), float(p)) for s, b, c, p in zip(scenarios, best, chosen, planned, strict=True)
        ),
    )


def _rates(scenario: PlanScenario, thresholds: Floats, num_pd: int) -> Floats:
    at = cuts_of(scenario.loads, thresholds)
    names = ("offloaded", "local_s", "remote_s", "egress_bytes", "ttft_s")
    cold = None if scenario.loads.cold is None else scenario.loads.cold.at(at)
    few = replace(scenario.loads, **{name: getattr(scenario.loads, name)[at] for name in names}, cold=cold)
    return np.stack([rates(few, scenario.capacity, split) for split in range(num_pd + 1)])

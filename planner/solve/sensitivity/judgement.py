"""The value of a plan if its inputs are wrong, and the gain of one more unit of anything."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from membership.lines import BYTES_PER_S_PER_GBPS
from planner.solve.aims import Aim
from planner.solve.problem import Problem, SolveOptions, best_cut, threshold_for
from planner.solve.search import Cut, Interval, interval_of

NEAR_OPTIMAL: Final = 0.01
ALTERNATIVE_COST: Final = 0.05
FACTORS: Final = (0.9, 1.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What a wrong input does to the rate that the aim counts: when the plan is kept, and when it is solved again."""

    what: str
    factor: float
    kept_rate: float
    resolved_rate: float
    resolved_threshold_tokens: float
    resolved_num_prefill: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A split that keeps its Λ within 1 % over a wide range of thresholds."""

    num_prefill: int
    num_decode: int
    low_tokens: float
    high_tokens: float
    lambda_max: float


def shadow_prices(problem: Problem, found: Cut, aim: Aim) -> dict[str, float]:
    """What the rate gains, solved again, by one more PrfaaS instance, one more PD instance, one more Gbit/s."""
    capacity = problem.capacity
    more = {
        "prfaas_instance": problem.with_capacity(num_prfaas=capacity.num_prfaas + 1),
        "pd_instance": problem.with_capacity(num_pd=capacity.num_pd + 1),
        "egress_gbps": problem.with_capacity(egress_bytes_per_s=capacity.egress_bytes_per_s + BYTES_PER_S_PER_GBPS),
    }
    if problem.link is None:
        del more["prfaas_instance"], more["egress_gbps"]
    now = _resolved(problem, found, aim).rate
    return {what: max(0.0, _resolved(bigger, found, aim).rate - now) for what, bigger in more.items()}


def _resolved(problem: Problem, found: Cut, aim: Aim) -> Cut:
    """The best plan, which may be the one found; that is worth nothing where none meets the aim."""
    return aim.best(problem, known=found) or replace(found, rate=0.0)


def sensitivity(problem: Problem, found: Cut, aim: Aim) -> list[Sensitivity]:
    """Every input 10 % off, one at a time: the tornado."""
    egress = problem.capacity.egress_bytes_per_s
    rows = []
    for factor in FACTORS:
        variants = {
            "T_prefill PrfaaS": problem.scaled(remote=factor),
            "T_prefill PD": problem.scaled(local=factor),
            "decode rate": problem.scaled(decode=1 / factor),
            "egress bandwidth": problem.with_capacity(egress_bytes_per_s=egress * factor),
        }
        for what, changed in variants.items():
            again = _resolved(changed, found, aim)
            rows.append(
                Sensitivity(
                    what=what,
                    factor=factor,
                    kept_rate=aim.rate(changed, found),
                    resolved_rate=again.rate,
                    resolved_threshold_tokens=threshold_for(changed, again, aim.options),
                    resolved_num_prefill=again.num_prefill,
                )
            )
    return sorted(rows, key=lambda row: (row.what, row.factor))


def flat_alternative(problem: Problem, found: Cut, options: SolveOptions) -> Alternative | None:
    """The split that forgives the widest range of thresholds, if it costs at most 5 % of Λ and is not the plan's own."""
    if problem.variant.threshold_tokens is not None or problem.variant.num_prefill is not None:
        return None
    if problem.capacity.num_prfaas == 0:
        return None
    cuts = [best_cut(problem.pinned(split), options) for split in range(problem.capacity.num_pd)]
    good = [cut for cut in [*cuts, found] if cut.rate >= found.rate * (1 - ALTERNATIVE_COST)]
    ranges = {cut: interval_of(problem.loads, problem.capacity, cut, NEAR_OPTIMAL) for cut in good}
    flattest = max(good, key=lambda cut: _width(ranges[cut]))
    if flattest.num_prefill == found.num_prefill:
        return None
    return Alternative(
        num_prefill=flattest.num_prefill,
        num_decode=flattest.num_decode,
        low_tokens=ranges[flattest].low_tokens,
        high_tokens=ranges[flattest].high_tokens,
        lambda_max=flattest.rate,
    )


def _width(interval: Interval) -> float:
    # The ratio, not the difference: a threshold is missed by a factor.
    return min(interval.high_tokens, 1e9) / max(interval.low_tokens, 1.0)


def advantage_rises(problem: Problem) -> bool:
    """Whether the longer a prompt, the more PrfaaS gains: else a threshold may not be the best rule."""
    tokens = problem.lengths.tokens
    probe = np.linspace(tokens[0], tokens[-1], 200)
    return bool((np.diff(problem.local.of(probe) / problem.remote.of(probe)) >= -1e-9).all())

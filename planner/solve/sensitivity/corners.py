"""The corners of what is only known roughly, as scenarios for the robust plan."""

import itertools
from dataclasses import replace
from typing import Any

from membership.lines import BYTES_PER_S_PER_GBPS
from planner.errors import InputError
from planner.model.site import Deployment, Site
from planner.solve.goals import Worst
from planner.solve.problem import Problem, SolveOptions, best_cut, pose, threshold_for
from planner.solve.search import rate_at
from planner.solve.sensitivity.robust import PlanScenario, most_robust


def corner_scenarios(problem: Problem, site: Site, options: SolveOptions, spread: float) -> list[PlanScenario]:
    """Every corner of T_PrfaaS, T_PD and T_decode `spread` faster or slower, on each link quantile and workload slice."""
    capacities = [problem.capacity.egress_bytes_per_s]
    if problem.link is not None:
        capacities += [gbps * BYTES_PER_S_PER_GBPS for gbps in problem.link.quantiles_gbps]
    traffics = [("", problem.loads)]
    for index, lengths in enumerate(site.workload.slices, 1):
        traffics.append((f" slice {index}", problem.loads_for(lengths, options.service)))
    return [
        PlanScenario(
            name=f"T_PrfaaS×{remote:g} T_PD×{local:g} T_decode×{decode:g} {egress / BYTES_PER_S_PER_GBPS:g} Gbit/s{label}",
            loads=loads.scaled(remote=remote, local=local),
            capacity=replace(problem.capacity, egress_bytes_per_s=egress, decode_s=problem.capacity.decode_s * decode),
        )
        for label, loads in traffics
        for egress in capacities
        for remote, local, decode in itertools.product((1 - spread, 1 + spread), repeat=3)
    ]


def robust_report(
    site: Site, options: SolveOptions, spread: float, worst: Worst, deployment: str | None
) -> dict[str, Any]:
    """The plan with the best worst case, next to the one that is best if every number is right. Raises InputError."""
    if not 0 <= spread < 1:
        raise InputError(f"spread={spread:g}: must be at least 0 and below 1, so that something is left of a profile")
    variant = Deployment()
    if deployment is not None:
        site, variant = site.deployed(deployment)
    problem = pose(site, options, variant)
    found = best_cut(problem, options)
    scenarios = corner_scenarios(problem, site, options, spread)
    robust = most_robust(scenarios, problem.loads, plan=found, worst=worst)
    cut = replace(
        found,
        rate=rate_at(problem.loads, problem.capacity, robust.num_prefill, robust.cut),
        num_prefill=robust.num_prefill,
        num_decode=problem.capacity.num_pd - robust.num_prefill,
        cut=robust.cut,
        share=0.0,
    )
    return {
        "spread": spread,
        "worst_case_of": str(worst),
        "scenarios": len(scenarios),
        "threshold_tokens": threshold_for(problem, cut, options),
        "num_prefill": cut.num_prefill,
        "num_decode": cut.num_decode,
        "lambda_max_req_per_s": cut.rate,
        "worst_ratio": robust.worst_ratio,
        "worst_lambda_req_per_s": robust.worst_rate,
        "worst_scenario": robust.worst_scenario,
        "plan_worst_ratio": robust.plan_worst_ratio,
        "plan_worst_lambda_req_per_s": robust.plan_worst_rate,
        "regret": [
            {"scenario": name, "optimum": best, "robust": chosen, "plan": planned}
            for name, best, chosen, planned in robust.regrets
        ],
    }

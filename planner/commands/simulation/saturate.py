"""`prfaas-plan saturate`: the largest simulated rate that meets an SLO."""

import argparse
from typing import Any, Final

from planner.commands.rendering.output import emit, remark
from planner.commands.rendering.text import outcome_text
from planner.commands.simulation.trial import (
    disturbed,
    judged_watched,
    seeds_of,
    settle,
    site_for_trial,
    trace_of,
    trial_of,
)
from planner.decisions.defaults import TRIAL_REQUESTS
from planner.simulator.trials.saturation import parse_slo, saturate, slo_of
from planner.simulator.trials.trial import from_trace, from_workload, scenario_of

UPPER: Final = 1.5  # of Λ: no higher rate is tried


def run(args: argparse.Namespace) -> int:
    trace = trace_of(args)
    site = site_for_trial(args, trace)
    deployed, setting, limit = settle(args, site)
    scenario = scenario_of(deployed, setting, trial_of(args))
    seeds = seeds_of(args)

    def report_at(rate: float) -> dict[str, Any]:
        source = from_workload(deployed, rate, args.requests or TRIAL_REQUESTS)
        if trace is not None:
            source = from_trace(trace, rate * trace.span_s / len(trace))
        remark(f"trying {rate:.3f} req/s")
        return judged_watched(scenario, disturbed(args, source), seeds, args.processes)

    slo = args.slo or slo_of(site.slo)
    found = saturate(report_at, parse_slo(slo), upper=UPPER * limit, tolerance=args.tolerance)
    if args.json:
        emit(
            {
                "slo": slo,
                "rate_req_per_s": found.rate_req_per_s,
                "broken_at_req_per_s": found.broken_at_req_per_s,
                "broken": list(found.broken),
                "lambda_max_req_per_s": limit,
                "steps": found.steps,
                "report": found.report,
            }
        )
        return 0
    broken_at = found.broken_at_req_per_s
    beyond = (
        f"no rate up to that breaks it, so the largest is not known: {UPPER:g} Λ is the most that is tried"
        if broken_at is None
        else f"{broken_at:.3f} breaks {', '.join(found.broken)}"
    )
    print(
        f"{found.rate_req_per_s:.3f} req/s meets {slo} ({found.rate_req_per_s / limit:.0%} of Λ={limit:.3f}); {beyond}"
    )
    print(outcome_text(found.report, "at that rate:"))
    return 0

"""`prfaas-plan saturate`: the largest simulated rate that meets an SLO."""

import argparse
from typing import Any

from planner.commands.output import emit, remark
from planner.commands.text import outcome_text
from planner.commands.trial import REQUESTS, judged_watched, seeds_of, settle, site_for_trial, trace_of, trial_of
from planner.simulator.saturation import parse_slo, saturate
from planner.simulator.trials import from_trace, from_workload, scenario_of


def run(args: argparse.Namespace) -> int:
    trace = trace_of(args)
    site = site_for_trial(args, trace)
    deployed, setting, limit = settle(args, site)
    scenario = scenario_of(deployed, setting, trial_of(args))
    seeds = seeds_of(args)

    def report_at(rate: float) -> dict[str, Any]:
        source = from_workload(deployed, rate, args.requests or REQUESTS)
        if trace is not None:
            source = from_trace(trace, rate * trace.span_s / len(trace))
        remark(f"trying {rate:.3f} req/s")
        return judged_watched(scenario, source, seeds)

    found = saturate(report_at, parse_slo(args.slo), upper=1.5 * limit, tolerance=args.tolerance)
    if args.json:
        emit(
            {
                "rate_req_per_s": found.rate_req_per_s,
                "broken_at_req_per_s": found.broken_at_req_per_s,
                "broken": list(found.broken),
                "lambda_max_req_per_s": limit,
                "steps": found.steps,
                "report": found.report,
            }
        )
        return 0
    print(
        f"{found.rate_req_per_s:.3f} req/s meets {args.slo} ({found.rate_req_per_s / limit:.0%} of Λ={limit:.3f}); "
        f"{found.broken_at_req_per_s:.3f} breaks {', '.join(found.broken) or 'nothing'}"
    )
    print(outcome_text(found.report, "at that rate:"))
    return 0

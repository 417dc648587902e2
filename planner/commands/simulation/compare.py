"""`prfaas-plan compare`: plans or policies side by side, simulated on the same requests."""

import argparse

from planner.commands.capacity.options import options_of
from planner.commands.rendering.output import emit
from planner.commands.rendering.progress import busy
from planner.commands.rendering.text import table
from planner.commands.simulation.trial import (
    disturbed,
    seeds_of,
    site_for_trial,
    source_of,
    trace_of,
    trial_of,
)
from planner.decisions.defaults import TRIAL_REQUESTS
from planner.simulator.trials.compare import compare, contenders_of
from planner.simulator.trials.trial import from_workload


def run(args: argparse.Namespace) -> int:
    trace = trace_of(args)
    site = site_for_trial(args, trace)
    usual = [] if args.plans or args.deployments else ["homogeneous", "naive", "prfaas"]
    contenders = contenders_of(
        site,
        options_of(args),
        trial_of(args),
        policies=args.policies or usual,
        plans=args.plans,
        deployments=args.deployments,
        base=args.deployment,
    )
    least = min(contender.lambda_max for contender in contenders)
    source = (
        disturbed(args, from_workload(site, args.arrivals, args.requests or TRIAL_REQUESTS))
        if args.arrivals and trace is None
        else source_of(args, site, trace, least)
    )
    with busy("simulating"):
        rows = compare(contenders, source, seeds_of(args), args.processes)
    if args.json:
        emit(rows)
        return 0
    columns = [
        "name", "lambda_max", "ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "tbt_p99_s", "goodput_req_per_s", "rejected",
        "hit_ratio", "egress_mean_gbps",
    ]  # fmt: skip
    print(table(rows, columns))
    return 0

"""`prfaas-plan report`: one self-contained HTML page."""

import argparse

from planner.commands.capacity.options import options_of
from planner.commands.rendering.output import emit, remark
from planner.commands.rendering.page import html_report
from planner.commands.rendering.progress import busy
from planner.commands.simulation.trial import seeds_of, site_for_trial, source_of, trace_of, trial_of
from planner.simulator.outcome import over_seeds
from planner.simulator.trials.compare import contenders_of
from planner.solve.plan import make_plan


def run(args: argparse.Namespace) -> int:
    trace = trace_of(args)
    site = site_for_trial(args, trace)
    options = options_of(args)
    plan = make_plan(site, options, args.deployment)
    usual = [name for name in ("homogeneous", "naive") if name in site.deployments]
    contenders = contenders_of(site, options, trial_of(args), policies=[*usual, "prfaas"])
    least = min(contender.lambda_max for contender in contenders)
    source = source_of(args, site, trace, least)
    with busy("simulating"):
        outcomes = {contender.name: contender.run(source, seeds_of(args), args.processes) for contender in contenders}
    args.output.write_text(html_report(site, options, plan, outcomes))
    remark(f"wrote {args.output}")
    summary = {name: over_seeds([outcome.report() for outcome in runs]) for name, runs in outcomes.items()}
    if args.json:
        emit({"plan": plan.to_json(), "simulated": summary})
    return 0

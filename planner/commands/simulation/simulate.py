"""`prfaas-plan simulate`: a plan in virtual time."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.commands.capacity.options import options_of
from planner.commands.rendering.output import emit
from planner.commands.rendering.text import outcome_text, table
from planner.commands.simulation.promise import promised
from planner.commands.simulation.trial import (
    judged_watched,
    seeds_of,
    settle,
    site_for_trial,
    source_of,
    trace_of,
    trial_of,
)
from planner.decisions.views import ClusterKind
from planner.errors import Infeasible
from planner.model.site import Site
from planner.simulator.trials.trial import scenario_of
from planner.solve.plan import outline


def run(args: argparse.Namespace) -> int:
    trace = trace_of(args)
    site = site_for_trial(args, trace)
    deployed, setting, limit = settle(args, site)
    scenario = scenario_of(deployed, setting, trial_of(args))
    seeds = seeds_of(args)
    report = judged_watched(scenario, source_of(args, deployed, trace, limit), seeds, args.processes)
    report["setting"] = {
        "threshold_tokens": setting.threshold_tokens,
        "num_prefill": setting.num_prefill,
        "num_decode": setting.num_decode,
    }
    if args.json:
        emit(report)
        return 0
    name = trace.name if trace is not None else f"{site.workload.name} at {args.load:.0%} of Λ={limit:.3f}"
    print(
        outcome_text(
            report,
            f"{name}: t={setting.threshold_tokens:.0f}, Np/Nd={setting.num_prefill}/{setting.num_decode}, "
            f"{args.placement}, admission {args.admission}, seeds {seeds[0]}–{seeds[-1]}",
        )
    )
    if (rows := _promised(args, site, report)) is not None:
        print(table(rows, ["", "plan", "simulated", "why"]))
    if "timeline" in report:
        print(table(_turning_points(report["timeline"]), ["at_s", "num_prefill", "num_decode", "threshold_tokens"]))
    return 0


def _promised(args: argparse.Namespace, site: Site, report: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The plan beside its simulation; None where it is not solved here, and where its rate changes."""
    are_several = any(len(site.of_kind(kind)) > 1 for kind in ClusterKind)
    if args.plan or args.day or args.controller or are_several or not report["completed"]:
        return None
    rate = report["requests"] / report["horizon_s"]
    options = options_of(args)
    try:
        plan = outline(site, replace(options, rate_req_per_s=rate), args.deployment)
    except Infeasible:
        plan = outline(site, options, args.deployment)
    return promised(plan, report, rate, site.workload.hit_ratio, is_replayed=site.workload.arrivals is not None)


def _turning_points(timeline: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ticks at which the split differed from the one before; at most 20."""
    changed = [
        row for before, row in zip([None, *timeline], timeline, strict=False)
        if before is None or (before["num_prefill"], before["num_decode"]) != (row["num_prefill"], row["num_decode"])
    ]  # fmt: skip
    return changed[:20]

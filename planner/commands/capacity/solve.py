"""`prfaas-plan solve`: threshold and split of highest rate, of least cost, or within an SLO."""

import argparse
from dataclasses import replace

from planner.commands.capacity.options import options_of, site_of
from planner.commands.rendering.output import emit, warn, write
from planner.commands.rendering.progress import busy, watched
from planner.commands.rendering.text import plan_text, table
from planner.decisions.views import ClusterKind
from planner.errors import InputError
from planner.model.site import Site
from planner.simulator.trials.rehearsal import TraceRehearsal
from planner.solve.fleet import fleet_json, fleet_of, solve_fleet
from planner.solve.goals import Objective, Worst
from planner.solve.plan import make_plan, outline
from planner.solve.problem import SolveOptions
from planner.solve.sensitivity.corners import robust_report


def run(args: argparse.Namespace) -> int:
    site = site_of(args)
    if len(site.of_kind(ClusterKind.PD)) > 1 or len(site.of_kind(ClusterKind.PRFAAS)) > 1:
        return _solve_fleet(args, site)
    options = options_of(args)
    if args.robust:
        return _solve_robust(args, site, options)
    with busy("solving"):
        plan = make_plan(site, options, args.deployment, TraceRehearsal.of)
    if args.output:
        write(args.output, plan.to_json())
    if args.json:
        emit(plan.to_json())
        return 0
    baseline = None
    if args.deployment is None and "homogeneous" in site.deployments:
        alone = replace(options, objective=Objective.THROUGHPUT, rate_req_per_s=None)
        baseline = outline(site, alone, "homogeneous")
    print(plan_text(plan, baseline))
    warn(plan)
    return 0


def _solve_fleet(args: argparse.Namespace, site: Site) -> int:
    if args.as_in_paper or args.objective != Objective.THROUGHPUT or args.robust:
        raise InputError(
            "several clusters: only --objective throughput with E[T(L)] is supported; drop the other options"
        )
    fleet = fleet_of(site, args.bins, args.extrapolate, survives_cold=not args.warm_caches)
    result = fleet_json(site, fleet, solve_fleet(fleet, watched))
    if args.output:
        write(args.output, result)
    if args.json:
        emit(result)
        return 0
    print(f"Plan  site={site.name}  Λmax={result['lambda_max_req_per_s']:.3f} req/s  ({result['length_bins']} bins)")
    one = result["one_threshold"]
    print(
        f"  with one threshold for all, {one['threshold_tokens']:,.0f} tokens: {one['lambda_max_req_per_s']:.3f} req/s"
    )
    columns = ["name", "num_prefill", "num_decode", "threshold_tokens", "decoded_fraction", "offload_fraction"]
    print(table(result["pd_clusters"], columns))
    print(table(result["prfaas_clusters"], ["name", "instances", "utilisation"]))
    print(table(result["links"], ["source", "destination", "egress_gbps", "capacity_gbps"]))
    return 0


def _solve_robust(args: argparse.Namespace, site: Site, options: SolveOptions) -> int:
    result = robust_report(site, options, args.spread, Worst(args.worst), args.deployment)
    if args.output:
        write(args.output, result)
    if args.json:
        emit(result)
        return 0
    print(
        f"Robust plan: t={result['threshold_tokens']:.0f}, Np/Nd={result['num_prefill']}/{result['num_decode']}, "
        f"Λ={result['lambda_max_req_per_s']:.3f}; over {result['scenarios']} scenarios at least "
        f"{result['worst_ratio']:.1%} of the optimum and {result['worst_lambda_req_per_s']:.3f} req/s "
        f"(nominal plan: {result['plan_worst_ratio']:.1%}, {result['plan_worst_lambda_req_per_s']:.3f})"
    )
    print(table(result["regret"][:30], ["scenario", "optimum", "robust", "plan"]))
    return 0

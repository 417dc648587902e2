"""How arguments become options of the solver."""

import argparse
from dataclasses import replace

from planner.model.demand.slo import parsed_target
from planner.model.reading import named
from planner.model.site import Site, load_site
from planner.solve.goals import Objective, TieBreak
from planner.solve.problem import SolveOptions


def site_of(args: argparse.Namespace) -> Site:
    """The site of a command line, with the targets that it adds."""
    site = load_site(args.config, args.workload)
    if not args.target:
        return site
    with named("--target"):
        slo = replace(site.slo, targets=(*site.slo.targets, *map(parsed_target, args.target)))
    return replace(site, slo=slo)


def options_of(args: argparse.Namespace) -> SolveOptions:
    options = SolveOptions.as_in_paper() if args.as_in_paper else SolveOptions()
    return replace(
        options,
        extrapolate=args.extrapolate,
        survives_cold=not (args.as_in_paper or args.warm_caches),
        tie_break=TieBreak(args.tie_break),
        objective=Objective(getattr(args, "objective", Objective.THROUGHPUT)),
        rate_req_per_s=getattr(args, "rate", None),
    )

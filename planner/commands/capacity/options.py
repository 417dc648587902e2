"""How arguments become options of the solver."""

import argparse
from dataclasses import replace

from planner.solve.goals import Objective, TieBreak
from planner.solve.problem import SolveOptions


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

"""`prfaas-plan whatif`: the same site solved over ranges of its numbers."""

import argparse
import sys

from planner.commands.capacity.options import options_of, site_of
from planner.commands.rendering.output import emit, remark, write_csv
from planner.commands.rendering.progress import watched
from planner.errors import InputError
from planner.solve.sensitivity.sweeps import Sweep, heat_map, whatif


def run(args: argparse.Namespace) -> int:
    site = site_of(args)
    variant = None
    if args.deployment:
        site, variant = site.deployed(args.deployment)
    if args.heat_map:
        grid = heat_map(site, options_of(args))
        rows = [
            {"threshold_tokens": t, "num_prefill": split, "lambda_max_req_per_s": line[at]}
            for split, line in zip(grid["num_prefill"], grid["rates"], strict=True)
            for at, t in enumerate(grid["thresholds_tokens"])
        ]
    elif args.sweep:
        rows = whatif(site, options_of(args), [Sweep.parse(text) for text in args.sweep], watched, variant)
    else:
        raise InputError("whatif: give --sweep knob=low:high or --heat-map")
    if args.json:
        emit(rows)
        return 0
    if args.output:
        with args.output.open("w", newline="") as file:
            write_csv(file, rows)
        remark(f"{len(rows)} rows to {args.output}")
        return 0
    write_csv(sys.stdout, rows)
    return 0

"""`prfaas-plan diff`: a plan against what runs."""

import argparse
import json

from planner.commands.output import emit
from planner.errors import InputError
from planner.solve.differences import compare_plans


def run(args: argparse.Namespace) -> int:
    try:
        plan, current = json.loads(args.plan.read_text()), json.loads(args.current.read_text())
        found = compare_plans(plan, current)
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise InputError(f"diff {args.plan} {args.current}: {exc!r}") from exc
    if args.json:
        emit(
            {
                "verdict": found.verdict.name.lower(),
                "changes": {c.name: {"current": c.current, "planned": c.planned} for c in found.changes},
                "obstacles": list(found.obstacles),
            }
        )
        return int(found.verdict)
    for change in found.changes:
        print(f"{change.name:<20} {change.current!s:>12} -> {change.planned}")
    for obstacle in found.obstacles:
        print(f"infeasible: {obstacle}")
    if not found.changes and not found.obstacles:
        print("no change")
    return int(found.verdict)

"""`prfaas-plan diff`: a plan against what runs: of two files, or a running plan service's proposal against what is in force."""

import argparse
import json

import msgspec

from planner.commands.live import client_of, diff_text, differences, setting_now
from planner.commands.output import emit
from planner.errors import InputError
from planner.solve.differences import Verdict, compare_plans


def run(args: argparse.Namespace) -> int:
    if args.plan is None and args.current is None:
        return _of_service(args)
    if args.plan is None or args.current is None:
        raise InputError("diff: give a plan file and --current, or neither to ask a running service")
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


def _of_service(args: argparse.Namespace) -> int:
    status = client_of(args).status()
    if not args.json:
        print(diff_text(status))
    elif status.proposal is not None:
        changes = differences(setting_now(status), status.proposal.setting)
        emit(
            {
                "changes": {name: {"current": before, "planned": after} for name, before, after in changes},
                "proposal": msgspec.to_builtins(status.proposal),
            }
        )
    else:
        emit({"changes": {}, "proposal": None})
    return int(Verdict.SAME if status.proposal is None else Verdict.DIFFERENT)

"""`prfaas-plan diff`: a plan against what runs: of two files, or a running plan service's proposal against what is in force."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from planner.commands.rendering.output import emit
from planner.commands.service.live import client_of, diff_text, differences, setting_now
from planner.errors import InputError
from planner.model.reading import SHARE, Range, named, number, read_json
from planner.model.site import INSTANCES
from planner.solve.differences import DiffStatus, compare_plans

COUNTS: Final = ("num_prfaas", "num_prefill", "num_decode")  # what every plan says
KNOWN: Final = {
    "threshold_tokens": Range(0, float("inf"), "tokens"),
    "tie_share": SHARE,
    **dict.fromkeys((*COUNTS, "max_prfaas", "num_pd"), INSTANCES),
}


def run(args: argparse.Namespace) -> int:
    if args.plan is None and args.current is None:
        return _of_service(args)
    if args.plan is None or args.current is None:
        raise InputError("diff: give a plan file and --current, or neither to ask a running service")
    found = compare_plans(_read(args.plan, needed=COUNTS), _read(args.current))
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


def _read(path: Path, needed: Sequence[str] = ()) -> dict[str, Any]:
    """A plan file's object; all numbers that are compared have been checked. Raises InputError."""
    with named(f"plan {path}"):
        table = read_json(path)
        for key, allowed in KNOWN.items():
            if key in needed or table.get(key) is not None:
                number(table, key, allowed)
    return table


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
    return int(DiffStatus.SAME if status.proposal is None else DiffStatus.DIFFERENT)

"""`prfaas-plan show|apply|rollback|pause|resume|history`: ask a running plan service, or tell it what to do."""

import argparse
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from planner.commands.rendering.output import emit
from planner.commands.service.live import client_of, history_text, status_text
from planner.service.client import PlanClient
from planner.service.status import Status
from planner.solve.control.ledger import LedgerEntry

CALLS: Final[Mapping[str, Callable[[PlanClient, argparse.Namespace], Status | list[LedgerEntry]]]] = {
    "show": lambda service, _: service.status(),
    "apply": lambda service, args: service.change("apply", version=args.version),
    "rollback": lambda service, _: service.change("rollback"),
    "pause": lambda service, _: service.change("pause"),
    "resume": lambda service, _: service.change("resume"),
    "history": lambda service, args: service.history(args.limit),
}


def run(args: argparse.Namespace) -> int:
    answer = CALLS[args.command](client_of(args), args)
    if args.json:
        emit(msgspec.to_builtins(answer))
    else:
        print(history_text(answer) if isinstance(answer, list) else status_text(answer))
    return 0

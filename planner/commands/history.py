"""`prfaas-plan history`: the last changes of a running plan service, oldest first."""

import argparse

import msgspec

from planner.commands.live import client_of, history_text
from planner.commands.output import emit


def run(args: argparse.Namespace) -> int:
    entries = client_of(args).history(args.limit)
    if args.json:
        emit(msgspec.to_builtins(entries))
    else:
        print(history_text(entries))
    return 0

"""`prfaas-plan resume`: a running plan service goes on after `pause` or `rollback`."""

import argparse

import msgspec

from planner.commands.live import client_of, status_text
from planner.commands.output import emit


def run(args: argparse.Namespace) -> int:
    status = client_of(args).change("resume")
    if args.json:
        emit(msgspec.to_builtins(status))
    else:
        print(status_text(status))
    return 0

"""`prfaas-plan apply`: the proposal comes into force."""

import argparse

import msgspec

from planner.commands.live import client_of, status_text
from planner.commands.output import emit


def run(args: argparse.Namespace) -> int:
    status = client_of(args).change("apply", version=args.version)
    if args.json:
        emit(msgspec.to_builtins(status))
    else:
        print(status_text(status))
    return 0

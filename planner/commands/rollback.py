"""`prfaas-plan rollback`: what was in force before is so again; nothing changes by itself until `resume`."""

import argparse

import msgspec

from planner.commands.live import client_of, status_text
from planner.commands.output import emit


def run(args: argparse.Namespace) -> int:
    status = client_of(args).change("rollback")
    if args.json:
        emit(msgspec.to_builtins(status))
    else:
        print(status_text(status))
    return 0

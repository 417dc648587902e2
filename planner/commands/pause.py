"""`prfaas-plan pause`: a running plan service proposes nothing and changes nothing by itself."""

import argparse

import msgspec

from planner.commands.live import client_of, status_text
from planner.commands.output import emit


def run(args: argparse.Namespace) -> int:
    status = client_of(args).change("pause")
    if args.json:
        emit(msgspec.to_builtins(status))
    else:
        print(status_text(status))
    return 0

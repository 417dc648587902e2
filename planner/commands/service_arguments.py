"""Arguments of the commands that are, or ask, a plan service."""

import argparse
from pathlib import Path

from planner.commands.argument_types import at_least_one


def as_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")


def to_ask(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default="http://127.0.0.1:8100", metavar="URL", help="the plan service (default: %(default)s)"
    )
    command.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the service's secret, if it requires one"
    )
    command.add_argument(
        "--certificate", type=Path, metavar="FILE",
        help="an operator's certificate, with its key beside it, for a service that other machines reach",
    )  # fmt: skip
    command.add_argument(
        "--authority", type=Path, metavar="FILE",
        help="who signed the service's certificate (default: authorities or authority.pem beside --certificate)",
    )  # fmt: skip
    as_json(command)


def to_serve(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-c", "--config", type=Path, required=True, metavar="FILE.toml", help="configuration with a [plan] table"
    )
    command.add_argument("--check", action="store_true", help="only check the configuration, and exit")


def to_compare(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "plan", type=Path, nargs="?", metavar="PLAN", help="plan file (default: ask the service at --url)"
    )
    command.add_argument("--current", type=Path, metavar="FILE.json", help="what runs, with the keys of a plan file")
    to_ask(command)


def to_apply(command: argparse.ArgumentParser) -> None:
    command.add_argument("--version", type=at_least_one, metavar="N", help="apply only a proposal of this version")
    to_ask(command)


def to_look_back(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--limit", type=at_least_one, default=20, metavar="N", help="number of changes to show (default: %(default)s)"
    )
    to_ask(command)

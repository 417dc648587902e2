"""`prfaas-plan`: plan capacity, judge plans by simulation, and steer what runs by the plan service.

Results go to stdout, remarks and warnings to stderr. Exit statuses are those of `prfaas` (docs/reference/commands.md), and 3 says
infeasible. Ctrl-C ends it as a signal does.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from planner.commands.arguments import COMMANDS
from planner.commands.command_parser import CommandParser
from planner.commands.tab_completion import SHELLS, script_of
from planner.errors import Infeasible, InputError, MissingExtra, PlannerError
from planner.version import tool_version
from transport.control.grpc_environment import for_grpc

EXIT_FAILED, EXIT_INPUT, EXIT_INFEASIBLE = 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    os.environ.update(for_grpc(os.environ))
    args = parser().parse_args(argv)
    # Vectors are all there is to multiply; a thread per core, started by the first import of numpy, costs more than it saves.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        if getattr(args, "output", None) is not None:
            from planner.commands.rendering.output import check_output  # imports numpy

            check_output(args.output)
        # By name: a command loads what it needs, and no command loads what another one does.
        return int(import_module(f"planner.commands.{COMMANDS[args.command].module}").run(args))
    except BrokenPipeError:
        # The reader has seen enough; the interpreter's last flush must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        # Not by returning: Python would wait for what is on its way to processes that have ended.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        raise
    except Infeasible as exc:
        print(f"infeasible: {exc}", file=sys.stderr)
        return EXIT_INFEASIBLE
    except PlannerError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return _status_of(exc, args.command)
    except OSError as exc:
        # A full disk is told by a write, which knows no name of a file.
        where = exc.filename or getattr(args, "output", None)
        print(f"error: {f'{where}: ' if where else ''}{exc.strerror or exc}", file=sys.stderr)
        return _status_of(exc, args.command)


def _status_of(failure: PlannerError | OSError, command: str) -> int:
    # Of `diff`, 1 says that there is a difference.
    return EXIT_INPUT if isinstance(failure, InputError | MissingExtra) or command == "diff" else EXIT_FAILED


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = CommandParser(
        prog="prfaas-plan",
        description="Plan the capacity of PrfaaS-PD deployments, simulate plans, run the plan service that gateways follow.",
        epilog=f"Example: {COMMANDS['solve'].example}. Each command has its own --help.",
    )  # fmt: skip
    top.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    top.add_argument(
        "--completion",
        action=_Completion,
        choices=SHELLS,
        help="print a script for tab completion in this shell, and exit",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(name, help=command.help, description=command.description, epilog=command.epilog)
        )
    return top


class _Completion(argparse.Action):
    """Prints a script."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        print(script_of(parser, values), end="")
        parser.exit()


class _Version(argparse.Action):
    """Asks for the version only when it is wanted."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"prfaas-plan {tool_version()}")
        parser.exit()

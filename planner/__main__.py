"""`python -m planner` is `prfaas-plan`."""

import sys

from planner.commands.interrupted import run_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> int:
    """The command."""
    return run_imported(_load)


def _load() -> "Callable[[], int]":
    from planner.commands.cli import main as run

    return run


if __name__ == "__main__":
    sys.exit(main())

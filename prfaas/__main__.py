"""`python -m prfaas` is `prfaas`."""

import sys

from planner.commands.interrupted import run_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> int:
    """The command."""
    return run_imported(_load)


def _load() -> "Callable[[], int]":
    from prfaas.cli import main as run

    return run


if __name__ == "__main__":
    sys.exit(main())

"""What an engine says on standard error before it ends for good, for the node that started it to tell its operator."""

from typing import Final

CANNOT_SERVE: Final = "engine: cannot serve: "  # and why, in one line

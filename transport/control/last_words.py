"""The line that an engine prints on standard error before it ends for good. Its node shows it to the operator."""

from typing import Final

CANNOT_SERVE: Final = "engine: cannot serve: "  # and why, in one line

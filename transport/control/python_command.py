"""How a process of ours starts another one in Python."""

import sys
from typing import Final

# A folder that a process is started in may be anybody's. Without -P Python would take `engine.py` or `json.py` of there.
SAFE_PATH: Final = "-P"
SAFE_PATH_VARIABLE: Final = "PYTHONSAFEPATH"  # the same for what others start in Python below a process of ours


def python_module(name: str) -> list[str]:
    """A command that runs this module as it is installed, never one of the current folder."""
    return [sys.executable, SAFE_PATH, "-m", name]

"""Each start of a process writes a log of its own: NAME.log is the latest start's, NAME.log.1 that of the one before.

What a process said before it died is not pushed aside by the next start. What is shown of a failed start is its own.
"""

from pathlib import Path
from typing import IO, Final

# With as many restarts as a process has by default before it is given up, the first death can still be read.
KEPT_STARTS: Final = 5


def start_log(path: Path) -> IO[bytes]:
    """The empty log of a start that begins now; earlier ones move up by one, the oldest goes. Raises OSError.

    A process that still writes to an earlier one goes on writing there: files are renamed, not copied.
    """
    if path.exists() and path.stat().st_size > 0:  # a start that said nothing pushes nothing out
        for age in range(KEPT_STARTS, 0, -1):
            younger = earlier(path, age - 1)
            if younger.exists():
                younger.replace(earlier(path, age))
    return path.open("ab")


def earlier(path: Path, starts: int) -> Path:
    """The log of so many starts ago. It ends in a number, which no process's own log does, whatever a node is called."""
    return path.with_name(f"{path.name}.{starts}") if starts else path

"""What a server leaves in shared memory when it ends.

SGLang's front end and scheduler share a file there, of 16 KiB, which neither removes, however they end. So it is looked for while
they have it, and removed once they are gone.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

from node.process.children import members

SHARED: Final = "/dev/shm/"
OF_SGLANG: Final = f"{SHARED}sglang_loads_"


def shared_by(leader: int) -> set[Path]:
    """Files of that kind that a server, or a process that it has started, has mapped."""
    found: set[Path] = set()
    for process in members(leader):
        try:
            lines = (process / "maps").read_text(errors="replace").splitlines()
        except OSError:  # it has ended
            continue
        # proc_pid_maps(5): the path is the last field; what has been removed says so behind it.
        found |= {
            Path(line[line.index(OF_SGLANG) :]) for line in lines if OF_SGLANG in line and " (deleted)" not in line
        }
    return found


def remove(files: set[Path]) -> None:
    """Of a server that has ended."""
    for file in files:
        with suppress(OSError):  # a little memory at most
            file.unlink()

"""Small files that must be whole whenever the machine stops: written beside, synced, and put in place by one rename."""

import os
from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    """`path` holds `data`, or what it held before; never a part, and what it holds is on the disk. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)

"""Files that outlive a process: where they are, and small ones that stay whole if the machine stops.

Those are written into a temporary file, synced, then renamed.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

STATE_DIRECTORY: Final = "STATE_DIRECTORY"  # which systemd gives to units with StateDirectory=


def state_folder(beside: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Where a process writes what it is to find again: systemd's folder for its unit, which has one, or `beside`."""
    folders = environment.get(STATE_DIRECTORY, "")
    return Path(folders.partition(":")[0]) if folders else beside


def write_durably(path: Path, data: bytes) -> None:
    """Afterwards `path` holds `data`, on disk; on failure it holds its old bytes, never a part. Raises OSError."""
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

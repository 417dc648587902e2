"""Files that outlive a process: where they are, and small ones that stay whole if the machine stops.

Those are written into a temporary file, synced, then renamed.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

STATE_DIRECTORY: Final = "STATE_DIRECTORY"  # which systemd gives to units with StateDirectory=


def state_path(beside: Path, name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Where a process writes `name`, which it is to find again: in systemd's folder for its unit, if any, else `beside`.

    What is beside already, and may be written, stays there: nothing is lost when a process is first told of a folder.
    """
    former, folders = beside / name, environment.get(STATE_DIRECTORY, "")
    if not folders:
        return former
    folder = Path(folders.partition(":")[0])
    path = folder / name
    is_there = any(folder.iterdir()) if path == folder and folder.is_dir() else os.path.exists(path)
    if is_there or not os.path.exists(former):
        return path
    if os.access(former if former.is_dir() else former.parent, os.W_OK):  # a file is replaced by another one
        return former
    log.warning("%s may not be written to, so it is of no use: what should be kept belongs in %s", former, path)
    return path


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

"""Writes small files that stay whole if the machine stops: into a temporary file, synced, then renamed."""

import os
from pathlib import Path


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

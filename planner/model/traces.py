"""A file of requests, whatever its shape: a trace, or sessions of agents, which say when their requests came, not they."""

from pathlib import Path
from typing import Final

from planner.model.reading import json_rows, named, open_text
from planner.model.sessions import drawn_once, read_sessions, trace_of_sessions
from planner.model.workload import Trace, read_trace

BEGIN_WITHIN_S: Final = 10_800.0  # sessions, where nothing else is said


def read_requests(path: Path, begin_within_s: float = BEGIN_WITHIN_S) -> Trace:
    """The requests of a file. Sessions begin once each, at times drawn from `begin_within_s` seconds, always the same ones.

    Raises InputError naming the file, the row, the field and its value.
    """
    if not _are_sessions(path):
        return read_trace(path)
    return trace_of_sessions(drawn_once(read_sessions(path), begin_within_s), name=path.name.split(".")[0])


def _are_sessions(path: Path) -> bool:
    with named(f"trace {path}"):
        if path.is_dir() or ".csv" in [suffix.lower() for suffix in path.suffixes]:
            return False
        with open_text(path) as text:
            _, row = next(json_rows(text, is_growing=True), (0, {}))
        return "session" in row

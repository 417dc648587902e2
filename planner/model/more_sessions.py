"""A trace at another rate: the same requests faster, or, of sessions, more of them, each as fast as it was."""

from dataclasses import replace
from math import ceil
from typing import Final

import numpy as np

from planner.model.profile import Floats
from planner.model.trace_files.blocks import Places
from planner.model.workload import Trace

SHIFT: Final = 0.1  # of the trace's span, by which a session that is there again begins earlier or later


def at_factor(trace: Trace, factor: float, seed: int) -> Trace:
    """As many requests per second times `factor`."""
    return trace.faster(factor) if trace.sessions is None else more_sessions(trace, factor, seed)


def more_sessions(trace: Trace, factor: float, seed: int) -> Trace:
    """As many sessions as make `factor` times the requests, within the same time. Of fewer, some are left out.

    Of more, all are there once, and some again: they begin a little earlier or later, share no blocks with the first ones, and
    are cut where the trace ends.
    """
    assert trace.sessions is not None
    rng = np.random.default_rng((seed, 2))
    members, end_s = _members(trace.sessions), float(trace.arrival_s[-1])
    wanted, count = factor * len(trace), 0
    kept, times, copies = list[Places](), list[Floats](), list[Floats]()
    for copy in range(ceil(factor) + 1):  # once more than that, as some are cut
        order = rng.permutation(len(members))
        shifts_s = rng.uniform(-SHIFT, SHIFT, len(members)) * trace.span_s
        for which in order.tolist():
            rows = members[which]
            at = trace.arrival_s[rows]
            if copy:
                at = at + (abs(at[0] + shifts_s[which]) - at[0])
                rows, at = rows[at <= end_s], at[at <= end_s]
            if copy + 1 > factor and len(rows) > 2 * (wanted - count):
                continue  # fewer are nearer
            kept.append(rows)
            times.append(at)
            copies.append(np.full(len(rows), float(copy)))
            count += len(rows)
    return _together(trace, np.concatenate(kept), np.concatenate(times), np.concatenate(copies))


def _members(sessions: Floats) -> list[Places]:
    """The places of each session's requests, in order."""
    order = np.argsort(sessions, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(sessions[order])) + 1)


def _together(trace: Trace, rows: Places, times: Floats, copies: Floats) -> Trace:
    assert trace.sessions is not None
    order = np.lexsort((rows, copies, times))
    rows, times, copies = rows[order], times[order], copies[order]
    blocks = None
    if trace.blocks is not None:
        step = 1 + max((max(ids, default=0) for ids in trace.blocks), default=0)
        blocks = [
            tuple([block + int(copy) * step for block in trace.blocks[row]]) if copy else trace.blocks[row]
            for row, copy in zip(rows.tolist(), copies.tolist(), strict=True)
        ]
    numbers = 1.0 + float(trace.sessions.max())
    return replace(
        trace,
        arrival_s=times,
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        blocks=blocks,
        cached_tokens=None if trace.cached_tokens is None else trace.cached_tokens[rows],
        categories=None,
        sessions=trace.sessions[rows] + copies * numbers,
    )

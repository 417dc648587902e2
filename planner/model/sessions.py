"""Sessions of coding agents, as requests that arrive.

One JSON object per line: `session`: `N`, or `N.k` for the k-th sub-agent of session N, which shares the ids of its
session; `t`: seconds since the session began; `input_length`; `output_length`; `blocks`: the prompt's full blocks of 64
tokens as runs [first id, count]; `think_time`: seconds from the end of the answer before to this request, where known.
Sessions say when their requests came, not when they themselves began: starts are drawn.

A replay is open, every request at its time (`replay`), or closed, later turns waiting for answers (`ClosedLoop`). At another
rate there are more of them, or fewer (`at_factor`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import ceil
from pathlib import Path
from typing import Any, Final

import numpy as np

from planner.model.profile import Floats
from planner.model.reading import SECONDS, Range, json_rows, named, number, open_text, placed
from planner.model.trace_files.blocks import Places
from planner.model.workload import Trace
from transport.control.settings import SettingsError, require

BLOCK_TOKENS: Final = 512  # of a trace: eight of the file's
MERGED: Final = 8
SMALL_TOKENS: Final = BLOCK_TOKENS // MERGED
PROMPT: Final = Range(0, 1e7, "tokens")  # each block of a prompt is named
SHIFT: Final = 0.1  # of the trace's span, by which a session that is there again begins earlier or later
THINK: Final = Range(-SECONDS.high, SECONDS.high, "seconds")  # below 0 where clocks differed: at once


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: when, how long, and the names of its blocks of 512 tokens, equal where prefixes are.

    `agent` is the sub-agent that asks, or the session itself; `think_s` after the answer before it does.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    agent: str = ""
    think_s: float = 0.0


Session = tuple[Turn, ...]


def read_sessions(path: Path) -> list[Session]:
    """The sessions of a file, each with its sub-agents, in order of time. Raises InputError naming file and line."""
    found: dict[str, _Reader] = {}
    with named(f"sessions {path}"), open_text(path) as lines:
        for at, row in json_rows(lines):
            with placed(f"line {at}"):
                require("session" in row, "session", None, "said")
                found.setdefault(str(row["session"]).split(".")[0], _Reader()).add(row)
        require(bool(found), "requests", 0, "at least one: the file is empty")
    return [reader.session() for reader in found.values()]


class _Reader:
    """One session: names blocks by what is before them and in them."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._names: dict[tuple[Any, ...], int] = {}

    def add(self, row: dict[str, Any]) -> None:
        prompt, output = (int(number(row, key, PROMPT)) for key in ("input_length", "output_length"))
        small = [block for first, count in _runs(row, prompt) for block in range(first, first + count)]
        names: list[int] = []
        for at in range(0, len(small) - MERGED + 1, MERGED):
            key = (names[-1] if names else None, *small[at : at + MERGED])
            names.append(self._names.setdefault(key, len(self._names)))
        while len(names) < -(-prompt // BLOCK_TOKENS):  # no other request shares the partial last block
            names.append(self._names.setdefault(("tail", len(self._turns), len(names)), len(self._names)))
        think_s = THINK.of("think_time", row.get("think_time") or 0.0)
        self._turns.append(
            Turn(
                number(row, "t", SECONDS), prompt, max(1, output), tuple(names),
                agent=str(row["session"]), think_s=max(0.0, think_s),
            )
        )  # fmt: skip

    def session(self) -> Session:
        return tuple(sorted(self._turns, key=lambda turn: turn.at_s))


def _runs(row: dict[str, Any], prompt_tokens: int) -> list[tuple[int, int]]:
    """The runs of blocks, no more of them than the prompt has. Raises SettingsError."""
    if "blocks" not in row:
        raise SettingsError("missing: blocks")
    runs = row["blocks"]
    is_runs = isinstance(runs, list) and all(
        isinstance(run, list) and len(run) == 2 and all(type(each) is int for each in run) for run in runs
    )
    require(is_runs, "blocks", runs, "a list of [first id, count]")
    most = prompt_tokens // SMALL_TOKENS
    fits = all(count >= 0 for _, count in runs) and sum(count for _, count in runs) <= most
    require(fits, "blocks", runs, f"the full blocks of the prompt, at most {most}")
    return [(first, count) for first, count in runs]


def replay(sessions: Sequence[Session], count: int, over_s: float, seed: int) -> Trace:
    """`count` sessions drawn from `sessions`, begun at times uniform over `over_s`, cut there.

    A session that is drawn twice is two sessions: they share no blocks. Later turns do not wait for slow answers.
    """
    return trace_of_sessions(
        [
            (start + turn.at_s, which, turn)
            for which, (start, session) in enumerate(drawn(sessions, count, over_s, seed))
            for turn in session
            if start + turn.at_s < over_s
        ]
    )


def drawn(sessions: Sequence[Session], count: int, over_s: float, seed: int) -> list[tuple[float, Session]]:
    """`count` sessions and when they begin, uniform over `over_s`. They share no blocks, even if one is drawn twice."""
    rng = np.random.default_rng(seed)
    begun = sorted(zip(rng.random(count) * over_s, rng.integers(len(sessions), size=count), strict=True))
    found: list[tuple[float, Session]] = []
    offset = 0
    for start, which in begun:
        session = sessions[int(which)]
        own = [replace(turn, blocks=tuple([block + offset for block in turn.blocks])) for turn in session]
        found.append((float(start), tuple(own)))
        offset += 1 + max((max(turn.blocks, default=0) for turn in session), default=0)
    return found


def drawn_once(sessions: Sequence[Session], over_s: float, seed: int = 0) -> list[tuple[float, int, Turn]]:
    """Every session once, begun at a time uniform over `over_s`, to its end: when, its number, and each turn.

    They share no blocks.
    """
    starts = np.random.default_rng(seed).random(len(sessions)) * over_s
    found, offset = [], 0
    for which, (start, session) in enumerate(zip(starts.tolist(), sessions, strict=True)):
        for turn in session:
            own = tuple([block + offset for block in turn.blocks])
            found.append((start + turn.at_s, which, replace(turn, blocks=own)))
        offset += 1 + max((max(turn.blocks, default=0) for turn in session), default=0)
    return found


def trace_of_sessions(arrivals: Sequence[tuple[float, int, Turn]], name: str = "sessions") -> Trace:
    """Turns as requests, each with its session's number."""
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    numbers = np.array([float(which) for _, which, _ in arrivals])
    return replace(trace_of([(at, turn) for at, _, turn in arrivals], name), sessions=numbers)


def trace_of(arrivals: Sequence[tuple[float, Turn]], name: str = "sessions") -> Trace:
    """Turns as requests, in order of the times at which they come, counted from the first."""
    arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
    return Trace(
        name=name,
        arrival_s=np.array([at for at, _ in arrivals]),
        prompt_tokens=np.array([float(turn.prompt_tokens) for _, turn in arrivals]),
        output_tokens=np.array([float(turn.output_tokens) for _, turn in arrivals]),
        blocks=tuple(turn.blocks for _, turn in arrivals),
        block_size=BLOCK_TOKENS,
    )


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
        categories=None if trace.categories is None else trace.categories.part(rows),
        sessions=trace.sessions[rows] + copies * numbers,
    )


def within(sessions: Sequence[Session], most_tokens: int) -> list[Session]:
    """Each session up to its first prompt that is longer; without those that begin with one."""
    cut = [tuple(takewhile(lambda turn: turn.prompt_tokens <= most_tokens, session)) for session in sessions]
    return [session for session in cut if session]


@dataclass(frozen=True, slots=True)
class DueTurn:
    """A turn that is due: when, its session of a closed loop, and its place in it."""

    at_s: float
    session: int
    index: int
    turn: Turn


class ClosedLoop:
    """Sessions of agents that wait: a turn is sent `think_s` after the answer to the one before it of the same agent.

    A sub-agent begins as long after its session's turn before as it did, but never before that was answered. What would be
    sent from `until_s` on is not. Who drives it says when answers came: a clock, or `in_virtual_time`.
    """

    def __init__(self, begun: Sequence[tuple[float, Session]], until_s: float) -> None:
        self._begun = begun
        self._until_s = until_s
        self._after = [_followers(session) for _, session in begun]

    def first(self) -> list[DueTurn]:
        """Where each session begins."""
        return self._due([DueTurn(start, number, 0, session[0]) for number, (start, session) in enumerate(self._begun)])

    def answered(self, call: DueTurn, sent_s: float, now: float) -> list[DueTurn]:
        """What is due after `call`, sent at `sent_s`, has been answered."""
        session = self._begun[call.session][1]
        found = []
        for index in self._after[call.session].get(call.index, ()):
            turn = session[index]
            gap_s = turn.at_s - call.turn.at_s
            at_s = now + turn.think_s if turn.agent == call.turn.agent else max(now, sent_s + gap_s)
            found.append(DueTurn(at_s, call.session, index, turn))
        return self._due(found)

    def _due(self, calls: list[DueTurn]) -> list[DueTurn]:
        return [call for call in calls if call.at_s < self._until_s]


def _followers(session: Session) -> dict[int, list[int]]:
    """The turns that wait for each: the same agent's next one, and the first ones of sub-agents."""
    found: dict[int, list[int]] = {}
    last: dict[str, int] = {}
    for index, turn in enumerate(session):
        before = last.get(turn.agent, last.get(session[0].agent))
        if before is not None:
            found.setdefault(before, []).append(index)
        last[turn.agent] = index
    return found


def in_virtual_time(loop: ClosedLoop, answer_s: Callable[[Turn], float]) -> Iterator[DueTurn]:
    """All calls in order, if every answer takes what `answer_s` says."""
    due = [(call.at_s, call.session, call.index, call) for call in loop.first()]
    heapify(due)
    while due:
        at_s, *_, call = heappop(due)
        yield call
        for other in loop.answered(call, at_s, at_s + answer_s(call.turn)):
            heappush(due, (other.at_s, other.session, other.index, other))

"""Sessions of coding agents, as requests that arrive.

One JSON object per line: `session` (`N`, or `N.k` for the k-th sub-agent of session N, which shares the ids of its session), `t`
seconds since the session began, `input_length`, `output_length`, and `blocks`, the prompt's full blocks of 64 tokens as runs
[first id, count]. Sessions say when their requests came, not when they themselves began: starts are drawn.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from planner.errors import InputError
from planner.model.workload import Trace

BLOCK_TOKENS: Final = 512  # of a trace: eight of the file's
MERGED: Final = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: when, how long, and the names of its blocks of 512 tokens, equal where prefixes are."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


Session = tuple[Turn, ...]


def read_sessions(path: Path) -> list[Session]:
    """The sessions of a file, each with its sub-agents, in order of time. Raises InputError naming file and line."""
    found: dict[str, _Reader] = {}
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    found.setdefault(str(row["session"]).split(".")[0], _Reader()).add(row)
                except (KeyError, TypeError, ValueError) as exc:
                    raise InputError(f"sessions {path}, line {number}: {type(exc).__name__} {exc}") from exc
    except OSError as exc:
        raise InputError(f"sessions {path}: {exc.strerror}") from exc
    if not found:
        raise InputError(f"sessions {path}: empty; at least one request is needed")
    return [reader.session() for reader in found.values()]


class _Reader:
    """One session: names blocks by what is before them and in them."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._names: dict[tuple[Any, ...], int] = {}

    def add(self, row: dict[str, Any]) -> None:
        small = [block for first, count in row["blocks"] for block in range(first, first + count)]
        names: list[int] = []
        for at in range(0, len(small) - MERGED + 1, MERGED):
            key = (names[-1] if names else None, *small[at : at + MERGED])
            names.append(self._names.setdefault(key, len(self._names)))
        while len(names) < -(-row["input_length"] // BLOCK_TOKENS):  # the partial last block is nobody else's
            names.append(self._names.setdefault(("tail", len(self._turns), len(names)), len(self._names)))
        output = max(1, row["output_length"])
        self._turns.append(Turn(float(row["t"]), int(row["input_length"]), int(output), tuple(names)))

    def session(self) -> Session:
        return tuple(sorted(self._turns, key=lambda turn: turn.at_s))


def replay(sessions: Sequence[Session], count: int, over_s: float, seed: int) -> Trace:
    """`count` sessions drawn from `sessions`, begun at times uniform over `over_s`, cut there.

    A session that is drawn twice is two sessions: they share no blocks. Later turns do not wait for slow answers.
    """
    rng = np.random.default_rng(seed)
    begun = sorted(zip(rng.random(count) * over_s, rng.integers(len(sessions), size=count), strict=True))
    arrivals: list[tuple[float, Turn, int]] = []
    offset = 0
    for start, which in begun:
        session = sessions[int(which)]
        arrivals += [(start + turn.at_s, turn, offset) for turn in session if start + turn.at_s < over_s]
        offset += 1 + max((max(turn.blocks, default=0) for turn in session), default=0)
    arrivals.sort(key=lambda arrival: arrival[0])
    return Trace(
        name="sessions",
        arrival_s=np.array([at for at, _, _ in arrivals]),
        prompt_tokens=np.array([float(turn.prompt_tokens) for _, turn, _ in arrivals]),
        output_tokens=np.array([float(turn.output_tokens) for _, turn, _ in arrivals]),
        blocks=tuple(tuple(block + base for block in turn.blocks) for _, turn, base in arrivals),
        block_size=BLOCK_TOKENS,
    )

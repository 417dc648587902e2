"""Categories of requests: what a trace says of their type, or whether they begin a conversation or go on with one."""

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from planner.model.reading import Range, number
from planner.model.trace_files.blocks import Places, PromptBlocks
from transport.control.settings import require

MOST_CATEGORIES: Final = 32  # told apart; further ones are together
MOST_NAME: Final = 64  # characters
MOST_MARKED: Final = 1 << 22  # blocks, where names are too sparse for a table
FIRST, LATER, UNSAID, OTHERS = "first turn", "later turns", "not said", "others"
TURN: Final = Range(1, 1e9, is_whole=True)
INSIDE, LAST, BEFORE_LAST = 1, 2, 3  # where a block is in the prompt that used it last


class CategorySource(StrEnum):
    """How the category of a request is known."""

    TRACE = "as the trace says"
    PROMPTS = "turns, inferred from prompts"


@dataclass(frozen=True, slots=True, eq=False)
class RequestCategories:
    """Request i is of category `names[codes[i]]`."""

    names: tuple[str, ...]
    codes: npt.NDArray[np.uint8]
    source: CategorySource

    def part(self, kept: slice | Places) -> "RequestCategories":
        """Those of some requests."""
        return RequestCategories(self.names, self.codes[kept], self.source)

    @property
    def of_requests(self) -> Any:
        """The name of each request's category."""
        return np.array(self.names)[self.codes]

    @classmethod
    def inferred(cls, blocks: Sequence[tuple[int, ...]]) -> Self:
        """First and later turns, where a trace does not tell them apart."""
        return cls((FIRST, LATER), _later_turns(blocks), CategorySource.PROMPTS)


def category_of(row: Mapping[str, Any]) -> str | None:
    """What a row says of its category: its type, else its turn. Raises SettingsError."""
    for key in ("type", "category"):
        if (name := row.get(key)) is not None:
            fits = isinstance(name, str) and 0 < len(name) <= MOST_NAME
            require(fits, key, name, f"a text of 1 to {MOST_NAME} characters")
            return str(name)
    if "turn" not in row:
        return None
    return FIRST if number(row, "turn", TURN) == 1 else LATER


class CategoryColumn:
    """Takes the category of one request after the other, one byte each."""

    def __init__(self) -> None:
        self._codes = array("B")
        self._known = {UNSAID: 0, OTHERS: 1}

    def append(self, name: str | None) -> None:
        known = self._known
        if name is None:
            self._codes.append(0)
            return
        if name not in known and len(known) < MOST_CATEGORIES:
            known[name] = len(known)
        self._codes.append(known.get(name, known[OTHERS]))

    def ordered(self, order: Places) -> RequestCategories | None:
        """Those of the requests in this order; None where no row has said any."""
        codes = np.frombuffer(self._codes, dtype=np.uint8)[order]
        if not codes.any():
            return None
        return RequestCategories(tuple(self._known), codes, CategorySource.TRACE)


def _later_turns(blocks: Sequence[tuple[int, ...]]) -> npt.NDArray[np.uint8]:
    """1 for each prompt that goes on with an earlier one, else 0.

    It shares its leading blocks with earlier prompts. The latest prompt that used the last shared block ends there, or one block
    later: a prompt's last block is partial, and changes when the conversation goes on. A prompt of one block has no later turn.
    """
    marks = _marks(blocks)
    is_bounded = isinstance(marks, dict)
    found = bytearray()
    for names in blocks:
        shared = 0
        for name in names:
            if not marks[name]:
                break
            shared += 1
        mark = marks[names[shared - 1]] if shared else 0
        found.append(mark == LAST or (mark == BEFORE_LAST and len(names) > shared))
        for name in names:
            marks[name] = INSIDE
        if len(names) > 1:
            marks[names[-2]], marks[names[-1]] = BEFORE_LAST, LAST
        while is_bounded and len(marks) > MOST_MARKED:
            del marks[next(iter(marks))]  # a conversation that goes on after so many other blocks begins anew
    return np.frombuffer(found, dtype=np.uint8)


def _marks(blocks: Sequence[tuple[int, ...]]) -> Any:
    size = blocks.least_table if isinstance(blocks, PromptBlocks) else None
    return defaultdict(int) if size is None else bytearray(size)

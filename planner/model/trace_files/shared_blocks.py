"""Which blocks the prompts of a trace share, without the blocks' names: two numbers say as much as a prompt's hundreds do.

A block is named by all that is before it, too. So prompts that share one share all before it, and each goes on from a prompt
before it, after so many of its blocks. Names that are made up again differ from those of the trace, and are equal where they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from planner.model.reading import TOKENS, number
from transport.control.settings import require

Counts = npt.NDArray[np.int64]
COLUMNS: Final = ("source", "shared", "blocks")
MOST_BLOCKS: Final = 1_000_000  # of a prompt


@dataclass(frozen=True, slots=True, eq=False)
class SharedBlocks:
    """Each prompt has so many `blocks`; the first `shared` of them are those of the prompt at `source`, earlier or the same."""

    block_tokens: int
    source: Counts
    shared: Counts
    blocks: Counts

    def __len__(self) -> int:
        return len(self.source)

    @classmethod
    def of(cls, names: Sequence[tuple[int, ...]], block_tokens: int) -> Self:
        """From the names of each prompt's blocks."""
        holder: dict[int, int] = {}  # the latest prompt that has a block
        source, shared, blocks = (np.zeros(len(names), dtype=np.int64) for _ in COLUMNS)
        for at, ids in enumerate(names):
            count = next((count for count, name in enumerate(ids) if name not in holder), len(ids))
            source[at] = holder[ids[count - 1]] if count else at
            shared[at], blocks[at] = count, len(ids)
            holder.update(dict.fromkeys(ids, at))
        return cls(block_tokens, source, shared, blocks)

    def head(self, count: int) -> "SharedBlocks":
        """The first `count` prompts."""
        return SharedBlocks(self.block_tokens, self.source[:count], self.shared[:count], self.blocks[:count])

    def names(self) -> list[tuple[int, ...]]:
        """Names of each prompt's blocks, made up."""
        found: list[tuple[int, ...]] = []
        known = 0
        rows = zip(self.source.tolist(), self.shared.tolist(), self.blocks.tolist(), strict=True)
        for at, (source, shared, blocks) in enumerate(rows):
            before = found[source][:shared] if source < at else ()
            own = blocks - len(before)
            found.append((*before, *range(known, known + own)))
            known += own
        return found

    def table(self) -> dict[str, Any]:
        """Its JSON form."""
        return {"block_tokens": self.block_tokens} | {name: getattr(self, name).tolist() for name in COLUMNS}

    @classmethod
    def read(cls, table: Mapping[str, Any], prompts: int) -> Self:
        """From its JSON form, of so many prompts. Raises SettingsError."""
        columns = []
        for name in COLUMNS:
            column = table.get(name)
            is_counts = isinstance(column, list) and all(
                type(value) is int and 0 <= value <= MOST_BLOCKS for value in column
            )
            require(
                is_counts and len(column or ()) == prompts, name, column, f"{prompts} counts of at most {MOST_BLOCKS}"
            )
            columns.append(np.array(column, dtype=np.int64))
        source, shared, blocks = columns
        require(bool((source <= np.arange(prompts)).all()), "source", source.tolist(), "prompts before each")
        fits = bool(((shared <= blocks) & (shared <= blocks[source])).all())
        require(fits, "shared", shared.tolist(), "at most the blocks of both prompts")
        block_tokens = number(table, "block_tokens", TOKENS)
        require(block_tokens >= 1 and block_tokens == int(block_tokens), "block_tokens", block_tokens, "a count")
        return cls(int(block_tokens), source, shared, blocks)

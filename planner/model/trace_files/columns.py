"""Requests by column: what is kept of a trace's rows while it is read, eight bytes a number."""

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.model.profile import Floats
from planner.model.trace_files.blocks import BlockColumn, Places, PromptBlocks
from planner.model.trace_files.categories import CategoryColumn, RequestCategories
from planner.model.trace_files.rows import RequestRow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestColumns:
    """Requests sorted by arrival."""

    arrived_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    is_cut: Any
    cached_tokens: Floats | None
    blocks: PromptBlocks | None
    categories: RequestCategories | None


class RowColumns:
    """Takes one row after the other, and remembers where each was."""

    def __init__(self) -> None:
        self._numbers = {name: array("d") for name in ("arrived", "prompt", "output", "cached")}
        self._lines = array("q")
        self._is_cut, self._has_names, self._has_cached = bytearray(), bytearray(), bytearray()
        self._blocks, self._categories = BlockColumn(), CategoryColumn()
        self._files: list[tuple[int, str]] = []  # the first row of each

    def __len__(self) -> int:
        return len(self._lines)

    def append(self, row: RequestRow, file: str, line: int) -> None:
        """`line` of `file`."""
        if not self._files or self._files[-1][1] != file:
            self._files.append((len(self), file))
        self._lines.append(line)
        numbers = self._numbers
        numbers["arrived"].append(row.arrived_s)
        numbers["prompt"].append(row.prompt)
        numbers["output"].append(row.output)
        numbers["cached"].append(row.cached or 0.0)
        self._is_cut.append(row.is_cut)
        self._has_cached.append(row.cached is not None)
        self._has_names.append(row.ids is not None)
        self._blocks.append(row.ids or ())
        self._categories.append(row.category)

    def order(self) -> Places:
        """Of the rows, by arrival; equal ones as in the file."""
        return np.argsort(self._column("arrived"), kind="stable")

    def place(self, index: int) -> str:
        """Where a row was, for messages."""
        _, file = self._files[bisect_right(self._files, index, key=lambda each: each[0]) - 1]
        return f"{file}row {self._lines[index]}"

    def arrived_s(self, index: int) -> float:
        return self._numbers["arrived"][index]

    def nameless(self, order: Places) -> tuple[int, int | None]:
        """How many rows name their blocks, and the first that does not."""
        named = np.frombuffer(self._has_names, dtype=np.uint8)[order]
        without = np.flatnonzero(named == 0)
        return int(named.sum()), int(order[without[0]]) if len(without) else None

    def sorted_by(self, order: Places) -> RequestColumns:
        """All columns in this order."""
        has_cached = bool(self._has_cached[order[0]])
        return RequestColumns(
            arrived_s=self._column("arrived")[order],
            prompt_tokens=self._column("prompt")[order],
            output_tokens=self._column("output")[order],
            is_cut=np.frombuffer(self._is_cut, dtype=np.bool_)[order],
            cached_tokens=self._column("cached")[order] if has_cached else None,
            blocks=self._blocks.ordered(order) if all(self._has_names) else None,
            categories=self._categories.ordered(order),
        )

    def _column(self, name: str) -> Floats:
        return np.frombuffer(self._numbers[name], dtype=np.float64)

"""The names of the blocks of many prompts, one after the other in one array: a trace has tens of millions."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias, overload

import numpy as np
import numpy.typing as npt

Places: TypeAlias = npt.NDArray[np.int64]
TYPES: Final = ("I", "Q")  # the least in which all names fit; longer ones are kept as Python's integers
SPARSE: Final = 4  # names up to so many times their count are marked in a table, others in a set


class PromptBlocks(Sequence[tuple[int, ...]]):
    """The names of each prompt's blocks, as a sequence of tuples."""

    def __init__(self, flat: Any, starts: Places, stops: Places) -> None:
        self._flat, self._starts, self._stops = flat, starts, stops

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> "PromptBlocks": ...

    def __getitem__(self, index: int | slice) -> "tuple[int, ...] | PromptBlocks":
        if isinstance(index, slice):
            return PromptBlocks(self._flat, self._starts[index], self._stops[index])
        return tuple(self._flat[self._starts[index] : self._stops[index]])

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        flat = self._flat
        for start, stop in zip(self._starts.tolist(), self._stops.tolist(), strict=True):
            yield tuple(flat[start:stop])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def pieces(self, prompts: int) -> Iterator[tuple[npt.NDArray[np.uint64], Places]]:
        """The names of so many prompts at a time, one after the other, and how many each has. Of longer names, hashes."""
        is_array = isinstance(self._flat, array)
        flat = np.frombuffer(self._flat, dtype=self._flat.typecode) if is_array and self._flat else None
        for begin in range(0, len(self), prompts):
            starts, stops = self._starts[begin : begin + prompts], self._stops[begin : begin + prompts]
            counts = stops - starts
            if flat is None:
                names = chain.from_iterable(self[begin : begin + prompts])
                yield np.fromiter(map(hash, names), dtype=np.uint64, count=int(counts.sum())), counts
                continue
            before = np.cumsum(counts) - counts
            places = np.repeat(starts - before, counts) + np.arange(counts.sum())
            yield flat[places].astype(np.uint64), counts

    @property
    def least_table(self) -> int | None:
        """Entries of a table of all names; None where it would be mostly empty."""
        if not isinstance(self._flat, array) or not self._flat:
            return None
        largest = int(np.frombuffer(self._flat, dtype=self._flat.typecode).max())
        return largest + 1 if largest < SPARSE * len(self._flat) else None


class BlockColumn:
    """Takes the names of one prompt after the other."""

    def __init__(self) -> None:
        self._flat: Any = array(TYPES[0])
        self._known: dict[int, int] = {}  # long names: equal ones are one object
        self._starts = array("q")
        self._stops = array("q")

    def append(self, names: Sequence[int]) -> None:
        """Names are at least 0."""
        self._starts.append(len(self._flat))
        self._extend(names)
        self._stops.append(len(self._flat))

    def _extend(self, names: Sequence[int]) -> None:
        if isinstance(self._flat, list):
            self._flat.extend([self._known.setdefault(name, name) for name in names])
            return
        try:
            self._flat.fromlist(list(names))  # takes all of them, or none
        except OverflowError:
            wider = TYPES.index(self._flat.typecode) + 1
            self._flat = array(TYPES[wider], self._flat) if wider < len(TYPES) else self._flat.tolist()
            self._extend(names)

    def ordered(self, order: Places) -> PromptBlocks:
        """Those of the prompts in this order."""
        starts, stops = (np.frombuffer(each, dtype=np.int64)[order] for each in (self._starts, self._stops))
        return PromptBlocks(self._flat, starts, stops)


def leading_seen(blocks: Sequence[tuple[int, ...]]) -> Iterator[int]:
    """Of each prompt, the leading blocks that prompts before it had."""
    size = blocks.least_table if isinstance(blocks, PromptBlocks) else None
    if size is None:
        yield from _seen_by_set(blocks)
        return
    seen = bytearray(size)
    for names in blocks:
        count = 0
        for name in names:
            if not seen[name]:
                break
            count += 1
        yield count
        for name in names[count:]:
            seen[name] = 1


def _seen_by_set(blocks: Sequence[tuple[int, ...]]) -> Iterator[int]:
    seen: set[int] = set()
    for names in blocks:
        count = next((at for at, name in enumerate(names) if name not in seen), len(names))
        yield count
        seen.update(names[count:])

"""What moves for a prompt, and where it lies: slabs as runs of blocks, one run for each layer.

    group       0                           1
    layer       0            1              0            1
    block       4  5  6  7 | 4  5  6  7  || 6  7       | 6  7
    range       0  1  2  3 | 4  5  6  7  || 8  9       | 10 11

A long prompt of a deep model has a million slabs, and only as many runs as the model has layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from hybrid_cache.errors import LayoutError
from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow


class RangeKey(NamedTuple):
    """One slab of a transfer. `block` is a block index for attention groups, the token length for state groups."""

    group: int
    layer_index: int
    block: int


@dataclass(frozen=True, slots=True)
class GroupRanges:
    """The ranges of a group, layer by layer, each with the same blocks. `first` is the index of the first of them."""

    group: int
    num_layers: int
    blocks: range  # of a state group: its one length
    first: int

    @property
    def stop(self) -> int:
        return self.first + self.num_layers * len(self.blocks)

    def of_layer(self, layer_index: int, blocks: range) -> range:
        """The ranges of one layer in `blocks`, as far as those move."""
        start = max(blocks.start, self.blocks.start)
        stop = max(start, min(blocks.stop, self.blocks.stop))
        first = self.first + layer_index * len(self.blocks) - self.blocks.start
        return range(first + start, first + stop)

    def in_blocks(self, blocks: range) -> list[range]:
        """The ranges of all layers in `blocks`, as far as those move."""
        if blocks.start <= self.blocks.start and self.blocks.stop <= blocks.stop:
            return [range(self.first, self.stop)]
        found = (self.of_layer(layer_index, blocks) for layer_index in range(self.num_layers))
        return [ranges for ranges in found if ranges]


class TransferRanges(Sequence[RangeKey]):
    """The slabs that move, in order. `groups` has those that any slab moves of."""

    def __init__(self, groups: Sequence[GroupRanges]) -> None:
        self.groups = tuple(group for group in groups if group.stop > group.first)

    def __repr__(self) -> str:
        return f"TransferRanges({len(self)} of {len(self.groups)} groups)"

    def __len__(self) -> int:
        return self.groups[-1].stop if self.groups else 0

    @overload
    def __getitem__(self, index: int) -> RangeKey: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[RangeKey, ...]: ...

    def __getitem__(self, index: int | slice) -> RangeKey | tuple[RangeKey, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(len(self))[index])
        index = range(len(self))[index]
        part = self._part_at(index)
        layer_index, offset = divmod(index - part.first, len(part.blocks))
        return RangeKey(part.group, layer_index, part.blocks[offset])

    def __iter__(self) -> Iterator[RangeKey]:
        for part in self.groups:
            for layer_index in range(part.num_layers):
                for block in part.blocks:
                    yield RangeKey(part.group, layer_index, block)

    def group_of(self, index: int) -> int:
        """The group of a range."""
        return self._part_at(index).group

    def of_group(self, group: int) -> GroupRanges | None:
        """The ranges of a group; None if none of it moves."""
        return next((part for part in self.groups if part.group == group), None)

    def sizes(self, layout: ModelLayout) -> list[tuple[int, int]]:
        """Bytes of the ranges, as runs of equal ones: (bytes, how many)."""
        return [(layout.slab_bytes(part.group), part.stop - part.first) for part in self.groups]

    def _part_at(self, index: int) -> GroupRanges:
        return next(part for part in self.groups if index < part.stop)


def transfer_ranges(layout: ModelLayout, num_tokens: int, have_tokens: int) -> TransferRanges:
    """The slabs that move when KVCache of `num_tokens` goes where full attention of `have_tokens` already is.

    Both sides compute the same ones; the size of each range is `layout.slab_bytes(key.group)`. State and window groups
    travel whole: they hold the end of the sequence, which a shorter prefix lacks.
    """
    if not 0 <= have_tokens <= num_tokens:
        raise ValueError(f"have_tokens {have_tokens} not in [0, {num_tokens}]")
    groups, first = [], 0
    for group, entry in enumerate(layout.groups):
        blocks = _moving_blocks(layout, group, num_tokens, have_tokens)
        groups.append(GroupRanges(group, len(entry.layers), blocks, first))
        first = groups[-1].stop
    return TransferRanges(groups)


def _moving_blocks(layout: ModelLayout, group: int, num_tokens: int, have_tokens: int) -> range:
    match layout.groups[group].spec:
        case FullAttention():
            return range(have_tokens // layout.block_size, -(-num_tokens // layout.block_size))
        case SlidingWindow():
            return layout.window_blocks(group, num_tokens)
        case LinearState():
            return range(num_tokens, num_tokens + 1)


PagesOf = Callable[[GroupRanges], Sequence[Sequence[int]]]
"""The pages of a group's blocks that move, in their order."""


class RangePlaces:
    """Where the ranges of a transfer lie in the arena, many at a time. Threads may share it."""

    def __init__(self, layout: ModelLayout, ranges: TransferRanges, pages_of: PagesOf) -> None:
        """`pages_of` is asked once for each group, when first needed."""
        self._layout = layout
        self._ranges = ranges
        self._pages_of = pages_of
        self._tables: dict[int, NDArray[np.int64]] = {}

    def between(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Arena ranges (start, length) of ranges `[first, stop)`, in order; neighbours in the arena are one."""
        if not 0 <= first <= stop <= len(self._ranges):
            raise IndexError(f"ranges [{first}, {stop}) of {len(self._ranges)}")
        found = [
            self._run(part, layer_index, blocks)
            for part in self._ranges.groups
            for layer_index, blocks in _runs(part, first, stop)
        ]
        if not found:
            return []
        starts = np.concatenate([starts for starts, _ in found])
        stops = np.concatenate([stops for _, stops in found])
        begins = np.flatnonzero(np.concatenate(([True], starts[1:] != stops[:-1])))
        ends = np.concatenate((begins[1:], [len(starts)])) - 1
        return list(zip(starts[begins].tolist(), (stops[ends] - starts[begins]).tolist(), strict=True))

    def _run(self, part: GroupRanges, layer_index: int, blocks: slice) -> tuple[NDArray[Any], NDArray[Any]]:
        """Where the slabs of one layer in some of the group's blocks start and stop, cut by pages."""
        size, page_bytes = self._layout.slab_bytes(part.group), self._layout.page_bytes
        start, stop = layer_index * size, (layer_index + 1) * size
        pages = range(start // page_bytes, -(-stop // page_bytes))  # of a block, those that the layer lies in
        starts = self._table(part)[blocks, pages.start : pages.stop] * page_bytes
        stops = starts + page_bytes
        starts[:, 0] += start - pages.start * page_bytes
        stops[:, -1] -= pages.stop * page_bytes - stop
        return starts.ravel(), stops.ravel()

    def _table(self, part: GroupRanges) -> NDArray[np.int64]:
        """Pages by block and place in it."""
        table = self._tables.get(part.group)
        if table is None:
            table = self._tables[part.group] = self._made_table(part)
        return table

    def _made_table(self, part: GroupRanges) -> NDArray[np.int64]:
        pages, width = self._pages_of(part), self._layout.pages_per_block(part.group)
        if len(pages) != len(part.blocks) or set(map(len, pages)) - {width}:
            raise LayoutError(f"a block of group {part.group} has {width} pages, and {len(part.blocks)} blocks move")
        return np.fromiter(chain.from_iterable(pages), np.int64, len(pages) * width).reshape(len(pages), width)


def _runs(part: GroupRanges, first: int, stop: int) -> Iterator[tuple[int, slice]]:
    """The ranges `[first, stop)` of a group, as far as they are its own: layers, and which of the moving blocks."""
    count = len(part.blocks)
    at, stop = max(first, part.first) - part.first, min(stop, part.stop) - part.first
    while at < stop:
        layer_index, block = divmod(at, count)
        end = min(block + stop - at, count)
        yield layer_index, slice(block, end)
        at += end - block

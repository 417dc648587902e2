"""KVCache of one job in the pages of the shared arena.

A slab (one layer of one block) is [K of block_size tokens][V of block_size tokens], token-major, raw little-endian
values; a snapshot slab is a layer's states one after the other. `hybrid_cache.layout.layout` says where a slab lies; this
module moves rows:

    rows of a chunk   |  start ............ stop  |
    blocks       |  b0   |   b1   |   b2   |          blocks cut by a chunk: two writes, K part and V part

Whole blocks of a layer are moved together: one write for the K of all of them, one for their V.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np

from engine.agent.block_copies import (
    BlockCopies,
    BlockPages,
    Bytes,
    Index,
    block_pages,
    gather,
    in_batches,
    pieces_of,
    scatter,
)
from engine.errors import PagesInvalid
from hybrid_cache.layout.layout import ByteRange, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow
from transport.control.messages import JobPages

FEW_BLOCKS: Final = 4  # are copied one by one
BATCH_BYTES: Final = 1 << 18  # copied twice, the second time out of a core's own cache
NO_STARTS: Final[Index] = np.empty((0, 0), np.int64)


def _ignore(group: int, layer: int, num_tokens: int) -> None: ...


class ArenaPlace(NamedTuple):
    """Where another process finds the same arena; `file` is its device and inode."""

    path: str
    page_bytes: int
    num_pages: int
    file: tuple[int, int]

    def open(self) -> "MappedArena":
        """Raises OSError, and PagesInvalid where another agent has taken the path."""
        return MappedArena.open(Path(self.path), self.page_bytes, self.num_pages, self.file)


class MappedArena:
    """The page arena, mapped. Engine and agent share its pages."""

    def __init__(self, data: Bytes, page_bytes: int, place: ArenaPlace | None = None) -> None:
        self.data: Final = data
        self.page_bytes: Final = page_bytes
        self.place: Final = place

    @classmethod
    def open(cls, path: Path, page_bytes: int, num_pages: int, file: tuple[int, int] | None = None) -> "MappedArena":
        """Maps an arena file: `file`, if that is given. Raises OSError, or PagesInvalid for one that is not it, or too short."""
        size = page_bytes * num_pages
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            found = (status.st_dev, status.st_ino)
            if status.st_size < size:
                raise PagesInvalid(f"{path} has {status.st_size} bytes, {num_pages} pages need {size}")
            if file is not None and file != found:
                raise PagesInvalid(f"{path} is now another agent's")
            # Freed with the last array that looks into it, so a copy under way never touches unmapped memory.
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        return cls(
            np.frombuffer(mapping, dtype=np.uint8), page_bytes, ArenaPlace(str(path), page_bytes, num_pages, found)
        )

    @classmethod
    def in_memory(cls, page_bytes: int, num_pages: int) -> "MappedArena":
        return cls(np.zeros(page_bytes * num_pages, dtype=np.uint8), page_bytes)


@dataclass(frozen=True, slots=True)
class LayerOffset:
    """Where a layer is in the layout."""

    group: int
    layer_index: int


class LayerMap:
    """Layer number to its place among attention groups and among state groups."""

    def __init__(self, layout: ModelLayout) -> None:
        self.attention: dict[int, LayerOffset] = {}
        self.state: dict[int, LayerOffset] = {}
        for number, group in enumerate(layout.groups):
            places = self.state if isinstance(group.spec, LinearState) else self.attention
            places.update({layer: LayerOffset(number, index) for index, layer in enumerate(group.layers)})


class Loan(Protocol):
    """Whether a job's pages are still ours."""

    @property
    def is_over(self) -> bool: ...

    def writing(self) -> AbstractContextManager[object]:
        """Keeps the loan open inside."""
        ...

    def end(self) -> None:
        """When this returns no write is under way. Any thread."""
        ...


class OwnLoan:
    """A loan to one process, and to those that it lets write as well."""

    def __init__(self) -> None:
        self._is_over = False
        self._writing = threading.Lock()
        self._withdraw: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        return self._is_over

    def writing(self) -> AbstractContextManager[object]:
        return self._writing

    def share(self, withdraw: Callable[[], None]) -> None:
        """`withdraw` is called at the end, and returns once others do not write any more."""
        with self._writing:
            self._withdraw.append(withdraw)
            is_over = self._is_over
        if is_over:
            withdraw()

    def end(self) -> None:
        with self._writing:
            self._is_over = True
            withdraw = list(self._withdraw)
        for each in withdraw:
            each()


@dataclass(frozen=True, slots=True)
class _BatchedBlocks:
    """Tokens [start, stop) of whole blocks, where their pages begin, and the ranges of tokens beside them."""

    start: int
    stop: int
    rest: tuple[tuple[int, int], ...]
    starts: Index


class JobKV:
    """Reads and writes the KVCache of one job, and announces what has been written."""

    def __init__(
        self,
        layout: ModelLayout,
        arena: MappedArena,
        pages: JobPages,
        *,
        on_layer: Callable[[int, int, int], None] = _ignore,
        on_state: Callable[[int, int, int], None] = _ignore,
        loan: Loan | None = None,
    ) -> None:
        self.arena: Final = arena
        self.pages: Final = pages
        self.on_layer: Final = on_layer
        self.on_state: Final = on_state
        self.loan: Final = OwnLoan() if loan is None else loan
        self._layout = layout
        self._map = LayerMap(layout)
        self._block_pages: dict[int, BlockPages] = {}  # by group, when first needed
        self.num_tokens: Final = pages.num_tokens
        self.cached_tokens: Final = pages.cached_tokens
        self.exact: Final = pages.exact  # else what is computed on top of it is for its own request only
        self._check()

    @property
    def revoked(self) -> bool:
        """Whether the pages are no longer ours: from then on nothing is read or written."""
        return self.loan.is_over

    def revoke(self) -> None:
        """Gives the pages up, e.g. before they are freed. When this returns no write is under way. Any thread."""
        self.loan.end()

    def check_ours(self) -> None:
        """Raises PagesInvalid once the pages are given up. Call it after a read, to know that the data can be
        trusted."""
        if self.loan.is_over:
            raise PagesInvalid("the pages are no longer ours")

    @property
    def snapshot_lengths(self) -> tuple[int, ...]:
        """Token lengths at which states must be stored; a prefill has to stop there."""
        lengths = {length for group in self.pages.states for length in group if length > self.cached_tokens}
        return tuple(sorted(lengths))

    def wants_state(self, length: int) -> bool:
        return not self.loan.is_over and any(length in group for group in self.pages.states)

    # Attention

    def write_attention(self, layer: int, start: int, k: Bytes, v: Bytes) -> None:
        """Stores tokens [start, start + len(k)) of `layer`. k: [tokens, k bytes], v: [tokens, v bytes]."""
        place = self._map.attention.get(layer)
        if place is None:
            return
        with self.loan.writing():
            if self.loan.is_over:
                return
            self._write_rows(place, start, k, v)
        self.on_layer(place.group, layer, start + len(k))

    def _write_rows(self, place: LayerOffset, start: int, k: Bytes, v: Bytes) -> None:
        stop = start + len(k)
        batched = self._batched(place.group, start, stop)
        for block, lo, hi in chain(*(self._blocks(place.group, *part) for part in batched.rest)):
            offset = lo - block * self._layout.block_size
            segments = self._segments(place, block)
            _store(self.arena.data, segments, offset * k.shape[1], k[lo - start : hi - start])
            v_part = self._layout.block_size * k.shape[1]
            _store(self.arena.data, segments, v_part + offset * v.shape[1], v[lo - start : hi - start])
        at = slice(batched.start - start, batched.stop - start)
        for copies, rows in self._copies(place, batched, k[at], v[at]):
            gather(rows, copies, self.arena.data)

    def read_attention(self, layer: int, start: int, stop: int) -> tuple[Bytes, Bytes]:
        """K [tokens, k bytes] and V [tokens, v bytes] of tokens [start, stop). Raises PagesInvalid."""
        place = self._map.attention[layer]
        k_bytes, v_bytes = self._row_bytes(place.group)
        k, v = np.empty((stop - start, k_bytes), np.uint8), np.empty((stop - start, v_bytes), np.uint8)
        batched = self._batched(place.group, start, stop)
        for first, end in batched.rest:
            self._read_rows(place, first, end, k[first - start : end - start], v[first - start : end - start])
        at = slice(batched.start - start, batched.stop - start)
        for copies, rows in self._copies(place, batched, k[at], v[at]):
            for some in in_batches([copies], BATCH_BYTES):
                scatter(rows[some.rows[0] : some.rows[-1] + 1], some, self.arena.data)
        return k, v

    def _read_rows(self, place: LayerOffset, start: int, stop: int, k: Bytes, v: Bytes) -> None:
        k_bytes, v_bytes = k.shape[1], v.shape[1]
        expected = start
        for block, lo, hi in self._blocks(place.group, start, stop):
            if lo != expected:
                break
            offset = lo - block * self._layout.block_size
            segments = self._segments(place, block)
            _fetch(self.arena.data, segments, offset * k_bytes, k[lo - start : hi - start])
            v_part = self._layout.block_size * k_bytes
            _fetch(self.arena.data, segments, v_part + offset * v_bytes, v[lo - start : hi - start])
            expected = hi
        if expected != stop:
            raise PagesInvalid(f"token {expected} of group {place.group} is not stored")

    def _batched(self, group: int, start: int, stop: int) -> "_BatchedBlocks":
        """The whole blocks of [start, stop) that one copy moves, if they are many: the first that are stored in a row."""
        size, none = self._layout.block_size, _BatchedBlocks(start, start, ((start, stop),), NO_STARTS)
        first, end = -(-start // size), min(stop // size, len(self.pages.blocks[group]))
        if end - first < FEW_BLOCKS:
            return none
        if group not in self._block_pages:
            self._block_pages[group] = block_pages(self._layout, group, self.pages.blocks[group])
        found = self._block_pages[group]
        changes = np.flatnonzero(np.diff(found.stored[first:end], prepend=False, append=False))
        if not changes.size:
            return none
        first, end = first + int(changes[0]), first + int(changes[1])
        return _BatchedBlocks(
            first * size, end * size, ((start, first * size), (end * size, stop)), found.starts[first:end]
        )

    def _copies(
        self, place: LayerOffset, batched: "_BatchedBlocks", k: Bytes, v: Bytes
    ) -> Iterator[tuple[BlockCopies, Bytes]]:
        """One copy for the K of all blocks, one for their V, each with its rows, as many bytes as a block has of them."""
        size, count = self._layout.block_size, len(batched.starts)
        offset = place.layer_index * self._layout.slab_bytes(place.group)
        for tokens in (k, v):
            row_bytes = size * tokens.shape[1]
            if count and row_bytes:
                pieces = pieces_of(batched.starts, offset, offset + row_bytes, self._layout.page_bytes)
                yield BlockCopies(np.arange(count), pieces), tokens.reshape(count, row_bytes)
            offset += row_bytes

    # Linear states

    def write_state(self, layer: int, length: int, parts: Sequence[Bytes]) -> None:
        """Stores the states of `layer` after `length` tokens, one after the other."""
        place = self._map.state.get(layer)
        if place is None or length not in self.pages.states[place.group]:
            return
        segments = self._layout.segments(place.group, place.layer_index, self.pages.states[place.group][length])
        with self.loan.writing():
            if self.loan.is_over:
                return
            offset = 0
            for part in parts:
                _store(self.arena.data, segments, offset, part)
                offset += part.size
        self.on_state(place.group, layer, length)

    def read_state(self, layer: int, length: int) -> Bytes:
        """The states of `layer` after `length` tokens, one after the other. Raises PagesInvalid."""
        place = self._map.state[layer]
        pages = self.pages.states[place.group].get(length)
        if not pages:
            raise PagesInvalid(f"no snapshot of group {place.group} at {length} tokens")
        state = np.empty(self._layout.slab_bytes(place.group), np.uint8)
        _fetch(self.arena.data, self._layout.segments(place.group, place.layer_index, pages), 0, state)
        return state

    def _blocks(self, group: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(block, lo, hi) for every stored block that [start, stop) touches; [lo, hi) is what it holds of the range."""
        size, blocks = self._layout.block_size, self.pages.blocks[group]
        for block in range(start // size, min(-(-stop // size), len(blocks))):
            if blocks[block]:
                yield block, max(start, block * size), min(stop, (block + 1) * size)

    def _segments(self, place: LayerOffset, block: int) -> tuple[ByteRange, ...]:
        return self._layout.segments(place.group, place.layer_index, self.pages.blocks[place.group][block])

    def _row_bytes(self, group: int) -> tuple[int, int]:
        spec = self._layout.groups[group].spec
        assert isinstance(spec, FullAttention | SlidingWindow)
        return spec.k_bytes_per_token, spec.bytes_per_token - spec.k_bytes_per_token

    def _check(self) -> None:
        """Page lists come from another process: one that does not fit would write over other jobs."""
        groups = len(self._layout.groups)
        if len(self.pages.blocks) != groups or len(self.pages.states) != groups:
            raise PagesInvalid(f"pages of {len(self.pages.blocks)} groups for a layout of {groups}")
        if self.arena.page_bytes != self._layout.page_bytes:
            raise PagesInvalid(f"arena pages of {self.arena.page_bytes} bytes, layout has {self._layout.page_bytes}")
        num_pages = self.arena.data.size // self.arena.page_bytes
        for number in range(groups):
            per_block = self._layout.pages_per_block(number)
            for pages in (*self.pages.blocks[number], *self.pages.states[number].values()):
                if pages and (len(pages) != per_block or min(pages) < 0 or max(pages) >= num_pages):
                    raise PagesInvalid(f"pages {pages} do not fit group {number}")


def _store(arena: Bytes, segments: Sequence[ByteRange], offset: int, rows: Bytes) -> None:
    data = rows.reshape(-1)
    for place, source in _pieces(segments, offset, data.size):
        arena[place] = data[source]


def _fetch(arena: Bytes, segments: Sequence[ByteRange], offset: int, rows: Bytes) -> None:
    data = rows.reshape(-1)  # a view: rows are contiguous
    for place, target in _pieces(segments, offset, data.size):
        data[target] = arena[place]


def _pieces(segments: Sequence[ByteRange], offset: int, length: int) -> Iterator[tuple[slice, slice]]:
    """(arena slice, data slice) pairs for slab bytes [offset, offset + length)."""
    position = 0  # slab offset at which a segment begins
    for segment in segments:
        lo, hi = max(offset, position), min(offset + length, position + segment.length)
        if lo < hi:
            start = segment.start + lo - position
            yield slice(start, start + hi - lo), slice(lo - offset, hi - offset)
        position += segment.length

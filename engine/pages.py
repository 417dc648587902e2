"""KVCache of one job in the pages of the shared arena.

A slab (one layer of one block) is [K of block_size tokens][V of block_size tokens], token-major, raw little-endian
values; a snapshot slab is a layer's states one after the other. `hybrid_cache.layout` says where a slab lies; this
module moves rows:

    rows of a chunk   |  start ............ stop  |
    blocks       |  b0   |   b1   |   b2   |          each touched block: two writes, K part and V part
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.errors import PagesInvalid
from hybrid_cache.layout import ModelLayout, Segment
from hybrid_cache.spec import FullAttention, LinearState, SlidingWindow
from transport.control.messages import JobPages

Bytes = NDArray[np.uint8]


def _ignore(group: int, layer: int, num_tokens: int) -> None: ...


class Arena:
    """The page arena, mapped. Pages are shared with the agent: what is written here is there."""

    def __init__(self, data: Bytes, page_bytes: int) -> None:
        self.data: Final = data
        self.page_bytes: Final = page_bytes

    @classmethod
    def open(cls, path: Path, page_bytes: int, num_pages: int) -> "Arena":
        """Maps an arena file. Raises OSError, or PagesInvalid when the file is shorter than its pages."""
        size = page_bytes * num_pages
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < size:
                raise PagesInvalid(f"{path} has {os.fstat(fd).st_size} bytes, {num_pages} pages need {size}")
            # Freed with the last array that looks into it, so a copy under way never touches unmapped memory.
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        return cls(np.frombuffer(mapping, dtype=np.uint8), page_bytes)

    @classmethod
    def in_memory(cls, page_bytes: int, num_pages: int) -> "Arena":
        return cls(np.zeros(page_bytes * num_pages, dtype=np.uint8), page_bytes)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer is in the layout."""

    group: int
    layer_index: int


class LayerMap:
    """Layer number to its place among attention groups and among state groups."""

    def __init__(self, layout: ModelLayout) -> None:
        self.attention: dict[int, Place] = {}
        self.state: dict[int, Place] = {}
        for number, group in enumerate(layout.groups):
            places = self.state if isinstance(group.spec, LinearState) else self.attention
            places.update({layer: Place(number, index) for index, layer in enumerate(group.layers)})


class JobKV:
    """Reads and writes the KVCache of one job, and announces what has been written."""

    def __init__(
        self,
        layout: ModelLayout,
        arena: Arena,
        pages: JobPages,
        *,
        on_layer: Callable[[int, int, int], None] = _ignore,
        on_state: Callable[[int, int, int], None] = _ignore,
    ) -> None:
        self._layout = layout
        self._arena = arena
        self._pages = pages
        self._map = LayerMap(layout)
        self._on_layer = on_layer
        self._on_state = on_state
        self.num_tokens: Final = pages.num_tokens
        self.cached_tokens: Final = pages.cached_tokens
        self.exact: Final = pages.exact  # else what is computed on top of it is for its own request only
        self._revoked = False
        self._writing = threading.Lock()
        self._check()

    @property
    def revoked(self) -> bool:
        """Whether the pages are no longer ours: from then on nothing is read or written."""
        return self._revoked

    def revoke(self) -> None:
        """Gives the pages up, e.g. before they are freed. When this returns no write is under way. Any thread."""
        with self._writing:
            self._revoked = True

    def check_ours(self) -> None:
        """Raises PagesInvalid once the pages are given up. After a read: whether what was read can be trusted."""
        if self._revoked:
            raise PagesInvalid("the pages are no longer ours")

    @property
    def snapshot_lengths(self) -> tuple[int, ...]:
        """Token lengths at which states must be stored; a prefill has to stop there."""
        lengths = {length for group in self._pages.states for length in group if length > self.cached_tokens}
        return tuple(sorted(lengths))

    def wants_state(self, length: int) -> bool:
        return not self._revoked and any(length in group for group in self._pages.states)

    # Attention

    def write_attention(self, layer: int, start: int, k: Bytes, v: Bytes) -> None:
        """Stores tokens [start, start + len(k)) of `layer`. k: [tokens, k bytes], v: [tokens, v bytes]."""
        place = self._map.attention.get(layer)
        if place is None:
            return
        with self._writing:
            if self._revoked:
                return
            self._write_rows(place, start, k, v)
        self._on_layer(place.group, layer, start + len(k))

    def _write_rows(self, place: Place, start: int, k: Bytes, v: Bytes) -> None:
        for block, lo, hi in self._blocks(place.group, start, start + len(k)):
            offset = lo - block * self._layout.block_size
            segments = self._segments(place, block)
            _store(self._arena.data, segments, offset * k.shape[1], k[lo - start : hi - start])
            v_part = self._layout.block_size * k.shape[1]
            _store(self._arena.data, segments, v_part + offset * v.shape[1], v[lo - start : hi - start])

    def read_attention(self, layer: int, start: int, stop: int) -> tuple[Bytes, Bytes]:
        """K [tokens, k bytes] and V [tokens, v bytes] of tokens [start, stop). Raises PagesInvalid."""
        place = self._map.attention[layer]
        k_bytes, v_bytes = self._row_bytes(place.group)
        k, v = np.empty((stop - start, k_bytes), np.uint8), np.empty((stop - start, v_bytes), np.uint8)
        expected = start
        for block, lo, hi in self._blocks(place.group, start, stop):
            if lo != expected:
                break
            offset = lo - block * self._layout.block_size
            segments = self._segments(place, block)
            _fetch(self._arena.data, segments, offset * k_bytes, k[lo - start : hi - start])
            v_part = self._layout.block_size * k_bytes
            _fetch(self._arena.data, segments, v_part + offset * v_bytes, v[lo - start : hi - start])
            expected = hi
        if expected != stop:
            raise PagesInvalid(f"token {expected} of group {place.group} is not stored")
        return k, v

    # Linear states

    def write_state(self, layer: int, length: int, parts: Sequence[Bytes]) -> None:
        """Stores the states of `layer` after `length` tokens, one after the other."""
        place = self._map.state.get(layer)
        if place is None or length not in self._pages.states[place.group]:
            return
        segments = self._layout.segments(place.group, place.layer_index, self._pages.states[place.group][length])
        with self._writing:
            if self._revoked:
                return
            offset = 0
            for part in parts:
                _store(self._arena.data, segments, offset, part)
                offset += part.size
        self._on_state(place.group, layer, length)

    def read_state(self, layer: int, length: int) -> Bytes:
        """The states of `layer` after `length` tokens, one after the other. Raises PagesInvalid."""
        place = self._map.state[layer]
        pages = self._pages.states[place.group].get(length)
        if not pages:
            raise PagesInvalid(f"no snapshot of group {place.group} at {length} tokens")
        state = np.empty(self._layout.slab_bytes(place.group), np.uint8)
        _fetch(self._arena.data, self._layout.segments(place.group, place.layer_index, pages), 0, state)
        return state

    def _blocks(self, group: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(block, lo, hi) for every stored block that [start, stop) touches; [lo, hi) is what it holds of the range."""
        size, blocks = self._layout.block_size, self._pages.blocks[group]
        for block in range(start // size, min(-(-stop // size), len(blocks))):
            if blocks[block]:
                yield block, max(start, block * size), min(stop, (block + 1) * size)

    def _segments(self, place: Place, block: int) -> tuple[Segment, ...]:
        return self._layout.segments(place.group, place.layer_index, self._pages.blocks[place.group][block])

    def _row_bytes(self, group: int) -> tuple[int, int]:
        spec = self._layout.groups[group].spec
        assert isinstance(spec, FullAttention | SlidingWindow)
        return spec.k_bytes_per_token, spec.bytes_per_token - spec.k_bytes_per_token

    def _check(self) -> None:
        """Page lists come from another process: one that does not fit would write over other jobs."""
        groups = len(self._layout.groups)
        if len(self._pages.blocks) != groups or len(self._pages.states) != groups:
            raise PagesInvalid(f"pages of {len(self._pages.blocks)} groups for a layout of {groups}")
        if self._arena.page_bytes != self._layout.page_bytes:
            raise PagesInvalid(f"arena pages of {self._arena.page_bytes} bytes, layout has {self._layout.page_bytes}")
        num_pages = self._arena.data.size // self._arena.page_bytes
        for number in range(groups):
            per_block = self._layout.pages_per_block(number)
            for pages in (*self._pages.blocks[number], *self._pages.states[number].values()):
                if pages and (len(pages) != per_block or min(pages) < 0 or max(pages) >= num_pages):
                    raise PagesInvalid(f"pages {pages} do not fit group {number}")


def _store(arena: Bytes, segments: Sequence[Segment], offset: int, rows: Bytes) -> None:
    data = rows.reshape(-1)
    for place, source in _pieces(segments, offset, data.size):
        arena[place] = data[source]


def _fetch(arena: Bytes, segments: Sequence[Segment], offset: int, rows: Bytes) -> None:
    data = rows.reshape(-1)  # a view: rows are contiguous
    for place, target in _pieces(segments, offset, data.size):
        data[target] = arena[place]


def _pieces(segments: Sequence[Segment], offset: int, length: int) -> Iterator[tuple[slice, slice]]:
    """(arena slice, data slice) pairs for slab bytes [offset, offset + length)."""
    position = 0  # slab offset at which a segment begins
    for segment in segments:
        lo, hi = max(offset, position), min(offset + length, position + segment.length)
        if lo < hi:
            start = segment.start + lo - position
            yield slice(start, start + hi - lo), slice(lo - offset, hi - offset)
        position += segment.length

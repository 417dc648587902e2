"""The copies of one job between vLLM's blocks and the page arena: planned once for all layers, as arrays.

Layers of one group and one block table have the same blocks on both sides. Those are looked up once; a layer adds
where its part of a block lies in the pages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np

from engine.agent.block_copies import BlockCopies, BlockPages, Index, block_pages, pieces_of
from engine.vllm.layout import NULL_BLOCK, LayerKind, LayerPlace, Table, VllmLayout, block_range, state_block
from hybrid_cache.layout.layout import ModelLayout
from transport.control.messages import JobPages

NO_OFFERS: Final[Mapping[tuple[int, int], int]] = MappingProxyType({})


class PagesIndex:
    """A job's page lists as arrays, made when they are first needed."""

    def __init__(self, layout: ModelLayout, pages: JobPages) -> None:
        self.pages: Final = pages
        self._layout = layout

    @cached_property
    def blocks(self) -> tuple[BlockPages, ...]:
        """By group. Raises LayoutError."""
        groups = range(len(self._layout.groups))
        return tuple(block_pages(self._layout, group, self.pages.blocks[group]) for group in groups)


@dataclass(frozen=True, slots=True)
class _LiveBlocks:
    """Blocks that both sides have, which lie at the same place of a slab: the `slot`th of vLLM's blocks in one of ours."""

    slot: int
    ids: Index
    starts: Index  # of their pages


class CopyPlan:
    """The copies of tokens [start, stop) of one job, on one rank. Not for two threads at once."""

    def __init__(
        self,
        layout: VllmLayout,
        rank: int,
        index: PagesIndex,
        tables: tuple[Table, ...],
        start: int,
        stop: int,
        *,
        offers: Mapping[tuple[int, int], int] = NO_OFFERS,
    ) -> None:
        """`offers`: blocks with a state, by table and length, where the table does not say which."""
        self._layout = layout
        self._rank = rank
        self._index = index
        self._tables = tables
        self._start = start
        self._stop = stop
        self._offers = offers
        self._live: dict[tuple[int, int, int], tuple[_LiveBlocks, ...]] = {}

    def attention(self, place: LayerPlace) -> tuple[BlockCopies, ...]:
        """The copies for the blocks of a layer that the tokens touch, where both sides have the block."""
        layer = place.layer
        key = (place.group, layer.table, layer.block_tokens)
        if key not in self._live:
            self._live[key] = self._live_blocks(place)
        slot_bytes = layer.part_bytes * layer.parts
        return tuple(self._copies(place, live.ids, live.starts, live.slot * slot_bytes) for live in self._live[key])

    def state(self, place: LayerPlace, length: int) -> tuple[BlockCopies, ...]:
        """The copy for a layer's state after `length` tokens, if both sides have it."""
        pages = self._index.pages.states[place.group].get(length)
        table = place.layer.table
        block_id = self._offers.get((table, length)) or state_block(
            self._tables[table], length, place.layer.block_tokens
        )
        if not pages or block_id == NULL_BLOCK:
            return ()
        found = block_pages(self._layout.model, place.group, (pages,))
        return (self._copies(place, np.array([block_id]), found.starts, 0),)

    def of(self, place: LayerPlace) -> tuple[BlockCopies, ...]:
        """The copies of a layer, its state at the end of the tokens if that is what it has."""
        return self.state(place, self._stop) if place.layer.kind is LayerKind.STATE else self.attention(place)

    def _live_blocks(self, place: LayerPlace) -> tuple[_LiveBlocks, ...]:
        size, block_tokens = place.layer.block_tokens, self._layout.model.block_size
        touched = block_range(self._start, min(self._stop, self._index.pages.num_tokens), size)
        table = self._tables[place.layer.table]
        ids = np.array(table[touched.start : touched.stop], np.int64)
        numbers = np.arange(touched.start, touched.start + len(ids))
        found, ours = self._index.blocks[place.group], numbers * size // block_tokens
        is_live = ids != NULL_BLOCK
        is_live[is_live] = found.stored[ours[is_live]]
        slots = numbers % (block_tokens // size)
        return tuple(
            _LiveBlocks(slot, ids[these], found.starts[ours[these]])
            for slot in range(block_tokens // size)
            if (these := is_live & (slots == slot)).any()
        )

    def _copies(self, place: LayerPlace, ids: Index, starts: Index, offset: int) -> BlockCopies:
        model, part = self._layout.model, self._layout.part(place, self._rank)
        offset += place.layer_index * model.slab_bytes(place.group)
        return BlockCopies(ids, pieces_of(starts, offset + part.start, offset + part.stop, model.page_bytes))

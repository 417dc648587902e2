"""vLLM's KV cache in canonical pages: one layout however the model is spread over ranks, and each rank's part of it.

A slab (one layer of one block) holds all KV heads of the layer in order; a rank has some of them, so it reads and writes
one contiguous part. Where there are more ranks than heads, neighbours hold the same head and the first of them writes.

    slab of a layer   | head 0: tokens × (K, V) | head 1 | head 2 | head 3 |
    tensor parallel 2 | <-------- rank 0 --------------> | <--- rank 1 --> |

Where layers differ in their bytes per token vLLM makes all blocks of one size, so those with less have more tokens in each. A
block here is the longest of them, and a slab of the others holds several of theirs, one after the other.

Recurrent states have one part per rank, in the order of ranks. How heads lie inside a part depends on the model, so a
state cut for two ranks cannot be read by one: layouts with states differ by the number of parts.

Of a pipeline every stage has some of the layers, and nothing of the others: which ones is no part of the layout. Ranks are
numbered as vLLM does, those of a stage one after the other.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hybrid_cache.errors import LayoutError
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, KVCacheSpec, LinearState, SlidingWindow
from transport.control.messages import JobPages

NULL_BLOCK: Final = 0  # vLLM's block of nothing: skipped by a window, or a state that is no longer live

Table = Sequence[int]
"""Block ids of one request in one of vLLM's KV cache groups, by block index."""


class LayerKind(Enum):
    """What a layer stores."""

    FULL = "full attention"
    WINDOW = "sliding window"
    STATE = "recurrent state"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayer:
    """One layer of vLLM's KV cache, as one rank has it.

    `block_tokens`: tokens per entry of its block table. `part_bytes`: of a block (or a state) on one rank, padding not
    included. `parts`: how many different ones there are over all ranks. `gap_at`, `gap_bytes`: room for drafts inside of a
    state, which is no part of it.
    """

    name: str
    table: int
    kind: LayerKind
    block_tokens: int
    part_bytes: int
    parts: int
    window: int = 0
    gap_at: int = 0
    gap_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer lies in the canonical layout."""

    layer: CacheLayer
    group: int
    layer_index: int
    number: int

    def blocks(self, start: int, stop: int, block_tokens: int) -> Iterator[tuple[int, int, int]]:
        """vLLM's blocks of an attention layer that tokens [start, stop) touch: (its index, ours of `block_tokens`, where
        it begins in our slab).
        """
        size = self.layer.block_tokens
        for index in block_range(start, stop, size):
            block, offset = divmod(index * size, block_tokens)
            yield index, block, offset // size * self.layer.part_bytes * self.layer.parts


@dataclass(frozen=True, slots=True)
class RankPart:
    """The bytes [start, stop) of every block of vLLM's that one rank holds; of equal parts one rank is the writer."""

    start: int
    stop: int
    writes: bool


@dataclass(frozen=True, slots=True)
class VllmLayout:
    """The canonical layout and the way back to vLLM's layers. `ranks` share each layer, `stages` the layers among them."""

    model: ModelLayout
    places: tuple[LayerPlace, ...]
    ranks: int
    stages: int = 1

    @property
    def workers(self) -> int:
        """Ranks of all stages."""
        return self.ranks * self.stages

    def part(self, place: LayerPlace, rank: int) -> RankPart:
        """What `rank`, of a stage that has the layer, holds of each of its slabs."""
        replicas = self.ranks // place.layer.parts
        index, replica = divmod(rank % self.ranks, replicas)
        start = index * place.layer.part_bytes
        return RankPart(start, start + place.layer.part_bytes, writes=replica == 0)

    def num_writers(self, place: LayerPlace) -> int:
        """How many ranks must have written before a slab of the layer is whole."""
        return place.layer.parts

    def place_of(self, group: int, number: int) -> LayerPlace:
        """The place of a layer that a message names."""
        return next(place for place in self.places if place.group == group and place.number == number)


def vllm_layout(
    layers: Sequence[CacheLayer], *, model: str, dtype: str, block_tokens: int, ranks: int, stages: int = 1
) -> VllmLayout:
    """The canonical layout of a model's cache layers, those of all stages. Raises LayoutError for what pages cannot hold.

    Layers are numbered in the natural order of their names, equal on all nodes however vLLM groups them.
    """
    ordered = sorted(layers, key=lambda layer: _natural(layer.name))
    members: dict[KVCacheSpec, list[int]] = {}
    for number, layer in enumerate(ordered):
        members.setdefault(_spec(layer, block_tokens, ranks), []).append(number)
    kinds = (FullAttention, SlidingWindow, LinearState)
    specs = sorted(members, key=lambda spec: kinds.index(type(spec)))
    groups = tuple(KVCacheGroup(spec, tuple(members[spec])) for spec in specs)
    if any(layer.kind is LayerKind.STATE for layer in ordered):
        model = f"{model}/tp{ranks}"
    sizes = {layer.block_tokens for layer in ordered if layer.kind is not LayerKind.STATE}
    if len(sizes) > 1:  # bytes lie in slabs as vLLM's blocks have them
        model = f"{model}/blocks-of-{'-'.join(map(str, sorted(sizes)))}"
    places = [
        LayerPlace(ordered[number], group, index, number)
        for group, entry in enumerate(groups)
        for index, number in enumerate(entry.layers)
    ]
    layout = ModelLayout(model=model, dtype=dtype, block_size=block_tokens, groups=groups)
    return VllmLayout(layout, tuple(sorted(places, key=lambda place: place.number)), ranks, stages)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key under which layer 10 comes after layer 9."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def _spec(layer: CacheLayer, block_tokens: int, ranks: int) -> KVCacheSpec:
    if layer.parts <= 0 or ranks % layer.parts:
        raise LayoutError(f"{layer.name}: {layer.parts} parts cannot be spread over {ranks} ranks evenly")
    size = layer.part_bytes * layer.parts
    if layer.kind is LayerKind.STATE:
        return LinearState(size)
    if block_tokens % layer.block_tokens:
        raise LayoutError(f"{layer.name}: blocks of {layer.block_tokens} tokens among blocks of {block_tokens}")
    per_token, rest = divmod(size, layer.block_tokens)
    if rest:
        raise LayoutError(f"{layer.name}: {size} bytes per block are not a whole number per token")
    # K and V lie side by side for each token: there is no K part and no V part of a slab, so all of it counts as K.
    if layer.kind is LayerKind.WINDOW:
        return SlidingWindow(window=layer.window, bytes_per_token=per_token, k_bytes_per_token=per_token)
    return FullAttention(bytes_per_token=per_token, k_bytes_per_token=per_token)


def block_range(start: int, stop: int, block_tokens: int) -> range:
    """The blocks that tokens [start, stop) touch."""
    return range(start // block_tokens, -(-stop // block_tokens))


def is_live(table: Table, index: int) -> bool:
    """Whether vLLM has that block."""
    return index < len(table) and table[index] != NULL_BLOCK


def state_block(table: Table, length: int, block_tokens: int) -> int:
    """vLLM's block with the state after `length` tokens, NULL_BLOCK if it is not kept.

    Without prefix caching a state has one block for any length, its `block_tokens` is that large.
    """
    index = (length - 1) // block_tokens
    return table[index] if index < len(table) else NULL_BLOCK


def unloadable(layout: VllmLayout, pages: JobPages, tables: Sequence[Table], start: int, stop: int) -> str:
    """Why tokens [start, stop) cannot be loaded from these pages; empty if they can.

    Every live block that vLLM allocated for them must have its bytes: one without would be served as if it had.
    """
    size = layout.model.block_size
    for place in _one_of_each(layout):
        table = tables[place.layer.table]
        if place.layer.kind is LayerKind.STATE:
            if state_block(table, stop, place.layer.block_tokens) == NULL_BLOCK:
                return f"vLLM has no block for the state of {place.layer.name} after {stop} tokens"
            if not pages.states[place.group].get(stop):
                return f"no state of {place.layer.name} after {stop} tokens is stored"
            continue
        for index, block, _ in place.blocks(start, stop, size):
            live = is_live(table, index)
            if live and not pages.blocks[place.group][block]:
                return f"block {block} of {place.layer.name} is not stored"
            if not live and place.layer.kind is LayerKind.FULL:
                return f"vLLM has no block {index} for {place.layer.name}"
    return ""


def unfilled(
    layout: VllmLayout, pages: JobPages, tables: Sequence[Table], start: int, stop: int
) -> set[tuple[int, int]]:
    """(group, block) of what pages wait for and vLLM no longer has, or not all of: windows that moved on."""
    return {
        (place.group, block)
        for place in _one_of_each(layout)
        if place.layer.kind is LayerKind.WINDOW
        for index, block, _ in place.blocks(start, min(stop, pages.num_tokens), layout.model.block_size)
        if pages.blocks[place.group][block] and not is_live(tables[place.layer.table], index)
    }


def _one_of_each(layout: VllmLayout) -> list[LayerPlace]:
    """The first of all layers that have their blocks in common: those of one group and one block table."""
    found: dict[tuple[int, int, int], LayerPlace] = {}
    for place in layout.places:
        found.setdefault((place.group, place.layer.table, place.layer.block_tokens), place)
    return list(found.values())

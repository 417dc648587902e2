"""The rule by which copies were once made one by one: what a plan must expand to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.vllm.layout import NULL_BLOCK, LayerPlace, RankPart, Table, is_live, state_block
from hybrid_cache.layout.layout import ByteRange, ModelLayout
from transport.control.messages import JobPages


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One rank's part of one slab: vLLM's block, and where the bytes lie in the arena, in order."""

    block_id: int
    segments: tuple[ByteRange, ...]


def attention_copies(
    layout: ModelLayout, place: LayerPlace, part: RankPart, pages: JobPages, table: Table, start: int, stop: int
) -> Iterator[BlockCopy]:
    """The copies for the blocks of a layer that tokens [start, stop) touch, where both sides have the block."""
    stored = pages.blocks[place.group]
    for index, block, offset in place.blocks(start, min(stop, pages.num_tokens), layout.block_size):
        if is_live(table, index) and stored[block]:
            segments = layout.segments(place.group, place.layer_index, stored[block])
            yield BlockCopy(table[index], cut(segments, offset + part.start, offset + part.stop))


def state_copy(
    layout: ModelLayout, place: LayerPlace, part: RankPart, pages: JobPages, table: Table, length: int
) -> BlockCopy | None:
    """The copy for a layer's state after `length` tokens, if both sides have it."""
    stored = pages.states[place.group].get(length)
    block_id = state_block(table, length, place.layer.block_tokens)
    if not stored or block_id == NULL_BLOCK:
        return None
    return BlockCopy(block_id, cut(layout.segments(place.group, place.layer_index, stored), part.start, part.stop))


def cut(segments: Sequence[ByteRange], start: int, stop: int) -> tuple[ByteRange, ...]:
    """The arena ranges of slab bytes [start, stop)."""
    pieces, position = [], 0  # position: slab offset at which a segment begins
    for segment in segments:
        lo, hi = max(start, position), min(stop, position + segment.length)
        if lo < hi:
            pieces.append(ByteRange(segment.start + lo - position, hi - lo))
        position += segment.length
    return tuple(pieces)

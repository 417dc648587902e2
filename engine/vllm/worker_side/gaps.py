"""Blocks with room inside that is no part of them: recurrent states of a server with drafts.

    block    | columns of a convolution | room for drafts | what else a state consists of | padding
    part     | columns of a convolution | what else a state consists of |

What lies in the room is neither saved nor loaded. vLLM reads it only behind drafts that it has verified, and has written it then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import torch

from engine.agent.block_copies import BlockCopies, CopyPiece, check_copies
from engine.errors import PagesInvalid
from engine.vllm.layout import CacheLayer
from engine.vllm.worker_side.blocks import Blocks, OnBuffered, blocks_of
from engine.vllm.worker_side.device import ArenaMemory, CopyDevice, CopyStream, Mark


def blocks_around(layer: CacheLayer, tensor: torch.Tensor, device: CopyDevice, on_buffered: OnBuffered) -> Blocks:
    """The blocks of a layer whose states have a gap. Raises PagesInvalid when its tensor has others."""
    whole = tensor.view(torch.uint8).flatten(1)
    size = layer.part_bytes + layer.gap_bytes
    if whole.shape[1] != size:
        raise PagesInvalid(f"{layer.name}: blocks of {whole.shape[1]} bytes, not of {size}")
    ends = (0, layer.gap_at), (layer.gap_at + layer.gap_bytes, size)
    parts = [
        blocks_of(layer.name, whole[:, start:stop], stop - start, device, on_buffered)
        for start, stop in ends
        if stop > start
    ]
    return BlocksAround(parts, len(whole), layer.gap_at)


class BlocksAround:
    """Two parts of each block, seen as one: copies are cut where the second begins."""

    def __init__(self, parts: Sequence[Blocks], num_blocks: int, gap_at: int) -> None:
        self._parts: Final = tuple(parts)
        self._num_blocks = num_blocks
        self._gap_at = gap_at

    def read(self, copies: Sequence[BlockCopies], arena: ArenaMemory, stream: CopyStream) -> Mark:
        check_copies(copies, self._num_blocks, arena.data)
        marks = [part.read(some, arena, stream) for part, some in self._shared_out(copies)]
        return marks[-1]

    def write(self, copies: Sequence[BlockCopies], arena: ArenaMemory, stream: CopyStream) -> Mark:
        check_copies(copies, self._num_blocks, arena.data)
        marks = [part.write(some, arena, stream) for part, some in self._shared_out(copies)]
        return marks[-1]

    def _shared_out(self, copies: Sequence[BlockCopies]) -> Iterable[tuple[Blocks, list[BlockCopies]]]:
        """Streams keep their order: the mark of the last part is one of all."""
        windows = (0, self._gap_at), (self._gap_at, None)
        return [
            (part, [replace(each, pieces=_within(each.pieces, *window)) for each in copies])
            for part, window in zip(self._parts, windows, strict=False)
        ]


def _within(pieces: Iterable[CopyPiece], start: int, stop: int | None) -> tuple[CopyPiece, ...]:
    """The parts of pieces between two bytes of a block, counted from the first of them."""
    found = []
    for piece in pieces:
        low = max(piece.offset, start)
        high = piece.offset + piece.length if stop is None else min(piece.offset + piece.length, stop)
        if low < high:
            found.append(CopyPiece(low - start, high - low, piece.starts + (low - piece.offset)))
    return tuple(found)

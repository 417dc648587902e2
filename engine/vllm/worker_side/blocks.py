"""vLLM's KV tensors as blocks of bytes, and the way of those bytes into and out of the page arena.

A tensor is [blocks, heads, tokens, K and V] whatever its strides; a block of it, head after head, is one rank's part of a slab.
A backend that cuts blocks into smaller ones has [pieces of blocks, heads, fewer tokens, K and V]: the pieces of a block
follow each other, and are seen here as one block, so that both kinds pair.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
import torch

from engine.agent.block_copies import BlockCopies, Bytes, Index, check_copies, gather, in_batches, scatter, windows
from engine.errors import PagesInvalid
from engine.vllm.worker_side.device import (
    OVER,
    ArenaMemory,
    CopyDevice,
    CopyStream,
    HostDevice,
    Mark,
    Moves,
    address_of,
    joined,
)

BATCH_BYTES: Final = 16 << 20  # a device has room for what vLLM has planned, and little else
HOST_BATCH_BYTES: Final = 1 << 18  # copied twice, the second time out of a core's own cache
MAX_RUNS: Final = 256  # of a block; shorter ones are put together by the device first
SHORT_RUNS: Final = "short_runs"  # why copies of such blocks do not go straight

OnBuffered = Callable[[str, int], None]
"""Hears why so many bytes are copied through a buffer in between."""


class Blocks(Protocol):
    """One layer's tensor. Copies of blocks are given to a stream, or are over at once. Any thread, one at a time."""

    def read(self, copies: Sequence[BlockCopies], arena: ArenaMemory, stream: CopyStream) -> Mark:
        """Copies blocks into the arena. Raises IndexError for what is not there, and copies nothing then."""

    def write(self, copies: Sequence[BlockCopies], arena: ArenaMemory, stream: CopyStream) -> Mark:
        """Copies arena ranges into blocks. Raises IndexError as `read` does."""


def _unheard(reason: str, num_bytes: int) -> None: ...


def blocks_of(
    name: str, tensor: torch.Tensor, part_bytes: int, device: CopyDevice, on_buffered: OnBuffered = _unheard
) -> Blocks:
    """The blocks of a layer's tensor. Raises PagesInvalid when its blocks are not of `part_bytes` bytes."""
    size = tensor[0].numel() * tensor.element_size()
    pieces, rest = divmod(part_bytes, size)
    if rest or not pieces or tensor.shape[0] % pieces:
        raise PagesInvalid(f"{name}: {tensor.shape[0]} blocks of {size} bytes, not of {part_bytes}")
    whole = whole_blocks(tensor, pieces)
    if isinstance(device, HostDevice) and whole[0].is_contiguous():
        return HostBlocks(whole, part_bytes)
    return DeviceBlocks(whole, device, on_buffered)


def whole_blocks(tensor: torch.Tensor, pieces: int) -> torch.Tensor:
    """Pieces of a block as one block: [blocks, heads, pieces, tokens of a piece, K and V]."""
    return tensor if pieces == 1 else tensor.view(-1, pieces, *tensor.shape[1:]).transpose(1, 2)


class HostBlocks:
    """Blocks in host memory, each contiguous: a copy is one memcpy per arena range."""

    def __init__(self, tensor: torch.Tensor, part_bytes: int) -> None:
        # The view keeps the memory alive, which several tensors may share; between two blocks may be padding.
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
        first = storage[tensor.storage_offset() * tensor.element_size() :]
        strides = (tensor.stride(0) * tensor.element_size(), 1)
        self._rows: Final = np.lib.stride_tricks.as_strided(first, (tensor.shape[0], part_bytes), strides)

    def read(self, copies: Sequence[BlockCopies], arena: ArenaMemory, stream: CopyStream) -> Mark:
        check_copies(copies, len(self._rows), arena.data)
        for some in in_batches(copies, HOST_BATCH_BYTES):
            for piece in some.pieces:
                rows = self._rows[:, piece.offset : piece.offset + piece.length]
                windows(arena.data, piece.length)[_index(piece.starts)] = rows[_index(some.rows)]
        return OVER

    def write(self, copies: Sequence[BlockCopies], arena: ArenaMemory, stream: CopyStream) -> Mark:
        check_copies(copies, len(self._rows), arena.data)
        for some in in_batches(copies, HOST_BATCH_BYTES):
            for piece in some.pieces:
                rows = self._rows[:, piece.offset : piece.offset + piece.length]
                rows[_index(some.rows)] = windows(arena.data, piece.length)[_index(piece.starts)]
        return OVER


def _index(numbers: Index) -> Index | int:
    """One row alone is taken as a view, without a copy in between."""
    return numbers if len(numbers) > 1 else int(numbers[0])


class DeviceBlocks:
    """Blocks of any strides, on any device. Where the arena is registered with it copies go straight there, one call for
    all blocks of a layer. Else they go through a buffer in host memory, for which a read waits.
    """

    def __init__(self, tensor: torch.Tensor, device: CopyDevice, on_buffered: OnBuffered = _unheard) -> None:
        self._on_buffered = on_buffered
        self._tensor = tensor.view(torch.uint8)  # a block's innermost dimension is never strided
        self._shape = tuple(self._tensor.shape[1:])
        self._run_bytes, self._runs = runs_of(self._tensor)
        self._device = device

    def read(self, copies: Sequence[BlockCopies], arena: ArenaMemory, stream: CopyStream) -> Mark:
        check_copies(copies, len(self._tensor), arena.data)
        if self._goes_straight(copies, arena):
            stream.copy(joined([Moves(blocks, pages, size) for blocks, pages, size in self._pairs(copies, arena.data)]))
            return stream.mark()
        for some in in_batches(copies, BATCH_BYTES):
            self._read(some, arena.data, stream)
        return OVER

    def write(self, copies: Sequence[BlockCopies], arena: ArenaMemory, stream: CopyStream) -> Mark:
        check_copies(copies, len(self._tensor), arena.data)
        if self._goes_straight(copies, arena):
            stream.copy(joined([Moves(pages, blocks, size) for blocks, pages, size in self._pairs(copies, arena.data)]))
        else:
            for some in in_batches(copies, BATCH_BYTES):
                self._write(some, arena.data, stream)
        return stream.mark()

    def _goes_straight(self, copies: Sequence[BlockCopies], arena: ArenaMemory) -> bool:
        """Whether copies need no buffer; where they do, this counts their bytes by the reason."""
        num_bytes = sum(each.num_bytes for each in copies)
        reason = arena.unregistered_because or (SHORT_RUNS if len(self._runs) > MAX_RUNS else "")
        if reason and num_bytes:
            self._on_buffered(reason, num_bytes)
        return not reason and num_bytes > 0

    def _pairs(self, copies: Sequence[BlockCopies], arena: Bytes) -> list[tuple[Index, Index, Index]]:
        """(addresses in blocks, addresses in the arena, bytes) of what is contiguous on both sides."""
        found, arena_at = [], address_of(arena)
        for each in copies:
            blocks = self._tensor.data_ptr() + each.rows * self._tensor.stride(0)
            for piece in each.pieces:
                for number, offset in enumerate(self._runs):
                    begins = number * self._run_bytes
                    lo = max(piece.offset, begins)
                    size = min(piece.offset + piece.length, begins + self._run_bytes) - lo
                    if size > 0:
                        pages = arena_at + piece.starts + (lo - piece.offset)
                        found.append((blocks + (offset + lo - begins), pages, np.full(len(each.rows), size, np.int64)))
        return found

    # Through a buffer

    def _read(self, copies: BlockCopies, arena: Bytes, stream: CopyStream) -> None:
        host = self._device.host_rows(len(copies.rows), copies.row_bytes)
        stream.run(lambda: host.copy_(self._rows(copies), non_blocking=True))
        stream.mark().wait()
        gather(host.numpy(), copies, arena)

    def _rows(self, copies: BlockCopies) -> torch.Tensor:
        return self._tensor[self._ids(copies)].contiguous().reshape(len(copies.rows), -1)

    def _ids(self, copies: BlockCopies) -> torch.Tensor:
        return torch.from_numpy(copies.rows).to(self._tensor.device)

    def _write(self, copies: BlockCopies, arena: Bytes, stream: CopyStream) -> None:
        host = self._device.host_rows(len(copies.rows), copies.row_bytes)
        scatter(host.numpy(), copies, arena)
        stream.run(lambda: self._put(copies, host))

    def _put(self, copies: BlockCopies, host: torch.Tensor) -> None:
        rows = host.to(self._tensor.device, non_blocking=True)
        self._tensor[self._ids(copies)] = rows.reshape(len(copies.rows), *self._shape)


def runs_of(tensor: torch.Tensor) -> tuple[int, list[int]]:
    """(bytes, where each begins) of the contiguous runs of a block, in the order of a slab. `tensor`: of bytes."""
    shape, strides = tensor.shape[1:], tensor.stride()[1:]
    run, outer = 1, len(shape)
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == run):
        outer -= 1
        run *= shape[outer]
    starts = np.zeros(1, np.int64)
    for size, stride in zip(shape[:outer], strides[:outer], strict=True):
        starts = (starts[:, None] + np.arange(size) * stride).reshape(-1)
    return run, starts.tolist()

"""vLLM's KV tensors as blocks of bytes, and the way of those bytes into and out of the page arena.

A tensor is [blocks, heads, tokens, K and V] whatever its strides; a block of it, head after head, is one rank's part of a slab.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from engine.agent.block_copies import BlockCopies, Bytes, Index, check_copies, gather, in_batches, scatter, windows
from engine.errors import PagesInvalid

BATCH_BYTES: Final = 16 << 20  # a device has room for what vLLM has planned, and little else
HOST_BATCH_BYTES: Final = 1 << 18  # copied twice, the second time out of a core's own cache


class Blocks(Protocol):
    """One layer's tensor."""

    def mark(self) -> Any:
        """A point in what the model's thread has launched so far; `read` starts after it. Model's thread."""

    def read(self, copies: Sequence[BlockCopies], arena: Bytes, mark: Any) -> int:
        """Copies blocks into the arena; returns bytes. Raises IndexError for what is not there, and copies nothing then. Any
        thread."""

    def write(self, copies: Sequence[BlockCopies], arena: Bytes) -> int:
        """Copies arena ranges into blocks; returns bytes. Raises IndexError as `read` does. Any thread."""


def blocks_of(name: str, tensor: torch.Tensor, part_bytes: int) -> Blocks:
    """The blocks of a layer's tensor. Raises PagesInvalid when its blocks are not of `part_bytes` bytes."""
    size = tensor[0].numel() * tensor.element_size()
    if size != part_bytes:
        raise PagesInvalid(
            f"{name}: blocks of {size} bytes, not {part_bytes}; an attention backend that cuts vLLM's blocks into smaller "
            "ones cannot be used: choose another (--attention-backend) or its --block-size"
        )
    if tensor.device.type == "cpu" and tensor[0].is_contiguous():
        return HostBlocks(tensor, part_bytes)
    return StridedBlocks(tensor, None if tensor.device.type == "cpu" else torch.Stream(tensor.device))


class HostBlocks:
    """Blocks in host memory, each contiguous: a copy is one memcpy per arena range."""

    def __init__(self, tensor: torch.Tensor, part_bytes: int) -> None:
        # The view keeps the memory alive, which several tensors may share; between two blocks may be padding.
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
        first = storage[tensor.storage_offset() * tensor.element_size() :]
        strides = (tensor.stride(0) * tensor.element_size(), 1)
        self._rows: Final = np.lib.stride_tricks.as_strided(first, (tensor.shape[0], part_bytes), strides)

    def mark(self) -> None:
        """Host tensors are final when the operator returns."""

    def read(self, copies: Sequence[BlockCopies], arena: Bytes, mark: Any) -> int:
        check_copies(copies, len(self._rows), arena)
        for some in in_batches(copies, HOST_BATCH_BYTES):
            for piece in some.pieces:
                rows = self._rows[:, piece.offset : piece.offset + piece.length]
                windows(arena, piece.length)[_index(piece.starts)] = rows[_index(some.rows)]
        return sum(each.num_bytes for each in copies)

    def write(self, copies: Sequence[BlockCopies], arena: Bytes) -> int:
        check_copies(copies, len(self._rows), arena)
        for some in in_batches(copies, HOST_BATCH_BYTES):
            for piece in some.pieces:
                rows = self._rows[:, piece.offset : piece.offset + piece.length]
                rows[_index(some.rows)] = windows(arena, piece.length)[_index(piece.starts)]
        return sum(each.num_bytes for each in copies)


def _index(numbers: Index) -> Index | int:
    """One row alone is taken as a view, without a copy in between."""
    return numbers if len(numbers) > 1 else int(numbers[0])


class StridedBlocks:
    """Blocks of any strides, on any device. On an accelerator the copies run on a stream of their own, through host
    memory that CUDA has pinned. PyTorch keeps that memory for the next ones.
    """

    def __init__(self, tensor: torch.Tensor, stream: Any = None) -> None:
        """`stream`: of the tensor's device, None in host memory."""
        self._tensor = tensor
        self._shape = tuple(tensor.shape[1:])
        self._stream = stream
        self._is_pinned = tensor.device.type == "cuda"

    def mark(self) -> Any:
        return torch.accelerator.current_stream().record_event() if self._stream is not None else None

    def read(self, copies: Sequence[BlockCopies], arena: Bytes, mark: Any) -> int:
        check_copies(copies, len(self._tensor), arena)
        for some in in_batches(copies, BATCH_BYTES):
            gather(self._read(some, mark).numpy(), some, arena)
        return sum(each.num_bytes for each in copies)

    def _read(self, copies: BlockCopies, mark: Any) -> torch.Tensor:
        if self._stream is None:
            return self._rows(copies)
        self._stream.wait_event(mark)
        with self._stream:
            rows = self._rows(copies)
            host = self._host(*rows.shape)
            host.copy_(rows, non_blocking=True)
        self._stream.synchronize()
        return host

    def _host(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._is_pinned)

    def _rows(self, copies: BlockCopies) -> torch.Tensor:
        return self._tensor[self._ids(copies)].contiguous().reshape(len(copies.rows), -1).view(torch.uint8)

    def _ids(self, copies: BlockCopies) -> torch.Tensor:
        return torch.from_numpy(copies.rows).to(self._tensor.device)

    def write(self, copies: Sequence[BlockCopies], arena: Bytes) -> int:
        check_copies(copies, len(self._tensor), arena)
        for some in in_batches(copies, BATCH_BYTES):
            self._write(some, arena)
        return sum(each.num_bytes for each in copies)

    def _write(self, copies: BlockCopies, arena: Bytes) -> None:
        host = self._host(len(copies.rows), copies.row_bytes)
        scatter(host.numpy(), copies, arena)
        rows = host.view(self._tensor.dtype).reshape(len(copies.rows), *self._shape)
        if self._stream is None:
            self._tensor[self._ids(copies)] = rows
        else:
            with self._stream:
                self._tensor[self._ids(copies)] = rows.to(self._tensor.device, non_blocking=True)
            self._stream.synchronize()

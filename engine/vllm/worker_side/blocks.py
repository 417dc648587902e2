"""vLLM's KV tensors as blocks of bytes, and the way of those bytes into and out of the page arena.

A tensor is [blocks, heads, tokens, K and V] whatever its strides; a block of it, head after head, is one rank's part of a slab.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from engine.agent.job_pages import Bytes
from engine.errors import PagesInvalid
from engine.vllm.layout import BlockCopy

BATCH_BYTES: Final = 16 << 20


class Blocks(Protocol):
    """One layer's tensor."""

    def mark(self) -> Any:
        """A point in what the model's thread has launched so far; `read` starts after it. Model's thread."""

    def read(self, copies: Sequence[BlockCopy], arena: Bytes, mark: Any) -> int:
        """Copies blocks into the arena; returns bytes. Any thread."""

    def write(self, copies: Sequence[BlockCopy], arena: Bytes) -> int:
        """Copies arena ranges into blocks; returns bytes. Any thread."""


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

    def read(self, copies: Sequence[BlockCopy], arena: Bytes, mark: Any) -> int:
        return sum(_gather(self._rows[copy.block_id], copy, arena) for copy in copies)

    def write(self, copies: Sequence[BlockCopy], arena: Bytes) -> int:
        return sum(_scatter(self._rows[copy.block_id], copy, arena) for copy in copies)


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

    def read(self, copies: Sequence[BlockCopy], arena: Bytes, mark: Any) -> int:
        return sum(self._read(some, arena, mark) for some in _batches(copies))

    def _read(self, copies: Sequence[BlockCopy], arena: Bytes, mark: Any) -> int:
        if self._stream is None:
            host = self._rows(copies)
        else:
            self._stream.wait_event(mark)
            with self._stream:
                rows = self._rows(copies)
                host = self._host(*rows.shape)
                host.copy_(rows, non_blocking=True)
            self._stream.synchronize()
        return sum(_gather(row, copy, arena) for row, copy in zip(host.numpy(), copies, strict=True))

    def _host(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._is_pinned)

    def _rows(self, copies: Sequence[BlockCopy]) -> torch.Tensor:
        ids = torch.tensor([copy.block_id for copy in copies], device=self._tensor.device)
        return self._tensor[ids].contiguous().reshape(len(copies), -1).view(torch.uint8)

    def write(self, copies: Sequence[BlockCopy], arena: Bytes) -> int:
        return sum(self._write(some, arena) for some in _batches(copies))

    def _write(self, copies: Sequence[BlockCopy], arena: Bytes) -> int:
        part_bytes = sum(segment.length for segment in copies[0].segments)
        host = self._host(len(copies), part_bytes)
        size = sum(_scatter(row, copy, arena) for row, copy in zip(host.numpy(), copies, strict=True))
        rows = host.view(self._tensor.dtype).reshape(len(copies), *self._shape)
        ids = torch.tensor([copy.block_id for copy in copies], device=self._tensor.device)
        if self._stream is None:
            self._tensor[ids] = rows
        else:
            with self._stream:
                self._tensor[ids] = rows.to(self._tensor.device, non_blocking=True)
            self._stream.synchronize()
        return size


def _batches(copies: Sequence[BlockCopy]) -> Iterator[Sequence[BlockCopy]]:
    """Of a bounded size: a device has room for what vLLM has planned, and little else."""
    at = 0
    while at < len(copies):
        most = max(1, BATCH_BYTES // sum(segment.length for segment in copies[at].segments))
        yield copies[at : at + most]
        at += most


def _gather(row: Bytes, copy: BlockCopy, arena: Bytes) -> int:
    position = 0
    for start, length in copy.segments:
        arena[start : start + length] = row[position : position + length]
        position += length
    return position


def _scatter(row: Bytes, copy: BlockCopy, arena: Bytes) -> int:
    position = 0
    for start, length in copy.segments:
        row[position : position + length] = arena[start : start + length]
        position += length
    return position

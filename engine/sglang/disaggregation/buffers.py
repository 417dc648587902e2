"""Pages of a pool that is known by its pointers only: SGLang tells its transfer backends no more.

Memory of a GPU becomes a tensor by the CUDA array interface (version 3), which torch reads without a copy. SGLang's own streams
are not known here. So the device is waited for once before the pages of a chunk are read, and once after they were written.
"""

import ctypes
from typing import Any, Final

import numpy as np
import torch

from engine.agent.block_copies import Bytes
from engine.errors import PagesInvalid
from engine.sglang.disaggregation.pools import Buffer, PageIndex, Pools


class PageBuffers:
    """All buffers of a pool. The caller makes sure that it owns the pages while they are read or written."""

    def __init__(self, pools: Pools, gpu: int | None = None) -> None:
        self._gpu: Final = gpu if pools.device == "cuda" else None
        self._page_tokens: Final = pools.page_tokens
        self._rows = [_tensor(buffer, self._gpu) for buffer in pools.buffers]
        self._num_pages: Final = min(map(len, self._rows), default=0)

    def __len__(self) -> int:
        return len(self._rows)

    def select(self, pages: PageIndex) -> torch.Tensor:
        """These pages as an index on the device, for all buffers. Raises PagesInvalid for pages that are not there."""
        # torch would take a negative page for one from the end.
        index = torch.from_numpy(pages.astype(np.int64))
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self._num_pages:
            raise PagesInvalid(f"pages {int(index.min())} to {int(index.max())} of {self._num_pages}")
        return index if self._gpu is None else index.to(f"cuda:{self._gpu}")

    def read(self, buffer: int, index: torch.Tensor) -> Bytes:
        """A copy of these pages: [tokens, bytes of a token]. What was submitted before may still change them: see `wait`."""
        tokens: Bytes = self._rows[buffer][index].cpu().numpy().reshape(len(index) * self._page_tokens, -1)
        return tokens

    def write(self, buffer: int, index: torch.Tensor, tokens: Bytes) -> None:
        """Fills these pages, or submits that to the device: they are filled after `wait`."""
        rows = self._rows[buffer]
        rows[index] = torch.from_numpy(tokens.reshape(len(index), -1)).to(rows.device)

    def wait(self) -> None:
        """Returns when all that was submitted to the device has happened, whatever its stream."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)


def read_item(buffer: Buffer, item: int) -> bytes:
    """One item of a buffer in the host's memory. Raises PagesInvalid for one that is not there."""
    return ctypes.string_at(_item_pointer(buffer, item), buffer.item_bytes)


def write_item(buffer: Buffer, item: int, data: bytes) -> None:
    """Fills one item of a buffer in the host's memory. Raises PagesInvalid unless it is there and of that size."""
    if len(data) != buffer.item_bytes:
        raise PagesInvalid(f"{len(data)} bytes for an item of {buffer.item_bytes}")
    ctypes.memmove(_item_pointer(buffer, item), data, len(data))


def _item_pointer(buffer: Buffer, item: int) -> int:
    if not 0 <= item < buffer.num_bytes // buffer.item_bytes:
        raise PagesInvalid(f"item {item} of {buffer.num_bytes // buffer.item_bytes}")
    return buffer.pointer + item * buffer.item_bytes


def _tensor(buffer: Buffer, gpu: int | None) -> torch.Tensor:
    """The buffer as bytes [pages, bytes of a page], the same memory."""
    shape = (buffer.num_bytes // buffer.item_bytes, buffer.item_bytes)
    if gpu is not None:
        return torch.as_tensor(_OnGpu(buffer.pointer, shape), device=f"cuda:{gpu}")
    memory = (ctypes.c_uint8 * buffer.num_bytes).from_address(buffer.pointer)
    return torch.from_numpy(np.ctypeslib.as_array(memory).reshape(shape))


class _OnGpu:
    def __init__(self, pointer: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (pointer, False), "shape": shape, "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip

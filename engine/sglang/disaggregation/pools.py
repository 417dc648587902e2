"""Maps SGLang's pools of pages to a layout of ours, and refuses servers that cannot hand over page by page.

A pool is a list of buffers, each the K, V or latent of one layer. All pages of a buffer have equal sizes. What a page
means inside is SGLang's own affair: pages travel whole. So each buffer is a layer of ours that has a K and no V:

    SGLang   | K of layer 0: page 0, page 1, ... | ... | V of layer 0: page 0, ... | ...
    slab     | one page of one buffer |                  one for each buffer, as block of page_tokens tokens

Buffers whose pages have equal sizes are a group.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention

PageIndex = NDArray[np.int32]
"""Numbers of pages, in the order of their tokens."""

DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One buffer of a pool: where it lies in its device's memory, and how many bytes it and one of its items have."""

    pointer: int
    num_bytes: int
    item_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The memory that a server hands over. `states` are the kinds of state it holds beside pages of attention; `ranks`
    are named counts."""

    buffers: tuple[Buffer, ...]
    page_tokens: int
    dtype: str
    device: str
    states: tuple[str, ...] = ()
    ranks: tuple[tuple[str, int], ...] = ()
    features: tuple[str, ...] = ()  # switched on, and not supported


def refusal_of(pools: Pools) -> str | None:
    """The reason why a server's KVCache cannot be handed over; None if it can."""
    for name, count in pools.ranks:
        if count > 1:
            return f"{count} {name} ranks: one agent serves one rank"
    if pools.states:
        return f"state of kind {', '.join(pools.states)} beside pages of attention: no hybrids and no windows so far"
    if pools.features:
        return f"{', '.join(pools.features)} is not supported"
    if pools.device not in DEVICES:
        return f"device {pools.device}: memory of {' and '.join(DEVICES)} can be read, no other"
    if not pools.buffers:
        return "the pool has no buffers of whole pages"
    for number, buffer in enumerate(pools.buffers):
        if buffer.item_bytes <= 0 or buffer.item_bytes % pools.page_tokens:
            return f"buffer {number}: pages of {buffer.item_bytes} bytes are not {pools.page_tokens} equal tokens"
        if buffer.num_bytes % buffer.item_bytes:
            return f"buffer {number}: {buffer.num_bytes} bytes are no whole pages of {buffer.item_bytes}"
    return None


def layout_of(identity: str, pools: Pools) -> ModelLayout:
    """The layout of the transferred pages; `identity` names model and settings. For pools that are not refused."""
    by_size: dict[int, list[int]] = {}
    for number, buffer in enumerate(pools.buffers):
        by_size.setdefault(buffer.item_bytes // pools.page_tokens, []).append(number)
    groups = tuple(
        KVCacheGroup(FullAttention(bytes_per_token=size, k_bytes_per_token=size), tuple(layers))
        for size, layers in by_size.items()
    )
    return ModelLayout(model=f"{identity}/sglang-pages", dtype=pools.dtype, block_size=pools.page_tokens, groups=groups)

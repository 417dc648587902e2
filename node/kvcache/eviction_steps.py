"""Evicts in steps, between which the event loop goes on, what a reservation of many blocks would evict at once."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.errors import UnchainedHashes
from hybrid_cache.layout.layout import ModelLayout
from node.errors import NodeRefusal

EVICT_BLOCKS: Final = 1024  # in one go: less than a millisecond, a few under "wa"


def attention_pages(layout: ModelLayout, num_tokens: int) -> int:
    """Pages that the full attention of so many tokens takes."""
    return -(-num_tokens // layout.block_size) * _block_pages(layout)


def pages_to_fit(cache: PrefixCache, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose) -> int:
    """Pages that must be free or evictable for a reservation, those of its states and windows included."""
    layout = cache.layout
    blocks = dict.fromkeys(layout.state_groups, 1)
    blocks |= {group: len(layout.window_blocks(group, num_tokens)) for group in layout.window_groups}
    end_pages = sum(count * layout.pages_per_block(group) for group, count in blocks.items())
    return cache.attention_pages_wanted(hashes, num_tokens, purpose) + end_pages


def takes_steps(cache: PrefixCache, num_tokens: int) -> bool:
    """Whether a reservation of so many tokens may have to evict more than one step."""
    step = EVICT_BLOCKS * _block_pages(cache.layout)
    return 0 < step < attention_pages(cache.layout, num_tokens) - cache.free_pages


async def evict_in_steps(
    cache: PrefixCache,
    name: str,
    hashes: Sequence[bytes],
    num_tokens: int,
    purpose: Purpose,
    now: Callable[[], float],
    on_step: Callable[[], None],
) -> None:
    """Evicts nothing that the reservation can use: `name` holds that meanwhile. What is missing in the end, `reserve` evicts.
    Raises NodeRefusal.
    """
    layout = cache.layout
    step = EVICT_BLOCKS * _block_pages(layout)
    reusable = cache.reusable(hashes, num_tokens, purpose)
    if attention_pages(layout, num_tokens) - attention_pages(layout, reusable) - cache.free_pages <= step:
        return  # to hold a long prefix takes long, too
    try:
        cached = cache.pin(name, hashes, num_tokens, purpose)
    except UnchainedHashes as exc:
        raise NodeRefusal("bad_request", str(exc)) from exc
    try:
        missing = attention_pages(layout, num_tokens) - attention_pages(layout, cached)
        while missing - cache.free_pages > step and cache.shrink(step, now()):
            on_step()
            await asyncio.sleep(0)
    finally:
        cache.release(name, now())


def _block_pages(layout: ModelLayout) -> int:
    return sum(layout.pages_per_block(group) for group in layout.full_groups)

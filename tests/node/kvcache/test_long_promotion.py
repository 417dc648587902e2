"""A long prefix comes back from disk in steps, between which the event loop goes on."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.tiers.disk import DiskTier
from hybrid_cache.tiers.files import FileDisk
from node.kvcache.eviction_steps import EVICT_BLOCKS
from node.kvcache.ssd_tier import COMMIT_BLOCKS, Ssd, SsdWaits
from tests.hybrid_cache.builders import BLOCK, FULL, make_layout
from tests.pd_cluster.handover import run

LAYOUT = make_layout(FULL)
LONG = 2 * COMMIT_BLOCKS + EVICT_BLOCKS
PAGES = (LONG + 8) * LAYOUT.pages_per_block(0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    with DiskTier(LAYOUT, FileDisk(tmp_path), capacity_bytes=64 << 20) as tier:
        yield tier


def cached(cache: PrefixCache, first: int) -> list[bytes]:
    """The blocks of a long prompt that was prefilled."""
    hashes = block_hashes(range(first, first + LONG * BLOCK), BLOCK, b"")
    cache.reserve("p", hashes, LONG * BLOCK, now=0.0, purpose=Purpose.PREFILL)
    cache.commit("p", LONG * BLOCK, 0.0)
    cache.release("p", 0.0)
    return hashes


def test_a_long_prefix_comes_back_in_steps_between_which_others_have_their_turns(disk: DiskTier) -> None:
    cache, arena = PrefixCache(LAYOUT, PAGES), memoryview(bytearray(PAGES * LAYOUT.page_bytes))
    blocks: list[int] = []

    async def beat(hashes: list[bytes]) -> None:
        while True:
            free = cache.free_pages // LAYOUT.pages_per_block(0)
            blocks.append(free if free > 8 else cache.match(hashes, LONG * BLOCK).num_tokens // BLOCK)
            await asyncio.sleep(0)

    async def scenario() -> None:
        ssd = Ssd(
            cache,
            disk,
            lambda segments: [arena[each.start : each.start + each.length] for each in segments],
            lambda: None,
            lambda: 0.0,
            waits=SsdWaits(first_s=60.0),
        )
        hashes = cached(cache, 0)
        cache.shrink(cache.evictable_pages, 0.0)
        await ssd.settled()
        disk.flush()
        cached(cache, 10**6)
        beating = asyncio.create_task(beat(hashes))
        await ssd.bring_back_for_prefill(hashes, LONG * BLOCK)
        beating.cancel()
        assert cache.match(hashes, LONG * BLOCK).num_tokens == LONG * BLOCK
        cache.check_integrity()
        await ssd.close()

    run(scenario())
    steps = [after - before for before, after in pairwise(blocks)]
    assert max(steps) <= COMMIT_BLOCKS
    assert len({each for each in blocks if each}) > LONG // EVICT_BLOCKS // 2

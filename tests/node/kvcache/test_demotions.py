"""A request waits until its own pages are copied to the SSD's queue, whatever others evict meanwhile."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from pathlib import Path

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose, Reservation
from hybrid_cache.tiers.disk import BlockKey, DiskTier
from hybrid_cache.tiers.files import Buffer, FileDisk
from node.kvcache.ssd_tier import Ssd
from tests.hybrid_cache.builders import BLOCK, FULL, hashes_of, make_layout, prefill, reserve

LAYOUT = make_layout(FULL)
PROMPTS = [[number] * BLOCK for number in range(3)]
WAIT_S = 60.0


class GatedTier(DiskTier):
    """Each block's copy waits until it is let."""

    gates: defaultdict[bytes, threading.Event]

    def put(self, key: BlockKey, parts: Sequence[Buffer]) -> bool:
        assert self.gates[key.block_hash].wait(WAIT_S)
        return super().put(key, parts)

    def let(self, prompt: list[int]) -> None:
        self.gates[hashes_of(prompt)[0]].set()


class World:
    """A cache of three blocks, all of them taken: each further request evicts the oldest."""

    def __init__(self, folder: Path) -> None:
        self.disk = GatedTier(LAYOUT, FileDisk(folder), capacity_bytes=1 << 20)
        self.disk.gates = defaultdict(threading.Event)
        self.cache = PrefixCache(LAYOUT, 3)
        arena = memoryview(bytearray(3 * LAYOUT.page_bytes))
        self.ssd = Ssd(
            self.cache,
            self.disk,
            lambda parts: [arena[at : at + size] for at, size in parts],
            lambda: None,
            lambda: 0.0,
        )
        for now, prompt in enumerate(PROMPTS):
            prefill(self.cache, prompt, now=float(now))

    def evict(self, number: int) -> Reservation:
        return reserve(self.cache, f"r{number}", [100 + number] * BLOCK, now=10.0 + number)

    async def close(self) -> None:
        for prompt in PROMPTS:
            self.disk.let(prompt)
        await self.ssd.close()


async def in_time(what: Awaitable[None]) -> None:
    async with asyncio.timeout(WAIT_S):
        await what


async def a_moment() -> None:
    """Lets every waiter run that no copy holds back."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_who_evicts_later_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        world.evict(0)
        first = asyncio.create_task(world.ssd.settled())
        await a_moment()
        world.evict(1)
        second = asyncio.create_task(world.ssd.settled())
        world.disk.let(PROMPTS[0])
        await in_time(first)
        await a_moment()
        assert not second.done()
        world.disk.let(PROMPTS[1])
        await in_time(second)
        await world.close()

    asyncio.run(scenario())


def test_pages_that_others_evicted_for_themselves_are_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        world.cache.drop(hashes_of(PROMPTS[2]), 0, unused_since=99.0, now=9.0)
        world.disk.let(PROMPTS[2])
        free = world.evict(0)
        await in_time(world.ssd.settled(free))
        evicting = world.evict(1)
        waiting = asyncio.create_task(world.ssd.settled(evicting))
        await a_moment()
        await in_time(world.ssd.settled(free))
        assert not waiting.done(), "its own pages are still being copied"
        world.disk.let(PROMPTS[0])
        await in_time(waiting)
        await world.close()

    asyncio.run(scenario())


def test_a_request_that_is_given_up_keeps_nobody_from_going_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        waiting = [asyncio.create_task(world.ssd.settled(world.evict(number))) for number in range(2)]
        await a_moment()
        waiting[0].cancel()
        for prompt in PROMPTS:
            world.disk.let(prompt)
        await in_time(waiting[1])
        assert {BlockKey(0, hashes_of(prompt)[0]) in world.disk for prompt in PROMPTS[:2]} == {True}
        await world.close()

    asyncio.run(scenario())


def test_every_page_that_was_lent_is_copied_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        for prompt in PROMPTS:
            world.disk.let(prompt)
        hashes = hashes_of([200] * 3 * BLOCK)
        whole = world.cache.reserve("whole", hashes, 3 * BLOCK, now=20.0, purpose=Purpose.PREFILL)
        await in_time(world.ssd.settled(whole))
        assert all(BlockKey(0, hashes_of(prompt)[0]) in world.disk for prompt in PROMPTS)
        await world.close()

    asyncio.run(scenario())

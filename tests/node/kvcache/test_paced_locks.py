"""Long prefixes are locked and unlocked in steps, and whatever comes between two steps leaks no lock."""

import asyncio
import random
from itertools import pairwise
from pathlib import Path

import pytest

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.hashing.block_hash import block_hashes
from node.control.broadcast import Broadcast
from node.errors import NodeRefusal
from node.kvcache.paced_locks import LOCK_BLOCKS
from node.kvcache.pages import ArenaPages
from tests.hybrid_cache.builders import BLOCK, FULL, STATE, make_layout
from tests.node.kvcache.test_pages import arena_pages, full_of
from tests.pd_cluster.handover import LAYOUT, run

BLOCKS = 3 * LOCK_BLOCKS
SIZE = LAYOUT.block_size


@pytest.fixture
def pages(tmp_path: Path) -> ArenaPages:
    return arena_pages(tmp_path, Broadcast(), 2 * BLOCKS)


async def cached(pages: ArenaPages) -> list[bytes]:
    hashes = full_of(pages, BLOCKS)
    await pages.work.settled()
    return hashes


def nothing_is_left(pages: ArenaPages) -> bool:
    pages.cache.check_integrity()
    return pages.report().reservations == pages.report().pages_locked == pages.report().pages_transfer == 0


async def locked_over_time(pages: ArenaPages, seen: list[int]) -> None:
    while True:
        seen.append(pages.report().pages_locked // (pages.cache.layout.pages_per_block(0)))
        await asyncio.sleep(0)


def test_no_turn_locks_or_unlocks_more_than_one_step(pages: ArenaPages) -> None:
    async def scenario() -> None:
        hashes, seen = await cached(pages), list[int]()
        watching = asyncio.create_task(locked_over_time(pages, seen))
        await asyncio.sleep(0)
        got = await pages.reserve_when_free("again", hashes, BLOCKS * SIZE, Purpose.LANDING, 0.0)
        assert got.cached_tokens == BLOCKS * SIZE
        assert max(seen) == BLOCKS
        pages.release("again")
        await pages.work.settled()
        await asyncio.sleep(0)
        watching.cancel()
        assert seen[-1] == 0
        assert max(abs(after - before) for before, after in pairwise(seen)) <= LOCK_BLOCKS
        assert nothing_is_left(pages)

    run(scenario())


@pytest.mark.parametrize("turns", range(8))
def test_a_request_that_is_given_up_half_way_holds_nothing(pages: ArenaPages, turns: int) -> None:
    async def scenario() -> None:
        hashes = await cached(pages)
        asking = asyncio.create_task(pages.reserve_when_free("r", hashes, BLOCKS * SIZE, Purpose.LANDING, 0.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if not asking.cancelled():
            pages.release("r")
        await pages.work.settled()
        assert nothing_is_left(pages)
        pages.cache.shrink(pages.num_pages, 0.0)
        assert pages.cache.free_pages == pages.num_pages

    run(scenario())


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_meet_while_the_chain_changes_leak_nothing(pages: ArenaPages, seed: int) -> None:
    drawn = random.Random(seed)

    async def asks(name: str, hashes: list[bytes]) -> None:
        blocks = drawn.randint(LOCK_BLOCKS, BLOCKS)
        try:
            got = await pages.reserve_when_free(name, hashes[:blocks], blocks * SIZE, Purpose.LANDING, 0.0)
        except NodeRefusal:
            return
        assert got.cached_tokens <= pages.match(hashes, blocks * SIZE).attention_tokens
        for _ in range(drawn.randint(0, 4)):
            await asyncio.sleep(0)
        pages.commit(name, blocks * SIZE)
        pages.release(name)

    async def scenario() -> None:
        hashes = await cached(pages)
        asking = [asyncio.create_task(asks(f"r{number}", hashes)) for number in range(3)]
        while not all(each.done() for each in asking):
            match drawn.choice(("shrink", "turn", "turn", "cancel", "drop")):
                case "shrink":
                    pages.cache.shrink(drawn.randint(1, BLOCKS), 0.0)
                case "drop":
                    pages.drop(hashes, drawn.randint(0, BLOCKS) * SIZE, 0.0)
                case "cancel" if not drawn.randrange(6):
                    drawn.choice(asking).cancel()
            await asyncio.sleep(0)
        assert not [each for each in asking if not each.cancelled() and each.exception()]
        await pages.work.settled()
        pages.cache.check_integrity()
        for number in range(3):
            pages.release(f"r{number}")  # of one that was cancelled before it could
        await pages.work.settled()
        assert nothing_is_left(pages)

    run(scenario())


def test_a_prefix_that_lost_its_state_between_steps_is_taken_over_as_far_as_it_is_of_use() -> None:
    layout = make_layout(FULL, STATE)
    cache, num = PrefixCache(layout, 400), 40
    hashes = block_hashes(range(num * BLOCK), BLOCK, b"")
    for name, blocks in (("short", num // 2), ("long", num)):
        cache.reserve(name, hashes[:blocks], blocks * BLOCK, now=0.0, purpose=Purpose.PREFILL)
        cache.commit(name, blocks * BLOCK, 0.0)
        cache.release(name, 0.0)
    steps = cache.pin_steps("pin", hashes, num * BLOCK, Purpose.PREFILL, 30)
    next(steps)
    cache.drop(hashes, num // 2 * BLOCK, unused_since=1.0, now=1.0)  # the end goes, and the state there
    for _ in steps:
        pass
    cache.check_integrity()
    got = cache.reserve("r", hashes, num * BLOCK, now=1.0, purpose=Purpose.PREFILL, pinned="pin")
    assert got.cached_tokens == num // 2 * BLOCK
    assert cache.report().reservations == 1
    locked = num // 2 * layout.pages_per_block(0) + layout.pages_per_block(1)
    assert cache.report().pages_locked == locked  # the blocks after the state are not of use
    cache.check_integrity()
    cache.release("r", 1.0)
    assert cache.report().pages_locked == 0


def test_what_is_locked_ahead_counts_as_free_for_its_own_request(pages: ArenaPages) -> None:
    async def scenario() -> None:
        hashes = await cached(pages)
        async with pages.locks.ahead(hashes, BLOCKS * SIZE, Purpose.LANDING) as pinned:
            assert pages.cache.pages_ahead(pinned) == BLOCKS * LAYOUT.pages_per_block(0)
            got = pages.reserve("r", hashes, BLOCKS * SIZE, Purpose.LANDING, tenant="t", pinned=pinned)
            assert got.cached_tokens == BLOCKS * SIZE
        assert pages.report().reservations == 1
        pages.release("r")
        await pages.work.settled()
        assert nothing_is_left(pages)

    run(scenario())


def may_have_more(pages: ArenaPages, tenant: str, blocks: int) -> bool:
    hashes = block_hashes(range(10**7, 10**7 + blocks * SIZE), SIZE, b"")
    try:
        pages.reserve("more", hashes, blocks * SIZE, Purpose.LANDING, tenant=tenant)
    except NodeRefusal:
        return False
    pages.release("more")
    return True


@pytest.mark.parametrize("together", [False, True])
def test_a_tenant_holds_what_its_requests_have_locked_first_however_their_steps_meet(
    pages: ArenaPages, together: bool
) -> None:
    async def scenario() -> None:
        hashes = await cached(pages)
        small = block_hashes(range(10**6, 10**6 + SIZE), SIZE, b"")
        pages.reserve("other", small, SIZE, Purpose.LANDING, tenant="other")

        async def asks(name: str) -> None:
            await pages.reserve_when_free(name, hashes, BLOCKS * SIZE, Purpose.LANDING, 0.0, tenant="big")

        if together:
            await asyncio.gather(asks("r0"), asks("r1"))
        else:
            await asks("r0")
            await asks("r1")
        assert not may_have_more(pages, "big", 15 * BLOCKS // 16)  # it holds more than it would leave to others
        for name in ("r0", "r1"):
            pages.release(name)
        await pages.work.settled()
        assert may_have_more(pages, "big", 15 * BLOCKS // 16)

    run(scenario())


def test_a_tenant_is_not_held_to_what_was_locked_ahead_in_vain(pages: ArenaPages) -> None:
    async def scenario() -> None:
        hashes = await cached(pages)
        small = block_hashes(range(10**6, 10**6 + SIZE), SIZE, b"")
        pages.reserve("other", small, SIZE, Purpose.LANDING, tenant="other")
        blocks = BLOCKS // 8
        async with pages.locks.ahead(hashes, BLOCKS * SIZE, Purpose.PREFILL) as pinned:
            pages.cache.shrink(pages.num_pages, 0.0)  # the states leave, nothing else can
            got = pages.reserve("r", hashes[:blocks], blocks * SIZE, Purpose.PREFILL, tenant="big", pinned=pinned)
            assert not got.cached_tokens
        await pages.work.settled()
        assert may_have_more(pages, "big", 7 * BLOCKS // 4)
        pages.release("r")
        await pages.work.settled()
        pages.cache.check_integrity()

    run(scenario())


def test_what_was_locked_in_vain_wakes_those_who_wait_for_room(pages: ArenaPages) -> None:
    async def scenario() -> None:
        hashes = await cached(pages)
        other = block_hashes(range(10**6, 10**6 + (BLOCKS + 1000) * SIZE), SIZE, b"")
        async with pages.locks.ahead(hashes, BLOCKS * SIZE, Purpose.LANDING):
            waiting = asyncio.create_task(
                pages.reserve_when_free("r", other, (BLOCKS + 1000) * SIZE, Purpose.LANDING, 30.0)
            )
            for _ in range(20):
                await asyncio.sleep(0)
            assert not waiting.done()
        async with asyncio.timeout(5.0):
            await waiting

    run(scenario())


def test_what_waits_for_no_room_may_have_what_is_being_given_back(pages: ArenaPages) -> None:
    async def scenario() -> None:
        blocks = BLOCKS + LOCK_BLOCKS
        first, second = (block_hashes(range(at, at + blocks * SIZE), SIZE, b"") for at in (0, 10**7))
        pages.reserve("r", first, blocks * SIZE, Purpose.ANSWER)
        await pages.work.settled()
        pages.release("r")
        await pages.reserve_now("again", second, blocks * SIZE, Purpose.ANSWER)
        pages.release("again")
        await pages.work.settled()
        assert nothing_is_left(pages)

    run(scenario())

"""What a tenant's part of the pages is held against: what a request takes, not what it finds."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hybrid_cache.cache.events import BlocksStored, CacheEvent
from hybrid_cache.cache.reservation import Purpose, Reservation
from hybrid_cache.hashing.block_hash import HASH_BYTES, block_hashes
from node.config import NodeConfig
from node.control.broadcast import Broadcast, Watcher
from node.errors import NodeRefusal
from node.kvcache.arena import Arena
from node.kvcache.eviction_steps import EVICT_BLOCKS
from node.kvcache.pages import (
    COMMIT_BLOCKS,
    PACED_BLOCKS,
    PART_HASHES,
    WHOLE_PARTS,
    ArenaPages,
    snapshot_messages,
)
from node.kvcache.pinned_contexts import PinnedContexts
from node.kvcache.prompt_hashes import CheckedHashes
from node.kvcache.tenant_pages import TENANTS_PART
from tests.pd_cluster.handover import LAYOUT, run
from transport.control.proto import node_pb2 as pb

BLOCKS = 3000  # fit into the arena, about


def arena_pages(tmp_path: Path, events: Broadcast, blocks: int = BLOCKS) -> ArenaPages:
    num_bytes = blocks * sum(LAYOUT.pages_per_block(group) for group in LAYOUT.full_groups) * LAYOUT.page_bytes
    config = NodeConfig(
        node_id="n",
        cluster="c",
        cluster_kind="pd",
        role="decode",
        model="m",
        run_dir=str(tmp_path),
        cache_bytes=num_bytes,
    )
    return ArenaPages(LAYOUT, Arena(tmp_path / "arena", num_bytes), config, events, lambda: 0.0)


@pytest.fixture
def pages(tmp_path: Path) -> ArenaPages:
    return arena_pages(tmp_path, Broadcast())


def reserve(pages: ArenaPages, name: str, tenant: str, blocks: int, *, first: int = 0, shared: int = 0) -> Reservation:
    """A landing of so many blocks: tokens from 0 on `shared` times, from `first` on after that."""
    size = LAYOUT.block_size
    tokens = [*range(shared * size), *range(first, first + (blocks - shared) * size)]
    hashes = block_hashes(tokens, size, b"")
    return pages.reserve(name, hashes, len(tokens), Purpose.LANDING, tenant=tenant)


def test_a_prefix_that_is_held_already_is_no_part_of_what_a_request_wants(pages: ArenaPages) -> None:
    reserve(pages, "other", "other", 10, first=10_000_000)
    reserve(pages, "first", "fan", 2000)
    pages.commit("first", 2000 * LAYOUT.block_size)
    for number in range(16):
        answer = reserve(pages, str(number), "fan", 2001, first=(number + 1) * 1_000_000, shared=2000)
        assert answer.cached_tokens == 2000 * LAYOUT.block_size


@pytest.mark.parametrize(("held", "reason"), [(0, "no_capacity"), (400, "no_capacity"), (1400, TENANTS_PART)])
def test_a_tenant_that_has_less_than_it_asks_for_lets_nobody_pass(pages: ArenaPages, held: int, reason: str) -> None:
    reserve(pages, "other", "other", 2800 - held, first=10_000_000)
    if held:
        reserve(pages, "held", "big", held, first=20_000_000)
    with pytest.raises(NodeRefusal) as refused:
        reserve(pages, "wanted", "big", 1200)
    assert refused.value.label == reason


def test_a_prompt_that_contexts_leave_no_room_for_keeps_nobody_waiting(pages: ArenaPages) -> None:
    async def scenario() -> None:
        size = LAYOUT.block_size
        hashes = block_hashes(range(1000 * size), size, b"")
        pages.reserve("kept", hashes, 1000 * size, Purpose.PREFILL)
        pages.commit("kept", 1000 * size)
        pages.release("kept")
        kept = pb.ContextRequest(context_id="c", block_hashes=b"".join(hashes), num_tokens=1000 * size, ttl_s=60.0)
        await PinnedContexts(pages, lambda: 0.0).create(kept)
        reserve(pages, "other", "other", 10, first=10_000_000)
        large = block_hashes(range(20_000_000, 20_000_000 + 2500 * size), size, b"")
        with pytest.raises(NodeRefusal) as refused:
            async with asyncio.timeout(10.0):
                await pages.reserve_when_free("large", large, 2500 * size, Purpose.PREFILL, 60.0, tenant="large")
        assert refused.value.label == "no_capacity"

    run(scenario())


class Turns:
    """Turns of the loop that others have had, and the pages that were free in each."""

    def __init__(self, pages: ArenaPages) -> None:
        self._pages = pages
        self.free: list[int] = []

    async def run(self) -> None:
        while True:
            self.free.append(self._pages.cache.free_pages)
            await asyncio.sleep(0)


def full_of(pages: ArenaPages, blocks: int, *, first: int = 0) -> list[bytes]:
    """A prefix of so many blocks, cached and not in use."""
    size = LAYOUT.block_size
    hashes = block_hashes(range(first, first + blocks * size), size, b"")
    pages.reserve("full", hashes, blocks * size, Purpose.LANDING)
    pages.commit("full", blocks * size)
    pages.release("full")
    return hashes


def evicted_most(pages: ArenaPages, free: list[int]) -> int:
    """The most blocks that were evicted between two turns."""
    block_pages = sum(LAYOUT.pages_per_block(group) for group in LAYOUT.full_groups)
    return max(after - before for before, after in pairwise(free)) // block_pages


@pytest.mark.parametrize("landing", [True, False])
def test_a_long_prompt_makes_room_in_steps_between_which_others_have_their_turns(
    pages: ArenaPages, landing: bool
) -> None:
    async def scenario() -> None:
        full_of(pages, 2900)
        turns, size = Turns(pages), LAYOUT.block_size
        beating = asyncio.create_task(turns.run())
        hashes = block_hashes(range(10**6, 10**6 + 2500 * size), size, b"")
        if landing:
            await pages.prepare_landing(b"".join(hashes), 2500 * size, "tenant")
            pages.reserve("new", hashes, 2500 * size, Purpose.LANDING)
        else:
            await pages.reserve_when_free("new", hashes, 2500 * size, Purpose.PREFILL, 0.0)
        beating.cancel()
        assert len(turns.free) >= 2000 // EVICT_BLOCKS
        assert EVICT_BLOCKS // 2 < evicted_most(pages, turns.free) < 2 * EVICT_BLOCKS
        pages.release("new")
        pages.cache.check_integrity()
        assert pages.report().reservations == 0

    run(scenario())


class ReadHashes(CheckedHashes):
    """Hashes that count how many of them were read at once."""

    read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(key, slice) else 1
        return found


def test_one_that_finds_no_room_is_refused_before_its_prompt_is_read(pages: ArenaPages) -> None:
    """A long prompt that waits asks again at each step in which another one gives pages back."""
    reserve(pages, "other", "", 2000, first=10_000_000)
    size = LAYOUT.block_size
    hashes = ReadHashes(block_hashes(range(2000 * size), size, b""))
    with pytest.raises(NodeRefusal, match="are left") as refused:
        pages.reserve("wanted", hashes, 2000 * size, Purpose.LANDING)
    assert refused.value.label == "no_capacity"
    assert hashes.read < 50


def test_making_room_leaves_what_the_prompt_begins_with(pages: ArenaPages) -> None:
    async def scenario() -> None:
        size = LAYOUT.block_size
        full_of(pages, 1200, first=10**6)
        shared = full_of(pages, 1600)
        hashes = [*shared, *block_hashes(range(10**7, 10**7 + 1000 * size), size, b"")]
        await pages.prepare_landing(b"".join(hashes), 2600 * size, "")
        assert pages.match(shared, 1600 * size).attention_tokens == 1600 * size
        landing = pages.reserve("new", hashes, 2600 * size, Purpose.LANDING)
        assert landing.cached_tokens == 1600 * size

    run(scenario())


@pytest.mark.parametrize(("tenant", "blocks"), [("big", 1200), ("", 2990), ("", 2_000_000)])
def test_nothing_is_evicted_for_a_prompt_that_will_be_refused(pages: ArenaPages, tenant: str, blocks: int) -> None:
    async def scenario() -> None:
        reserve(pages, "other", "other", 1200, first=10_000_000)
        reserve(pages, "held", "big", 900, first=20_000_000)
        cached = full_of(pages, 700)
        free = pages.cache.free_pages
        size = LAYOUT.block_size
        hashes = block_hashes(range(10**6, 10**6 + min(blocks, 3000) * size), size, b"")
        await pages.prepare_landing(b"".join(hashes), blocks * size, tenant)
        assert pages.cache.free_pages == free
        assert pages.match(cached, 700 * size).attention_tokens == 700 * size
        with pytest.raises(NodeRefusal):
            pages.reserve("wanted", hashes, blocks * size, Purpose.LANDING, tenant=tenant)

    run(scenario())


def test_nothing_is_evicted_for_a_prompt_whose_states_and_windows_find_no_room(pages: ArenaPages) -> None:
    async def scenario() -> None:
        reserve(pages, "other", "", 1200, first=10_000_000)
        cached = full_of(pages, 1500)
        size, block_pages = LAYOUT.block_size, sum(LAYOUT.pages_per_block(group) for group in LAYOUT.full_groups)
        free = pages.cache.free_pages
        blocks = (free + pages.cache.evictable_pages) // block_pages  # which leave nothing for the rest
        hashes = block_hashes(range(10**6, 10**6 + blocks * size), size, b"")
        await pages.prepare_landing(b"".join(hashes), blocks * size, "")
        with pytest.raises(NodeRefusal):
            pages.reserve("wanted", hashes, blocks * size, Purpose.LANDING)
        assert pages.cache.free_pages == free
        assert pages.match(cached, 1500 * size).attention_tokens == 1500 * size

    run(scenario())


def test_a_prompt_that_is_given_up_while_room_is_made_holds_nothing(pages: ArenaPages) -> None:
    async def scenario() -> None:
        full_of(pages, 2900)
        size = LAYOUT.block_size
        hashes = block_hashes(range(10**6, 10**6 + 2500 * size), size, b"")
        making = asyncio.create_task(pages.make_room(hashes, 2500 * size, Purpose.PREFILL, ""))
        await asyncio.sleep(0)
        assert pages.report().reservations == 1
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        assert pages.report().reservations == 0
        pages.cache.check_integrity()

    run(scenario())


async def heard(watcher: Watcher) -> list[pb.NodeEvent]:
    events: list[pb.NodeEvent] = []
    while (event := await watcher.next(0.0)) is not None:
        events.append(event)
    return events


def test_no_message_has_more_blocks_than_a_reader_takes_in_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        events = Broadcast()
        cached = arena_pages(tmp_path, events)
        reserve(cached, "long", "t", 2500)
        with events.watch() as watcher:
            cached.commit("long", 2500 * LAYOUT.block_size)
            stored = [
                len(event.stored.hashes) // HASH_BYTES for event in await heard(watcher) if not event.stored.group
            ]
            assert stored == [PART_HASHES, 2500 - PART_HASHES]
            cached.release("long")
            cached.cache.shrink(cached.cache.evictable_pages, 0.0)
            cached.publish()
            gone = [len(event.removed.hashes) // HASH_BYTES for event in await heard(watcher)]
        assert max(gone) == PART_HASHES

    run(scenario())


@pytest.mark.parametrize("parts", [0, 1, WHOLE_PARTS, WHOLE_PARTS + 1, WHOLE_PARTS + 3])
def test_a_long_snapshot_is_an_empty_one_with_more_behind_it(parts: int) -> None:
    names = [bytes([number]) * HASH_BYTES for number in range(parts)]
    read = []

    def snapshot() -> Iterator[CacheEvent]:
        for name in names:
            read.append(name)
            yield BlocksStored(0, (name,))

    messages = snapshot_messages(snapshot())
    first = next(messages)
    assert len(read) <= WHOLE_PARTS + 1  # the rest when it is asked for
    rest = [message.stored.hashes for message in messages]
    assert [group.hashes for group in first.snapshot.groups] + rest == names
    assert (len(first.snapshot.groups), len(rest)) == ((parts, 0) if parts <= WHOLE_PARTS else (0, parts))


@pytest.mark.parametrize("landing", [True, False])
def test_a_long_prompt_is_committed_in_steps_before_it_is_released(tmp_path: Path, landing: bool) -> None:
    async def scenario() -> None:
        blocks, size = 2 * PACED_BLOCKS, LAYOUT.block_size
        pages = arena_pages(tmp_path, Broadcast(), blocks + 10)
        hashes = block_hashes(range(blocks * size), size, b"")
        if landing:
            found = await pages.prepare_landing(b"".join(hashes), blocks * size, "tenant")
            assert found == hashes
            pages.reserve("long", found, blocks * size, Purpose.LANDING)
        else:
            await pages.reserve_when_free("long", hashes, blocks * size, Purpose.PREFILL, 0.0)
        held = [0]
        pages.commit("long", blocks * size)
        pages.release("long")
        while pages.report().reservations:
            await asyncio.sleep(0)
            held.append(pages.match(hashes, blocks * size).attention_tokens // size)
        assert held[-1] == blocks
        assert max(after - before for before, after in pairwise(held)) == COMMIT_BLOCKS
        pages.cache.check_integrity()
        pages.cache.shrink(pages.cache.evictable_pages, 0.0)
        assert pages.cache.free_pages == pages.num_pages

    run(scenario())


def test_a_landing_finds_the_pages_that_a_long_prompt_is_about_to_free(tmp_path: Path) -> None:
    async def scenario() -> None:
        blocks, size = 2 * PACED_BLOCKS, LAYOUT.block_size
        pages = arena_pages(tmp_path, Broadcast(), blocks + 10)
        long = block_hashes(range(blocks * size), size, b"")
        pages.reserve("long", long, blocks * size, Purpose.LANDING)
        pages.commit("long", blocks * size)
        pages.release("long")
        other = block_hashes(range(10**7, 10**7 + 100 * size), size, b"")
        await pages.prepare_landing(b"".join(other), 100 * size, "tenant")
        pages.reserve("other", other, 100 * size, Purpose.LANDING)

    run(scenario())


def test_a_prompt_finds_all_of_a_long_one_that_is_just_being_committed(tmp_path: Path) -> None:
    """Its state lies at its end, and comes last: half of a long prompt is of no use to a hybrid model."""

    async def scenario() -> None:
        blocks, size = 2 * PACED_BLOCKS, LAYOUT.block_size
        pages = arena_pages(tmp_path, Broadcast(), 3 * blocks)
        hashes = block_hashes(range((blocks + 4) * size), size, b"")
        await pages.reserve_when_free("long", hashes[:blocks], blocks * size, Purpose.PREFILL, 0.0)
        pages.commit("long", blocks * size)
        pages.release("long")
        contexts = PinnedContexts(pages, lambda: 0.0)
        wish = pb.ContextRequest(
            context_id="kept", block_hashes=b"".join(hashes[:blocks]), num_tokens=blocks * size, ttl_s=60.0
        )
        kept = asyncio.create_task(contexts.create(wish))
        next_turn = await pages.reserve_when_free("next", hashes, (blocks + 4) * size, Purpose.PREFILL, 10.0)
        assert next_turn.cached_tokens == blocks * size
        assert (await kept).num_tokens == blocks * size

    run(scenario())


def test_a_prompt_does_not_wait_for_another_one_that_is_being_committed(tmp_path: Path) -> None:
    async def scenario() -> None:
        blocks, size = 2 * PACED_BLOCKS, LAYOUT.block_size
        pages = arena_pages(tmp_path, Broadcast(), blocks + 100)
        long = block_hashes(range(blocks * size), size, b"")
        await pages.reserve_when_free("long", long, blocks * size, Purpose.PREFILL, 0.0)
        pages.commit("long", blocks * size)
        pages.release("long")
        other = block_hashes(range(10**7, 10**7 + 4 * size), size, b"")
        await pages.reserve_when_free("other", other, 4 * size, Purpose.PREFILL, 10.0)
        assert "long" in pages.work

    run(scenario())


def test_hashes_of_several_prompts_are_refused_as_a_bad_request(pages: ArenaPages) -> None:
    """They would be given pages of blocks that they do not name."""
    reserve(pages, "a", "", 20)
    pages.commit("a", 20 * LAYOUT.block_size)
    reserve(pages, "b", "", 20, first=100_000)
    pages.commit("b", 20 * LAYOUT.block_size)
    size = LAYOUT.block_size
    ours = block_hashes([*range(20 * size)], size, b"")
    others = block_hashes([*range(100_000, 100_000 + 20 * size)], size, b"")
    mixed, before = ours[:5] + others[9:15], pages.report()
    with pytest.raises(NodeRefusal, match=r"bad_request: .* not one after the other"):
        pages.reserve("r", mixed, 11 * size, Purpose.LANDING)

    async def waiting() -> None:
        await pages.reserve_when_free("r", mixed, 11 * size, Purpose.LANDING, 1000.0)

    with pytest.raises(NodeRefusal, match="bad_request"):  # at once: nothing that ends makes it another prompt
        run(waiting())
    assert pages.report() == before
    pages.cache.check_integrity()

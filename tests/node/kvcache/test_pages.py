"""What a tenant's part of the pages is held against: what a request takes, not what it finds."""

import asyncio
from pathlib import Path

import pytest

from hybrid_cache.cache.reservation import Purpose, Reservation
from hybrid_cache.hashing.block_hash import block_hashes
from node.config import NodeConfig
from node.control.broadcast import Broadcast
from node.errors import NodeRefusal
from node.kvcache.arena import Arena
from node.kvcache.pages import ArenaPages
from node.kvcache.pinned_contexts import PinnedContexts
from node.kvcache.tenant_pages import TENANTS_PART
from tests.pd_cluster.handover import LAYOUT, run
from transport.control.proto import node_pb2 as pb

BLOCKS = 3000  # fit into the arena, about


@pytest.fixture
def pages(tmp_path: Path) -> ArenaPages:
    num_bytes = BLOCKS * sum(LAYOUT.pages_per_block(group) for group in LAYOUT.full_groups) * LAYOUT.page_bytes
    config = NodeConfig(
        node_id="n",
        cluster="c",
        cluster_kind="pd",
        role="decode",
        model="m",
        run_dir=str(tmp_path),
        cache_bytes=num_bytes,
    )
    return ArenaPages(LAYOUT, Arena(tmp_path / "arena", num_bytes), config, Broadcast(), lambda: 0.0)


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

"""What is read of a message's block hashes, and what is refused."""

from pathlib import Path

import pytest

from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.hashing.block_hash import block_hashes
from node.control.broadcast import Broadcast
from node.errors import NodeRefusal
from node.kvcache.pages import PACED_BLOCKS
from node.kvcache.prompt_hashes import read_hashes
from tests.node.kvcache.test_pages import arena_pages
from tests.pd_cluster.handover import LAYOUT, run


def test_of_a_long_prompt_no_block_may_appear_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        blocks, size = 2 * PACED_BLOCKS, LAYOUT.block_size
        pages = arena_pages(tmp_path, Broadcast(), blocks + 10)
        hashes = block_hashes(range((blocks - 1) * size), size, b"")
        with pytest.raises(NodeRefusal, match="twice"):
            await read_hashes(b"".join([*hashes, hashes[0]]), is_long=True)
        with pytest.raises(NodeRefusal, match="twice"):
            pages.reserve("long", [*hashes, hashes[0]], blocks * size, Purpose.LANDING)

    run(scenario())

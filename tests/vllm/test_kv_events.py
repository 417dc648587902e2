"""vLLM's own publisher, our listener: what one says the other takes in, over a real socket."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hybrid_cache.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Medium
from hybrid_cache.hashing import block_hashes, model_salt
from hybrid_cache.layout import KVCacheGroup, ModelLayout
from hybrid_cache.spec import FullAttention
from node.engine_cache import EngineCache
from node.kv_events import events_endpoint, follow

# vLLM is imported where it is used (collecting these tests needs none), with all that its imports warn of.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK = 4
LAYOUT = ModelLayout(model="m", dtype="f", block_size=BLOCK, groups=(KVCacheGroup(FullAttention(64, 32), (0,)),))
SALT = model_salt("m")
TOKENS = list(range(100, 100 + 4 * BLOCK))
OURS = block_hashes(TOKENS, BLOCK, SALT)


async def heard(publisher: Any, first: Any, batches: list[Any], agent: Path) -> list[CacheEvent]:
    """What the listener makes of batches; `first` is repeated until it hears, because it may subscribe late."""
    cleared = CacheCleared(Medium.ENGINE)
    said: list[CacheEvent] = []
    task = asyncio.create_task(follow(events_endpoint(agent), EngineCache(LAYOUT, SALT), said.append))
    try:
        async with asyncio.timeout(60.0):
            while not any(isinstance(event, BlocksStored) for event in said):
                publisher.publish(first)
                await asyncio.sleep(0.05)
            for batch in batches:
                publisher.publish(batch)
            before = said.count(cleared)
            while said.count(cleared) == before:  # noqa: ASYNC110 another thread sends
                await asyncio.sleep(0.05)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return [event for event in said if event != cleared]


def test_vllms_events_are_understood(tmp_path: Path) -> None:
    from vllm.distributed import kv_events as theirs

    def stored(first: int, stop: int) -> Any:
        return theirs.BlockStored(
            block_hashes=list(range(first + 1, stop + 1)),
            parent_block_hash=first or None,
            token_ids=TOKENS[first * BLOCK : stop * BLOCK],
            block_size=BLOCK,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None] * (stop - first),
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def batch(*events: Any) -> Any:
        return theirs.KVEventBatch(ts=0.0, events=list(events))

    agent = tmp_path / "engine.sock"
    publisher = theirs.ZmqEventPublisher(data_parallel_rank=0, endpoint=events_endpoint(agent))
    gone = theirs.BlockRemoved(block_hashes=[3], medium="GPU", group_idx=0)
    rest = [batch(stored(1, 3)), batch(gone), batch(theirs.AllBlocksCleared())]
    try:
        said = asyncio.run(heard(publisher, batch(stored(0, 1)), rest, agent))
    finally:
        publisher.shutdown()
    assert said == [
        BlocksStored(0, (OURS[0],), Medium.ENGINE),
        BlocksStored(0, tuple(OURS[1:3]), Medium.ENGINE),
        BlocksRemoved(0, (OURS[2],), Medium.ENGINE),
    ]

"""vLLM's own publisher, our listener: what one says the other takes in, over a real socket."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from hybrid_cache.cache.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Medium
from hybrid_cache.hashing.block_hash import block_hashes, model_salt
from hybrid_cache.index.index import PrefixIndex
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention
from node.engine.kv_events import events_endpoint, follow
from node.engine.prefix_cache import EngineCache
from tests.vllm.cases import CASES, build
from tests.vllm.harness import ANSWER_S, make_node, prompt_of

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


@pytest.mark.timeout(600)
@pytest.mark.dimensions(start="kv events")
def test_what_vllm_holds_of_layers_with_smaller_blocks_is_heard(models: Path, tmp_path: Path) -> None:
    """Gemma 4: blocks of full attention, with its larger heads, have fewer tokens than those of windows."""
    case = next(case for case in CASES if case.arch == "gemma4")
    endpoint = events_endpoint(tmp_path / "solo" / "agent.sock")
    publishing = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": ""}
    options = case.options(build(case.arch, models)) | {"kv_events_config": publishing}
    node = make_node("solo", tmp_path, options, "kv_both", "decode")
    try:
        node.engine.wait_ready()
        layout = ModelLayout.from_json(node.agent.describe().layout_json)
        assert "blocks-of" in layout.model, "vLLM gives all layers blocks of one size: this shows nothing"
        length, salt, index = 3 * layout.block_size + 5, model_salt(layout.fingerprint), PrefixIndex(layout)

        async def scenario() -> int:
            changed = asyncio.Event()

            def publish(event: CacheEvent) -> None:
                index.apply("solo", event)
                changed.set()

            async def known(prompt: list[int]) -> int:
                hashes = block_hashes(prompt, layout.block_size, salt)
                while not (held := index.match("solo", hashes, length).num_tokens):
                    changed.clear()
                    await changed.wait()
                return held

            task = asyncio.create_task(follow(endpoint, EngineCache(layout, salt), publish))
            try:
                for seed in range(1, 20):  # it may subscribe late
                    prompt = prompt_of(length, seed)
                    await asyncio.to_thread(node.engine.submit(f"r{seed}", prompt, 2).result, ANSWER_S)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(3.0):
                            return await known(prompt)
                raise AssertionError("nothing was heard")
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        assert asyncio.run(scenario()) == 3 * layout.block_size
    finally:
        node.close()


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

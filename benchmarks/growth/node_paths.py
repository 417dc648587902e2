"""What a node does over a cache of many blocks, without an engine and without bytes."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.growth.paths import Act, GrowthSize
from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.hashing.block_hash import HASH_BYTES
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState
from node.agent import NodeAgent
from node.config import NodeConfig
from node.engine.prefix_cache import BlockRemoved, BlockStored, EngineCache
from node.grpc_service import NodeService
from node.kvcache.arena import Arena
from node.kvcache.paced_check import PacedCheck
from node.kvcache.pages import PART_HASHES, ArenaPages
from node.metrics import NodeCollector
from pd_cluster.role import PD
from transport.control.proto import node_pb2 as pb

BLOCK_TOKENS: Final = 16
FILL_BLOCKS: Final = 8192  # of each prompt that fills the cache
ROOM: Final = 1.25  # pages for so many times the blocks


class SizedArena:
    """An arena of so many bytes that are not there."""

    path = Path("/dev/null")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def layout_of(layers: int) -> ModelLayout:
    """One group of attention and one of states, with as many layers each."""
    attention = KVCacheGroup(FullAttention(2, 1), tuple(range(layers)))
    states = KVCacheGroup(LinearState(2 * BLOCK_TOKENS), tuple(range(layers, 2 * layers)))
    return ModelLayout("growth", "u8", BLOCK_TOKENS, (attention, states))


def chain(blocks: int) -> list[bytes]:
    data = os.urandom(HASH_BYTES * blocks)
    return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]


class FilledNode:
    """An agent whose cache has so many blocks. Nothing of it listens."""

    def __init__(self, size: GrowthSize, folder: Path) -> None:
        config = NodeConfig(
            node_id=f"growth-{time.monotonic_ns()}", cluster="c", cluster_kind="pd", role="decode", model="m",
            run_dir=str(folder), cache_bytes=1 << 30,
        )  # fmt: skip
        self.layout = layout_of(size.layers)
        self.agent = NodeAgent(config, PD, time.monotonic)
        arena = SizedArena(int(ROOM * size.blocks) * self.layout.page_bytes)
        self.pages = ArenaPages(self.layout, cast(Arena, arena), config, self.agent.events, time.monotonic)
        self.agent.pages = self.pages
        self.service = NodeService(self.agent, time.monotonic)
        for start in range(0, size.blocks, FILL_BLOCKS):
            self._fill(f"fill-{start}", chain(min(FILL_BLOCKS, size.blocks - start)))

    def _fill(self, name: str, hashes: Sequence[bytes]) -> None:
        num_tokens = len(hashes) * BLOCK_TOKENS
        self.pages.reserve(name, hashes, num_tokens, Purpose.ANSWER)
        self.pages.commit(name, num_tokens)
        self.pages.release(name)

    async def watch(self) -> None:
        """A gateway connects, and is told what is cached."""
        request = pb.WatchRequest(load_interval_s=0.02)
        async for event in self.service.Watch(request, cast(Any, None)):
            await asyncio.sleep(0)  # as gRPC has, for each message
            if event.WhichOneof("event") == "load":
                return

    async def describe(self) -> None:
        await self.service.Describe(pb.DescribeRequest(), cast(Any, None))

    async def check(self) -> None:
        """The agent's check, however long ago the last one was."""
        error = await PacedCheck(time.monotonic).result(self.pages.cache.integrity_steps)
        assert not error, error

    async def scrape(self) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(NodeCollector(self.agent))
        generate_latest(registry)

    async def prompt(self, hashes: Sequence[bytes]) -> None:
        """A prompt's pages are reserved, filled and cached; the next one has others leave."""
        num_tokens = len(hashes) * BLOCK_TOKENS
        with self.agent.events.watch() as watcher:
            await self.pages.reserve_when_free("prompt", hashes, num_tokens, Purpose.PREFILL, 10.0)
            await asyncio.sleep(0)  # the engine says each of these in a message of its own
            self.pages.commit("prompt", num_tokens)
            await asyncio.sleep(0)
            self.pages.release("prompt")
            await self.pages.work.settled()
            while (event := await watcher.next(0.001)) is not None:
                pb.NodeEvent().CopyFrom(event)


class FilledEngineCache:
    """What an engine's own cache is known to hold."""

    def __init__(self, size: GrowthSize) -> None:
        self._layout = layout_of(size.layers)
        self.cache = EngineCache(self._layout, b"salt")
        self._told = 0
        for start in range(0, size.blocks, FILL_BLOCKS):
            self.store(chain(min(FILL_BLOCKS, size.blocks - start)))

    def _other_tokens(self, blocks: int) -> list[int]:
        """Tokens of so many blocks that were never told of before."""
        first, self._told = self._told, self._told + blocks * BLOCK_TOKENS
        return list(range(first, self._told))

    def store(self, hashes: Sequence[bytes]) -> None:
        tokens = self._other_tokens(len(hashes))
        stored = BlockStored(
            block_hashes=list(hashes), parent_block_hash=None, token_ids=tokens, block_size=BLOCK_TOKENS,
            kv_cache_spec_kind="full_attention",
        )  # fmt: skip
        self.cache.apply([stored])

    async def prompt(self, hashes: Sequence[bytes]) -> None:
        """The engine tells of a prompt's blocks, as it computes them, and that they are gone."""
        step = 512  # of a step of 8,192 tokens
        for start in range(0, len(hashes), step):
            part = hashes[start : start + step]
            tokens = self._other_tokens(len(part))
            stored = BlockStored(
                block_hashes=list(part), parent_block_hash=hashes[start - 1] if start else None, token_ids=tokens,
                block_size=BLOCK_TOKENS, kv_cache_spec_kind="full_attention",
            )  # fmt: skip
            self.cache.apply([stored])
            await asyncio.sleep(0)
        for start in range(0, len(hashes), step):
            self.cache.apply([BlockRemoved(block_hashes=list(hashes[start : start + step]))])
            await asyncio.sleep(0)

    async def snapshot(self) -> None:
        """A gateway connects."""
        for _ in self.cache.snapshot(PART_HASHES):
            await asyncio.sleep(0)


async def paths(size: GrowthSize) -> AsyncIterator[tuple[str, Act]]:
    """Each with what it does, over one cache."""
    with tempfile.TemporaryDirectory() as folder:
        node = FilledNode(size, Path(folder))
        yield "node: watch, snapshot", node.watch
        yield "node: describe", node.describe
        yield "node: integrity", node.check
        yield "node: metrics", node.scrape
        yield "node: a prompt and its events", lambda: node.prompt(chain(size.prompt_blocks))
    engine = FilledEngineCache(size)
    yield "node: engine's cache events", lambda: engine.prompt(chain(size.prompt_blocks))
    yield "node: engine's cache, snapshot", engine.snapshot

"""What a gateway does over the caches of many nodes."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

import msgspec

from benchmarks.fleet.regions import nodes_of, said_of
from benchmarks.fleet.scale import ARM, GatewayView, agents_of
from benchmarks.gateway.decision import request_of
from benchmarks.growth.node_paths import BLOCK_TOKENS, chain, layout_of
from benchmarks.growth.paths import Act, GrowthSize
from gateway.cluster.agent_values import events_from
from gateway.request.request import Request, record_of
from hybrid_cache.cache.events import BlocksStored, CacheCleared, CacheEvent
from hybrid_cache.index.index import PrefixIndex
from node.kvcache.pages import as_message
from transport.control.proto import node_pb2 as pb

CLUSTERS: Final = 20
PARTS: Final = 8192  # hashes of an event that fills it


class FilledIndex:
    """An index of so many blocks of so many nodes: each block has one holder, but for a prompt that all hold."""

    def __init__(self, size: GrowthSize) -> None:
        self.index = PrefixIndex(layout_of(size.layers))
        self._blocks, self._nodes = size.blocks, size.nodes
        self.prompt = chain(size.prompt_blocks)
        for node in range(self._nodes):
            self.index.apply(f"n{node}", CacheCleared())
        self.hashes = chain(self._blocks)
        each = -(-self._blocks // self._nodes)
        for node in range(self._nodes):
            own = self.hashes[node * each : (node + 1) * each]
            for at in range(0, len(own), PARTS):
                self.index.apply(f"n{node}", BlocksStored(0, tuple(own[at : at + PARTS])))
            length = len(self.prompt) * (node % 4) // 4
            self.index.apply(f"n{node}", BlocksStored(0, tuple(self.prompt[:length])))

    async def fill(self) -> None:
        """A gateway that has just started hears of all that, and loses all of its nodes; its memory is the index's."""
        index = PrefixIndex(self.index.layout)
        each = -(-self._blocks // self._nodes)
        for node in range(self._nodes):
            own = self.hashes[node * each : (node + 1) * each]
            for at in range(0, len(own), PARTS):
                await _heard(index, f"n{node}", BlocksStored(0, tuple(own[at : at + PARTS])))
        for node in range(self._nodes):
            index.drop(f"n{node}")
        while index.tidy():  # noqa: ASYNC110 nothing else does it
            await asyncio.sleep(0)

    async def snapshot(self) -> None:
        """One node of a whole cache of blocks connects, and its connection is lost."""
        for at in range(0, self._blocks, PARTS):
            await _heard(self.index, "last", BlocksStored(0, tuple(self.hashes[at : at + PARTS])))
        self.index.drop("last")
        while self.index.tidy():  # noqa: ASYNC110 nothing else does it
            await asyncio.sleep(0)

    async def prompt_cached(self) -> None:
        """A node caches a prompt at once, and evicts it."""
        stored = as_message(BlocksStored(0, tuple(self.prompt)))
        removed = pb.NodeEvent(removed=pb.BlocksRemoved(group=0, hashes=stored.stored.hashes))
        for message in (stored, removed):
            for event in events_from(pb.NodeEvent.FromString(message.SerializeToString())):
                self.index.apply("n0", event)  # type: ignore[arg-type]
                await asyncio.sleep(0)

    async def look(self) -> None:
        """What each node holds of a prompt."""
        self.index.match_all(self.prompt, len(self.prompt) * BLOCK_TOKENS)


async def _heard(index: PrefixIndex, node_id: str, event: CacheEvent) -> None:
    for part in events_from(pb.NodeEvent.FromString(as_message(event).SerializeToString())):
        index.apply(node_id, part)  # type: ignore[arg-type]
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def gateway_view(nodes: int) -> AsyncIterator[GatewayView]:
    """A gateway's view of a fleet, without blocks."""
    rng = random.Random(0)
    members = nodes_of(nodes, min(CLUSTERS, nodes))
    decodes = sorted({node.cluster for node in members if node.kind == "pd"})
    view = GatewayView(agents_of([said_of(ARM, node, decodes, rng) for node in members], asyncio.Event()))
    await view.start()
    try:
        yield view
    finally:
        await view.clusters.close()


async def write_record(request: Request) -> None:
    """A prompt's record, as readers and logs have it."""
    msgspec.json.encode(record_of(request, 1, 200, ""))


async def show_links(view: GatewayView) -> None:
    """Links, as consoles and metrics have them."""
    view.links.status()
    view.links.views()


async def paths(size: GrowthSize) -> AsyncIterator[tuple[str, Act]]:
    """Each with what it does, over one index and one fleet."""
    filled = FilledIndex(size)
    yield "gateway: index is filled, emptied", filled.fill
    yield "gateway: index, node comes and goes", filled.snapshot
    yield "gateway: index, a prompt's events", filled.prompt_cached
    yield "gateway: index, a look", filled.look
    async with gateway_view(size.nodes) as view:
        yield "gateway: a request's record", partial(write_record, request_of(filled.prompt, view.clusters, 0))
        yield "gateway: links are shown", partial(show_links, view)

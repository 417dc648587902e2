"""Less than a gateway: the view that it has of scripted nodes, and what it decides by that."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import Clusters
from gateway.config.gateway import GatewayConfig
from gateway.config.models import ModelCatalog
from gateway.request.request import Request
from gateway.routing.router import Router
from gateway.tasks import TaskSet
from planner.decisions.estimates.durations import LearnedCost
from planner.decisions.routing.offload import Route
from tests.gateway.scripted import ScriptedNode, Topology, topology
from tests.gateway.worlds import PATIENCE_S, config_for, request_of, until
from transport.control.proto import node_pb2 as pb

ABUNDANT = pb.Load(links=[pb.Link(peer="west", available_bytes_per_s=1e9)])


@dataclass
class Watched:
    """The view that a gateway has of these nodes, without the gateway; `errors` are those of its own."""

    clusters: Clusters
    nodes: Topology
    errors: list[str]

    def request(self, text: str) -> Request:
        """A plain request, once a model is served."""
        assert self.clusters.served is not None
        return request_of(text, self.clusters.served)

    async def holds(self, node: ScriptedNode, text: str, medium: "pb.Medium.ValueType" = pb.MEDIUM_MEMORY) -> None:
        """The view hears that `node` has the prefix of `text` cached."""
        hashes = self.request(text).prompt.hashes
        for group in (0, 1):
            stored = pb.BlocksStored(group=group, hashes=b"".join(hashes), medium=medium)
            node.tell(pb.NodeEvent(stored=stored))
        index = self.clusters.index
        assert index is not None
        await until(lambda: index.match(node.node_id, hashes, 10_000).num_tokens)


@asynccontextmanager
async def view_of(nodes: Topology, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Watched]:
    errors: list[str] = []
    agents = [AgentClient(node.agent_address, PATIENCE_S) for node in nodes.nodes]
    clusters = Clusters(agents, clock, catalog=ModelCatalog(served_model="scripted"), tasks=TaskSet(errors.append))
    clusters.start()
    try:
        assert await clusters.wait_for(lambda: all(node.connected for node in clusters.nodes), PATIENCE_S)
        yield Watched(clusters, nodes, errors)
    finally:
        await clusters.close()


@asynccontextmanager
async def watched(
    remote: int = 1,
    local: int = 1,
    decode: int = 2,
    *,
    remote_clusters: tuple[str, ...] = ("east",),
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Watched]:
    """That many scripted nodes, and the view of them."""
    async with topology(remote, local, decode, remote_clusters) as nodes, view_of(nodes, clock) as seen:
        yield seen


@dataclass
class Deciding(Watched):
    """What a gateway that sees these nodes decides, without the gateway."""

    decider: Router
    config: GatewayConfig

    def route(self, text: str) -> Route:
        return self.decider.route(self.request(text))

    async def reports(self, node: ScriptedNode, load: pb.Load) -> None:
        """The view hears that `node` is as busy as that."""
        known = self.clusters.by_id(node.node_id)
        before, node.load = known.load, load
        node.tell(pb.NodeEvent(load=load))
        await until(lambda: known.load != before)

    async def has_bandwidth(self) -> None:
        for node in self.nodes.remote:
            await self.reports(node, ABUNDANT)


@asynccontextmanager
async def deciding(
    remote: int = 1,
    local: int = 1,
    decode: int = 1,
    *,
    remote_clusters: tuple[str, ...] = ("east",),
    **fields: Any,
) -> AsyncIterator[Deciding]:
    async with watched(remote, local, decode, remote_clusters=remote_clusters) as w:
        config, clock = config_for(w.nodes, **fields), time.monotonic
        cost = LearnedCost(config.routing.prefill_tokens_per_s)
        links = ClusterLinks(w.clusters.nodes, clock, config.routing.link_bytes_per_s)
        decided = Deciding(w.clusters, w.nodes, w.errors, Router(config, w.clusters, links, cost, clock), config)
        await decided.has_bandwidth()
        yield decided

"""Builders: a gateway's steps and pages before scripted nodes, and a client, all in memory."""

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from gateway.admin.reload import Reloads
from gateway.admission.queue import WaitingLine
from gateway.admission.slo import SloGate
from gateway.assembly import keep_chores
from gateway.auth.sessions import OperatorSessions
from gateway.cluster.agent_client import AgentClient
from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import NODE_TIMES, Clusters, NodeTimes
from gateway.config.gateway import GatewayConfig, Strangers
from gateway.http.body import BodyReceiver
from gateway.http.connections import Gate
from gateway.http.listener import OPERATORS, Listener
from gateway.models.served import Models, config_of
from gateway.models.upkeep import ModelUpkeep
from gateway.pages import ShownParts, operator_pages, token_endpoints
from gateway.parts import (
    GatewayTasks,
    NodeAccess,
    build_audit,
    build_common,
    build_model,
    build_nodes,
    build_sinks,
    ending,
)
from gateway.prompt.reader import PromptReader
from gateway.routing.replication import Replicas
from gateway.server.app import GenerationEndpoint
from gateway.server.routes import build_app, straight_ways
from gateway.tasks import TaskSet
from gateway.telemetry.record_ring import RecordRing
from gateway.workers.process_scope import SingleProcess
from prompts.tokens.tokenizer import TextTokenizer
from tests.gateway.memory.agent import MemoryAgent, in_memory
from tests.gateway.memory.loop import HOST, MemoryLoop, memory_loop
from tests.gateway.scripted import ScriptedNode, Topology, topology
from tests.gateway.worlds import PATIENCE_S, Deployment, config_for, on_loops
from tests.prompts.builders import text_tokenizer

PORT = 80
URL = f"http://{HOST}"  # that port's, by default


def on_memory_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on a loop in memory of its own; a task left behind is an error."""
    return on_loops(test, [MemoryLoop])


class MemoryReader(PromptReader):
    """Reads as the gateway does; the clock goes on for tasks that wait for a thread."""

    async def read(self, *args: Any, **options: Any) -> Any:
        with memory_loop().working():
            return await super().read(*args, **options)

    async def think(self, *args: Any, **options: Any) -> Any:
        with memory_loop().working():
            return await super().think(*args, **options)

    async def close(self) -> None:
        with memory_loop().working():
            await super().close()


class MemoryUpkeep(ModelUpkeep):
    """Keeps models as the gateway does; the clock goes on for a thread that reads a tokenizer."""

    async def settle(self) -> None:
        with memory_loop().working():
            await super().settle()


@dataclass
class Pipelined(Deployment):
    """The steps and pages of a gateway before scripted nodes."""

    reloads: Reloads
    endpoint: GenerationEndpoint
    seen: NodeAccess
    models: Models
    kept: RecordRing
    app: web.Application

    @property
    def url(self) -> str:
        return URL

    @property
    def config(self) -> GatewayConfig:
        """The configuration by which the steps run now."""
        return self.reloads.config

    def configure(self, config: GatewayConfig) -> None:
        """Has the steps take over what may change while they run."""
        assert self.reloads.take(config) == []

    @property
    def clusters(self) -> Clusters:
        return self.seen.clusters

    @property
    def links(self) -> ClusterLinks:
        return self.seen.links

    @property
    def replicas(self) -> Replicas | None:
        return self.models.default.replicas

    @property
    def refusals(self) -> SloGate:
        return self.models.default.refusals

    @property
    def line(self) -> WaitingLine:
        return self.models.default.line

    @property
    def door(self) -> GenerationEndpoint:
        return self.endpoint

    async def records(self) -> list[dict[str, Any]]:
        await self.idle()
        return [json.loads(msgspec.json.encode(record)) for record in self.kept.since(0)]

    async def metrics(self) -> str:
        await self.idle()
        self.door.metrics.observe_nodes(self.clusters.nodes)
        self.door.metrics.observe_links(self.links.status())
        self.door.metrics.observe_estimates({"": self.models.default.router.errors()})
        return self.door.metrics.render().decode()


@asynccontextmanager
async def pipeline(
    remote: int = 1,
    local: int = 1,
    decode: int = 2,
    *,
    remote_clusters: tuple[str, ...] = ("east",),
    clusters: tuple[str, ...] = ("west",),
    kind: type[ScriptedNode] = ScriptedNode,
    seat: SingleProcess | None = None,
    agent_client: type[AgentClient] = MemoryAgent,
    node_times: NodeTimes = NODE_TIMES,
    read_again: Callable[[GatewayConfig], GatewayConfig] = lambda config: config,
    tokenizers: Callable[[GatewayConfig], TextTokenizer] | None = None,
    **fields: Any,
) -> AsyncIterator[Pipelined]:
    """A gateway's steps and pages before that many scripted nodes."""
    seat = seat or SingleProcess()
    async with AsyncExitStack() as held:
        nodes = await held.enter_async_context(
            topology(remote, local, decode, remote_clusters, clusters, kind, in_memory)
        )
        config = config_for(nodes, **fields)
        steps = await held.enter_async_context(
            _stepping(config, nodes, seat, agent_client, node_times, read_again, tokenizers)
        )
        known = steps.clusters
        known.start()
        assert await known.wait_for(lambda: all(node.connected for node in known.nodes), PATIENCE_S)
        await held.enter_async_context(_listening(steps, seat))
        async with steps.http:
            yield steps


@asynccontextmanager
async def _stepping(
    config: GatewayConfig,
    nodes: Topology,
    seat: SingleProcess,
    agent_client: type[AgentClient],
    node_times: NodeTimes,
    read_again: Callable[[GatewayConfig], GatewayConfig],
    tokenizers: Callable[[GatewayConfig], TextTokenizer] | None = None,
) -> AsyncIterator[Pipelined]:
    """The steps and pages, built as a gateway builds them."""
    clock, metrics = memory_loop().time, seat.metrics
    tasks = GatewayTasks(*(TaskSet(metrics.upkeep.unforeseen) for _ in range(4)))
    async with AsyncExitStack() as held:
        ended = await held.enter_async_context(build_sinks(config=config, metrics=metrics))
        audit = await held.enter_async_context(build_audit(config=config, seat=seat, clock=clock))
        allowances = held.enter_context(contextlib.closing(seat.allowances(clock)))
        seen = await held.enter_async_context(
            build_nodes(
                config=config,
                clock=clock,
                seat=seat,
                tasks=tasks,
                agent_client=agent_client,
                times=node_times,
                forget=lambda node_id: models.forget(node_id),
            )
        )
        models = Models(seen.clusters, config.catalog)
        common = build_common(
            config=config,
            clock=clock,
            seat=seat,
            tasks=tasks,
            seen=seen,
            receiver=BodyReceiver(config.strangers, config.max_body_bytes, config.timeouts.body_s, clock),
            strangers=config.strangers,
            ended=ended,
            allowances=allowances,
        )
        upkeep = MemoryUpkeep(
            config,
            models,
            clusters=seen.clusters,
            build=partial(build_model, common=common, is_default=False, reader_type=MemoryReader),
            tasks=tasks.afterwards,
            clock=clock,
            load=lambda of: tokenizers(of) if tokenizers is not None else text_tokenizer(),
            on_failed=metrics.fallback,
        )
        held.push_async_callback(upkeep.close)
        catalog = config.catalog
        default = config_of(config, catalog, catalog.default, 1)
        tokenizer = text_tokenizer() if tokenizers is None else tokenizers(default)
        models.add(
            await held.enter_async_context(
                build_model(default, catalog.default, tokenizer, common=common, reader_type=MemoryReader)
            )
        )
        await held.enter_async_context(ending(config=config, tasks=tasks))
        door = GenerationEndpoint(
            config=config,
            models=models,
            clusters=seen.clusters,
            rotation=seen.rotation,
            metrics=metrics,
            tasks=tasks.requests,
            clock=clock,
            allowances=allowances,
            audit=audit,
            sessions=OperatorSessions(seat.sessions, config.session_s),
            traces=ended.traces,
        )

        reloads = Reloads(
            config,
            [
                upkeep,
                common.admission,
                seen.legs,
                door,
                seen.rotation,
                seen.roster,
                seen.links,
            ],
            lambda: read_again(config),
            metrics.upkeep.reloaded,
        )
        shown = ShownParts(
            config=config,
            clock=clock,
            seat=seat,
            seen=seen,
            models=models,
            door=door,
            reloads=reloads,
        )
        pages = operator_pages(shown, {"requests": common.records, "flows": common.flows, "audit": audit}, None)
        app = build_app(door, pages, token_endpoints(seen=seen, door=door))
        keep_chores(config=config, clock=clock, metrics=metrics, tasks=tasks, seen=seen, flows=common.flows, door=door)
        http = aiohttp.ClientSession(URL, connector=aiohttp.UnixConnector(str(PORT)))
        await upkeep.settle()
        tasks.chores.keep(upkeep.run, "models")
        yield Pipelined(nodes, http, reloads, door, seen, models, common.records, app)


@asynccontextmanager
async def _listening(steps: Pipelined, seat: SingleProcess) -> AsyncIterator[None]:
    """Has the steps and pages answer clients on a port of the loop's."""
    gate = Gate("clients", OPERATORS * 16, Strangers(), seat.metrics, memory_loop().time)
    listener = await Listener.start(steps.app, gate, HOST, PORT, Strangers().idle_s, straight=straight_ways(steps.door))
    try:
        yield
        steps.door.visits.end_all()
    finally:
        await listener.close()

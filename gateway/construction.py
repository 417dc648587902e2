"""The parts of a gateway: `construct` says what is built, in order."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gateway.admin.reload import Reloads
from gateway.admission.concurrency import ConcurrencyLimiter
from gateway.auth.keyring import Keyring
from gateway.auth.sessions import OperatorSessions
from gateway.cluster.agent_client import AgentClient
from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import Clusters, NodeTimes
from gateway.config.gateway import GatewayConfig, Strangers
from gateway.fleet.fleet import FleetPart, build_fleet
from gateway.http.body import BodyReceiver
from gateway.http.connections import Gate
from gateway.http.listener import Listener
from gateway.models.served import Models, config_of
from gateway.models.upkeep import ModelUpkeep
from gateway.parts import (
    CommonParts,
    GatewayTasks,
    NodeAccess,
    RequestSinks,
    build_audit,
    build_common,
    build_model,
    build_nodes,
    build_sinks,
    ending,
)
from gateway.ratelimit.limiter import TenantLimiters
from gateway.server.app import GenerationEndpoint
from gateway.server.audit_log import AuditLog
from gateway.tasks import TaskSet
from gateway.telemetry.log_setup import LogLevel
from gateway.workers.peers import NumberedRing
from gateway.workers.process_scope import SingleProcess, WorkerProcess
from prompts.tokens.tokenizer import TextTokenizer

BEAT_S: Final = 0.25


@dataclass(slots=True, kw_only=True)
class RunningGateway:
    """A running gateway; `url` is where it answers."""

    door: GenerationEndpoint
    admission: ConcurrencyLimiter
    clusters: Clusters
    models: Models
    links: ClusterLinks
    reloads: Reloads
    url: str = ""
    metrics_url: str = ""
    listeners: list[Listener] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Gateway {self.url} [{self.admission.in_flight} in flight]>"

    @property
    def config(self) -> GatewayConfig:
        """The configuration by which it runs now."""
        return self.reloads.config

    def reload(self, config: GatewayConfig) -> list[str]:
        """Takes over what may change while it runs; the keys that differ and may not are returned."""
        return self.reloads.take(config)

    def end_connections(self) -> None:
        """Answers say `Connection: close` from now on."""
        for gate in self.gates:
            gate.is_leaving = True

    def leave_ports(self) -> None:
        """Takes no more connections; another gateway has the ports, or may have them."""
        self.end_connections()
        for listener in self.listeners:
            listener.close_port()

    async def left(self, timeout_s: float, goes_on: Callable[[], bool]) -> None:
        """Waits until no client is connected, or `goes_on` says no. Answers tell clients to connect anew."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while goes_on() and (self.admission.in_flight or any(map(len, self.gates))):  # noqa: ASYNC110 nothing tells
                    await asyncio.sleep(BEAT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDraft:
    """What a gateway is built from. `tokenizer` is that of the default model."""

    config: GatewayConfig
    tokenizer: TextTokenizer
    clock: Callable[[], float]
    seat: SingleProcess | WorkerProcess
    read_again: Callable[[], GatewayConfig]
    agent_client: type[AgentClient]
    node_times: NodeTimes
    load_tokenizer: Callable[[GatewayConfig], TextTokenizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedParts:
    """What has happened and been used, written down."""

    ended: RequestSinks
    audit: AuditLog
    allowances: TenantLimiters


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltParts:
    """What a gateway is made of. Nothing of it runs yet but what writes its traces and records."""

    config: GatewayConfig
    clock: Callable[[], float]
    seat: SingleProcess | WorkerProcess
    strangers: Strangers
    tasks: GatewayTasks
    seen: NodeAccess
    common: CommonParts
    fleet: FleetPart
    upkeep: ModelUpkeep
    door: GenerationEndpoint
    gateway: RunningGateway
    audit: NumberedRing

    @property
    def kept(self) -> dict[str, NumberedRing]:
        """What operators read page by page."""
        return {"requests": self.common.records, "flows": self.common.flows, "audit": self.audit}


@asynccontextmanager
async def construct(draft: GatewayDraft) -> AsyncIterator[BuiltParts]:
    """The parts of a gateway, each after those that it is given; at the block's end they end the other way round."""
    config, seat = draft.config, draft.seat
    strangers = config.strangers.divided(seat.workers)
    tasks = GatewayTasks(*(TaskSet(seat.metrics.upkeep.unforeseen) for _ in range(4)))
    async with AsyncExitStack() as held:
        held.callback(seat.offered.publish)
        noted = await _noted(draft, held)
        seen, models = await _nodes_and_models(draft, tasks, held)
        fleet = _fleet(draft, noted, seen, lambda: door.keyring, held)
        common = build_common(
            config=config,
            clock=draft.clock,
            seat=seat,
            tasks=tasks,
            seen=seen,
            receiver=_receiver(config, strangers),
            strangers=strangers,
            ended=noted.ended,
            allowances=noted.allowances,
        )
        upkeep = await _first_model(draft, common, models, held)
        await held.enter_async_context(ending(config=config, tasks=tasks))
        door = _door(draft, noted, common, models)
        yield BuiltParts(
            config=config,
            clock=draft.clock,
            seat=seat,
            strangers=strangers,
            tasks=tasks,
            seen=seen,
            common=common,
            fleet=fleet,
            upkeep=upkeep,
            door=door,
            gateway=_gateway(draft, common, upkeep, door),
            audit=noted.audit,
        )


async def _noted(draft: GatewayDraft, held: AsyncExitStack) -> NotedParts:
    """Where it is written down what has happened, and what tenants have used."""
    config, seat = draft.config, draft.seat
    return NotedParts(
        ended=await held.enter_async_context(build_sinks(config=config, metrics=seat.metrics)),
        audit=await held.enter_async_context(build_audit(config=config, seat=seat, clock=draft.clock)),
        allowances=held.enter_context(contextlib.closing(seat.allowances(draft.clock))),
    )


async def _nodes_and_models(
    draft: GatewayDraft, tasks: GatewayTasks, held: AsyncExitStack
) -> tuple[NodeAccess, Models]:
    """How nodes are reached, and the models that they serve: a node that leaves is forgotten by each of these."""
    seen = await held.enter_async_context(
        build_nodes(
            config=draft.config,
            clock=draft.clock,
            seat=draft.seat,
            tasks=tasks,
            agent_client=draft.agent_client,
            times=draft.node_times,
            forget=lambda node_id: models.forget(node_id),
        )
    )
    models = Models(seen.clusters, draft.config.catalog)
    return seen, models


def _fleet(
    draft: GatewayDraft,
    noted: NotedParts,
    seen: NodeAccess,
    keyring: Callable[[], Keyring],
    held: AsyncExitStack,
) -> FleetPart:
    """What it shares with other gateways; they hear when it ends."""
    seat = draft.seat
    fleet = held.enter_context(
        contextlib.closing(
            build_fleet(
                draft.config, seat.duty, seat.metrics, seat.usage, draft.clock, noted.allowances, keyring, seen.drained
            )
        )
    )
    held.push_async_callback(fleet.farewell)
    return fleet


def _receiver(config: GatewayConfig, strangers: Strangers) -> BodyReceiver:
    return BodyReceiver(strangers, config.max_body_bytes, config.timeouts.body_s, asyncio.get_running_loop().time)


async def _first_model(draft: GatewayDraft, common: CommonParts, models: Models, held: AsyncExitStack) -> ModelUpkeep:
    """Adds the default model; the others come by the upkeep, which is returned."""
    config, tasks = draft.config, common.tasks
    upkeep = ModelUpkeep(
        config,
        models,
        clusters=common.seen.clusters,
        build=partial(build_model, common=common, is_default=False),
        tasks=tasks.afterwards,
        clock=draft.clock,
        workers=draft.seat.workers,
        load=draft.load_tokenizer,
        on_failed=draft.seat.metrics.fallback,
    )
    held.push_async_callback(upkeep.close)
    default = config_of(config, config.catalog, config.catalog.default, draft.seat.workers)
    models.add(
        await held.enter_async_context(build_model(default, config.catalog.default, draft.tokenizer, common=common))
    )
    return upkeep


def _door(draft: GatewayDraft, noted: NotedParts, common: CommonParts, models: Models) -> GenerationEndpoint:
    """What answers requests."""
    config, seat, seen = draft.config, draft.seat, common.seen
    return GenerationEndpoint(
        config=config,
        models=models,
        clusters=seen.clusters,
        rotation=seen.rotation,
        metrics=seat.metrics,
        tasks=common.tasks.requests,
        clock=draft.clock,
        allowances=noted.allowances,
        audit=noted.audit,
        sessions=OperatorSessions(seat.sessions, config.session_s),
        traces=noted.ended.traces,
    )


def _gateway(draft: GatewayDraft, common: CommonParts, upkeep: ModelUpkeep, door: GenerationEndpoint) -> RunningGateway:
    """As its owner sees it, and what takes over another configuration."""
    seen, seat = common.seen, draft.seat
    reloads = Reloads(
        draft.config,
        [upkeep, common.admission, seen.legs, door, LogLevel(), seen.rotation, seen.roster, seen.links],
        draft.read_again,
        seat.metrics.upkeep.reloaded,
        seat.parent,
    )
    return RunningGateway(
        door=door,
        admission=common.admission,
        clusters=seen.clusters,
        models=door.models,
        links=seen.links,
        reloads=reloads,
    )

"""The object graph of a gateway: `running` says what is built, in order; a builder for each part says how."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final

from aiohttp import web

from gateway.admin.console.endpoints import Console
from gateway.admin.console.link_switch import LinkSwitch
from gateway.admin.console.plan_proxy import PlanProxy
from gateway.admin.console_snapshot import ConsoleSnapshots
from gateway.admin.explain import Explanations
from gateway.admin.reload import Reloads
from gateway.admission.concurrency import ConcurrencyLimiter
from gateway.auth.oidc import Provider
from gateway.auth.sessions import OperatorSessions
from gateway.cluster.agent_client import AgentClient
from gateway.cluster.drained_links import DrainedLinks
from gateway.cluster.link_probes import Probes
from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import NODE_TIMES, Clusters, NodeTimes
from gateway.config.gateway import GatewayConfig, Strangers
from gateway.errors import NotReplaced
from gateway.fleet.fleet import build_fleet
from gateway.fleet.usage.keeper import FleetUsage
from gateway.http.body import BodyReceiver
from gateway.http.connections import Gate, Way
from gateway.http.listener import OPERATORS, Listener, client_connections, descriptor_limit
from gateway.http.tls import ServerCertificate, keep_current, server_certificate
from gateway.models.load_report import LoadReporter
from gateway.models.served import Models, config_of
from gateway.models.upkeep import ModelUpkeep, loaded
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
from gateway.routing.egress_leases import Shares
from gateway.routing.transfer_log import Flows
from gateway.server.app import GenerationEndpoint
from gateway.server.handlers.operators import OperatorEndpoints
from gateway.server.handlers.tokens import TokenEndpoints
from gateway.server.routes import build_app, build_operators_app, straight_ways
from gateway.tasks import TaskSet
from gateway.telemetry.log_setup import LogLevel
from gateway.telemetry.metrics import Metrics
from gateway.workers.peers import NumberedRing, WorkerPeers
from gateway.workers.ports import ListenerName
from gateway.workers.process_scope import SingleProcess, WorkerProcess
from gateway.workers.shared_counters import WorkerState
from membership.watch import MembershipWatch
from prompts.tokens.tokenizer import TextTokenizer
from transport.peers.guard import end_revoked

BEAT_S: Final = 0.25
NODES_S: Final = 5.0  # that a worker waits for its nodes before it takes connections
PROBE_TIMEOUT_S: Final = 10.0  # of a link: twice what a sender waits for a connection


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
class ShownParts:
    """The parts of a gateway that operators' pages and the console show, and act on."""

    config: GatewayConfig
    clock: Callable[[], float]
    seat: SingleProcess | WorkerProcess
    seen: NodeAccess
    models: Models
    door: GenerationEndpoint
    reloads: Reloads


@asynccontextmanager
async def running(
    config: GatewayConfig,
    tokenizer: TextTokenizer,
    clock: Callable[[], float],
    seat: SingleProcess | WorkerProcess | None = None,
    read_again: Callable[[], GatewayConfig] | None = None,
    warm_s: float = 0.0,
    *,
    agent_client: type[AgentClient] = AgentClient,
    node_times: NodeTimes = NODE_TIMES,
    load_tokenizer: Callable[[GatewayConfig], TextTokenizer] = loaded,
) -> AsyncIterator[RunningGateway]:
    """A gateway that answers inside the block, or the worker of one that has this seat.

    `read_again` gives its configuration as it is now, when an operator wants that taken over. The gateway waits up to `warm_s`
    for a process that reads long bodies; 0: the first long body starts one. `tokenizer` is that of the default model.
    """
    seat = seat or SingleProcess()
    metrics = seat.metrics
    strangers = config.strangers.divided(seat.workers)
    tasks = GatewayTasks(*(TaskSet(metrics.upkeep.unforeseen) for _ in range(4)))
    async with AsyncExitStack() as held:
        held.callback(seat.offered.publish)
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
        fleet = held.enter_context(
            contextlib.closing(
                build_fleet(
                    config, seat.duty, metrics, seat.usage, clock, allowances, lambda: door.keyring, seen.drained
                )
            )
        )
        held.push_async_callback(fleet.farewell)
        receiver = BodyReceiver(
            strangers, config.max_body_bytes, config.timeouts.body_s, asyncio.get_running_loop().time
        )
        common = build_common(
            config=config,
            clock=clock,
            seat=seat,
            tasks=tasks,
            seen=seen,
            receiver=receiver,
            strangers=strangers,
            ended=ended,
            allowances=allowances,
        )
        upkeep = ModelUpkeep(
            config,
            models,
            clusters=seen.clusters,
            build=partial(build_model, common=common, is_default=False),
            tasks=tasks.afterwards,
            clock=clock,
            workers=seat.workers,
            load=load_tokenizer,
            on_failed=metrics.fallback,
        )
        held.push_async_callback(upkeep.close)
        default = config_of(config, config.catalog, config.catalog.default, seat.workers)
        models.add(
            await held.enter_async_context(build_model(default, config.catalog.default, tokenizer, common=common))
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
                LogLevel(),
                seen.rotation,
                seen.roster,
                seen.links,
            ],
            read_again or (lambda: config),
            metrics.upkeep.reloaded,
            seat.parent,
        )
        gateway = RunningGateway(
            door=door,
            admission=common.admission,
            clusters=seen.clusters,
            models=models,
            links=seen.links,
            reloads=reloads,
        )
        await upkeep.settle()
        seen.clusters.start()
        keep_chores(config=config, clock=clock, metrics=metrics, tasks=tasks, seen=seen, flows=common.flows, door=door)
        tasks.chores.keep(upkeep.run, "models")
        for work in fleet.chores:
            tasks.chores.keep(work, "fleet")
        warming = tasks.afterwards.start(models.default.steps.reader.warm(warm_s), "warm") if warm_s else None
        kept: dict[str, NumberedRing] = {"requests": common.records, "flows": common.flows, "audit": audit}
        siblings = await held.enter_async_context(seat.siblings(kept))
        shown = ShownParts(
            config=config,
            clock=clock,
            seat=seat,
            seen=seen,
            models=models,
            door=door,
            reloads=reloads,
        )
        pages = operator_pages(shown, kept, siblings, fleet.usage)
        await _nodes_heard(seen, seat)
        await fleet.settled()
        seen.links.drain(seen.drained.links())  # other gateways may have drained some
        if warming is not None:
            await warming
        certificate = server_certificate(config)
        gates = await held.enter_async_context(
            _listening(
                gateway,
                strangers=strangers,
                seat=seat,
                pages=pages,
                desk=token_endpoints(seen=seen, door=door),
                certificate=certificate,
            )
        )
        if certificate is not None:
            tasks.chores.keep(lambda: keep_current(certificate), "certificate")
        seat.be(_state(door))
        tasks.chores.keep(lambda: _heartbeat(door, gates, seen.links, seen.drained, clock, seat), "heartbeat")
        held.callback(door.visits.end_all)
        yield gateway


def keep_chores(
    *,
    config: GatewayConfig,
    clock: Callable[[], float],
    metrics: Metrics,
    tasks: GatewayTasks,
    seen: NodeAccess,
    flows: Flows,
    door: GenerationEndpoint,
) -> None:
    """Has done for ever what goes on beside requests."""
    keep = tasks.chores.keep
    if door.tokens is not None:
        keep(Provider(config.oidc, door.tokens, metrics.upkeep.keys_asked).run, "oidc")
    guard = seen.guard
    if guard is not None:
        keep(lambda: end_revoked(guard), "revoked")
    keep(seen.roster.run, "roster")
    if sources := config.membership.sources():
        watch = MembershipWatch(sources, clock, seen.roster.saw, metrics.upkeep.registry_failed)
        keep(watch.run, "membership")
    if config.routing.share_egress:
        keep(Shares(seen.clusters.nodes, metrics.upkeep, clock, uuid.uuid4().hex).run, "shares")
    keep(Probes(seen.links, tasks.afterwards, PROBE_TIMEOUT_S, clock, flows.probed).run, "probes")


def operator_pages(
    shown: ShownParts,
    kept: Mapping[str, NumberedRing],
    siblings: WorkerPeers | None,
    usage: FleetUsage | None = None,
) -> OperatorEndpoints:
    seat, seen = shown.seat, shown.seen
    return OperatorEndpoints(
        clusters=seen.clusters,
        roster=seen.roster,
        rotation=seen.rotation,
        models=shown.models,
        links=seen.links,
        admission=shown.door.rooms.admission,
        metrics=seat.metrics,
        usage=usage,
        kept=kept,
        load=LoadReporter(seen.clusters, seen.links, shown.config.routing.decode_slots),
        seat=seat,
        siblings=siblings,
        console=_console(shown),
        clock=shown.clock,
        keyring=shown.door.keyring,
        started_at=int(datetime.now(UTC).timestamp()),
    )


def _console(shown: ShownParts) -> Console:
    seen, steps, door = shown.seen, shown.door.rooms, shown.door
    snapshots = ConsoleSnapshots(
        config=shown.config,
        clusters=seen.clusters,
        roster=seen.roster,
        rotation=seen.rotation,
        links=seen.links,
        models=shown.models,
        admission=steps.admission,
        classes=lambda: door.classes,
        tenants=lambda: door.keyring.tenants,
        seat=shown.seat,
        clock=shown.clock,
    )
    return Console(
        snapshots=snapshots,
        explanations=Explanations(
            door=door,
            receiver=steps.receiver,
            clusters=seen.clusters,
            models=shown.models,
            clock=shown.clock,
        ),
        desk=PlanProxy(shown.config.plan, shown.config.plan.asked(shown.config.identity)),
        switch=LinkSwitch(seen.links, seen.drained),
        reloads=shown.reloads,
        receiver=steps.receiver,
        keyring=door.keyring,
        sessions=door.sessions,
    )


def token_endpoints(*, seen: NodeAccess, door: GenerationEndpoint) -> TokenEndpoints:
    return TokenEndpoints(
        admission=door.rooms.admission,
        receiver=door.rooms.receiver,
        models=door.models,
        clusters=seen.clusters,
        legs=seen.legs,
        metrics=door.metrics,
        tenant_of=door.keyring.tenant,
        allowances=door.allowances,
        media_domains=door.media_domains,
    )


async def _nodes_heard(seen: NodeAccess, seat: SingleProcess | WorkerProcess) -> None:
    """Waits for nodes before it listens, if others serve meanwhile: whom it answers first should be served, too.

    Raises NotReplaced where the one before does that better.
    """
    clusters = seen.clusters
    if seat.ready_s is not None:
        if not await clusters.wait_for(lambda: seen.roster.is_synced and clusters.is_ready, seat.ready_s):
            raise NotReplaced(f"no decode node was ready within {seat.ready_s:g} s")
        await clusters.wait_for(lambda: all(node.info is not None for node in clusters.nodes), NODES_S)
    elif seat.workers > 1:
        await clusters.wait_for(lambda: clusters.is_ready, NODES_S)


@asynccontextmanager
async def _listening(
    gateway: RunningGateway,
    *,
    strangers: Strangers,
    seat: SingleProcess | WorkerProcess,
    pages: OperatorEndpoints,
    desk: TokenEndpoints,
    certificate: ServerCertificate | None,
) -> AsyncIterator[list[Gate]]:
    """Has `gateway` answer on its ports inside the block; the gates of its listeners."""
    config, door, now = gateway.config, gateway.door, asyncio.get_running_loop().time
    clients_gate = Gate("clients", client_connections(config, descriptor_limit()), strangers, seat.metrics, now)
    operators_gate = Gate("operators", OPERATORS, strangers, seat.metrics, now)
    async with AsyncExitStack() as held:

        async def listen(
            name: ListenerName, app: web.Application, gate: Gate, port: int, straight: Mapping[str, Way]
        ) -> str:
            gateway.gates.append(gate)
            listener = await Listener.start(
                app, gate, config.host, port, strangers.idle_s, straight=straight, sockets=seat.sockets.get(name, ()),
                certificate=certificate, header_s=strangers.header_s, strict_transport=config.strict_transport,
            )  # fmt: skip
            held.push_async_callback(listener.close)
            gateway.listeners.append(listener)
            return listener.url

        app = build_app(door, pages, desk)
        gateway.url = await listen(ListenerName.CLIENTS, app, clients_gate, config.port, straight_ways(door))
        gateway.metrics_url = f"{gateway.url}/metrics"
        if config.metrics_port:
            app = build_operators_app(door, pages)
            url = await listen(ListenerName.OPERATORS, app, operators_gate, config.metrics_port, {})
            gateway.metrics_url = f"{url}/metrics"
        yield [clients_gate, operators_gate]


async def _heartbeat(
    door: GenerationEndpoint,
    gates: list[Gate],
    links: ClusterLinks,
    drained: DrainedLinks,
    clock: Callable[[], float],
    seat: SingleProcess | WorkerProcess,
) -> None:
    """Measures how late the event loop is, and ends unread answers and unused connections."""
    while True:
        due = clock() + BEAT_S
        await asyncio.sleep(BEAT_S)
        door.metrics.loop_lag(max(0.0, clock() - due))
        door.visits.end_stalled(clock(), door.config.timeouts.client_stall_s)
        for gate in gates:
            gate.sweep()
        seat.be(_state(door))
        for parts in door.models:
            parts.offered.publish()
        links.drain(drained.links())


def _state(door: GenerationEndpoint) -> WorkerState:
    if door.rooms.admission.is_draining or door.rooms.admission.is_leaving:
        return WorkerState.DRAINING
    return WorkerState.READY if door.clusters.is_ready else WorkerState.WITHOUT_NODES

"""A running gateway: `gateway.construction` builds its parts, `running` says what then begins."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from aiohttp import web

from gateway.auth.oidc import Provider
from gateway.cluster.agent_client import AgentClient
from gateway.cluster.link_probes import Probes
from gateway.cluster.registry import NODE_TIMES, NodeTimes
from gateway.config.gateway import GatewayConfig
from gateway.construction import BEAT_S, BuiltParts, GatewayDraft, RunningGateway, construct
from gateway.errors import NotReplaced
from gateway.http.connections import Gate, Way
from gateway.http.listener import OPERATORS, Listener, client_connections
from gateway.http.tls import keep_current, server_certificate
from gateway.models.upkeep import loaded
from gateway.pages import ShownParts, operator_pages, token_endpoints
from gateway.parts import (
    GatewayTasks,
    NodeAccess,
)
from gateway.routing.egress_leases import Shares
from gateway.routing.transfer_log import Flows
from gateway.server.app import GenerationEndpoint
from gateway.server.handlers.operators import OperatorEndpoints
from gateway.server.routes import build_app, build_operators_app, straight_ways
from gateway.telemetry.metrics import Metrics
from gateway.workers.ports import ListenerName
from gateway.workers.process_scope import SingleProcess, WorkerProcess
from gateway.workers.shared_counters import WorkerState
from membership.watch import MembershipWatch
from prompts.tokens.tokenizer import TextTokenizer
from transport.path.descriptors import descriptor_limit
from transport.peers.guard import end_revoked

NODES_S: Final = 5.0  # that a worker waits for its nodes before it takes connections
PROBE_TIMEOUT_S: Final = 10.0  # of a link: twice what a sender waits for a connection


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
    async with AsyncExitStack() as held:
        built = await held.enter_async_context(
            construct(
                GatewayDraft(
                    config=config,
                    tokenizer=tokenizer,
                    clock=clock,
                    seat=seat or SingleProcess(),
                    read_again=read_again or (lambda: config),
                    agent_client=agent_client,
                    node_times=node_times,
                    load_tokenizer=load_tokenizer,
                )
            )
        )
        await built.upkeep.settle()
        _begin_chores(built)
        warming = _warming(built, warm_s)
        pages = await held.enter_async_context(_pages(built))
        await _all_heard(built)
        if warming is not None:
            await warming
        gates = await held.enter_async_context(_listening(built, pages))
        _begin_heartbeat(built, gates)
        held.callback(built.door.visits.end_all)
        yield built.gateway


def _begin_chores(built: BuiltParts) -> None:
    """From now on the gateway hears its nodes, and does what goes on beside requests."""
    built.seen.clusters.start()
    keep_chores(
        config=built.config,
        clock=built.clock,
        metrics=built.seat.metrics,
        tasks=built.tasks,
        seen=built.seen,
        flows=built.common.flows,
        door=built.door,
    )
    built.tasks.chores.keep(built.upkeep.run, "models")
    for work in built.fleet.chores:
        built.tasks.chores.keep(work, "fleet")


def _warming(built: BuiltParts, warm_s: float) -> "asyncio.Task[None] | None":
    """The start of a process that reads long bodies; None: the first of them starts one."""
    reader = built.gateway.models.default.steps.reader
    return built.tasks.afterwards.start(reader.warm(warm_s), "warm") if warm_s else None


@asynccontextmanager
async def _pages(built: BuiltParts) -> AsyncIterator[OperatorEndpoints]:
    """What operators are shown, other workers' part of it as well."""
    shown = ShownParts(
        config=built.config,
        clock=built.clock,
        seat=built.seat,
        seen=built.seen,
        models=built.gateway.models,
        door=built.door,
        reloads=built.gateway.reloads,
    )
    async with built.seat.siblings(built.kept) as siblings:
        yield operator_pages(shown, built.kept, siblings, built.fleet.usage)


async def _all_heard(built: BuiltParts) -> None:
    """Waits for nodes and other gateways, before the first client is answered. Raises NotReplaced."""
    await _nodes_heard(built.seen, built.seat)
    await built.fleet.settled()
    built.seen.links.drain(built.seen.drained.links())  # other gateways may have drained some


def _begin_heartbeat(built: BuiltParts, gates: list[Gate]) -> None:
    """From now on the gateway says how it is, and ends what clients leave unread."""
    built.seat.be(_state(built.door))
    built.tasks.chores.keep(lambda: _heartbeat(built, gates), "heartbeat")


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
async def _listening(built: BuiltParts, pages: OperatorEndpoints) -> AsyncIterator[list[Gate]]:
    """Has the gateway answer on its ports inside the block; the gates of its listeners."""
    gateway, door, seat, strangers = built.gateway, built.door, built.seat, built.strangers
    config, now = gateway.config, asyncio.get_running_loop().time
    certificate = server_certificate(config)
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

        app = build_app(door, pages, token_endpoints(seen=built.seen, door=door))
        gateway.url = await listen(ListenerName.CLIENTS, app, clients_gate, config.port, straight_ways(door))
        gateway.metrics_url = f"{gateway.url}/metrics"
        if config.metrics_port:
            app = build_operators_app(door, pages)
            url = await listen(ListenerName.OPERATORS, app, operators_gate, config.metrics_port, {})
            gateway.metrics_url = f"{url}/metrics"
        if certificate is not None:
            built.tasks.chores.keep(lambda: keep_current(certificate), "certificate")
        yield [clients_gate, operators_gate]


async def _heartbeat(built: BuiltParts, gates: list[Gate]) -> None:
    """Measures how late the event loop is, and ends unread answers and unused connections."""
    clock, door = built.clock, built.door
    while True:
        due = clock() + BEAT_S
        await asyncio.sleep(BEAT_S)
        door.metrics.loop_lag(max(0.0, clock() - due))
        door.visits.end_stalled(clock(), door.config.timeouts.client_stall_s)
        for gate in gates:
            gate.sweep()
        built.seat.be(_state(door))
        for parts in door.models:
            parts.offered.publish()
        built.seen.links.drain(built.seen.drained.links())


def _state(door: GenerationEndpoint) -> WorkerState:
    if door.rooms.admission.is_draining or door.rooms.admission.is_leaving:
        return WorkerState.DRAINING
    return WorkerState.READY if door.clusters.is_ready else WorkerState.WITHOUT_NODES

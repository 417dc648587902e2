"""The process: builds the object graph, serves until told to stop, and lets running requests end."""

import asyncio
import contextlib
import logging
import secrets
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from gateway.admin.console.endpoints import Console
from gateway.admin.console.link_switch import LinkSwitch
from gateway.admin.console.plan_proxy import PlanProxy
from gateway.admin.console_snapshot import ConsoleSnapshots
from gateway.admin.explain import Explanations
from gateway.admin.reload import Reloads
from gateway.admission.concurrency import ConcurrencyLimiter
from gateway.admission.queue import WaitingLine
from gateway.admission.service_classes import Classes
from gateway.admission.slo import SloGate
from gateway.auth.oidc import Provider
from gateway.cluster.agent_client import AgentClient
from gateway.cluster.drained_links import DrainedLinks, SharedDrainedLinks
from gateway.cluster.link_probes import Probes
from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import NODE_TIMES, Clusters, NodeTimes
from gateway.config.gateway import GatewayConfig
from gateway.errors import GatewayConfigError
from gateway.http.body import BodyReceiver
from gateway.http.connections import Gate
from gateway.http.listener import OPERATORS, Listener, client_connections, descriptor_limit, raise_descriptor_limit
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.engine_render import EngineReadings
from gateway.pipeline.relay import Relay
from gateway.pipeline.reservations import DecodeReservations
from gateway.pipeline.retries import Retries
from gateway.pipeline.sglang_pair import Pairing
from gateway.pipeline.ticketed import TicketedRunner
from gateway.prompt.reader import PromptReader
from gateway.prompt.tokenizer_trust import Styles
from gateway.routing.egress_leases import Shares
from gateway.routing.plan_follower import Follower
from gateway.routing.prefix_transfers import PrefixTransfers
from gateway.routing.replication import Replicas
from gateway.routing.router import Router
from gateway.routing.transfer_log import Flows
from gateway.server.app import GenerationEndpoint, Pipeline
from gateway.server.handlers.operators import OperatorEndpoints
from gateway.server.handlers.tokens import TokenEndpoints
from gateway.server.routes import build_app, build_operators_app, straight_ways
from gateway.tasks import TaskSet
from gateway.telemetry.load_report import LoadReporter
from gateway.telemetry.otlp import Traces
from gateway.telemetry.recorder import RequestRecorder
from gateway.telemetry.request_log import RequestLog
from gateway.upstream.legs import Legs
from gateway.workers.peers import NumberedRing
from gateway.workers.process_scope import ORPHANED, SingleProcess, WorkerProcess
from gateway.workers.shared_counters import WorkerState
from planner.decisions.estimates.decoding import LearnedSteps
from planner.decisions.estimates.durations import LearnedCost
from prompts.chat.renderers import renders_otherwise
from prompts.tokens.tokenizer import TextTokenizer

log = logging.getLogger("prfaas.gateway")

BEAT_S: Final = 0.25
CLOSE_S: Final = 1.0
NODES_S: Final = 5.0  # that a worker waits for its nodes before it takes connections
WARM_S: Final = 60.0  # that a gateway waits for its first process for long bodies; three on an idle machine
PROBE_TIMEOUT_S: Final = 10.0  # of a link: twice what a sender waits for a connection


@dataclass(slots=True)
class RunningGateway:
    """A running gateway; `url` is where it answers."""

    config: GatewayConfig
    door: GenerationEndpoint
    admission: ConcurrencyLimiter
    decider: Router
    refusals: SloGate
    legs: Legs
    line: WaitingLine
    clusters: Clusters
    links: ClusterLinks
    replicas: Replicas | None
    reloads: Reloads = field(init=False)
    url: str = ""
    metrics_url: str = ""
    listeners: list[Listener] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Gateway {self.url} [{self.admission.in_flight} in flight]>"

    def reload(self, config: GatewayConfig) -> list[str]:
        """Takes over what may change while it runs; the keys that differ and may not are returned."""
        possible = self.config.with_changes_of(config)
        self.decider.configure(possible)
        self.admission.limit = possible.max_in_flight
        self.legs.serve(possible.max_in_flight)
        self.refusals.configure(possible)
        self.line.configure(possible.max_waiting, possible.admission.ageing_s)
        self.door.classes = Classes(possible.classes, possible.admission.default_class)
        self.door.keyring.configure(possible.tenants, possible.operator_keys)
        logging.getLogger().setLevel(possible.log_level.upper())
        self.config = possible
        return possible.differences(config)

    def leave_ports(self) -> None:
        """Takes no more connections; those there are go on. Another gateway may have the ports."""
        for listener in self.listeners:
            listener.close_port()


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
) -> AsyncIterator[RunningGateway]:
    """A gateway that answers inside the block, or the worker of one that has this seat.

    `read_again` gives its configuration as it is now, when an operator wants that taken over. The gateway waits up to `warm_s`
    for a process that reads long bodies; 0: the first long body starts one.
    """
    seat = seat or SingleProcess()
    metrics = seat.metrics
    tokenizer.encoder.report_to(lambda reason: metrics.fallback(f"tokenizer_{reason}"))
    strangers = config.strangers.divided(seat.workers)
    now = asyncio.get_running_loop().time
    chores, watches, afterwards, requests = (TaskSet(metrics.upkeep.unforeseen) for _ in range(4))
    holder = uuid.uuid4().hex  # a name for what this process reserves: no worker's and no other start's
    identity = config.identity
    guard = identity.guard() if identity is not None else None
    agents = [
        agent_client(
            node.agent, config.timeouts.rpc_s, identity, node.name, metrics.upkeep.called_by_grpc, holder, guard
        )
        for node in config.nodes
    ]
    steps = LearnedSteps()
    cost = LearnedCost(config.routing.prefill_tokens_per_s, steps=steps)

    def on_renamed(node_id: str) -> None:
        cost.forget(node_id)
        refusals.forget(node_id)

    legs = Legs(config.timeouts, config.max_in_flight, clock)
    clusters = Clusters(
        agents,
        clock,
        served_model=config.served_model,
        decode_slots=config.routing.decode_slots,
        tasks=watches,
        on_lost=metrics.upkeep.node_lost,
        on_silent=legs.give_up,
        on_renamed=on_renamed,
        catch_up=seat.catch_up,
        times=node_times,
    )
    seat.join(clusters.nodes)
    refusals = SloGate(config, clusters, steps, clock)
    links = ClusterLinks(
        clusters.nodes, clock, config.routing.link_bytes_per_s, metrics.upkeep.link_failed, expected=config.ways,
        is_budget_shared=config.routing.share_egress,
    )  # fmt: skip
    drained = SharedDrainedLinks(config.drained_dir) if config.drained_dir is not None else seat.drained
    links.drain(drained.links())
    records = seat.records(config.kept_records)
    flows = Flows(seat.next_seq, clock)
    kept: dict[str, NumberedRing] = {"requests": records, "flows": flows}
    with _named(config):
        request_log = (
            RequestLog(config.request_log, metrics.upkeep.not_logged) if config.request_log.directory else None
        )
        traces = Traces(config.traces, metrics.upkeep.not_traced) if config.traces.endpoint else None
    reader = PromptReader(
        tokenizer,
        afterwards,
        threads=config.tokenise_threads,
        timeout_s=config.timeouts.read_s,
        max_bytes=strangers.max_reading_bytes,
    )
    warming = afterwards.start(reader.warm(warm_s), "warm") if warm_s else None
    decider = Router(config, clusters, links, cost, clock)
    engine_readings = EngineReadings(
        Styles(), clusters, legs, reader, afterwards, clock, config.timeouts.read_s,
        lambda: decider.setting.threshold_tokens,
        renders_otherwise=renders_otherwise(config.tokenizer_dir),
    )  # fmt: skip
    on_ended = [each.ended for each in (request_log, traces, engine_readings) if each is not None]
    accounts = RequestRecorder(metrics, records, seat.offered, clock, on_ended)
    follower = Follower(config.plan, decider.follow, metrics.upkeep)
    follower.begin()
    moves = PrefixTransfers(
        metrics,
        afterwards,
        clock,
        limit=max(1, config.routing.max_moves // seat.workers),
        timeout_s=config.routing.move_timeout_s,
        on_moved=decider.learn_move,
        on_failed=decider.learn_late_move,
        on_ended=flows.moved,
    )
    replicas = Replicas(clusters, moves, clock, decider.pays) if config.routing.replicate else None
    admission = ConcurrencyLimiter(config.max_in_flight, metrics.in_flight.set, seat.in_flight)
    line = WaitingLine(
        clock,
        limit=config.max_waiting,
        patience_s=config.timeouts.room_s,
        ageing_s=config.admission.ageing_s,
        on_change=metrics.waiting.set,
        room=seat.waiting,
    )
    retries = Retries(
        clusters,
        accounts,
        clock,
        max_tries=config.max_attempts,
        max_takeovers=config.max_takeovers,
        share=config.retry_share,
        least=config.least_retries / seat.workers,
    )
    rooms = Pipeline(
        receiver=BodyReceiver(strangers, config.max_body_bytes, config.timeouts.body_s, now),
        admission=admission,
        reader=reader,
        engine_readings=engine_readings,
        dispatcher=Dispatcher(
            clusters,
            decider,
            DecodeReservations(clusters, accounts, afterwards, clock, config.timeouts.reservation_ttl_s),
            TicketedRunner(
                clusters,
                links,
                legs,
                moves,
                decider,
                refusals,
                accounts,
                requests,
                retries,
                config.timeouts.room_s,
            ),
            Pairing(
                clusters,
                links,
                legs,
                decider,
                refusals,
                accounts,
                requests,
                retries,
                secrets.randbits,
            ),
            reader,
            engine_readings,
            accounts,
            replicas,
            refusals,
            line,
            clock,
            retries,
        ),
        relay=Relay(accounts, requests, clock),
        accounts=accounts,
    )
    allowances = seat.allowances(clock)
    door = GenerationEndpoint(
        config, rooms, clusters, metrics, requests, clock, allowances, decider.answer_tokens, traces
    )
    load = LoadReporter(
        seat.offered, clusters, links, lambda: decider.setting, lambda: follower.plan,
        config.routing.decode_slots,
    )  # fmt: skip
    gates = [
        Gate("clients", client_connections(config, descriptor_limit()), strangers, metrics, now),
        Gate("operators", OPERATORS, strangers, metrics, now),
    ]
    clusters.start()
    if door.tokens is not None:
        chores.keep(Provider(config.oidc, door.tokens, metrics.upkeep.keys_asked).run, "oidc")
    if config.plan.url:
        chores.keep(follower.run, "plan")
    if config.routing.share_egress:
        chores.keep(Shares(clusters.nodes, metrics.upkeep, clock, uuid.uuid4().hex).run, "shares")
    chores.keep(Probes(links, afterwards, PROBE_TIMEOUT_S, clock, flows.probed).run, "probes")
    if replicas:
        chores.keep(replicas.run, "replicas")
    gateway = RunningGateway(config, door, admission, decider, refusals, legs, line, clusters, links, replicas)
    gateway.reloads = Reloads(
        read_again or (lambda: config), lambda: gateway.config, gateway.reload, metrics.upkeep.reloaded, seat.parent
    )
    async with AsyncExitStack() as stack:
        for each in (request_log, traces):
            if each is not None:
                stack.push_async_callback(asyncio.to_thread, each.close)
        stack.callback(allowances.close)
        stack.push_async_callback(rooms.reader.close)
        stack.push_async_callback(clusters.close)
        stack.callback(legs.close)
        stack.push_async_callback(afterwards.join, max(config.timeouts.rpc_s, config.routing.move_timeout_s))
        stack.push_async_callback(requests.join, CLOSE_S)
        stack.push_async_callback(chores.cancel)
        siblings = await stack.enter_async_context(seat.siblings(kept))
        console = Console(
            ConsoleSnapshots(
                config, clusters, links, decider, admission, line, lambda: door.classes, lambda: door.keyring.tenants,
                follower, seat, clock,
            ),
            Explanations(door, rooms.receiver, clusters, decider, refusals, line),
            PlanProxy(config.plan),
            LinkSwitch(links, drained),
            gateway.reloads,
            rooms.receiver,
            door.keyring.is_operator,
        )  # fmt: skip
        pages = OperatorEndpoints(
            clusters,
            links,
            decider,
            admission,
            metrics,
            kept,
            load,
            lambda: follower.plan,
            seat,
            siblings,
            console,
            clock,
            door.keyring,
            int(datetime.now(UTC).timestamp()),
        )
        if siblings is not None:  # the others serve meanwhile; who comes here first should be served, too
            await clusters.wait_for(lambda: clusters.is_ready, NODES_S)
        if warming is not None:
            await warming
        idle_s, is_shared = strangers.idle_s, siblings is not None
        port = config.port if seat.port is None else seat.port
        desk = TokenEndpoints(
            admission, rooms.receiver, rooms.reader, clusters, legs, metrics, door.keyring.tenant, allowances
        )
        app, straight = build_app(door, pages, desk), straight_ways(door)
        clients = await Listener.start(app, gates[0], config.host, port, idle_s, straight=straight, is_shared=is_shared)
        stack.push_async_callback(clients.close)
        gateway.url, gateway.metrics_url = clients.url, f"{clients.url}/metrics"
        gateway.listeners.append(clients)
        if config.metrics_port:
            app = build_operators_app(door, pages)
            operators = await Listener.start(
                app, gates[1], config.host, config.metrics_port, idle_s, is_shared=is_shared
            )
            stack.push_async_callback(operators.close)
            gateway.metrics_url = f"{operators.url}/metrics"
            gateway.listeners.append(operators)
        seat.be(_state(door))
        chores.keep(lambda: _heartbeat(door, gates, links, drained, clock, seat), "heartbeat")
        stack.callback(door.visits.end_all)
        yield gateway


async def serve(
    config: GatewayConfig,
    tokenizer: TextTokenizer,
    announce: Callable[[str], None],
    read_again: Callable[[], GatewayConfig],
    seat: SingleProcess | WorkerProcess | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then until the running requests have ended; a second signal ends them too.

    SIGHUP has the configuration read again. A worker whose parent is gone leaves its ports to the next gateway.
    """
    loop = asyncio.get_running_loop()
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    raise_descriptor_limit()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)

    def on_orphaned(gateway: RunningGateway) -> None:
        gateway.leave_ports()
        stop.set()

    async with running(config, tokenizer, loop.time, seat, read_again, WARM_S) as gateway:
        loop.add_signal_handler(signal.SIGHUP, gateway.reloads.run)
        loop.add_signal_handler(ORPHANED, on_orphaned, gateway)
        announce(f"gateway ready url={gateway.url}")
        await stop.wait()
        log.info("stopping: %d requests in flight", gateway.admission.in_flight)
        draining = asyncio.create_task(gateway.admission.drained(config.timeouts.drain_s))
        hurry = asyncio.create_task(stop_now.wait())
        await asyncio.wait([draining, hurry], return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurry):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.contextmanager
def _named(config: GatewayConfig) -> Iterator[None]:
    """Says at the start what of the configuration cannot be had."""
    try:
        yield
    except OSError as error:
        raise GatewayConfigError(
            f"request_log.directory = {str(config.request_log.directory)!r}: {error.strerror}"
        ) from error


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
        links.drain(drained.links())


def _state(door: GenerationEndpoint) -> WorkerState:
    if door.rooms.admission.is_draining:
        return WorkerState.DRAINING
    return WorkerState.READY if door.clusters.is_ready else WorkerState.WITHOUT_NODES

"""The parts of a gateway: a builder for each, in the order in which they are built. Those that own something close it."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gateway.admission.concurrency import ConcurrencyLimiter
from gateway.admission.queue import WaitingLine
from gateway.admission.slo import SloGate
from gateway.cluster.agent_client import AgentClient
from gateway.cluster.drained_links import DrainedLinks, SharedDrainedLinks
from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import Clusters, NodeTimes
from gateway.config.gateway import GatewayConfig, Strangers
from gateway.errors import GatewayConfigError
from gateway.http.body import BodyReceiver
from gateway.members.roster import Roster, RosterParts
from gateway.pipeline.attempt import LegRunner
from gateway.pipeline.dispatcher import Dispatcher
from gateway.pipeline.engine_render import EngineReadings
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.relay import Relay
from gateway.pipeline.reservations import DecodeReservations
from gateway.pipeline.retries import Retries
from gateway.pipeline.sglang_pair import Pairing
from gateway.pipeline.ticketed import TicketedRunner
from gateway.prompt.reader import PromptReader
from gateway.prompt.tokenizer_trust import Styles
from gateway.ratelimit.limiter import TenantLimiters
from gateway.routing.block_naming import name_secrets
from gateway.routing.name_rotation import NameRotation
from gateway.routing.plan_follower import Follower
from gateway.routing.prefix_transfers import PrefixTransfers
from gateway.routing.replication import Replicas
from gateway.routing.router import Router
from gateway.routing.transfer_log import Flows
from gateway.server.audit_log import AuditLog
from gateway.tasks import TaskSet
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.otlp import Traces
from gateway.telemetry.record_ring import RecordRing
from gateway.telemetry.recorder import RequestRecorder
from gateway.telemetry.request_log import RequestLog
from gateway.upstream.legs import Legs
from gateway.workers.process_scope import SingleProcess, WorkerProcess
from membership.member import Member
from planner.decisions.estimates.decoding import LearnedSteps
from planner.decisions.estimates.durations import LearnedCost
from prompts.tokens.tokenizer import TextTokenizer
from transport.peers.guard import Guard

CLOSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class GatewayTasks:
    """The tasks of a gateway, by what may end them."""

    chores: TaskSet  # go on until the gateway ends
    watches: TaskSet  # of nodes
    afterwards: TaskSet  # what requests leave to be done; waited for
    requests: TaskSet


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSinks:
    """What hears of requests that have ended; None: not configured."""

    request_log: RequestLog | None
    traces: Traces | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAccess:
    """What is known of nodes and links, and how nodes are spoken to."""

    clusters: Clusters
    links: ClusterLinks
    drained: DrainedLinks
    legs: Legs
    guard: Guard | None  # of their certificates
    refusals: SloGate
    cost: LearnedCost
    roster: Roster
    rotation: NameRotation


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingParts:
    """What decides where requests and prefixes go."""

    router: Router
    follower: Follower
    moves: PrefixTransfers
    replicas: Replicas | None
    flows: Flows


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingParts:
    """A request's steps, the line that it may wait in, and the records that stay."""

    steps: Pipeline
    line: WaitingLine
    records: RecordRing


@asynccontextmanager
async def build_sinks(*, config: GatewayConfig, metrics: Metrics) -> AsyncIterator[RequestSinks]:
    async with AsyncExitStack() as held:
        request_log = traces = None
        with _named("request_log", config.request_log.directory):
            if config.request_log.directory:
                request_log = RequestLog(config.request_log, metrics.upkeep.not_logged)
                held.push_async_callback(asyncio.to_thread, request_log.close)
            if config.traces.endpoint:
                traces = Traces(config.traces, metrics.upkeep.not_traced)
                held.push_async_callback(asyncio.to_thread, traces.close)
        yield RequestSinks(request_log=request_log, traces=traces)


@asynccontextmanager
async def build_audit(
    *, config: GatewayConfig, seat: SingleProcess | WorkerProcess, clock: Callable[[], float]
) -> AsyncIterator[AuditLog]:
    with _named("audit", config.audit.directory):
        audit = AuditLog(config.audit, seat.next_seq, clock, _unix_s, seat.metrics.upkeep.not_audited)
    try:
        yield audit
    finally:
        await asyncio.to_thread(audit.close)


def _unix_s() -> float:
    return datetime.now(UTC).timestamp()


@asynccontextmanager
async def build_reader(
    *, config: GatewayConfig, strangers: Strangers, tokenizer: TextTokenizer, tasks: GatewayTasks
) -> AsyncIterator[PromptReader]:
    reader = PromptReader(
        tokenizer,
        tasks.afterwards,
        threads=config.tokenise_threads,
        timeout_s=config.timeouts.read_s,
        max_bytes=strangers.max_reading_bytes,
    )
    try:
        yield reader
    finally:
        await reader.close()


@asynccontextmanager
async def build_nodes(
    *,
    config: GatewayConfig,
    clock: Callable[[], float],
    seat: SingleProcess | WorkerProcess,
    tasks: GatewayTasks,
    agent_client: type[AgentClient],
    times: NodeTimes,
) -> AsyncIterator[NodeAccess]:
    upkeep = seat.metrics.upkeep
    identity = config.identity
    guard = identity.guard() if identity is not None else None
    if guard is not None:
        guard.told = upkeep.peer_refused

    def agent_of(member: Member) -> AgentClient:
        return agent_client(
            member.agent,
            config.timeouts.rpc_s,
            identity,
            member.name,
            upkeep.called_by_grpc,
            seat.holder,
            guard,
            near=config.near,
        )

    steps = LearnedSteps()
    cost = LearnedCost(config.routing.prefill_tokens_per_s, steps=steps)

    def on_renamed(node_id: str) -> None:
        cost.forget(node_id)
        refusals.forget(node_id)

    legs = Legs(config.timeouts, config.max_in_flight, clock, identity, guard)
    clusters = Clusters(
        [agent_of(node.member) for node in config.nodes],
        clock,
        served_model=config.served_model,
        accepted=config.revisions,
        decode_slots=config.routing.decode_slots,
        tasks=tasks.watches,
        on_lost=upkeep.node_lost,
        on_silent=legs.give_up,
        on_renamed=on_renamed,
        catch_up=seat.catch_up,
        times=times,
        secrets=name_secrets(config.names_secret),
    )
    seat.join(clusters.nodes)
    refusals = SloGate(config, clusters, steps, clock)
    acted_on = RosterParts(
        clusters=clusters,
        agent_of=agent_of,
        join=seat.join,
        leave=seat.leave,
        forget=on_renamed,
        on_change=upkeep.member_changed,
    )
    links = ClusterLinks(
        clusters.nodes,
        clock,
        config.routing.link_bytes_per_s,
        upkeep.link_failed,
        expected=config.ways,
        is_budget_shared=config.routing.share_egress,
        remembered=acted_on.remembered,
        lines=config.lines,
    )
    drained = SharedDrainedLinks(config.drained_dir) if config.drained_dir is not None else seat.drained
    links.drain(drained.links())
    try:
        yield NodeAccess(
            clusters=clusters,
            links=links,
            drained=drained,
            legs=legs,
            guard=guard,
            refusals=refusals,
            cost=cost,
            roster=Roster(config, acted_on, clock, times),
            rotation=NameRotation(clusters, config, _unix_s),
        )
    finally:
        legs.close()
        await clusters.close()


@asynccontextmanager
async def ending(*, config: GatewayConfig, tasks: GatewayTasks) -> AsyncIterator[None]:
    """Ends what is under way before what it uses is closed."""
    async with AsyncExitStack() as ends:
        ends.push_async_callback(tasks.afterwards.join, max(config.timeouts.rpc_s, config.routing.move_timeout_s))
        ends.push_async_callback(tasks.requests.join, CLOSE_S)
        ends.push_async_callback(tasks.chores.cancel)
        yield


def build_routing(
    *,
    config: GatewayConfig,
    clock: Callable[[], float],
    seat: SingleProcess | WorkerProcess,
    tasks: GatewayTasks,
    seen: NodeAccess,
) -> RoutingParts:
    router = Router(config, seen.clusters, seen.links, seen.cost, clock)
    follower = Follower(config.plan, router.follow, seat.metrics.upkeep, config.plan.asked(config.identity))
    follower.begin()
    flows = Flows(seat.next_seq, clock)
    moves = PrefixTransfers(
        seat.metrics,
        tasks.afterwards,
        clock,
        limit=max(1, config.routing.max_moves // seat.workers),
        timeout_s=config.routing.move_timeout_s,
        on_moved=router.learn_move,
        on_failed=router.learn_late_move,
        on_ended=flows.moved,
    )
    replicas = Replicas(seen.clusters, moves, clock, router.pays) if config.routing.replicate else None
    return RoutingParts(router=router, follower=follower, moves=moves, replicas=replicas, flows=flows)


def build_pipeline(
    *,
    config: GatewayConfig,
    clock: Callable[[], float],
    seat: SingleProcess | WorkerProcess,
    tasks: GatewayTasks,
    seen: NodeAccess,
    routing: RoutingParts,
    receiver: BodyReceiver,
    reader: PromptReader,
    ended: RequestSinks,
    allowances: TenantLimiters,
    renders_otherwise: bool,
) -> ServingParts:
    metrics, clusters, router = seat.metrics, seen.clusters, routing.router
    engine_readings = EngineReadings(
        Styles(), clusters, seen.legs, reader, tasks.afterwards, clock, config.timeouts.read_s,
        lambda: router.setting.threshold_tokens,
        renders_otherwise=renders_otherwise,
    )  # fmt: skip
    records = seat.records(config.kept_records)
    on_ended = [each.ended for each in (ended.request_log, ended.traces, engine_readings) if each is not None]
    accounts = RequestRecorder(metrics, records, seat.offered, clock, on_ended)
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
    dispatcher = _dispatcher(
        config=config,
        clock=clock,
        tasks=tasks,
        seen=seen,
        routing=routing,
        reader=reader,
        engine_readings=engine_readings,
        accounts=accounts,
        line=line,
        retries=retries,
    )
    steps = Pipeline(
        receiver=receiver,
        admission=ConcurrencyLimiter(
            config.max_in_flight,
            metrics.in_flight.set,
            clock=clock,
            patience_s=config.timeouts.room_s,
            taken=seat.in_flight,
            wanted=seat.places_wanted,
            claims=allowances,
            bodies=reader.room,
        ),
        reader=reader,
        engine_readings=engine_readings,
        dispatcher=dispatcher,
        relay=Relay(accounts, tasks.requests, clock),
        accounts=accounts,
        tasks=tasks.requests,
    )
    return ServingParts(steps=steps, line=line, records=records)


def _dispatcher(
    *,
    config: GatewayConfig,
    clock: Callable[[], float],
    tasks: GatewayTasks,
    seen: NodeAccess,
    routing: RoutingParts,
    reader: PromptReader,
    engine_readings: EngineReadings,
    accounts: RequestRecorder,
    line: WaitingLine,
    retries: Retries,
) -> Dispatcher:
    run = LegRunner(
        clusters=seen.clusters,
        links=seen.links,
        legs=seen.legs,
        decider=routing.router,
        accounts=accounts,
        tasks=tasks.requests,
        retries=retries,
    )
    return Dispatcher(
        clusters=seen.clusters,
        decider=routing.router,
        reservations=DecodeReservations(
            seen.clusters, accounts, tasks.afterwards, clock, config.timeouts.reservation_ttl_s
        ),
        runner=TicketedRunner(run, moves=routing.moves, refusals=seen.refusals, room_s=config.timeouts.room_s),
        pairing=Pairing(run, refusals=seen.refusals, draw=secrets.randbits),
        reader=reader,
        engine_readings=engine_readings,
        rotation=seen.rotation,
        accounts=accounts,
        replicas=routing.replicas,
        refusals=seen.refusals,
        line=line,
        clock=clock,
        retries=retries,
    )


@contextlib.contextmanager
def _named(table: str, directory: Path | None) -> Iterator[None]:
    """Says at the start which directory cannot be had."""
    try:
        yield
    except OSError as error:
        raise GatewayConfigError(f"{table}.directory = {str(directory)!r}: {error.strerror}") from error

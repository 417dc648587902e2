"""The parts of a gateway: a builder for each, in the order in which they are built. Those that own something close it."""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from gateway.admission.concurrency import ConcurrencyLimiter
from gateway.admission.queue import WaitingLine
from gateway.admission.slo import SloGate
from gateway.cluster.agent_client import AgentClient, NearClusters
from gateway.cluster.drained_links import DrainedLinks, SharedDrainedLinks
from gateway.cluster.links import ClusterLinks
from gateway.cluster.registry import Clusters, NodeTimes
from gateway.config.gateway import GatewayConfig, Strangers
from gateway.errors import GatewayConfigError
from gateway.http.body import BodyReceiver
from gateway.members.roster import Roster, RosterParts
from gateway.models.served import ModelParts
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
from gateway.prompt.reader_queue import ReadingRoom
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
from gateway.telemetry.load_report import OfferedLoad
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
from prompts.chat.renderers import renders_otherwise
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
    roster: Roster
    rotation: NameRotation


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingParts:
    """What decides where requests and prefixes of one model go, and what is learned of its nodes."""

    router: Router
    follower: Follower
    moves: PrefixTransfers
    replicas: Replicas | None
    refusals: SloGate
    cost: LearnedCost


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonParts:
    """What the models of a gateway share: its books, its limits, and how it is spoken to."""

    clock: Callable[[], float]
    seat: SingleProcess | WorkerProcess
    tasks: GatewayTasks
    seen: NodeAccess
    receiver: BodyReceiver
    admission: ConcurrencyLimiter
    room: ReadingRoom
    records: RecordRing
    flows: Flows
    ended: RequestSinks
    waiting: "Counter[str]"  # by model


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


def build_common(
    *,
    config: GatewayConfig,
    clock: Callable[[], float],
    seat: SingleProcess | WorkerProcess,
    tasks: GatewayTasks,
    seen: NodeAccess,
    receiver: BodyReceiver,
    strangers: Strangers,
    ended: RequestSinks,
    allowances: TenantLimiters,
) -> CommonParts:
    room = ReadingRoom(strangers.max_reading_bytes)
    return CommonParts(
        clock=clock,
        seat=seat,
        tasks=tasks,
        seen=seen,
        receiver=receiver,
        admission=ConcurrencyLimiter(
            config.max_in_flight,
            seat.metrics.in_flight.set,
            clock=clock,
            patience_s=config.timeouts.room_s,
            taken=seat.in_flight,
            wanted=seat.places_wanted,
            claims=allowances,
            bodies=room,
        ),
        room=room,
        records=seat.records(config.kept_records),
        flows=Flows(seat.next_seq, clock),
        ended=ended,
        waiting=Counter(),
    )


@asynccontextmanager
async def build_model(
    config: GatewayConfig,
    key: str,
    tokenizer: TextTokenizer,
    *,
    common: CommonParts,
    is_default: bool = True,
    reader_type: type[PromptReader] = PromptReader,
) -> AsyncIterator[ModelParts]:
    """What serves the model `key`, with what it does for ever; `config` is as it holds for that model."""
    metrics, tasks = common.seat.metrics, common.tasks
    tokenizer.encoder.report_to(lambda reason: metrics.fallback(f"tokenizer_{reason}"))
    chores: list[asyncio.Task[None]] = []
    reader = reader_type(
        tokenizer,
        tasks.afterwards,
        threads=config.tokenise_threads,
        timeout_s=config.timeouts.read_s,
        room=common.room,
    )
    try:
        routing = build_routing(config=config, common=common)
        line = WaitingLine(
            common.clock,
            limit=config.max_waiting,
            patience_s=config.timeouts.room_s,
            ageing_s=config.admission.ageing_s,
            on_change=partial(_note_waiting, common, key),
            room=common.seat.waiting if is_default else None,
        )
        offered = common.seat.offered if is_default else common.seat.offered_of(key)
        if config.plan.url:
            chores.append(tasks.chores.keep(routing.follower.run, "plan"))
        if routing.replicas:
            chores.append(tasks.chores.keep(routing.replicas.run, "replicas"))
        yield ModelParts(
            key=key,
            config=config,
            router=routing.router,
            follower=routing.follower,
            moves=routing.moves,
            replicas=routing.replicas,
            refusals=routing.refusals,
            line=line,
            offered=offered,
            steps=build_pipeline(
                config=config, key=key, common=common, routing=routing, reader=reader, line=line, offered=offered
            ),
            forget=partial(_forget, routing),
        )
    finally:
        for chore in chores:
            chore.cancel()
        if chores:
            await asyncio.wait(chores)
        await reader.close()


def _note_waiting(common: CommonParts, key: str, length: int) -> None:
    common.waiting[key] = length
    common.seat.metrics.waiting.set(common.waiting.total())


def _forget(routing: RoutingParts, node_id: str) -> None:
    routing.cost.forget(node_id)
    routing.refusals.forget(node_id)


@asynccontextmanager
async def build_nodes(
    *,
    config: GatewayConfig,
    clock: Callable[[], float],
    seat: SingleProcess | WorkerProcess,
    tasks: GatewayTasks,
    agent_client: type[AgentClient],
    times: NodeTimes,
    forget: Callable[[str], None] = lambda node_id: None,
) -> AsyncIterator[NodeAccess]:
    """`forget` is told whose name is another node's now, or of none."""
    upkeep = seat.metrics.upkeep
    identity = config.identity
    guard = identity.guard() if identity is not None else None
    if guard is not None:
        guard.told = upkeep.peer_refused

    near = NearClusters(config.near)

    def agent_of(member: Member) -> AgentClient:
        return agent_client(
            member.agent,
            config.timeouts.rpc_s,
            identity,
            member.name,
            upkeep.called_by_grpc,
            seat.holder,
            guard,
            near,
        )

    legs = Legs(config.timeouts, config.max_in_flight, clock, identity, guard)
    clusters = Clusters(
        [agent_of(node.member) for node in config.nodes],
        clock,
        catalog=config.catalog,
        decode_slots=config.routing.decode_slots,
        tasks=tasks.watches,
        on_lost=upkeep.node_lost,
        on_silent=legs.give_up,
        on_renamed=forget,
        catch_up=seat.catch_up,
        times=times,
        secrets=name_secrets(config.names_secret),
    )
    seat.join(clusters.nodes)
    acted_on = RosterParts(
        clusters=clusters,
        agent_of=agent_of,
        near=near,
        join=seat.join,
        leave=seat.leave,
        forget=forget,
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


def build_routing(*, config: GatewayConfig, common: CommonParts) -> RoutingParts:
    clock, seat, seen = common.clock, common.seat, common.seen
    steps = LearnedSteps()
    cost = LearnedCost(config.routing.prefill_tokens_per_s, steps=steps)
    router = Router(config, seen.clusters, seen.links, cost, clock)
    follower = Follower(
        config.plan, router.follow, seat.metrics.upkeep, config.plan.asked(config.identity), config.served_model
    )
    follower.begin()
    moves = PrefixTransfers(
        seat.metrics,
        common.tasks.afterwards,
        clock,
        limit=max(1, config.routing.max_moves // seat.workers),
        timeout_s=config.routing.move_timeout_s,
        on_moved=router.learn_move,
        on_failed=router.learn_late_move,
        on_ended=common.flows.moved,
    )
    replicas = Replicas(seen.clusters, moves, clock, router.pays) if config.routing.replicate else None
    return RoutingParts(
        router=router,
        follower=follower,
        moves=moves,
        replicas=replicas,
        refusals=SloGate(config, seen.clusters, steps, clock),
        cost=cost,
    )


def build_pipeline(
    *,
    config: GatewayConfig,
    key: str,
    common: CommonParts,
    routing: RoutingParts,
    reader: PromptReader,
    line: WaitingLine,
    offered: OfferedLoad,
) -> Pipeline:
    clock, seat, tasks, seen, ended = common.clock, common.seat, common.tasks, common.seen, common.ended
    clusters, router = seen.clusters, routing.router
    engine_readings = EngineReadings(
        Styles(), lambda role: clusters.ready(role, model=key), seen.legs, reader, tasks.afterwards, clock,
        config.timeouts.read_s,
        lambda: router.setting.threshold_tokens,
        renders_otherwise=config.tokenizer_dir is not None and renders_otherwise(config.tokenizer_dir),
    )  # fmt: skip
    on_ended = [each.ended for each in (ended.request_log, ended.traces, engine_readings) if each is not None]
    accounts = RequestRecorder(seat.metrics, common.records, offered, clock, on_ended)
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
        common=common,
        routing=routing,
        reader=reader,
        engine_readings=engine_readings,
        accounts=accounts,
        line=line,
        retries=retries,
    )
    return Pipeline(
        receiver=common.receiver,
        admission=common.admission,
        reader=reader,
        engine_readings=engine_readings,
        dispatcher=dispatcher,
        relay=Relay(accounts, tasks.requests, clock),
        accounts=accounts,
        tasks=tasks.requests,
    )


def _dispatcher(
    *,
    config: GatewayConfig,
    common: CommonParts,
    routing: RoutingParts,
    reader: PromptReader,
    engine_readings: EngineReadings,
    accounts: RequestRecorder,
    line: WaitingLine,
    retries: Retries,
) -> Dispatcher:
    clock, tasks, seen = common.clock, common.tasks, common.seen
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
        runner=TicketedRunner(run, moves=routing.moves, refusals=routing.refusals, room_s=config.timeouts.room_s),
        pairing=Pairing(run, refusals=routing.refusals, draw=secrets.randbits),
        reader=reader,
        engine_readings=engine_readings,
        rotation=seen.rotation,
        accounts=accounts,
        replicas=routing.replicas,
        refusals=routing.refusals,
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

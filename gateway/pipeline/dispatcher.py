"""Takes a request that has been read to a decode node that answers it: decides, reserves, runs, and begins again.

Everything held on a node is held by a `with` block: the client going away, a node dying and the answer ending all leave
by the same door. What fails before the client has seen a byte is decided anew as often as
`planner.decisions.failures.retries` allows; so is a stream that the client has a part of, with that part as the end
of its prompt (`gateway.pipeline.stream_resume`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from gateway.admission.queue import ASK_AGAIN_S, QueueEntry, WaitingLine
from gateway.admission.slo import SloGate
from gateway.cluster.inflight_load import Booking, booked
from gateway.cluster.node import ClusterNode
from gateway.cluster.registry import Clusters
from gateway.cluster.served_model import ServedModel, others_of
from gateway.errors import (
    AgentCallFailed,
    DecodeFailed,
    KillsEngines,
    NoDecodeNode,
    NodeFailure,
    Overloaded,
    ShapeKillsEngines,
    Unavailable,
)
from gateway.pipeline.attempt import Attempt
from gateway.pipeline.engine_render import EngineReadings
from gateway.pipeline.reservations import DecodeReservations
from gateway.pipeline.retries import Retries
from gateway.pipeline.sglang_pair import Pairing
from gateway.pipeline.ticketed import TicketedRunner
from gateway.prompt.reader import PromptReader
from gateway.request.fingerprint import RequestShape, shape_of
from gateway.request.request import Request
from gateway.routing.name_rotation import NameRotation
from gateway.routing.replication import Replicas
from gateway.routing.router import Router
from gateway.telemetry.recorder import RequestRecorder
from planner.decisions.failures.poison import Poison
from planner.decisions.failures.retries import (
    MAX_DEATHS,
    TENANTS_PART,
    FailedStage,
    FailureKind,
    Next,
    adds_enough,
    may_have_died,
    tries_of,
)
from planner.decisions.routing.offload import Route, Target


@dataclass(slots=True)
class Tried:
    """What a request has behind it: the decode nodes that failed, and the routes to those that only lacked room."""

    failed: dict[str, FailureKind] = field(default_factory=dict)
    full: dict[str, tuple[ServedModel, Route]] = field(default_factory=dict)  # in which revision each was asked
    tries: int = 0  # that failed; one node may have failed several
    waits: int = 0  # for any decode node to be ready
    has_full_engine: bool = False  # though its node had room
    laps: int = 0  # waits for room after such an engine

    def fail(self, node_id: str, failure: FailureKind) -> None:
        """A try on `node_id` has failed; one that found it full and then asked it for more is one try."""
        if self.failed.get(node_id) is not FailureKind.FULL:
            self.tries += tries_of([failure])
        self.failed[node_id] = failure


class Answering:
    """A request's answer: the attempt that gives it, and should that fail in the middle, the next one."""

    def __init__(self, dispatcher: "Dispatcher", request: Request, attempt: Attempt, held: AsyncExitStack) -> None:
        self.attempt = attempt
        self._tried = Tried()  # since the answer last went on far enough
        self._dispatcher = dispatcher
        self._request = request
        self._held = held  # what the attempt holds on nodes

    async def go_on(self, answered: list[int], error: DecodeFailed) -> None:
        """Has another decode node go on after the tokens `answered` so far. Raises ApiError."""
        failed, request = self.attempt, self._request
        if adds_enough(len(answered), len(request.progress.answered)):
            self._tried = Tried()
        await self._held.aclose()
        self.attempt = await self._dispatcher.rest(request, answered, failed, error, self._tried, self._held)


class Dispatcher:
    """Takes a request that has been read and admitted to a decode node that answers it."""

    def __init__(
        self,
        *,
        clusters: Clusters,
        decider: Router,
        reservations: DecodeReservations,
        runner: TicketedRunner,
        pairing: Pairing,
        reader: PromptReader,
        engine_readings: EngineReadings,
        rotation: NameRotation,
        accounts: RequestRecorder,
        replicas: Replicas | None,
        refusals: SloGate,
        line: WaitingLine,
        clock: Callable[[], float],
        retries: Retries,
    ) -> None:
        self._poison = Poison()
        self._clusters = clusters
        self._decider = decider
        self._reservations = reservations
        self._runner = runner
        self._pairing = pairing
        self._reader = reader
        self._engine_readings = engine_readings
        self._rotation = rotation
        self._accounts = accounts
        self.replicas = replicas
        self._refusals = refusals
        self._line = line
        self._clock = clock
        self._retries = retries
        self._reading_again = asyncio.Semaphore()  # a body is put together for it, and an engine has many answers

    @asynccontextmanager
    async def answered(self, request: Request) -> AsyncIterator[Answering]:
        """The answer that has begun, to be relayed inside the block; leaving the block frees everything.

        Raises ApiError.
        """
        shape = shape_of(request.call, request.prompt.num_tokens)
        if wait_s := self._poison.let_in(shape, self._clock()):
            raise ShapeKillsEngines(str(shape), wait_s)
        try:
            async with AsyncExitStack() as held:
                place = held.enter_context(self._place(request))
                chosen = await self._decide(request, place)
                attempt = await self._answer(request, chosen, place, Tried(), held)
                self._accounts.answering(request, attempt.answer.status)
                answering = Answering(self, request, attempt, held)
                yield answering
                self._learn(request, answering.attempt, shape)
        finally:
            self._ended(request, shape)

    def _ended(self, request: Request, shape: RequestShape) -> None:
        """However a request ends, decode has it no more, and engines that died under it say something of its kind."""
        try:
            self._judge(request, shape)
        finally:
            self._accounts.unheard(request, self._refusals.left(request))

    def _place(self, request: Request) -> QueueEntry:
        """Its place in the line for room, which it may never need."""
        return self._line.place(request.service, request.progress.timeline.arrived, request.tenant.share)

    async def _decide(self, request: Request, place: QueueEntry) -> Route:
        """Where it goes, after those that waited before it, and that it is served as promised. Raises ApiError."""
        share = request.tenant.share
        chosen = self._route(request)
        place.tokens = chosen.uncached_tokens
        self._accounts.asked(chosen)
        if chosen.prefill_node and self._line.must_wait(request.service, share):
            self._refusals.check(request, chosen, self._line.expected_s(request.service, share))
            await place.wait()
            chosen = self._route(request)
        self._refusals.check(request, chosen)
        self._refusals.accepted(request, chosen)
        self._retries.begins(request)
        return chosen

    def _learn(self, request: Request, attempt: Attempt, shape: RequestShape) -> None:
        """After a whole answer: how long such answers are, and that its kind kills no engines."""
        if request.is_served and attempt.answer.status == 200:
            self._decider.learn_answer(request)
            self._poison.answered(shape, self._clock())

    def _judge(self, request: Request, shape: RequestShape) -> None:
        if len(request.progress.deaths) < MAX_DEATHS:
            self._poison.ended(shape, self._clock())
        elif not request.is_served:
            self._accounts.killed_engines(request, str(shape), self._poison.killed(shape, self._clock()))

    def _route(self, request: Request, exclude: Collection[str] = ()) -> Route:
        """Where it goes now, leaving the nodes of `exclude` out: in its revision while that can serve it. Raises Unavailable."""
        self._accounts.decides(request, self._decider.plan_version)
        if request.progress.served is None:
            self._accounts.serves(request, self._decider.revision(request, exclude))
        try:
            return self._decider.route(request, exclude)
        except Unavailable:
            if (other := self._decider.other_revision(request, exclude)) is None:
                raise
        self._accounts.fell_back(request, "other_revision")
        self._accounts.serves(request, other)
        return self._decider.route(request, exclude)

    async def rest(
        self,
        request: Request,
        answered: list[int],
        failed: Attempt,
        error: DecodeFailed,
        tried: Tried,
        held: AsyncExitStack,
    ) -> Attempt:
        """The attempt that goes on after the tokens `answered`, the last of them by `failed` before its `error`. Raises ApiError.

        The request has been accepted: it is not asked again whether it will be served as promised.
        """
        call, memory = request.call, request.tenant.memory
        domains = request.model.media_domains if request.model is not None else frozenset[str]()
        model = request.served.as_read(
            request.tenant.group, domains, others_of(self._clusters.revisions, request.served)
        )
        if request.token_ids is not None:
            prompt = await self._engine_readings.longer(request.token_ids, call, model, request.tenant, answered)
        else:
            async with self._reading_again:
                _, prompt = await self._reader.read(
                    call.endpoint, call.body({}), model, memory, answered, request.tenant.share
                )
        prompt = self._rotation.known(prompt)
        self._accounts.goes_on(request, prompt, answered)
        if may_have_died(error.reason):
            self._accounts.broke(request, failed.decode, failed.engine)
        place = held.enter_context(self._place(request))
        assert request.progress.route is not None
        following = await self._following(request, request.progress.route, error, tried, FailedStage.STREAM)
        if following is None:
            following = await self._turn(request, place)
        return await self._answer(request, following, place, tried, held)

    async def _following(
        self, request: Request, chosen: Route, error: NodeFailure, tried: Tried, stage: FailedStage
    ) -> Route | None:
        """As `_next_route`; but an answer that has begun waits a while for a decode node that is ready."""
        await self._learn_deaths(request)
        try:
            return self._next_route(request, chosen, error, tried, stage)
        except NoDecodeNode:
            if (
                not request.progress.answered
                or error.failure is FailureKind.TROUBLE
                or tried.waits >= self._retries.max_tries
            ):
                raise
        tried.waits += 1
        return await self._ready_route(request)

    async def _ready_route(self, request: Request) -> Route:
        """A route once some decode node is ready: the one that failed may be back, or has only lost a connection.

        Raises NoDecodeNode if none is ready when a request would have to wait for room.
        """
        due = self._clock() + self._line.patience_s
        while True:
            try:
                return self._route(request)
            except NoDecodeNode:
                if self._clock() >= due:
                    raise
            await asyncio.sleep(ASK_AGAIN_S)

    async def _learn_deaths(self, request: Request) -> None:
        """Which of the engines that broke a stream have died of it. The first is not waited for: the client waits."""
        if len(request.progress.broken) + len(request.progress.deaths) < MAX_DEATHS:
            return
        for node, engine in self._accounts.take_broken(request):
            if await self._clusters.has_died(node, engine):
                self._accounts.died(request, node)

    async def _turn(self, request: Request, place: QueueEntry) -> Route:
        """The route of a request that has waited in line for room. Raises Overloaded."""
        await place.wait()
        following = self._route(request)
        if not request.progress.answered:
            self._refusals.check(request, following)
            self._refusals.accepted(request, following)
        return following

    async def _answer(
        self, request: Request, chosen: Route, place: QueueEntry, tried: Tried, held: AsyncExitStack
    ) -> Attempt:
        """The first attempt that is answered, from that by `chosen` on; what it holds is handed to `held`."""
        while True:
            self._accounts.routed(request, chosen, tried.tries)
            if self.replicas and chosen.prefill_node and not request.served.is_paired:
                self.replicas.wanted(request.prompt, chosen.prefill_node)
            try:
                return await held.enter_async_context(self._attempt(request, chosen, place))
            except (DecodeFailed, AgentCallFailed) as error:
                if not (place.stands and error.failure is FailureKind.FULL):  # that it still waits is no news
                    self._accounts.fell_back(request, f"decode_{error.reason}", error)
                if error.reason == TENANTS_PART:
                    place.held_back()
                stage = FailedStage.RESERVE if isinstance(error, AgentCallFailed) else FailedStage.DECODE
                tried.has_full_engine |= stage is FailedStage.DECODE and error.failure is FailureKind.FULL
                following = await self._following(request, chosen, error, tried, stage)
            if following is None:
                # Each wait begins with the whole patience again, as the node's room had been got: they must not go on for ever.
                laps = tried.laps + tried.has_full_engine
                if laps > self._retries.max_tries:
                    raise Overloaded("Engines have no room. Please retry.", "no_room")
                following = await self._turn(request, place)
                tried = Tried(laps=laps)
            chosen = following

    def _attempt(self, request: Request, chosen: Route, place: QueueEntry) -> AbstractAsyncContextManager[Attempt]:
        # Nothing is awaited between the decision and its booking: the next decision sees this one.
        decode = self._clusters.by_id(chosen.decode_node, request.served.revision)
        running = self._in_a_room if decode.is_paired else self._with_a_ticket
        return running(request, chosen, place, decode)

    @contextmanager
    def _booked(self, request: Request, chosen: Route, decode: ClusterNode) -> Iterator[Booking]:
        held_tokens = max(chosen.held_tokens, chosen.shared_tokens)
        with booked(decode, self._clock, request.prompt.hashes, held_tokens) as booking:
            booking.prefill(self._clusters.by_id(chosen.prefill_node or chosen.decode_node), chosen)
            yield booking

    @asynccontextmanager
    async def _in_a_room(
        self, request: Request, chosen: Route, place: QueueEntry, decode: ClusterNode
    ) -> AsyncIterator[Attempt]:
        """The attempt of a pair of servers, which make room by themselves."""
        with self._booked(request, chosen, decode) as booking:
            place.served()
            try:
                async with self._pairing.attempt(request, chosen, booking) as attempt:
                    self._begins_to_answer(request, attempt, booking)
                    yield attempt
            finally:
                self._line.freed()

    @asynccontextmanager
    async def _with_a_ticket(
        self, request: Request, chosen: Route, place: QueueEntry, decode: ClusterNode
    ) -> AsyncIterator[Attempt]:
        """The attempt of nodes that agents join: room is reserved, then both legs run."""
        has_room = False
        with self._booked(request, chosen, decode) as booking:
            if chosen.prefill_node is not None and not request.is_unshared:
                booking.lands(chosen)
            if chosen.shared_tokens:
                place.served()  # it waits for what others are sent, not for room
            try:
                async with self._reservations.held(request, chosen, booking) as hold:
                    has_room = True
                    place.served()
                    async with self._runner.attempt(request, chosen, hold, booking) as attempt:
                        self._begins_to_answer(request, attempt, booking)
                        yield attempt
            finally:
                if has_room:  # else the first in line would wake itself, and ask a full node as fast as it answers
                    self._line.freed()

    def _begins_to_answer(self, request: Request, attempt: Attempt, booking: Booking) -> None:
        """The request decodes from now on, until its engine has said all."""

        def decoded() -> None:
            booking.answered()
            self._refusals.decoded(request)
            self._line.freed()

        self._refusals.decoding(request, attempt.decode.id)
        attempt.answer.when_whole(decoded)

    def _next_route(
        self, request: Request, chosen: Route, error: NodeFailure, tried: Tried, stage: FailedStage
    ) -> Route | None:
        """The route after one that failed; None: there is no room now, and a decode node may not do more by itself.

        Raises ApiError when there is to be none.
        """
        tried.fail(chosen.decode_node, error.failure)
        rule = self._retries.rule_after(request, stage, chosen.decode_node, error.failure, tried.tries)
        if rule.otherwise is Next.ALONE:
            tried.full[chosen.decode_node] = request.served, chosen
        if stage is not FailedStage.RESERVE:
            # It has computed the prompt itself, or was to: it is not asked for that again.
            tried.full.pop(chosen.decode_node, None)
        if rule.next is Next.ELSEWHERE:
            return self._elsewhere(request, tried)
        if rule.next is Next.ALONE:
            return _alone(chosen) if error.failure is FailureKind.REQUEST else self._alone_if_spared(chosen)
        if len(request.progress.deaths) >= MAX_DEATHS:
            raise KillsEngines(request.progress.deaths)
        if rule.is_over_budget:
            raise Unavailable("A decode node failed, and so do many others now. Please retry.", "retry_budget_spent")
        if stage is FailedStage.STREAM and self._retries.are_takeovers_spent(request):
            raise Unavailable(
                f"{request.progress.takeovers} decode nodes have continued the answer already.", "takeovers_spent"
            )
        raise Unavailable(f"{tried.tries} decode nodes failed one after the other.", "attempts_exhausted")

    def _elsewhere(self, request: Request, tried: Tried) -> Route | None:
        try:
            return self._route(request, tried.failed)
        except Unavailable:
            if tried.full:
                served, chosen = next(reversed(tried.full.values()))
                if (alone := self._alone_if_spared(chosen)) is not None and served.revision != request.served.revision:
                    self._accounts.serves(request, served)  # it is back in the one before
                return alone
            if request.served.is_paired:
                # Such nodes change no roles, and have waited for room themselves: who joined the line would be let go at once.
                if FailureKind.FULL in tried.failed.values():
                    raise Overloaded("No decode node has room. Please retry.", "no_room") from None
                raise
            if FailureKind.AWAY in tried.failed.values():  # what has taken its place is about to say so
                return None
            raise

    def _alone_if_spared(self, chosen: Route) -> Route | None:
        """A full system must not turn its decode nodes into prefill nodes."""
        return _alone(chosen) if self._decider.may_compute(chosen.decode_node) else None


def _alone(chosen: Route) -> Route:
    """The same decode node, which has no room for a landing, without one."""
    return replace(chosen, target=Target.DECODE, prefill_node=None, fetch_from=None)

"""One request's life.

    read      tokens, block hashes and digest of the prompt, in a worker thread
    decide    local or remote, which nodes: a pure function of what is known of the clusters
    reserve   the decode node makes room and hands out a ticket
    run       both legs at once: the prefill node pushes KVCache under the ticket, the decode node waits for it
    relay     the decode node's bytes, unchanged but for the number of cached tokens

Everything held on a node is held by a `with` block: the client going away, a node dying and the answer ending all leave
by the same door. What fails before the client has seen a byte is tried again, a bounded number of times:

    prefill leg fails           another prefill node, same ticket: what has landed stays. No other node: the decode node
                                is told to stop waiting, and computes the prompt itself
    reservation refused         another decode node. No other: this one without a transfer
    decode node fails           another decode node, new ticket
    … after its first token     the stream ends with an error event
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from gateway.clusters import Clusters, Node, ServedModel
from gateway.config import GatewayConfig
from gateway.errors import ApiError, BadRequest, DecodeFailed, NodeError, PrefillFailed, Unavailable
from gateway.legs import DecodeAnswer, Legs
from gateway.metrics import Metrics
from gateway.moves import OK, Move, Moves, prefix_of
from gateway.replicas import Replicas
from gateway.request import PrefillOutcome, Request
from gateway.tasks import TaskSet
from gateway.tokens import Prompt, PromptReader
from gateway.usage import RECOMPUTED, UsagePatch, recompute_reason, with_cached_tokens
from planner.errors import NoReadyNode
from planner.placement import PLACERS, PlacementPolicy
from planner.routing import Route, RoutingPolicy, Target, route
from planner.views import PrefillCost, RouteRequest
from transport.messages import TicketInfo

log = logging.getLogger("prfaas.gateway.route")

NO_CAPACITY: Final = "no_capacity"  # a node that is well but full
OUTCOME_WAIT_S: Final = 2.0  # the prefill's own report is a round trip behind the KVCache that the answer needed
SETTLE_WAIT_S: Final = 0.25


@dataclass(slots=True)
class Hold:
    """A reservation on a decode node, and everybody who may still hold something for it."""

    ticket: TicketInfo
    nodes: list[Node]
    settled: bool = False


@dataclass(slots=True)
class Answer:
    """What goes back to the client: all of `body`, or what `read` gives piece by piece until b""."""

    status: int
    content_type: str
    headers: dict[str, str]
    body: bytes | None = None
    read: Callable[[], Awaitable[bytes]] | None = None


@dataclass(slots=True)
class Attempt:
    """One try at a request that a decode node has begun to answer. A delivery that ends in None did not take place."""

    answer: DecodeAnswer
    delivery: asyncio.Task[PrefillOutcome | None] | None = None
    hold: Hold | None = None


class Dispatcher:
    """Carries requests from the front door to the clusters, and their answers back."""

    def __init__(
        self,
        config: GatewayConfig,
        clusters: Clusters,
        reader: PromptReader,
        legs: Legs,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._max_attempts = config.max_attempts
        self._timeouts = config.timeouts
        self._home = config.routing.home_cluster or None
        self._policy = RoutingPolicy(
            threshold_tokens=config.threshold_tokens,
            cross_cluster_cache=config.routing.cross_cluster_cache,
            placement=PlacementPolicy(fetch_bytes_per_s=config.routing.fetch_bytes_per_s),
        )
        self._moves = Moves(metrics, clock, limit=config.routing.max_moves, timeout_s=config.routing.move_timeout_s)
        self.replicas = Replicas(clusters, self._moves, clock) if config.routing.replicate else None
        self._place = PLACERS[config.routing.placement]
        self._cost = PrefillCost(config.routing.prefill_tokens_per_s)
        self._clusters = clusters
        self._reader = reader
        self._legs = legs
        self._metrics = metrics
        self._clock = clock
        self._afterwards = TaskSet()

    async def close(self) -> None:
        """Waits until what was held for ended requests is given back."""
        await self._moves.close()
        await self._afterwards.join(self._timeouts.rpc_s)

    @asynccontextmanager
    async def serve(self, request: Request) -> AsyncIterator[Answer]:
        """The answer to `request`, to be relayed inside the block; leaving the block frees everything.

        Raises ApiError; after the first byte, DecodeFailed.
        """
        served = self._served_model(request)
        request.prompt = await self._read(request, served)
        async with AsyncExitStack() as held:
            attempt = await self._first_answer(request, served, held)
            request.timeline.first_token = self._clock()
            yield await self._answer(request, attempt)
            await self._settle(request, attempt)

    # read

    def _served_model(self, request: Request) -> ServedModel:
        served = self._clusters.served
        if served is None:
            raise Unavailable("No node has reported its model yet.", "no_model")
        name = request.call.options.model
        if name not in (served.name, served.model_id):
            raise ApiError(
                404,
                f"The model '{name}' does not exist; this gateway serves '{served.name}'.",
                param="model",
                code="model_not_found",
            )
        return served

    async def _read(self, request: Request, served: ServedModel) -> Prompt:
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self._reader.executor, self._reader.read, request.call, served.hashing)
        check_length(prompt.num_tokens, request.call.options.output_tokens, served.max_model_len, request)
        return prompt

    # decide

    def _decide(self, request: Request, exclude: set[str], home: str | None = None) -> Route:
        """Where `request` goes now, leaving the nodes of `exclude` out. Raises Unavailable."""
        assert request.prompt is not None
        assert self._clusters.served is not None
        question = RouteRequest(
            num_tokens=request.prompt.num_tokens,
            kv_bytes=self._clusters.served.layout.kv_bytes,
            tie=_tie(request.leg_id),
            home=home or self._home,
            unshared=request.call.options.is_unshared,
        )
        nodes, links = self._clusters.views(request.prompt, exclude), self._clusters.links()
        try:
            return route(question, nodes, links, self._policy, place=self._place, cost=self._cost)
        except NoReadyNode as error:
            raise Unavailable("No decode node is ready.", "no_decode_node") from error

    # run

    async def _first_answer(self, request: Request, served: ServedModel, held: AsyncExitStack) -> Attempt:
        """The first attempt whose decode node answers; what it holds is handed to `held`."""
        failed: set[str] = set()
        refused: Route | None = None
        for number in range(self._max_attempts):
            chosen = self._decide_again(request, failed, refused)
            self._routed(request, chosen, number)
            try:
                return await held.enter_async_context(self._attempt(request, chosen, served))
            except (DecodeFailed, NodeError) as error:
                self._fall_back(request, f"decode_{error.reason}", error)
                failed.add(chosen.decode_node)
                if error.reason == NO_CAPACITY and chosen.prefill_node is not None:
                    refused = chosen
                if error.blames_node:
                    self._clusters.suspect(self._clusters.by_id(chosen.decode_node))
        raise Unavailable(f"{self._max_attempts} decode nodes failed in turn.", "attempts_exhausted")

    def _decide_again(self, request: Request, failed: set[str], refused: Route | None) -> Route:
        """The next route; when only a node without room for a landing is left, that node does it alone."""
        try:
            return self._decide(request, failed)
        except Unavailable:
            if refused is None:
                raise
            return replace(refused, target=Target.DECODE, prefill_node=None, fetch_from=None)

    @asynccontextmanager
    async def _attempt(self, request: Request, chosen: Route, served: ServedModel) -> AsyncIterator[Attempt]:
        decode = self._clusters.by_id(chosen.decode_node)
        with decode.busy_with(0 if chosen.prefill_node else chosen.uncached_tokens):
            if chosen.prefill_node is None:
                async with self._legs.decode(decode, request, served, None) as answer:
                    yield Attempt(answer)
                return
            async with self._reservation(request, decode) as hold, AsyncExitStack() as own:
                delivery = asyncio.create_task(self._deliver(request, chosen, served, hold))
                own.push_async_callback(_cancel, delivery)
                transfer_id = hold.ticket.transfer_id
                answer = await own.enter_async_context(self._legs.decode(decode, request, served, transfer_id))
                yield Attempt(answer, delivery, hold)

    @asynccontextmanager
    async def _reservation(self, request: Request, decode: Node) -> AsyncIterator[Hold]:
        """A ticket of `decode`. Unless it is settled inside the block, all that was made for it is freed after it."""
        assert request.prompt is not None
        making = self._afterwards.start(
            decode.agent.reserve(request.leg_id, request.prompt, self._timeouts.reservation_ttl_s)
        )
        hold: Hold | None = None
        try:
            # Shielded: a client that leaves now must not leave a reservation behind whose id nobody knows.
            hold = Hold(await asyncio.shield(making), [decode])
            yield hold
        finally:
            if hold is None or not hold.settled:
                self._afterwards.start(self._give_back(making, hold.nodes if hold else [decode]))

    async def _give_back(self, making: asyncio.Task[TicketInfo], nodes: list[Node]) -> None:
        try:
            ticket = await making
        except NodeError:
            return  # nothing was reserved
        aborts = [node.agent.abort(ticket.transfer_id, "request_ended") for node in nodes]
        for result in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(result, NodeError):
                log.warning("abort of %s failed (its lease will end it): %s", ticket.transfer_id, result)
            elif isinstance(result, BaseException):
                raise result

    async def _deliver(self, request: Request, chosen: Route, served: ServedModel, hold: Hold) -> PrefillOutcome | None:
        """Gets the KVCache to the decode node, by one prefill node or another. None: it computes the prompt itself."""
        failed: set[str] = set()
        node_id = chosen.prefill_node
        await self._fetch(request, chosen, served)
        while node_id is not None and len(failed) < self._max_attempts:
            node = self._clusters.by_id(node_id)
            hold.nodes.append(node)
            request.prefill_node = node_id
            try:
                with node.busy_with(chosen.uncached_tokens):
                    outcome = await self._legs.prefill(node, request, served, hold.ticket)
                self._delivered(request, outcome)
                return outcome
            except PrefillFailed as error:
                self._fall_back(request, f"prefill_{error.reason}", error)
                failed.add(node_id)
                if not error.retryable:
                    break
                if error.blames_node:
                    self._clusters.suspect(node)
                node_id = self._other_prefill(request, chosen, failed)
        await self._stop_waiting(request, hold)
        return None

    async def _fetch(self, request: Request, chosen: Route, served: ServedModel) -> None:
        """Gets the prefill node the prefix that another node has for it. Without it there is more to compute, no more."""
        if chosen.fetch_from is None or chosen.prefill_node is None:
            return
        assert request.prompt is not None
        source, target = self._clusters.by_id(chosen.fetch_from), self._clusters.by_id(chosen.prefill_node)
        hashes = prefix_of(request.prompt.hashes, chosen.cached_tokens, served.layout.block_size)
        outcome = await self._moves.make(Move(source, target, hashes, chosen.cached_tokens))
        if outcome == OK:
            request.fetched_from = source.id
        else:
            self._fall_back(request, f"fetch_{outcome}")

    def _other_prefill(self, request: Request, chosen: Route, failed: set[str]) -> str | None:
        home = self._clusters.by_id(chosen.decode_node).info
        try:
            return self._decide(request, failed, home.cluster if home else None).prefill_node
        except Unavailable:
            return None

    async def _stop_waiting(self, request: Request, hold: Hold) -> None:
        """Tells the decode node that nothing will come; its engine then recomputes, and the answer goes on."""
        self._fall_back(request, "recompute_no_prefill")
        request.is_recomputed = True
        request.prefill_node = hold.nodes[0].id
        try:
            await hold.nodes[0].agent.abort(hold.ticket.transfer_id, "prefill_failed")
        except NodeError as error:
            log.warning("id=%s decode node could not be told to recompute: %s", request.id, error)

    def _delivered(self, request: Request, outcome: PrefillOutcome) -> None:
        now, timeline = self._clock(), request.timeline
        request.outcome = outcome
        # The node tells durations, not times: they are counted back from its answer, never to before the routing.
        earliest = timeline.routed or timeline.arrived
        timeline.kv_ready = now
        timeline.prefill_end = max(earliest, now - max(0.0, outcome.delivered_s - outcome.prefill_end_s))
        timeline.prefill_start = max(earliest, now - max(0.0, outcome.delivered_s - outcome.prefill_start_s))

    # relay

    async def _answer(self, request: Request, attempt: Attempt) -> Answer:
        headers = {"x-prfaas-route": route_header(request)}
        first, call = attempt.answer, request.call
        if first.status != 200:
            return Answer(first.status, first.content_type, headers, body=first.first)
        if not call.stream:
            self._notice_recompute(request, first.first)
            cached = await self._cached_tokens(attempt)
            return Answer(200, first.content_type, headers, body=with_cached_tokens(first.first, cached))
        read = self._reading(request, attempt.answer)
        if call.options.wants_usage:
            read = UsagePatch(read, lambda: self._cached_tokens(attempt)).read
        return Answer(200, first.content_type, headers, read=read)

    def _reading(self, request: Request, answer: DecodeAnswer) -> Callable[[], Awaitable[bytes]]:
        """Reads `answer` from its first byte; what the client should not be the only one to learn is noticed."""
        first: bytes | None = answer.first

        async def read() -> bytes:
            nonlocal first
            chunk, first = first, None
            try:
                chunk = chunk or await answer.read()
            except DecodeFailed as error:
                self._fall_back(request, f"decode_{error.reason}", error)
                raise
            if RECOMPUTED in chunk:
                self._notice_recompute(request, chunk)
            return chunk

        return read

    async def _cached_tokens(self, attempt: Attempt) -> int | None:
        """What the prefill reused, or None when the decode node knows better."""
        if attempt.delivery is None:
            return None
        done, _ = await asyncio.wait([attempt.delivery], timeout=OUTCOME_WAIT_S)
        outcome = attempt.delivery.result() if done else None
        return outcome.cached_tokens if outcome else None

    async def _settle(self, request: Request, attempt: Attempt) -> None:
        """After a whole answer: nothing is left to free if the KVCache was delivered and loaded."""
        if attempt.hold is None or attempt.delivery is None or attempt.answer.status != 200 or request.is_recomputed:
            return
        if not attempt.delivery.done():
            await asyncio.wait([attempt.delivery], timeout=SETTLE_WAIT_S)
        attempt.hold.settled = attempt.delivery.done() and attempt.delivery.result() is not None

    # account

    def _routed(self, request: Request, chosen: Route, number: int) -> None:
        if request.timeline.routed is None:
            request.timeline.routed = self._clock()
        request.route = chosen
        if self.replicas and request.prompt and chosen.prefill_node:
            self.replicas.wanted(request.prompt, chosen.prefill_node)
        request.prefill_node = chosen.prefill_node or chosen.decode_node
        request.forget_prefill()
        retry = f" attempt={number + 1}" if number else ""
        log.info("route id=%s %s%s", request.id, chosen, retry)

    def _notice_recompute(self, request: Request, chunk: bytes) -> None:
        """A decode node that could not use what landed says so in its answer; that is not to go by unseen."""
        if not request.is_recomputed and (reason := recompute_reason(chunk)) is not None:
            request.is_recomputed = True
            self._fall_back(request, f"recompute_{reason}")

    def _fall_back(self, request: Request, reason: str, error: Exception | None = None) -> None:
        request.fallbacks.append(reason)
        self._metrics.fallback(reason)
        log.warning("fallback id=%s reason=%s%s", request.id, reason, f" ({error})" if error else "")


def check_length(num_tokens: int, output_tokens: int | None, max_model_len: int, request: Request) -> None:
    """Raises BadRequest when prompt and answer do not fit into the model's context."""
    wanted = output_tokens or 1
    if num_tokens + wanted <= max_model_len:
        return
    raise BadRequest(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{num_tokens + wanted} tokens ({num_tokens} in the prompt, {wanted} in the completion).",
        param=request.call.endpoint.prompt_field,
        code="context_length_exceeded",
    )


def route_header(request: Request) -> str:
    """The decision, for the client: `local; node=p0; uncached=812; reason=short`."""
    uncached = request.route.uncached_tokens if request.route else 0
    parts = [
        request.route_label,
        f"node={request.prefill_node}",
        f"uncached={uncached}",
        f"reason={request.reason_label}",
    ]
    parts += [f"fallback={reason}" for reason in request.fallbacks]
    return "; ".join(parts)


def _tie(request_id: str) -> float:
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=4).digest()) / 2**32


async def _cancel(task: asyncio.Task[PrefillOutcome | None]) -> None:
    task.cancel()
    await asyncio.wait([task])

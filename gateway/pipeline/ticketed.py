"""Runs both legs at once. The prefill node pushes KVCache under the ticket, and the decode node waits for it.

Whatever becomes of the prefill, the request hears of it: another prefill node takes over under the same ticket, or the decode
node is told to compute the prompt itself, or the request ends here and now.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from gateway.admission.slo import SloGate
from gateway.cluster.inflight_load import Booking
from gateway.cluster.links import ClusterLinks, is_path_failure
from gateway.cluster.node import ClusterNode
from gateway.cluster.prefill_outcome import PrefillOutcome
from gateway.cluster.registry import Clusters
from gateway.errors import (
    AgentCallFailed,
    ApiError,
    DecodeFailed,
    InternalError,
    KillsEngines,
    NodeFailure,
    PrefillFailed,
)
from gateway.pipeline.reservations import DecodeReservation
from gateway.pipeline.retries import Retries
from gateway.request.request import Request
from gateway.routing.prefix_transfers import OK, PrefixTransfer, PrefixTransfers, prefix_of
from gateway.routing.router import Router
from gateway.tasks import TaskSet
from gateway.telemetry.recorder import RequestRecorder
from gateway.upstream.legs import DecodeAnswer, Legs
from planner.decisions.failures.retries import FailedStage, FailureKind, Next, may_have_died, tries_of
from planner.decisions.routing.offload import Route

log = logging.getLogger("prfaas.gateway.run")

# For a prefix that is being computed: the time predicted for all that comes before the first token may be this wrong.
PATIENCE: Final = 2.0
LEAST_PATIENCE_S: Final = 1.0

PAUSE_S: Final = (
    1.0  # before full prefill nodes are asked again, where the decode node has no time for the prompt either
)


@dataclass(slots=True)
class Attempt:
    """One try at a request that a decode node has begun to answer. A delivery that ends in None did not take place.

    `engine` is which process of `decode` was asked.
    """

    answer: DecodeAnswer
    decode: ClusterNode
    engine: tuple[str, int]
    delivery: "asyncio.Task[PrefillOutcome] | asyncio.Task[PrefillOutcome | None] | None" = None
    hold: DecodeReservation | None = None


class TicketedRunner:
    """Runs what has been decided and reserved."""

    def __init__(
        self,
        clusters: Clusters,
        links: ClusterLinks,
        legs: Legs,
        moves: PrefixTransfers,
        decider: Router,
        refusals: SloGate,
        accounts: RequestRecorder,
        tasks: TaskSet,
        retries: Retries,
        room_s: float,
    ) -> None:
        self._clusters = clusters
        self._links = links
        self._legs = legs
        self._moves = moves
        self._decider = decider
        self._refusals = refusals
        self._accounts = accounts
        self._tasks = tasks
        self._retries = retries
        self._max_pauses = int(room_s / PAUSE_S)

    @asynccontextmanager
    async def attempt(
        self, request: Request, chosen: Route, hold: DecodeReservation | None, booking: Booking
    ) -> AsyncIterator[Attempt]:
        """The attempt, once its decode node answers. Raises NodeFailure, or ApiError for what no node can mend."""
        decode = self._clusters.by_id(chosen.decode_node)
        engine = decode.engine
        if hold is None:
            self._refusals.decoding(request, decode.id)
            answer = await self._ask(decode, request, None)
            try:
                yield Attempt(answer, decode, engine)
            finally:
                answer.close()
            return
        async with AsyncExitStack() as own:
            delivering = self._deliver(request, chosen, hold, booking)
            delivery = self._tasks.start(delivering, "deliver", expected=(ApiError,))
            own.push_async_callback(cancel, delivery)
            asking_for = self._ask(decode, request, hold.ticket.transfer_id)
            asking = self._tasks.start(asking_for, "ask", expected=(DecodeFailed,))
            own.push_async_callback(hang_up, asking)
            yield Attempt(await _unless_it_fails(delivery, asking), decode, engine, delivery, hold)

    async def _ask(self, decode: ClusterNode, request: Request, transfer_id: str | None) -> DecodeAnswer:
        async with noting_death(self._clusters, request, decode):
            return await self._legs.decode(decode, request, transfer_id)

    # The prefill's side

    async def _deliver(
        self, request: Request, chosen: Route, hold: DecodeReservation, booking: Booking
    ) -> PrefillOutcome | None:
        """Gets the KVCache to the decode node, by one prefill node or another. None: it computes the prompt itself."""
        if hold.shared_from != chosen.prefill_node:
            await self._fetch(request, chosen)
        await self._until_computed(request, chosen, booking)
        failed: dict[str, FailureKind] = {}
        pauses = 0
        way: Route | None = chosen
        while way is not None:
            assert way.prefill_node is not None
            try:
                outcome = await self._prefill(way, request, hold, booking)
            except (PrefillFailed, AgentCallFailed) as error:
                booking.prefilled()
                failed[way.prefill_node] = error.failure
                way = self._next_way(request, chosen, way.prefill_node, error, failed)
                full = way is None and error.failure is FailureKind.FULL
                if full and pauses < self._max_pauses and not self._decider.may_compute(chosen.decode_node):
                    pauses += 1
                    await asyncio.sleep(PAUSE_S)
                    failed.clear()
                    way = self._decider.other_prefill(request, chosen, ()) or chosen
            else:
                booking.prefilled()
                booking.landed(has_landed=True)
                self._accounts.delivered(request, outcome, hold.nodes[0])
                self._refusals.computed(request, chosen.decode_node)
                return outcome
        await self._stop_waiting(request, chosen, hold, booking)
        return None

    async def _prefill(self, way: Route, request: Request, hold: DecodeReservation, booking: Booking) -> PrefillOutcome:
        assert way.prefill_node is not None
        node, decode = self._clusters.by_id(way.prefill_node), hold.nodes[0]
        receiver = decode.engine
        await self._readdress(hold, node)
        hold.nodes.append(node)
        booking.prefill(node, way)
        self._accounts.prefilling(request, node)
        async with noting_death(self._clusters, request, node):
            try:
                outcome = await self._legs.prefill(node, request, hold.ticket)
            except PrefillFailed as error:
                if is_path_failure(error.reason, node, decode, receiver):
                    self._links.failed(node, decode)
                raise
        self._links.arrived(node, decode)
        self._links.learn_coding(node, decode, outcome)
        self._decider.learn(node, outcome)
        self._decider.learn_arrival(request, way, node, decode)
        return outcome

    async def _readdress(self, hold: DecodeReservation, sender: ClusterNode) -> None:
        """The ticket is that node's from now on. A receiver of before knows no senders, and refuses none."""
        if hold.sender is sender:
            return
        try:
            await hold.nodes[0].agent.readdress(hold.ticket.transfer_id, sender.place)
            hold.sender = sender
        except AgentCallFailed as error:
            log.info("the ticket of %s is not readdressed to %s: %s", hold.ticket.transfer_id, sender.id, error)

    def _next_way(
        self, request: Request, chosen: Route, failing: str, error: NodeFailure, failed: dict[str, FailureKind]
    ) -> Route | None:
        """The node that prefills after node `failing`; None: no node. Raises KillsEngines."""
        noted = self._accounts.doubted if error.failure is FailureKind.REQUEST else self._accounts.fell_back
        noted(request, f"prefill_{error.reason}", error)
        match self._retries.rule_after(
            request, FailedStage.PREFILL, failing, failed[failing], tries_of(failed.values())
        ).next:
            case Next.ELSEWHERE:
                return self._decider.other_prefill(request, chosen, failed)
            case Next.REFUSE:
                raise KillsEngines(request.deaths)
            case _:
                return None

    async def _until_computed(self, request: Request, chosen: Route, booking: Booking) -> None:
        """Waits while the prefill node computes for another request what this one goes on from."""
        if booking.awaited is None:
            return
        try:
            async with asyncio.timeout(LEAST_PATIENCE_S + PATIENCE * chosen.ttft_s):
                await booking.awaited.done.wait()
        except TimeoutError:
            self._accounts.fell_back(request, "prefix_late")

    async def _fetch(self, request: Request, chosen: Route) -> None:
        """Gets the prefill node the prefix that another node has for it. Without it there is more to compute, no more."""
        if chosen.fetch_from is None or chosen.prefill_node is None:
            return
        try:
            source, target = self._clusters.by_id(chosen.fetch_from), self._clusters.by_id(chosen.prefill_node)
        except AgentCallFailed as error:
            self._accounts.fell_back(request, f"fetch_{error.reason}", error)
            return
        if not self._links.is_up(source, target):
            self._accounts.fell_back(request, "fetch_link_down")
            return
        hashes = prefix_of(request.prompt.hashes, chosen.cached_tokens, request.served.layout.block_size)
        num_bytes = request.served.layout.kv_bytes(chosen.cached_tokens)
        move = PrefixTransfer(source, target, hashes, chosen.cached_tokens, num_bytes, tenant=request.tenant.name)
        outcome = await self._moves.make(move, chosen.fetch_limit_s)
        if outcome == OK:
            request.fetched_from = source.id
        else:
            self._accounts.fell_back(request, f"fetch_{outcome}")

    async def _stop_waiting(self, request: Request, chosen: Route, hold: DecodeReservation, booking: Booking) -> None:
        """Tells the decode node that nothing will come; its engine then recomputes, and the answer goes on."""
        noted = self._accounts.doubted if request.doubts else self._accounts.fell_back
        noted(request, "recompute_no_prefill")
        request.is_recomputed = True
        booking.landed(has_landed=False)
        booking.prefill(hold.nodes[0], chosen)
        self._accounts.prefilling(request, hold.nodes[0])
        try:
            await hold.nodes[0].agent.abort(hold.ticket.transfer_id, "prefill_failed")
        except AgentCallFailed as error:
            log.warning("id=%s decode node could not be told to recompute: %s", request.id, error)


@asynccontextmanager
async def noting_death(clusters: Clusters, request: Request, node: ClusterNode) -> AsyncIterator[None]:
    """A leg at `node`. If it fails because the engine died, the request keeps that, and the failure says `engine_died`."""
    engine = node.engine
    try:
        yield
    except (DecodeFailed, PrefillFailed) as error:
        if not may_have_died(error.reason) or not await clusters.has_died(node, engine):
            raise
        request.deaths.append(node.id)
        raise type(error)(node.id, "engine_died") from error


async def _unless_it_fails(
    delivery: "asyncio.Task[PrefillOutcome | None]", asking: "asyncio.Task[DecodeAnswer]"
) -> DecodeAnswer:
    """The answer asked for, or at once the error of a delivery that nothing can follow."""
    await asyncio.wait({delivery, asking}, return_when=asyncio.FIRST_COMPLETED)
    if not asking.done() and not delivery.cancelled() and (error := delivery.exception()) is not None:
        raise error if isinstance(error, ApiError) else InternalError from error
    return await asyncio.shield(asking)


async def cancel(task: "asyncio.Task[Any]") -> None:
    """Ends a task, and waits until it has."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


async def hang_up(asking: "asyncio.Task[DecodeAnswer]") -> None:
    """Ends the decode leg, whether it is still being asked or has answered; also for who does not wait until it has."""
    if asking.done():
        _let_go(asking)
        return
    asking.add_done_callback(_let_go)
    asking.cancel()
    await asyncio.wait([asking])


def _let_go(asking: "asyncio.Task[DecodeAnswer]") -> None:
    if not asking.cancelled() and asking.exception() is None:
        asking.result().close()

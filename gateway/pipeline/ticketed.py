"""Runs both legs at once. The prefill node pushes KVCache under the ticket, and the decode node waits for it.

Whatever becomes of the prefill, the request hears of it: another prefill node takes over under the same ticket, or
the decode node computes the prompt itself, or the request ends at once.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from gateway.admission.slo import SloGate
from gateway.cluster.agent_values import PrefillOutcome
from gateway.cluster.inflight_load import Booking
from gateway.cluster.node import ClusterNode
from gateway.errors import AgentCallFailed, ApiError, DecodeFailed, InternalError, NodeFailure, PrefillFailed
from gateway.pipeline.attempt import Attempt, KvDelivery, LegRunner, cancel, hang_up
from gateway.pipeline.reservations import DecodeReservation
from gateway.request.request import Request
from gateway.routing.prefix_transfers import OK, PrefixTransfer, PrefixTransfers, prefix_of
from gateway.upstream.legs import DecodeAnswer
from planner.decisions.failures.retries import FailureKind, Next
from planner.decisions.routing.offload import Route

log = logging.getLogger("prfaas.gateway.run")

# For a prefix that is being computed: the time predicted for all that comes before the first token may be this wrong.
PATIENCE: Final = 2.0
LEAST_PATIENCE_S: Final = 1.0

PAUSE_S: Final = (
    1.0  # before full prefill nodes are asked again, where the decode node has no time for the prompt either
)


class TicketedRunner:
    """Runs what has been decided and reserved."""

    def __init__(self, run: LegRunner, *, moves: PrefixTransfers, refusals: SloGate, room_s: float) -> None:
        self._run = run
        self._moves = moves
        self._refusals = refusals
        self._max_pauses = int(room_s / PAUSE_S)

    @asynccontextmanager
    async def attempt(
        self, request: Request, chosen: Route, hold: DecodeReservation | None, booking: Booking
    ) -> AsyncIterator[Attempt]:
        """The attempt, once its decode node answers. Raises NodeFailure, or ApiError for what no node can mend."""
        decode = self._run.clusters.by_id(chosen.decode_node)
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
            delivery = self._run.tasks.start(delivering, "deliver", expected=(ApiError,))
            own.push_async_callback(cancel, delivery)
            asking_for = self._ask(decode, request, hold.ticket.transfer_id)
            asking = self._run.tasks.start(asking_for, "ask", expected=(DecodeFailed,))
            own.push_async_callback(hang_up, asking)
            yield Attempt(await _unless_it_fails(delivery, asking), decode, engine, KvDelivery(delivery), hold)

    async def _ask(self, decode: ClusterNode, request: Request, transfer_id: str | None) -> DecodeAnswer:
        return await self._run.decode(request, decode, self._run.legs.decode(decode, request, transfer_id))

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
                if full and pauses < self._max_pauses and not self._run.decider.may_compute(chosen.decode_node):
                    pauses += 1
                    await asyncio.sleep(PAUSE_S)
                    failed.clear()
                    way = self._run.other_prefill(request, chosen, ()) or chosen
            else:
                booking.prefilled(is_computed=True)
                booking.landed(has_landed=True)
                self._run.accounts.delivered(request, outcome, hold.nodes[0])
                self._refusals.computed(request, chosen.decode_node)
                return outcome
        await self._stop_waiting(request, chosen, hold, booking)
        return None

    async def _prefill(self, way: Route, request: Request, hold: DecodeReservation, booking: Booking) -> PrefillOutcome:
        assert way.prefill_node is not None
        node, decode = self._run.clusters.by_id(way.prefill_node, request.served.revision), hold.nodes[0]
        await self._readdress(hold, node)
        hold.nodes.append(node)
        booking.prefill(node, way)
        self._run.accounts.prefilling(request, node)
        leg = self._run.legs.prefill(node, request, hold.ticket)
        outcome = await self._run.prefill(request, node, decode, leg)
        self._run.links.learn_coding(node, decode, outcome)
        self._run.decider.learn(node, outcome)
        self._run.decider.learn_arrival(request, way, node, decode)
        if way.cached_tokens and way.fetch_from is None and self._run.clusters.indexes.is_far(node.id):
            self._run.accounts.far_hit(request, way.cached_tokens, outcome.cached_tokens)
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
        if self._run.prefill_failed(request, failing, error, failed) is Next.ELSEWHERE:
            return self._run.other_prefill(request, chosen, failed)
        return None

    async def _until_computed(self, request: Request, chosen: Route, booking: Booking) -> None:
        """Waits while the prefill node computes for another request what this one goes on from."""
        if booking.awaited is None:
            return
        try:
            async with asyncio.timeout(LEAST_PATIENCE_S + PATIENCE * chosen.ttft_s):
                await booking.awaited.done.wait()
        except TimeoutError:
            self._run.accounts.fell_back(request, "prefix_late")

    async def _fetch(self, request: Request, chosen: Route) -> None:
        """Gets the prefill node the prefix that another node has for it. Without it there is more to compute, no more."""
        if chosen.fetch_from is None or chosen.prefill_node is None:
            return
        try:
            source, target = self._run.clusters.by_id(chosen.fetch_from), self._run.clusters.by_id(chosen.prefill_node)
        except AgentCallFailed as error:
            self._run.accounts.fell_back(request, f"fetch_{error.reason}", error)
            return
        if not self._run.links.is_up(source, target):
            self._run.accounts.fell_back(request, "fetch_link_down")
            return
        hashes = prefix_of(request.prompt.hashes, chosen.cached_tokens, request.served.layout.block_size)
        num_bytes = request.served.layout.kv_bytes(chosen.cached_tokens)
        move = PrefixTransfer(source, target, hashes, chosen.cached_tokens, num_bytes, tenant=request.tenant.name)
        outcome = await self._moves.make(move, chosen.fetch_limit_s)
        if outcome == OK:
            self._run.accounts.fetched(request, source)
        else:
            self._run.accounts.fell_back(request, f"fetch_{outcome}")

    async def _stop_waiting(self, request: Request, chosen: Route, hold: DecodeReservation, booking: Booking) -> None:
        """Tells the decode node that nothing will come; its engine then recomputes, and the answer goes on."""
        noted = self._run.accounts.doubted if request.progress.doubts else self._run.accounts.fell_back
        noted(request, "recompute_no_prefill")
        self._run.accounts.recomputes(request)
        booking.landed(has_landed=False)
        booking.prefill(hold.nodes[0], chosen)
        self._run.accounts.prefilling(request, hold.nodes[0])
        try:
            await hold.nodes[0].agent.abort(hold.ticket.transfer_id, "prefill_failed")
        except AgentCallFailed as error:
            log.warning("id=%s decode node could not be told to recompute: %s", request.id, error)


async def _unless_it_fails(
    delivery: "asyncio.Task[PrefillOutcome | None]", asking: "asyncio.Task[DecodeAnswer]"
) -> DecodeAnswer:
    """The answer asked for, or at once the error of a delivery that nothing can follow."""
    await asyncio.wait({delivery, asking}, return_when=asyncio.FIRST_COMPLETED)
    if not asking.done() and not delivery.cancelled() and (error := delivery.exception()) is not None:
        raise error if isinstance(error, ApiError) else InternalError from error
    return await asyncio.shield(asking)

"""Runs both legs of a pair of SGLang servers at once, without a reservation of the gateway's.

Neither server can do without the other. If the prefill fails, the decode leg is hung up, and both are asked again in another
room, with another prefill node; if decode does, its failure goes the way of every decode node's.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from gateway.admission.slo import SloGate
from gateway.cluster.agent_values import PrefillOutcome
from gateway.cluster.inflight_load import Booking
from gateway.cluster.node import ClusterNode
from gateway.errors import (
    AgentCallFailed,
    ApiError,
    DecodeFailed,
    InternalError,
    NodeFailure,
    PrefillFailed,
    Unavailable,
)
from gateway.pipeline.attempt import Attempt, KvDelivery, LegRunner, cancel, hang_up
from gateway.request.request import Request
from gateway.upstream.legs import DecodeAnswer
from gateway.upstream.sglang_bootstrap import BootstrapRoom, is_certain, room_at, to_blame
from planner.decisions.failures.retries import FailureKind, Next
from planner.decisions.routing.offload import Route

OTHERS_WORD_S: Final = 2.0  # of two servers one fails first; the other hears of it within SGLang's next few steps


class Pairing:
    """Runs what has been decided on nodes that are paired by rooms."""

    def __init__(self, run: LegRunner, *, refusals: SloGate, draw: Callable[[int], int]) -> None:
        """`draw` gives that many random bits."""
        self._run = run
        self._refusals = refusals
        self._draw = draw

    @asynccontextmanager
    async def attempt(self, request: Request, chosen: Route, booking: Booking) -> AsyncIterator[Attempt]:
        """The attempt, once its decode node answers. Raises DecodeFailed, or ApiError for what no decode node can mend."""
        async with AsyncExitStack() as own:
            yield await self._first_answer(request, chosen, booking, own)

    async def _first_answer(self, request: Request, chosen: Route, booking: Booking, own: AsyncExitStack) -> Attempt:
        """By one prefill node or another; what the attempt holds is handed to `own`."""
        failed: dict[str, FailureKind] = {}
        way = chosen
        while True:
            assert way.prefill_node is not None  # routing chooses no decode node without a prefill node
            try:
                async with AsyncExitStack() as held:
                    attempt = await self._in_a_room(request, way, chosen.decode_node, booking, held)
                    own.push_async_exit(held.pop_all())
                    return attempt
            except PrefillFailed as error:
                booking.prefilled()
                failed[way.prefill_node] = error.failure
                way = self._next_way(request, chosen, way.prefill_node, error, failed)

    async def _in_a_room(
        self, request: Request, way: Route, decode_node: str, booking: Booking, held: AsyncExitStack
    ) -> Attempt:
        """Raises PrefillFailed, DecodeFailed."""
        decode, prefill = self._run.clusters.by_id(decode_node), self._prefill_node(way)
        engine, room = decode.engine, room_at(prefill, self._draw)
        booking.prefill(prefill, way)
        self._run.accounts.prefilling(request, prefill)
        delivering = self._deliver(request, way, prefill, decode, room, booking)
        delivery = self._run.tasks.start(delivering, "deliver", expected=(ApiError, PrefillFailed))
        held.push_async_callback(cancel, delivery)
        asking = self._run.tasks.start(self._ask(request, decode, room), "ask", expected=(DecodeFailed,))
        held.push_async_callback(hang_up, asking)
        answer = await _answer_of(delivery, asking)
        return Attempt(answer, decode, engine, KvDelivery(delivery))

    def _prefill_node(self, way: Route) -> ClusterNode:
        assert way.prefill_node is not None
        try:
            node = self._run.clusters.by_id(way.prefill_node)
        except AgentCallFailed as error:  # the decode node is not to blame
            raise PrefillFailed(way.prefill_node, error.reason, error.detail) from error
        if node.info is None or node.info.rooms is None or not node.info.rooms.port:
            raise PrefillFailed(node.id, "wrong_role", "it no longer opens rooms")
        return node

    async def _deliver(
        self,
        request: Request,
        way: Route,
        node: ClusterNode,
        decode: ClusterNode,
        room: BootstrapRoom,
        booking: Booking,
    ) -> PrefillOutcome | None:
        # Its answer says nothing of a queue: only what had none tells how long computing takes.
        has_no_queue = node.pending_requests <= 1
        leg = self._run.legs.prefill_in(node, request, room)
        outcome = await self._run.prefill(request, node, decode, leg)
        booking.prefilled(is_computed=True)
        if has_no_queue:
            self._run.decider.learn(node, outcome)
        self._run.decider.learn_arrival(request, way, node, decode)
        self._run.accounts.delivered(request, outcome, decode)
        self._refusals.computed(request, decode.id)
        return outcome

    async def _ask(self, request: Request, decode: ClusterNode, room: BootstrapRoom) -> DecodeAnswer:
        return await self._run.decode(request, decode, self._run.legs.decode_in(decode, request, room))

    def _next_way(
        self, request: Request, chosen: Route, failing: str, error: PrefillFailed, failed: dict[str, FailureKind]
    ) -> Route:
        """The node that prefills after `failing`, for the same decode node. Raises ApiError without one: decode cannot go on
        alone."""
        following = self._run.prefill_failed(request, failing, error, failed)
        if error.failure is FailureKind.REQUEST:
            raise ApiError(400, error.detail or error.reason, code="bad_request")
        other = self._run.other_prefill(request, chosen, failed) if following is Next.ELSEWHERE else None
        if other is None:
            raise Unavailable(f"No prefill node could compute the prompt: {error.reason}.", "prefill_failed")
        return other


async def _answer_of(
    delivery: "asyncio.Task[PrefillOutcome | None]", asking: "asyncio.Task[DecodeAnswer]"
) -> DecodeAnswer:
    """The answer asked for; or the failure of one of the two servers, as soon as it is known which of them is to blame."""
    both: set[asyncio.Task[Any]] = {delivery, asking}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if _errors(delivery, asking) == (None, None):  # whichever is through, it is decode's answer that counts
        await asyncio.wait([asking])
    prefill, decode = _errors(delivery, asking)
    failed = prefill or decode
    if failed is not None and not is_certain(failed):
        await asyncio.wait(both, timeout=OTHERS_WORD_S)
        prefill, decode = _errors(delivery, asking)
    if decode is None and asking.done():  # the other one's outcome does not matter
        return asking.result()
    raise to_blame(prefill, decode)


def _errors(
    delivery: "asyncio.Task[PrefillOutcome | None]", asking: "asyncio.Task[DecodeAnswer]"
) -> tuple[PrefillFailed | None, DecodeFailed | None]:
    """Of those that are done. Raises what is no failure of a node's."""
    for task in (delivery, asking):
        if task.done() and isinstance(error := task.exception(), Exception) and not isinstance(error, NodeFailure):
            raise error if isinstance(error, ApiError) else InternalError from error
    prefill = delivery.exception() if delivery.done() else None
    decode = asking.exception() if asking.done() else None
    assert prefill is None or isinstance(prefill, PrefillFailed)
    assert decode is None or isinstance(decode, DecodeFailed)
    return prefill, decode

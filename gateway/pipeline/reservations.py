"""Reserves: the decode node makes room and hands out a ticket, before anything is computed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from gateway.cluster.inflight_load import Booking
from gateway.cluster.inflight_prefixes import InflightLanding
from gateway.cluster.node import ClusterNode
from gateway.cluster.registry import Clusters
from gateway.errors import AgentCallFailed
from gateway.request.request import Request
from gateway.tasks import TaskSet
from gateway.telemetry.recorder import RequestRecorder
from planner.decisions.routing.arrivals import SharedPrefix
from planner.decisions.routing.offload import Route
from transport.control.messages import TicketInfo

log = logging.getLogger("prfaas.gateway.reserve")


# How wrong the predicted time until others' KVCache has landed may be. A prompt that waits longer has all of it sent.
PATIENCE: Final = 3.0
LEAST_PATIENCE_S: Final = 5.0
KEEPS_NOTHING_S: Final = 60.0  # a decode node that kept nothing of what had landed is asked to share again after this


@dataclass(slots=True)
class DecodeReservation:
    """A reservation on a decode node, the first of `nodes`, and the other nodes that may hold something for it."""

    ticket: TicketInfo
    nodes: list[ClusterNode]
    sender: ClusterNode | None = None  # whose the ticket is
    shared_from: str = ""  # the prefill node that has sent others all that it was to begin with
    settled: bool = False  # delivered and loaded: nothing is left to free


async def until_landed(
    booking: Booking, held_blocks: int, patience_s: float
) -> tuple[SharedPrefix[InflightLanding] | None, bool]:
    """What has landed at last of what a booked prompt shares beyond `held_blocks`, and whether more of it is late."""
    landed = None
    try:
        async with asyncio.timeout(patience_s):
            while (shared := booking.shared_with(held_blocks)) is not None:
                await shared.first.over.wait()
                if shared.first.has_landed:
                    held_blocks, landed = shared.blocks, shared
    except TimeoutError:
        return landed, True
    return landed, False


class DecodeReservations:
    """Makes reservations that are given back whatever happens to the request."""

    def __init__(
        self, clusters: Clusters, accounts: RequestRecorder, tasks: TaskSet, clock: Callable[[], float], ttl_s: float
    ) -> None:
        self._clusters = clusters
        self._accounts = accounts
        self._tasks = tasks
        self._clock = clock
        self._ttl_s = ttl_s

    @asynccontextmanager
    async def held(self, request: Request, chosen: Route, booking: Booking) -> AsyncIterator[DecodeReservation | None]:
        """A ticket for what `chosen` has sent to its decode node; None where nothing travels.

        What is on its way there for others, and is to be shared, is waited for first.

        Unless it is settled inside the block, all that was made for it is freed after it. Raises AgentCallFailed.
        """
        if chosen.prefill_node is None:
            yield None
            return
        landed = await self._until_landed(request, chosen, booking) if chosen.shared_tokens else None
        landed_tokens = landed.blocks * request.served.layout.block_size if landed is not None else 0
        decode = self._clusters.by_id(chosen.decode_node)
        sender = self._sender(chosen.prefill_node)
        place = sender.place if sender is not None else ""
        making = self._tasks.start(self._reserve(request, decode, place), "reserve", expected=(AgentCallFailed,))
        hold: DecodeReservation | None = None
        try:
            # Shielded: a client that leaves now must not leave a reservation behind whose id is lost.
            hold = DecodeReservation(await asyncio.shield(making), [decode], sender)
            if landed is not None and landed_tokens >= chosen.cached_tokens:
                hold.shared_from = landed.first.prefill_node
            if hold.ticket.have_tokens < landed_tokens:
                self._accounts.fell_back(request, "landing_not_kept")
                decode.keeps_nothing_until = self._clock() + KEEPS_NOTHING_S
            yield hold
        finally:
            if hold is None or not hold.settled:
                self._tasks.start(self._give_back(making, hold.nodes if hold else [decode]), "give_back")

    async def _reserve(self, request: Request, decode: ClusterNode, sender: str) -> TicketInfo:
        flow = request.tenant.share.flow
        granted = await decode.agent.reserve(request.leg_id, request.prompt, self._ttl_s, flow, sender)
        if granted.beside is not None:
            decode.booked_beside(granted.beside)
        return granted.ticket

    def _sender(self, node_id: str) -> ClusterNode | None:
        """None for one that has just gone: who prefills instead will be the sender."""
        try:
            return self._clusters.by_id(node_id)
        except AgentCallFailed:
            return None

    async def _until_landed(
        self, request: Request, chosen: Route, booking: Booking
    ) -> SharedPrefix[InflightLanding] | None:
        """Waits while KVCache that this prompt shares lands for others; what has landed at last, if anything has.

        Should it not land, the first prompt that has waited for it has all of it sent, and the others wait for that.
        """
        held_blocks = chosen.held_tokens // request.served.layout.block_size
        landed, is_late = await until_landed(booking, held_blocks, LEAST_PATIENCE_S + PATIENCE * chosen.shared_s)
        if is_late:
            self._accounts.fell_back(request, "landing_late")
        return landed

    async def _give_back(self, making: "asyncio.Task[TicketInfo]", nodes: list[ClusterNode]) -> None:
        try:
            ticket = await making
        except AgentCallFailed:
            return  # nothing was reserved
        await asyncio.gather(*(self._abort(node, ticket.transfer_id) for node in nodes))

    async def _abort(self, node: ClusterNode, transfer_id: str) -> None:
        try:
            await node.agent.abort(transfer_id, "request_ended")
        except AgentCallFailed as error:
            log.warning("abort of %s failed (its lease will end it): %s", transfer_id, error)

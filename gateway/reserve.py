"""The fifth room: the decode node makes room and hands out a ticket, before anything is computed."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.clusters import Clusters
from gateway.errors import NodeError
from gateway.node import Node
from gateway.request import Request
from gateway.tasks import TaskSet
from planner.decisions.routing import Route
from transport.control.messages import TicketInfo

log = logging.getLogger("prfaas.gateway.reserve")


@dataclass(slots=True)
class Hold:
    """A reservation on a decode node, the first of `nodes`, and everybody else who may hold something for it."""

    ticket: TicketInfo
    nodes: list[Node]
    settled: bool = False  # delivered and loaded: nothing is left to free


class Reservations:
    """Makes reservations that are given back whatever happens to the request."""

    def __init__(self, clusters: Clusters, tasks: TaskSet, ttl_s: float) -> None:
        self._clusters = clusters
        self._tasks = tasks
        self._ttl_s = ttl_s

    @asynccontextmanager
    async def held(self, request: Request, chosen: Route) -> AsyncIterator[Hold | None]:
        """A ticket for what `chosen` has sent to its decode node; None where nothing travels.

        Unless it is settled inside the block, all that was made for it is freed after it. Raises NodeError.
        """
        if chosen.prefill_node is None:
            yield None
            return
        decode = self._clusters.by_id(chosen.decode_node)
        reserving = decode.agent.reserve(request.leg_id, request.prompt, self._ttl_s)
        making = self._tasks.start(reserving, "reserve", expected=(NodeError,))
        hold: Hold | None = None
        try:
            # Shielded: a client that leaves now must not leave a reservation behind whose id nobody knows.
            hold = Hold(await asyncio.shield(making), [decode])
            yield hold
        finally:
            if hold is None or not hold.settled:
                self._tasks.start(self._give_back(making, hold.nodes if hold else [decode]), "give_back")

    async def _give_back(self, making: "asyncio.Task[TicketInfo]", nodes: list[Node]) -> None:
        try:
            ticket = await making
        except NodeError:
            return  # nothing was reserved
        await asyncio.gather(*(self._abort(node, ticket.transfer_id) for node in nodes))

    async def _abort(self, node: Node, transfer_id: str) -> None:
        try:
            await node.agent.abort(transfer_id, "request_ended")
        except NodeError as error:
            log.warning("abort of %s failed (its lease will end it): %s", transfer_id, error)

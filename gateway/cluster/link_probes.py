"""Asks links that failed whether they carry anything again: a greeting over the path, no prompt.

    receiver.Reserve(one block) ──ticket──► sender.Probe ──the way of KVCache──► receiver ──an answer──► the link is up

The reservation is only for its ticket, which names the receiver's addresses; it is given back before the probe is sent.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from gateway.cluster.links import ClusterLinks
from gateway.cluster.node import ClusterNode
from gateway.errors import AgentCallFailed
from gateway.tasks import TaskSet
from planner.decisions.links.paths import MAX_LOST, PATH_FAILED, PROBE_TICK_S
from transport.control.messages import TicketInfo

log = logging.getLogger("prfaas.gateway.probes")

UNKNOWN_CALL: Final = "unimplemented"  # of a node that has yet to be upgraded
ROOM_S: Final = 5.0  # a lease, should the gateway die before it gives the block back


class Probes:
    """Sends them; each ends within the time limit of a call."""

    def __init__(
        self,
        links: ClusterLinks,
        tasks: TaskSet,
        timeout_s: float,
        clock: Callable[[], float],
        on_probed: Callable[[ClusterNode, ClusterNode, str, float], None],
    ) -> None:
        """`on_probed` hears of each that had an answer: who, whom, why there is no way ("": there is), seconds."""
        self._links = links
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_probed = on_probed

    async def run(self) -> None:
        """Sends what is due, for ever."""
        while True:
            await asyncio.sleep(PROBE_TICK_S)
            for sender, receivers in self._links.probes():
                self._tasks.start(self._probe(sender, receivers), "probe")

    async def _probe(self, sender: ClusterNode, receivers: list[ClusterNode]) -> None:
        lost = 0
        for receiver in receivers:
            try:
                ticket = await _ticket(receiver)
            except AgentCallFailed as error:  # says nothing of the link: another receiver may have a ticket
                log.info("no probe of the link to %s by %s: %s", receiver.id, sender.id, error)
                continue
            began = self._clock()
            try:
                reason = await sender.agent.probe(ticket, self._timeout_s)
            except AgentCallFailed as error:
                log.info("no probe of the link to %s by %s: %s", receiver.id, sender.id, error)
                if error.reason == UNKNOWN_CALL:
                    self._links.unasked(sender, receiver)
                return
            self._on_probed(sender, receiver, reason, self._clock() - began)
            if not reason:
                self._links.arrived(sender, receiver)
            if reason != PATH_FAILED:
                return
            self._links.still_down(sender, receiver)
            lost += 1
            if lost == MAX_LOST:
                return


async def _ticket(receiver: ClusterNode) -> TicketInfo:
    """The addresses of a receiver. Raises AgentCallFailed."""
    assert receiver.info is not None
    ticket = await receiver.agent.reserve_prefix("probe", (), receiver.info.block_size, ROOM_S)
    await receiver.agent.abort(ticket.transfer_id, "request_ended")
    return ticket

"""Senders of one line share its egress budget by what waits at each of them: read from their reports, dealt out every second.

What is dealt out ends by itself, in seconds; `planner.decisions.links.shares` says who gets what, and in which order.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gateway.cluster.node import ClusterNode
from gateway.errors import AgentCallFailed
from gateway.telemetry.process_metrics import ProcessMetrics
from planner.decisions.links.shares import DEAL_EVERY_S, LineSender, RateGrant, SharedBudget

DRIFT: Final = 1.02  # no two clocks run at rates that differ by more

Line = tuple[str, str]
"""Source and destination cluster."""


class Shares:
    """Deals out the budgets of all lines that have several senders, each with a budget of its own."""

    def __init__(
        self, nodes: Sequence[ClusterNode], upkeep: ProcessMetrics, clock: Callable[[], float], holder: str
    ) -> None:
        """`holder` names this process: a sender listens to one at a time."""
        self._nodes = nodes
        self._upkeep = upkeep
        self._clock = clock
        self._holder = holder
        self._serials = itertools.count()
        self._budgets: dict[Line, SharedBudget] = {}

    async def run(self) -> None:
        """Deals out every DEAL_EVERY_S, for ever."""
        while True:
            await asyncio.sleep(DEAL_EVERY_S)
            await self.tick()

    async def tick(self) -> None:
        """One round over all lines."""
        lines = self._lines()
        now = self._clock()
        # Senders may use what they were dealt even while the gateway does not see them.
        kept = {line: budget for line, budget in self._budgets.items() if line in lines or budget.holds(now)}
        self._budgets = {**{line: SharedBudget() for line in lines.keys() - kept.keys()}, **kept}
        await asyncio.gather(*(self._deal(line, nodes) for line, nodes in lines.items()))

    def _lines(self) -> Mapping[Line, list[ClusterNode]]:
        found: defaultdict[Line, list[ClusterNode]] = defaultdict(list)
        for node in self._nodes:
            for link in node.load.links if node.connected else ():
                if link.own_budget_bytes_per_s and link.peer != node.cluster:
                    found[node.cluster, link.peer].append(node)
        return {line: nodes for line, nodes in found.items() if len(nodes) > 1}

    async def _deal(self, line: Line, nodes: Sequence[ClusterNode]) -> None:
        budget, by_id = self._budgets[line], {node.id: node for node in nodes}
        senders = [_sender(node, line[1]) for node in nodes]
        given_up = budget.lower(senders, self._clock())
        answers = await asyncio.gather(*(self._tell(by_id[grant.node_id], line[1], grant) for grant in given_up))
        for grant, has_answered in zip(given_up, answers, strict=True):
            if has_answered:
                budget.answered(grant)
        raised = budget.raise_(senders, self._clock())
        await asyncio.gather(*(self._tell(by_id[grant.node_id], line[1], grant) for grant in raised))

    async def _tell(self, node: ClusterNode, cluster: str, grant: RateGrant) -> bool:
        left_s = grant.until - self._clock()
        until_clock_s = node.load.clock_s + (grant.until - node.reported_at) / DRIFT
        try:
            await node.agent.share_egress(
                self._holder,
                cluster,
                grant,
                serial=next(self._serials),
                lease_s=DRIFT * max(left_s, 0.1),
                until_clock_s=until_clock_s,
            )
        except AgentCallFailed as error:
            self._upkeep.shared(error.reason)
            return False
        self._upkeep.shared("ok")
        return True


def _sender(node: ClusterNode, cluster: str) -> LineSender:
    link = node.link_to(cluster)
    assert link is not None
    return LineSender.of(node.id, link.own_budget_bytes_per_s, link.queued_bytes, node.promised_bytes[cluster])

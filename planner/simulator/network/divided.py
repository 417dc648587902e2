"""A line whose senders have egress budgets: each has a part of its own, which no other one uses.

Every sender reports to the deciders as a live one does, and the line is made of these reports by the code of gateways
(`planner.decisions.routing.lines`). Where they share their egress, it is dealt out by the rules of gateways, too
(`planner.decisions.links.shares`). A sender that its budget holds back measures nothing of the line: it reports no rate, and how
much of its budget it uses.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from planner.decisions.links.shares import DEAL_EVERY_S, LineSender, RateGrant, SharedBudget
from planner.decisions.routing.lines import own_lines, seen_by_sender, shared_line
from planner.decisions.views import LinkView
from planner.model.profile import Floats
from planner.simulator.loop import Loop
from planner.simulator.network.egress import SimulatedEgress
from planner.simulator.nodes.node import SimulatedRequest
from planner.simulator.scenario import Wire
from transport.path.link import USE_WINDOW_S, used_share


class BudgetedReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a sender with a budget says of a line that has room for it."""

    budget_bytes_per_s: float
    queued_bytes: float
    rtt_s: float
    min_rtt_s: float
    utilisation: float
    available_bytes_per_s: float = 0.0
    retransmit_ratio: float = 0.0
    congested: bool = False
    inflated: bool = False
    estimate_error: float = 0.0


class BudgetedSender:
    """What one sender has to send: promised until it has been delivered, queued from when it has been computed."""

    def __init__(self, part: SimulatedEgress) -> None:
        self.part = part
        self.promised_bytes = 0.0
        self._share_until = 0.0
        self._computing = (0.0, 0.0, 0.0)  # since when, for how long, how many bytes

    def send(self, now: float, size: float, item: Any, over_s: float) -> None:
        if over_s:
            self._computing = now, over_s, size
        self.part.send(now, size, item)

    def queued_bytes(self, now: float) -> float:
        """What has been computed and has not left."""
        began, over_s, size = self._computing
        left_s = began + over_s - now
        uncomputed = size * left_s / over_s if left_s > 0 else 0.0
        return max(0.0, self.part.view(now).queued_bytes - uncomputed)

    def take_share(self, now: float, grant: RateGrant) -> None:
        """Sends at that rate until it ends."""
        self._share_until = grant.until
        self.part.scale(now, grant.bytes_per_s / grant.own_bytes_per_s)

    def end_share(self, now: float) -> None:
        """Back to its own budget, unless a later share holds."""
        if now >= self._share_until:
            self.part.scale(now, 1.0)

    def view(self, now: float) -> LinkView:
        wire = self.part.wire
        budget = self.part.view(now).available_bytes_per_s or 0.0
        report = BudgetedReport(
            budget_bytes_per_s=budget,
            utilisation=used_share(self.part.sent_bytes_per_s(now, USE_WINDOW_S), 0.0, budget),
            queued_bytes=self.queued_bytes(now),
            rtt_s=wire.rtt_s,
            min_rtt_s=wire.rtt_s,
        )
        found = seen_by_sender(
            wire.source, wire.destination, report, self.promised_bytes, self.part.unscaled_bytes_per_s
        )  # fmt: skip
        assert found is not None
        return found


class DividedEgress(SimulatedEgress):
    """The line of several senders. `names` are those of the nodes that send."""

    def __init__(
        self,
        wire: Wire,
        loop: Loop,
        on_delivered: Callable[[float, Any], None],
        on_lost: Callable[[float, list[Any]], None],
        peer_timeout_s: float,
        names: Sequence[str],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_over` says that there is nothing more to send, and so to share."""
        super().__init__(wire, loop, on_delivered, on_lost, peer_timeout_s)
        self._is_over = is_over
        self._budget = SharedBudget()
        part = replace(wire, capacity=[(at, rate / wire.senders) for at, rate in wire.capacity], senders=1)
        self._senders = {
            name: BudgetedSender(SimulatedEgress(part, loop, on_delivered, on_lost, peer_timeout_s)) for name in names
        }
        if wire.shares_egress:
            loop.at(DEAL_EVERY_S, self._deal)

    def promise(self, job: SimulatedRequest) -> None:
        self._sender_of(job).promised_bytes += job.route.link_bytes

    def leaves(self, size: float) -> None:
        """It stays promised until it has been delivered."""

    def forget(self, job: SimulatedRequest) -> None:
        sender = self._sender_of(job)
        sender.promised_bytes = max(0.0, sender.promised_bytes - job.route.link_bytes)

    def send(self, now: float, size: float, item: Any, over_s: float = 0.0) -> None:
        self._sender_of(item).send(now, size, item, over_s)

    def _sender_of(self, item: Any) -> BudgetedSender:
        """A prefix may come from a node of another role: its bytes count as the first sender's."""
        name = item.route.prefill_node or "" if isinstance(item, SimulatedRequest) else item.source
        return self._senders.get(name) or next(iter(self._senders.values()))

    def view(self, now: float) -> LinkView:
        seen = {name: sender.view(now) for name, sender in self._senders.items()}
        line = shared_line([*seen.values()])
        return structs.replace(
            line,
            available_bytes_per_s=self._rate or self._last_rate,
            # With shared budgets, what one sender leaves of the line is for the others.
            senders=() if self.wire.shares_egress else own_lines(line, seen, len(self._senders)),
        )

    def rates_bytes_per_s(self) -> dict[str, float]:
        """What each sender may send now."""
        return {name: sender.part.rate_bytes_per_s for name, sender in self._senders.items()}

    def line_senders(self, now: float) -> list[LineSender]:
        """Those that have sent something: of others a gateway knows no budget."""
        return [
            LineSender.of(
                name, sender.part.unscaled_bytes_per_s, sender.queued_bytes(now), sender.promised_bytes
            )
            for name, sender in self._senders.items()
            if sender.part.has_sent
        ]  # fmt: skip

    def _deal(self, now: float, _: Any) -> None:
        """Shares are answered at once."""
        if len(senders := self.line_senders(now)) > 1:
            for grant in self._budget.lower(senders, now):
                self._budget.answered(grant)
                self._grant(now, grant)
            for grant in self._budget.raise_(senders, now):
                self._grant(now, grant)
        if not self._is_over():
            self._loop.at(now + DEAL_EVERY_S, self._deal)

    def _grant(self, now: float, grant: RateGrant) -> None:
        sender = self._senders[grant.node_id]
        sender.take_share(now, grant)
        self._loop.at(grant.until, lambda at, _: sender.end_share(at))

    @property
    def sent_bytes(self) -> float:
        return sum(sender.part.sent_bytes for sender in self._senders.values())

    def sent_per_window(self, window_s: float, horizon_s: float) -> Floats:
        parts = [sender.part.sent_per_window(window_s, horizon_s) for sender in self._senders.values()]
        return np.asarray(np.sum(parts, axis=0))

"""Whose turn it is among tenants of one urgency: by bytes sent per weight."""

from collections.abc import Iterable
from typing import TypeAlias

from transport.send.spec import Urgency

Flow: TypeAlias = tuple[Urgency, str]  # and the tenant


class Fairness:
    """What each flow has sent, divided by the weight of what it sent."""

    def __init__(self) -> None:
        self._sent_by_weight: dict[Flow, float] = {}

    def join(self, flow: Flow, active: Iterable[Flow]) -> None:
        """A tenant that was away does not come back with credit from the time it was away."""
        others = [self._sent_by_weight[f] for f in set(active) if f[0] == flow[0] and f != flow]
        floor = min(others, default=0.0)
        self._sent_by_weight[flow] = max(self._sent_by_weight.get(flow, 0.0), floor)

    def charge(self, flow: Flow, size: int, weight: float) -> None:
        self._sent_by_weight[flow] += size / weight

    def sent(self, flow: Flow) -> float:
        return self._sent_by_weight[flow]

    def leave(self, flow: Flow) -> None:
        self._sent_by_weight.pop(flow, None)

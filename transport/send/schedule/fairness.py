"""Chooses the next tenant within one urgency: by bytes sent lately, per weight."""

from itertools import islice
from typing import Final, TypeAlias

from transport.send.spec import Urgency
from transport.turns import LATELY_S, Turns

HALF_LIFE_S: Final = 10.0  # some transfers of a usual length

Flow: TypeAlias = tuple[Urgency, str]  # and the tenant


class Fairness:
    """The recent bytes of each flow, divided by their weight.

    A tenant that has sent less goes first until it has had as much: a short transfer beside others' backlog leaves as if it
    were alone. `now` is as of the last `at`: fading is slow beside it.
    """

    def __init__(self) -> None:
        self._turns: Turns[Flow] = Turns(HALF_LIFE_S)
        self._now = 0.0

    def at(self, now: float) -> None:
        """It is `now`, in seconds of a clock that does not go back."""
        self._now = now

    def charge(self, flow: Flow, size: int, weight: float) -> None:
        """The flow has sent so many bytes."""
        self._turns.charge(flow, size / weight, self._now)

    @property
    def among_several(self) -> bool:
        """Whether more than one tenant has sent something lately: the next one may come at any time."""
        last = islice(self._turns.latest(), len(Urgency) + 1)  # one tenant has a flow of each
        return len({tenant for (_, tenant), at_s in last if self._now - at_s <= LATELY_S}) > 1

    def rank(self, flow: Flow) -> float:
        """Sort key within one urgency: the flow with the least is first."""
        return self._turns.rank(flow, self._now)

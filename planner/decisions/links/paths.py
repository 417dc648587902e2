"""Which ways between clusters are used: breakers of lines and of pairs of nodes, and what a failure, an answer or a probe says.

A failure opens the path of its sender to the receiver's cluster, and those of all senders of the same line. An answer of another
receiver says that the line is well, and that the one which could not be reached is not: its pairs with the senders then have
breakers of their own. Gateways (`gateway.cluster.links`) and simulated ones (`planner.simulator.network.links`) ask the same.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from planner.decisions.links.breaker import Breakers, BreakerState

PATH_FAILED: Final = "peer_lost"  # what a sender says of a receiver that it had no connection to for its peer timeout
PROBE_TICK_S: Final = 0.25  # between two looks whether a probe is due
MAX_LOST: Final = 2  # receivers that do not answer a probe; each takes half the time in which a probe must be heard of


class PathChange(msgspec.Struct, frozen=True):
    """What an answer has changed: `is_back` if the path was not used before, and receivers that are left out from now on."""

    is_back: bool
    left_out: tuple[str, ...]


class Paths:
    """All paths, by names of nodes and clusters. One never heard of is used."""

    def __init__(self) -> None:
        self._lines = Breakers()
        self._pairs = Breakers()  # of senders that reach others of the receiver's cluster
        # By (sender, cluster) that failed: who was not reached, the latest last.
        self._lost: dict[tuple[str, str], tuple[str, ...]] = {}

    @property
    def num_failed(self) -> int:
        """Paths that failed and have not answered since."""
        return len(self._lost)

    def state(self, sender: str, cluster: str) -> BreakerState:
        return self._lines.state(sender, cluster)

    def is_up(self, sender: str, receiver: str, cluster: str) -> bool:
        """Whether anything may be sent from a node to one of another cluster."""
        return self._lines.up(sender, cluster) and self._pairs.up(sender, receiver)

    def not_up(self) -> list[tuple[str, str]]:
        """Senders and clusters whose line is not used."""
        return self._lines.not_up()

    def lost_pairs(self) -> list[tuple[str, str]]:
        """Senders and receivers that are left out although the line is well."""
        return self._pairs.not_up()

    def cut_off_from(self, receiver: str) -> set[str]:
        """Senders that do not reach that node, although they reach others of its cluster."""
        return {sender for sender, lost in self._pairs.not_up() if lost == receiver}

    # What transfers and probes have seen

    def failed(self, sender: str, siblings: Collection[str], receiver: str, cluster: str, now: float) -> bool:
        """`sender` had no connection to `receiver`, which is well itself. Whether that is news of the line."""
        if not self._pairs.up(sender, receiver):  # what had left before that was known: no news of the line
            self._pairs.on_failed(sender, (), receiver, now)
            return False
        before = self._lines.state(sender, cluster)
        self._lines.on_failed(sender, siblings, cluster, now)
        for each in (sender, *siblings):
            self._not_reached(each, receiver, cluster)
        return before is BreakerState.CLOSED

    def still_down(self, sender: str, receiver: str, cluster: str, now: float) -> None:
        """A probe of the way to `receiver` had no answer; of the sender's siblings' it says nothing."""
        if not self._pairs.up(sender, receiver):
            self._pairs.on_failed(sender, (), receiver, now)
        if not self._lines.up(sender, cluster):
            self._lines.on_failed(sender, (), cluster, now)
            self._not_reached(sender, receiver, cluster)

    def arrived(self, sender: str, receiver: str, cluster: str, now: float) -> PathChange:
        """Something got through: the line is well, and receivers of it that were not reached have no such excuse any more."""
        was_up = self._lines.up(sender, cluster)
        self._lines.on_arrived(sender, cluster, now)
        self._pairs.on_arrived(sender, receiver, now)
        earlier = self._lost.pop((sender, cluster), ())
        left_out = tuple(lost for lost in earlier if lost != receiver and self._pairs.up(sender, lost))
        for lost in left_out:
            self._pairs.on_failed(sender, (), lost, now)
        return PathChange(not was_up, left_out)

    def unasked(self, sender: str, receiver: str, cluster: str) -> None:
        """`sender` knows no probes, being of an earlier version: a request may try the way."""
        self._lines.on_unasked(sender, cluster)
        self._pairs.on_unasked(sender, receiver)
        if self._lines.up(sender, cluster):
            self._lost.pop((sender, cluster), None)

    def _not_reached(self, sender: str, receiver: str, cluster: str) -> None:
        earlier = self._lost.get((sender, cluster), ())
        self._lost[sender, cluster] = (*(each for each in earlier if each != receiver), receiver)

    # What is to be probed

    def lines_to_probe(self, now: float) -> list[tuple[str, str]]:
        """Senders and clusters to probe now; they count as probed."""
        return self._lines.probes(now)

    def pairs_to_probe(self, now: float) -> list[tuple[str, str]]:
        """Senders and receivers to probe now; they count as probed."""
        return self._pairs.probes(now)

    def in_order(self, sender: str, cluster: str, receivers: Iterable[str]) -> list[str]:
        """The receivers to try: those never lost first, then those lost longest ago.

        So a line that is well is back without a wait for the answer that does not come.
        """
        lost: Sequence[str] = self._lost.get((sender, cluster), ())

        def place(receiver: str) -> tuple[bool, int]:
            known = receiver in lost
            return known or not self._pairs.up(sender, receiver), lost.index(receiver) if known else len(lost)

        return sorted(receivers, key=place)

    def forget(self, nodes: Collection[str], clusters: Collection[str]) -> None:
        """Nodes and clusters without these names are gone for good."""
        self._lines.forget({*nodes, *clusters})
        self._pairs.forget(nodes)
        self._lost = {
            path: tuple(each for each in lost if each in nodes) for path, lost in self._lost.items() if path[0] in nodes
        }

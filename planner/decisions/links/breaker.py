"""Whether a link between two clusters is used: a breaker per sender and destination, pure, closed by itself.

    CLOSED ──failed──► OPEN ──retry time──► HALF_OPEN ──probe arrived, or none can send one──► CLOSED
                        ▲                       │
                        └────────failed─────────┘   with a longer retry time

The first failure opens it: a path that fails has cost a request its peer timeout already, and no other request should pay
that again. Probes are the rim's (a greeting over the path, no prompt), so while it is not closed no request pays. A
failure says something about the link and nothing about the nodes at its ends: they stay in use for everything else.
"""

from collections.abc import Container, Iterable
from enum import StrEnum
from types import MappingProxyType
from typing import Final

RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 30.0  # a link that was down for hours is back within half a minute
PROBE_S: Final = 10.0  # a probe without an answer has failed: twice the time in which a peer is given up


class BreakerState(StrEnum):
    """The traffic that a breaker lets pass."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing
    HALF_OPEN = "half_open"  # one probe


class PathEvent(StrEnum):
    """What the rim has seen of the path."""

    FAILED = "failed"  # nothing got through within the time in which a peer is given up
    ARRIVED = "arrived"  # a transfer or a probe did
    WAITED = "waited"  # the retry time is over
    UNASKED = "unasked"  # the sender knows no probes: the next request is one


TRANSITIONS: Final = MappingProxyType(
    {
        (BreakerState.CLOSED, PathEvent.FAILED): BreakerState.OPEN,
        (BreakerState.CLOSED, PathEvent.ARRIVED): BreakerState.CLOSED,
        (BreakerState.OPEN, PathEvent.FAILED): BreakerState.OPEN,  # what had left before
        (BreakerState.OPEN, PathEvent.ARRIVED): BreakerState.CLOSED,  # what had left before got through after all
        (BreakerState.OPEN, PathEvent.WAITED): BreakerState.HALF_OPEN,
        (BreakerState.HALF_OPEN, PathEvent.FAILED): BreakerState.OPEN,
        (BreakerState.HALF_OPEN, PathEvent.ARRIVED): BreakerState.CLOSED,
        (BreakerState.CLOSED, PathEvent.UNASKED): BreakerState.CLOSED,
        (BreakerState.OPEN, PathEvent.UNASKED): BreakerState.OPEN,
        (BreakerState.HALF_OPEN, PathEvent.UNASKED): BreakerState.CLOSED,
    }
)


class Breaker:
    """One link's."""

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self._retry_s = RETRY_S
        self._until = 0.0

    def __repr__(self) -> str:
        return f"<Breaker {self.state}, retry {self._retry_s:g} s>"

    @property
    def up(self) -> bool:
        """Whether requests may be routed over the link."""
        return self.state is BreakerState.CLOSED

    def on_failed(self, now: float) -> None:
        """The path failed, for a transfer or for a probe."""
        if self.state is BreakerState.HALF_OPEN:
            self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)
        if self.state is not BreakerState.OPEN:
            self._until = now + self._retry_s
        self._take(PathEvent.FAILED)

    def on_arrived(self, now: float) -> None:
        """Something arrived over the path."""
        self._take(PathEvent.ARRIVED)
        self._retry_s = RETRY_S

    def on_unasked(self) -> None:
        """The sender cannot probe. Should the request that does it instead fail, the next one waits longer."""
        if self.state is BreakerState.HALF_OPEN:
            self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)
        self._take(PathEvent.UNASKED)

    def wants_probe(self, now: float) -> bool:
        """Whether to send one now; asked once, it counts as sent, and no other caller is told to."""
        if self.state is BreakerState.CLOSED or now < self._until:
            return False
        if self.state is BreakerState.HALF_OPEN:  # of the last one nothing was heard
            self.on_failed(now)
            return False
        self._take(PathEvent.WAITED)
        self._until = now + PROBE_S
        return True

    def next_probe_time(self) -> float | None:
        """When to ask again; None while there is nothing to probe."""
        return None if self.state is BreakerState.CLOSED else self._until

    def _take(self, event: PathEvent) -> None:
        self.state = TRANSITIONS[self.state, event]


class Breakers:
    """Those of all paths, by (sending node, destination): a cluster, or one node. A path never heard of is closed: it is used.

    Senders of one cluster share its line, so the failure of one opens those of all; each then closes by a probe of its own,
    and a sender that alone is cut off stays out alone.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Breaker] = {}

    def state(self, sender: str, destination: str) -> BreakerState:
        known = self._known.get((sender, destination))
        return BreakerState.CLOSED if known is None else known.state

    def up(self, sender: str, destination: str) -> bool:
        return self.state(sender, destination) is BreakerState.CLOSED

    def on_failed(self, sender: str, siblings: Iterable[str], destination: str, now: float) -> None:
        """The path of `sender` failed; nothing speaks for those of its `siblings` in the same cluster."""
        self._of(sender, destination).on_failed(now)
        for each in siblings:
            if (other := self._of(each, destination)).up:
                other.on_failed(now)

    def on_arrived(self, sender: str, destination: str, now: float) -> None:
        """Something of `sender`'s arrived."""
        if (known := self._known.get((sender, destination))) is not None:
            known.on_arrived(now)
            del self._known[sender, destination]

    def on_unasked(self, sender: str, destination: str) -> None:
        """`sender` knows no probes."""
        if (known := self._known.get((sender, destination))) is not None:
            known.on_unasked()

    def not_up(self) -> list[tuple[str, str]]:
        """The paths that are not used."""
        return [ends for ends, breaker in self._known.items() if not breaker.up]

    def probes(self, now: float) -> list[tuple[str, str]]:
        """The paths to probe now."""
        return [ends for ends, breaker in self._known.items() if breaker.wants_probe(now)]

    def forget(self, known: Container[str]) -> None:
        """Senders and destinations that are not among `known` are gone for good."""
        self._known = {ends: each for ends, each in self._known.items() if ends[0] in known and ends[1] in known}

    def _of(self, sender: str, destination: str) -> Breaker:
        return self._known.setdefault((sender, destination), Breaker())

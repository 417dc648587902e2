"""A gateway's offered load and its view of the system, for planners: `GET /prfaas/load`.

Samples have sequence numbers that never repeat while the gateway runs, so any number of readers can each ask for what is new to
them. A reader that comes too late misses the oldest ones, and is told how many there were in all.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

import msgspec

from planner.decisions.plans.live_plan import LivePlan
from planner.decisions.views import ClusterKind, Role

READY: Final = "ready"  # a node's state
CONVERTING: Final = "converting"  # another one


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """The latest samples after a cursor, oldest first. `last_seq` is the cursor to go on from, `missed` were forgotten."""

    values: tuple[int, ...] = ()
    last_seq: int = 0
    missed: int = 0


class SampleRing:
    """The last `limit` samples of something that is counted in whole numbers."""

    def __init__(self, limit: int) -> None:
        self._ring: deque[int] = deque(maxlen=limit)
        self._last_seq = 0

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, value: int) -> None:
        self._last_seq += 1
        self._ring.append(value)

    def after(self, seq: int) -> Samples:
        """Samples after `seq`; a `seq` that is yet to come is one of another life: everything is new then."""
        new = self._last_seq - seq if 0 <= seq <= self._last_seq else self._last_seq
        kept = min(new, len(self._ring))
        values = tuple(islice(self._ring, len(self._ring) - kept, None))
        return Samples(values=values, last_seq=self._last_seq, missed=new - kept)


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node as a gateway sees it. `waiting` and `running` are requests, `slots` how many it may decode at once."""

    node_id: str
    agent: str
    cluster: str
    kind: ClusterKind
    role: Role
    state: str
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    slots: int = 1


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """A link as a gateway sees it: what it can carry is believed only while it is `congested` or full."""

    source: str
    destination: str
    up: bool = True
    rate_bytes_per_s: float | None = None
    utilisation: float = 0.0
    congested: bool = False


class GatewayLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway says. `boot` names its life: cursors of another one mean nothing.

    `uncached` has a length for every request that was routed, whether it was served or refused afterwards; `unread`
    counts those that were refused before their length was known. `outputs` are the answers' lengths.
    """

    boot: str
    uncached: Samples
    outputs: Samples
    unread: int = 0
    threshold_tokens: float
    tie_share: float = 1.0
    nodes: tuple[NodeReport, ...] = ()
    links: tuple[LinkReport, ...] = ()
    follows: LivePlan | None = None


def of_kind(nodes: Iterable[NodeReport], kind: ClusterKind, role: Role) -> list[NodeReport]:
    """The working nodes of a kind and a role."""
    return [node for node in nodes if node.kind is kind and node.role is role and node.state == READY]

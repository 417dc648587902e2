"""What one watcher of a node is to hear, and when: a message in APART_S, but for what is urgent.

A message costs each gateway that watches far more CPU than what is in it, and every request changes several things on
its nodes. What comes after a quiet time goes at once. What comes soon after a message waits, and goes with the next one.
Blocks of a group are one event by then. Of loads only the last is told, as it is by then.

Urgent is what is neither blocks nor load, such as a description. So are MANY requests, or MANY_TOKENS to compute, more or
fewer than were told.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Final

from transport.control.proto import node_pb2 as pb

APART_S: Final = 0.1  # between two messages
MUCH_APART_S: Final = 0.02  # between a message and a load that has changed by MANY
MANY: Final = 4  # requests
MANY_TOKENS: Final = 32_768  # of prompts, not computed yet: about a second of a node, so computing them is no such news
MOST_BYTES: Final = 256 << 10  # that wait


@dataclass(slots=True)
class _Blocks:
    """Blocks of one group and medium that came, or went, one after the other."""

    kind: str
    group: int
    medium: pb.Medium
    hashes: list[bytes] = field(default_factory=list)

    def event(self) -> pb.NodeEvent:
        hashes = b"".join(self.hashes)
        if self.kind == "stored":
            return pb.NodeEvent(stored=pb.BlocksStored(group=self.group, hashes=hashes, medium=self.medium))
        return pb.NodeEvent(removed=pb.BlocksRemoved(group=self.group, hashes=hashes, medium=self.medium))


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a node has to do: requests, and tokens of prompts that it has not computed."""

    requests: int
    queued_tokens: int

    def is_far_from(self, other: "Backlog") -> bool:
        """Whether a gateway that knows the other one is to hear of this one soon."""
        return (
            abs(self.requests - other.requests) >= MANY or abs(self.queued_tokens - other.queued_tokens) >= MANY_TOKENS
        )


class WatchNews:
    """Holds what a watcher has not been told. Pure: the caller sends what is due."""

    def __init__(self, load_interval_s: float, told: Backlog, now: float) -> None:
        """The watcher has just been told a load: that one."""
        self._load_interval_s = load_interval_s
        self._load_at = now + load_interval_s
        self._is_load_new = False
        self._told_at, self._told = now, told
        self._held: list[pb.NodeEvent | _Blocks] = []
        self._open: dict[tuple[int, int], _Blocks] = {}  # of each group and medium, those that may become more
        self._held_bytes = 0
        self._events_at = inf

    @property
    def due_at(self) -> float:
        """When the next message is to be sent, if nothing else is heard."""
        return min(self._events_at, self._load_at)

    @property
    def is_full(self) -> bool:
        """Whether what waits is to be taken before more is heard."""
        return self._held_bytes >= MOST_BYTES

    def hear(self, event: pb.NodeEvent, backlog: Backlog) -> None:
        """An event of the node, which has that `backlog` now. It is not changed."""
        match event.WhichOneof("event"):
            case "load":
                apart_s = MUCH_APART_S if backlog.is_far_from(self._told) else APART_S
                self._is_load_new = True
                self._load_at = min(self._load_at, self._told_at + apart_s)
            case "stored":
                self._hold("stored", event.stored)
            case "removed":
                self._hold("removed", event.removed)
            case _:
                self._held.append(event)
                self._held_bytes += event.ByteSize()
                self._open.clear()  # what comes after a clearing is told after it
                self._events_at = -inf

    def _hold(self, kind: str, blocks: pb.BlocksStored | pb.BlocksRemoved) -> None:
        place = blocks.group, blocks.medium
        run = self._open.get(place)
        if run is None or run.kind != kind:
            run = self._open[place] = _Blocks(kind, blocks.group, blocks.medium)
            self._held.append(run)
        run.hashes.append(blocks.hashes)
        self._held_bytes += len(run.hashes[-1])
        self._events_at = min(self._events_at, -inf if self.is_full else self._told_at + APART_S)

    def take(self, now: float) -> tuple[list[pb.NodeEvent], bool]:
        """What is told now, and whether a load is to go with it: a new one, or one that is due before the next message."""
        events = [each.event() if isinstance(each, _Blocks) else each for each in self._held]
        is_load_due = self._is_load_new or self._load_at < now + APART_S
        self._held, self._open, self._held_bytes = [], {}, 0
        self._events_at, self._told_at = inf, now
        return events, is_load_due

    def load_told(self, told: Backlog, now: float) -> None:
        """The watcher is told a load."""
        self._is_load_new, self._told = False, told
        self._load_at = now + self._load_interval_s

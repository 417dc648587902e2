"""Gateways that hold reservations: which of them are there, and since when the others are gone.

A gateway's process draws a name at its start, and says it on its kept connection, on its Watch stream and in what it reserves.
It is there while it has a connection of either kind. What it held goes a short time after the last one: a process that was
killed never comes back under that name, and one whose network failed for a moment is back by then.

Processes of one gateway, which see each other's requests anyhow, have names that are alike up to the first dot.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from node.errors import NodeRefusal

GRACE_S: Final = 5.0  # gateways try to connect again after 2 s at the latest
MAX_NAME: Final = 64
MAX_GONE: Final = 1024  # names that are remembered; what an older one held ends with its lease


class ReservationHolders:
    """The holders of one node, by name. Those without a name are not known here: their reservations have leases only."""

    def __init__(self, now: Callable[[], float], grace_s: float = GRACE_S) -> None:
        self._now = now
        self.grace_s = grace_s
        self._connections: Counter[str] = Counter()
        self._booked: Counter[str] = Counter()  # requests that no engine has begun with, by gateway
        self._all_booked = 0
        self._gone_at: OrderedDict[str, float] = (
            OrderedDict()
        )  # of holders without a connection, the longest gone first

    def __len__(self) -> int:
        """How many are there."""
        return len(self._connections)

    def came(self, name: str) -> None:
        """It has one more connection."""
        self._connections[name] += 1
        self._gone_at.pop(name, None)

    def left(self, name: str) -> None:
        """One of its connections has ended."""
        self._connections[name] -= 1
        if not self._connections[name]:
            del self._connections[name]
            self._gone_at[name] = self._now()
            if len(self._gone_at) > MAX_GONE:
                self._gone_at.popitem(last=False)

    def booked(self, name: str) -> None:
        """It has reserved for one more request. Without a name it is an engine, which counts its requests itself."""
        self._book(name, 1)

    def unbooked(self, name: str) -> None:
        """One of these requests has begun in an engine, or never will."""
        self._book(name, -1)

    def _book(self, name: str, change: int) -> None:
        if not name:
            return
        gateway = gateway_of(name)
        self._all_booked += change
        self._booked[gateway] += change
        if not self._booked[gateway]:
            del self._booked[gateway]

    def booked_by(self, name: str) -> int:
        """Requests that its gateway has reserved for, and that no engine has begun with."""
        return self._booked[gateway_of(name)]

    def booked_by_others(self, name: str) -> int:
        """The same of all other gateways."""
        return self._all_booked - self._booked[gateway_of(name)]

    @contextmanager
    def connected(self, name: str) -> Iterator[None]:
        """It has one more connection inside the block; an empty name is not counted."""
        if not name:
            yield
            return
        self.came(name)
        try:
            yield
        finally:
            self.left(name)

    def is_gone(self, name: str, since: float) -> bool:
        """Whether it has had no connection for a while, and none since that time, when it was last heard of otherwise."""
        gone_at = self._gone_at.get(name)
        return gone_at is not None and self._now() >= max(gone_at, since) + self.grace_s


def gateway_of(name: str) -> str:
    """Whose process bears this name."""
    return name.partition(".")[0]


def checked_name(name: str) -> str:
    """Raises NodeRefusal for one that is too long to be a name."""
    if len(name) > MAX_NAME:
        raise NodeRefusal("bad_request", f"a holder's name has at most {MAX_NAME} characters, this one {len(name)}")
    return name

"""Tells busy connections of a listener from idle ones, and since when they are idle. Busy: a transfer that they opened
is still expected."""

from collections.abc import Iterable

from transport.receive.registry.landing import Landing


class Activity:
    """What each connection is busy with."""

    def __init__(self) -> None:
        self._busy: dict[int, set[Landing]] = {}
        self._idle_since: dict[int, float] = {}  # of connections that have opened something, and are not busy

    def idle_since(self, who: int) -> float:
        """Infinity for one that is busy, or has opened nothing yet."""
        return self._idle_since.get(who, float("inf"))

    def opened(self, who: int, landing: Landing | None, now: float) -> None:
        """None: a request that was answered at once."""
        if landing is None or landing.outcome is not None:
            self._rest(who, now)
            return
        self._busy.setdefault(who, set()).add(landing)
        self._idle_since.pop(who, None)

    def ended(self, connections: Iterable[int], landing: Landing, now: float) -> None:
        """These are through with it, or it is over."""
        for who in connections:
            self._busy.get(who, set()).discard(landing)
            self._rest(who, now)

    def gone(self, who: int) -> None:
        self._busy.pop(who, None)
        self._idle_since.pop(who, None)

    def _rest(self, who: int, now: float) -> None:
        if not self._busy.get(who):
            self._idle_since.setdefault(who, now)

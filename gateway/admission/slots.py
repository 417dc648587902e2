"""A bounded counter, in one process or shared by all workers of a gateway."""

from typing import Protocol


class Slots(Protocol):
    """Who takes one gives it back."""

    @property
    def taken(self) -> int: ...
    def take(self, limit: int) -> bool:
        """Takes a place, unless `limit` are taken already."""
        ...

    def give_back(self) -> None: ...


class InFlightSlots(Slots, Protocol):
    """Those of requests in flight. Each worker has a line of requests that wait for one."""

    def first_waits(self, since: float | None) -> None:
        """Says since when the first of this worker's line waits; None: no request does."""
        ...

    def take_in_turn(self, limit: int) -> bool:
        """Takes a place for that first one, if more are free than firsts have waited longer."""
        ...


class LocalSlots:
    """Places of this process alone."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, limit: int) -> bool:
        if self.taken >= limit:
            return False
        self.taken += 1
        return True

    def give_back(self) -> None:
        self.taken -= 1


class LocalInFlightSlots(LocalSlots):
    """Those of a process that has the only line."""

    def first_waits(self, since: float | None) -> None:
        """No other line asks."""

    def take_in_turn(self, limit: int) -> bool:
        return self.take(limit)

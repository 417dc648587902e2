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

"""The pure list of connections that have shown a secret; a thread reads each of them.

A connection is idle while no transfer that it opened is still expected: senders keep such ones for the next transfer.
When there are too many in all, of one address or of one ticket, the one that has been idle longest makes room. Only
busy ones stay, and the next one is refused. So one ticket takes a part of a listener at most, and nothing once its
transfer is over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_OF_TRANSFER: Final = 256  # a sender has at most 64, and another one may have the same ticket
TRANSFER_PART: Final = 4  # a quarter of all at most
ADDRESS_PART: Final = 2
IDLE_S: Final = 900.0  # senders hang up after 300 s

IdleSince = Callable[[int], float]  # of a connection; infinity while it is busy


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a connection comes from, and for which transfer it was let in."""

    address: str
    transfer_id: str


@dataclass(frozen=True, slots=True)
class Seated:
    """It may read; those of `instead_of` have to go."""

    instead_of: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Crowded:
    """It may not: too many of `what` are busy."""

    what: str


class Seats:
    """The connections of one listener that are read."""

    def __init__(self, num_seats: int) -> None:
        self._limits = {
            "all": num_seats,
            "address": max(1, num_seats // ADDRESS_PART),
            "transfer": max(1, min(MAX_OF_TRANSFER, num_seats // TRANSFER_PART)),
        }
        self._taken: dict[int, Origin] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def is_full(self, idle_since: IdleSince) -> bool:
        """Whether no connection could be seated, wherever it comes from."""
        return len(self._taken) >= self._limits["all"] and self._idlest(list(self._taken), idle_since) is None

    def take(self, who: int, origin: Origin, idle_since: IdleSince) -> Seated | Crowded:
        """Seats a connection, if there is room, or idle ones to give up their own: one for each limit that is reached."""
        of_address = [other for other, theirs in self._taken.items() if theirs.address == origin.address]
        of_transfer = [other for other, theirs in self._taken.items() if theirs.transfer_id == origin.transfer_id]
        instead_of: list[int] = []
        for what, rivals in (("transfer", of_transfer), ("address", of_address), ("all", list(self._taken))):
            staying = [rival for rival in rivals if rival not in instead_of]
            if len(staying) < self._limits[what]:
                continue
            idlest = self._idlest(staying, idle_since)
            if idlest is None:
                return Crowded(what)
            instead_of.append(idlest)
        for rival in instead_of:
            del self._taken[rival]
        self._taken[who] = origin
        return Seated(tuple(instead_of))

    def leave(self, who: int) -> None:
        self._taken.pop(who, None)

    def overdue(self, idle_since: IdleSince, now: float) -> list[int]:
        """Connections that have been idle for too long, also when there is room; each is named once."""
        late = [who for who in self._taken if idle_since(who) + IDLE_S <= now]
        for who in late:
            del self._taken[who]
        return late

    def _idlest(self, rivals: list[int], idle_since: IdleSince) -> int | None:
        first = min(rivals, key=idle_since, default=None)
        return first if first is not None and idle_since(first) < float("inf") else None

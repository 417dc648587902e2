"""Places for handshakes: few, of their own, and never kept by strangers from callers that are known.

A caller of a full network takes the place of the oldest handshake of its own network; one that finds all places taken takes that
of the oldest stranger. So a handshake is only lost to many that are younger, and a stranger never costs a known caller its place.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Caller = TypeVar("Caller")

IN_ALL: Final = 256  # each takes some 50 KiB until it ends
OF_NETWORK: Final = 32


@dataclass(frozen=True, slots=True)
class _Standing:
    network: str
    is_known: bool


class HandshakePlaces(Generic[Caller]):
    """Who shakes hands. `network` is an IPv4 address, or the 64 bits that stand for an IPv6 one."""

    def __init__(self, in_all: int = IN_ALL, of_network: int = OF_NETWORK) -> None:
        self._in_all = in_all
        self._of_network = of_network
        self._standings: dict[Caller, _Standing] = {}  # the oldest first
        self._networks: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._standings)

    def enter(self, caller: Caller, network: str, *, is_known: bool) -> Caller | None:
        """Gives `caller` a place. Returns who loses one for it: it has left; `caller` itself if there is none for it."""
        lost = self._who_loses(caller, network, is_known)
        if lost is not None and lost is not caller:
            self.leave(lost)
        if lost is not caller:
            self._standings[caller] = _Standing(network, is_known)
            self._networks[network] += 1
        return lost

    def leave(self, caller: Caller) -> None:
        """At the end of its handshake; whoever has no place has left already."""
        standing = self._standings.pop(caller, None)
        if standing is None:
            return
        self._networks[standing.network] -= 1
        if not self._networks[standing.network]:
            del self._networks[standing.network]

    def _who_loses(self, caller: Caller, network: str, is_known: bool) -> Caller | None:
        if self._networks[network] >= self._of_network:
            return next(each for each, standing in self._standings.items() if standing.network == network)
        if len(self) < self._in_all:
            return None
        strangers = (each for each, standing in self._standings.items() if not standing.is_known)
        return next(strangers, next(iter(self._standings)) if is_known else caller)

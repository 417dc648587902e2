"""Places for handshakes: some, of their own, and never kept by strangers from callers that are known.

    a known caller       finds a place as long as a stranger has one: the oldest stranger loses its own
    a stranger           has some places with all others of its network, and may take that of one that dawdles
    where all are taken  it takes that of the oldest stranger: handshakes are lost to many younger ones only
    known callers alone  the network with the most places loses its oldest one to another network, and to its own if it
                         dawdles: a caller is known by its address, which may be that of many

A gateway that connects for many requests at once finds places for all of them; none of these handshakes ends another one.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeVar

Caller = TypeVar("Caller")

IN_ALL: Final = 1_024  # each takes some 50 KiB until it ends
OF_NETWORK: Final = 256
DAWDLES_S: Final = 1.0  # a handshake takes milliseconds, and a round trip or two
KNOWN_S: Final = 600.0
MAX_KNOWN: Final = 1_024


@dataclass(frozen=True, slots=True)
class _Standing:
    network: str
    is_known: bool
    since: float


class KnownSites:
    """Sites from which a good caller has come of late, at most `most` of them. The caller of its methods gives `now`."""

    def __init__(self, most: int = MAX_KNOWN) -> None:
        self._most = most
        self._until_s: dict[str, float] = {}  # by site; the latest last

    def remember(self, site: str, now: float) -> None:
        """A site stays known for KNOWN_S."""
        self._until_s.pop(site, None)
        self._until_s[site] = now + KNOWN_S
        if len(self._until_s) > self._most:
            del self._until_s[next(iter(self._until_s))]

    def is_known(self, site: str, now: float) -> bool:
        return now < self._until_s.get(site, float("-inf"))


class HandshakePlaces(Generic[Caller]):
    """Who shakes hands. `network` is an IPv4 address, or the 64 bits that stand for an IPv6 one."""

    def __init__(self, in_all: int = IN_ALL, of_network: int = OF_NETWORK) -> None:
        self._in_all = in_all
        self._of_network = of_network
        self._standings: dict[Caller, _Standing] = {}  # the oldest first
        self._strangers: Counter[str] = Counter()  # by network
        self._known: Counter[str] = Counter()

    @classmethod
    def within(cls, descriptors: int) -> Self:
        """For a process with so many descriptors: a quarter of them at most."""
        in_all = min(IN_ALL, descriptors // 4)
        return cls(in_all, min(OF_NETWORK, in_all // 4))

    def __len__(self) -> int:
        return len(self._standings)

    def enter(self, caller: Caller, network: str, now: float, *, is_known: bool) -> Caller | None:
        """Gives `caller` a place. Returns who loses one for it, which has left; `caller` itself where there is no place."""
        lost = self._who_loses(caller, network, now, is_known)
        if lost is caller:
            return caller
        if lost is not None:
            self.leave(lost)
        self._standings[caller] = _Standing(network, is_known, now)
        self._counted(is_known)[network] += 1
        return lost

    def leave(self, caller: Caller) -> None:
        """At the end of its handshake, or later."""
        standing = self._standings.pop(caller, None)
        if standing is None:
            return
        counted = self._counted(standing.is_known)
        counted[standing.network] -= 1
        if not counted[standing.network]:
            del counted[standing.network]

    def _counted(self, is_known: bool) -> Counter[str]:
        return self._known if is_known else self._strangers

    def _who_loses(self, caller: Caller, network: str, now: float, is_known: bool) -> Caller | None:
        strangers = ((each, standing) for each, standing in self._standings.items() if not standing.is_known)
        if not is_known and self._strangers[network] >= self._of_network:
            oldest, standing = next(found for found in strangers if found[1].network == network)
            return oldest if now >= standing.since + DAWDLES_S else caller
        if len(self) < self._in_all:
            return None
        if self._strangers:
            return next(each for each, _ in strangers)
        return self._who_of_the_known(network, now) or caller if is_known else caller

    def _who_of_the_known(self, network: str, now: float) -> Caller | None:
        """Where they have all places."""
        (largest, most), *_ = self._known.most_common(1)
        if most <= self._known[network] + 1:  # it would only change places
            largest = network
        for each, standing in self._standings.items():
            if standing.network == largest:
                return each if largest != network or now >= standing.since + DAWDLES_S else None
        return None

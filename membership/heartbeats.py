"""Which nodes still refresh what they have written, by our clock alone: two machines' clocks are never compared.

A node's entry is stale once its stamp has not changed for as long as its lease. When no entry at all changes any more, it is
the registry that cannot be written, and no node is taken for dead.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

MOST_PAUSE_S: Final = 10.0  # between two looks; nothing is held against nodes for longer than that


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What was seen of an entry. A lease of 0 never ends."""

    stamp: Hashable
    lease_s: float


@dataclass(frozen=True, slots=True)
class StaleEntries:
    """Names of entries whose lease is over. `all_since_s` is how long nothing has changed at all, if that is why none is."""

    names: frozenset[str] = frozenset()
    all_since_s: float = 0.0


class Heartbeats:
    """Looks at stamps, again and again."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Hashable, float]] = {}  # the stamp, and when it was first seen
        self._looked_at: float | None = None
        self._stale: set[str] = set()  # when a node was last heard of
        self._is_silent = False  # since then none has been

    def look(self, beats: Mapping[str, Heartbeat], now: float) -> StaleEntries:
        """Whose lease is over, at a time of a clock that only goes forward."""
        self._excuse(now)
        for name, beat in beats.items():
            known = self._seen.get(name)
            if known is None or known[0] != beat.stamp:
                self._seen[name] = beat.stamp, now
        self._seen = {name: self._seen[name] for name in beats}
        ages = {name: now - self._seen[name][1] for name, beat in beats.items() if beat.lease_s}
        stale = {name for name, age_s in ages.items() if age_s > beats[name].lease_s}
        if stale and len(stale) == len(ages):
            self._is_silent = True
            return StaleEntries(all_since_s=min(ages.values()))
        if self._is_silent:
            stale &= self._stale
            self._begin_anew(now)
        self._stale = stale
        return StaleEntries(frozenset(stale))

    def _begin_anew(self, now: float) -> None:
        """The registry is back: nodes do not all reach it at once, so each has its lease from now on."""
        self._is_silent = False
        self._seen |= {name: (stamp, now) for name, (stamp, _) in self._seen.items() if name not in self._stale}

    def _excuse(self, now: float) -> None:
        """Without a look, no node was seen to refresh anything."""
        before, self._looked_at = self._looked_at, now
        if before is not None and (pause_s := now - before) > MOST_PAUSE_S:
            self._seen = {name: (stamp, at + pause_s) for name, (stamp, at) in self._seen.items()}

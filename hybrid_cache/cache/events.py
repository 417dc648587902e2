"""Events from a cache to its indexes: blocks came and went. One entry per group, as in vLLM's events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Medium(StrEnum):
    """Where a block lies. The media of a node are told apart: a block may leave one and stay in the other."""

    MEMORY = "memory"
    SSD = "ssd"
    ENGINE = "engine"  # the cache of an engine that keeps one of its own, such as vLLM's in GPU memory


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks (or snapshots) of a group can now be matched. In memory, parents come before children."""

    group: int
    hashes: tuple[bytes, ...]
    medium: Medium = Medium.MEMORY


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks (or snapshots) of a group can no longer be matched. In memory, children come before parents."""

    group: int
    hashes: tuple[bytes, ...]
    medium: Medium = Medium.MEMORY


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing that was stored before this event can be matched: in one medium, or in any (None)."""

    medium: Medium | None = None


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


def in_parts(event: CacheEvent, most_hashes: int) -> Iterator[CacheEvent]:
    """An event of many blocks as several of the same: a reader of a long one does nothing else meanwhile."""
    if isinstance(event, CacheCleared) or len(event.hashes) <= most_hashes:
        yield event
        return
    for start in range(0, len(event.hashes), most_hashes):
        yield replace(event, hashes=event.hashes[start : start + most_hashes])


class EventLog:
    """Events since the last `take`, neighbours of a kind merged. Past `limit` hashes only the fact of loss is kept."""

    def __init__(self, limit: int, medium: Medium = Medium.MEMORY) -> None:
        self.limit = limit
        self.medium = medium
        self._runs: list[tuple[type[BlocksStored | BlocksRemoved], int, list[bytes]]] = []
        self._count = 0
        self._overflowed = False

    def stored(self, group: int, hashes: Sequence[bytes]) -> None:
        self._append(BlocksStored, group, hashes)

    def removed(self, group: int, hashes: Sequence[bytes]) -> None:
        self._append(BlocksRemoved, group, hashes)

    def take(self) -> list[CacheEvent] | None:
        """The events and an empty log, or None if too many were lost: the reader must start from a snapshot."""
        runs, overflowed = self._runs, self._overflowed
        self._runs, self._count, self._overflowed = [], 0, False
        return None if overflowed else [kind(group, tuple(hashes), self.medium) for kind, group, hashes in runs]

    def _append(self, kind: type[BlocksStored | BlocksRemoved], group: int, hashes: Sequence[bytes]) -> None:
        if self._overflowed or not hashes:
            return
        self._count += len(hashes)
        if self._count > self.limit:
            self._runs, self._overflowed = [], True
            return
        if self._runs:
            last_kind, last_group, run = self._runs[-1]
            if last_kind is kind and last_group == group:
                run += hashes
                return
        self._runs.append((kind, group, list(hashes)))

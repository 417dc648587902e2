"""Policies that give each item a rank when it is touched and evict the lowest; the simplest is LRU."""

import heapq
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from hybrid_cache.eviction.base import EvictionPolicy, Key, Use

Rank = TypeVar("Rank", bound=int | tuple[Any, ...])


class Ranked(EvictionPolicy, Generic[Rank]):
    """A heap over ranks. Stale entries are dropped when they surface or outnumber the live ones.

    Ranks are, or contain, the number of the touch, so no two are equal and keys are never compared.
    """

    def __init__(self) -> None:
        self._touches = 0
        self._ranks: dict[Key, Rank] = {}
        self._offered: dict[Key, Rank] = {}
        self._heap: list[tuple[Rank, Key]] = []
        # Not in the heap yet: a victim's parent is mostly the next victim, and need never be.
        self._newest: tuple[Rank, Key] | None = None
        self._last_rank: Rank | None = None  # of the last victim

    def __len__(self) -> int:
        return len(self._ranks)

    def next_rank(self, previous: Rank | None) -> Rank:
        raise NotImplementedError

    def begin(self, use: Use) -> None:
        pass

    def touch(self, key: Key, now: float) -> None:
        self._touches += 1
        self._ranks[key] = self.next_rank(self._ranks.get(key))
        if key in self._offered:
            self.offer(key, now)

    def offer(self, key: Key, now: float) -> None:
        if key not in self._ranks:
            self.touch(key, now)
        rank = self._offered[key] = self._ranks[key]
        if self._newest is not None:
            self._push(self._newest)
        self._newest = (rank, key)

    def withdraw(self, key: Key) -> None:
        self._offered.pop(key, None)

    def forget(self, key: Key) -> None:
        self._offered.pop(key, None)
        self._ranks.pop(key, None)

    def pop_victim(self, now: float, incoming: Key | None = None) -> Key:
        heap, offered = self._heap, self._offered
        while True:
            if self._newest is None:
                rank, key = heapq.heappop(heap)
            else:
                rank, key = heapq.heappushpop(heap, self._newest)
                self._newest = None
            # A rank is made once per touch, so identity tells the live entry from stale ones.
            if offered.get(key) is rank:
                del offered[key], self._ranks[key]
                self._last_rank = rank
                return key

    def take_path(self, keys: Sequence[Key], now: float) -> int:
        if self._newest is not None:
            return 0
        lowest = self._heap[0][0] if self._heap else None
        for taken, key in enumerate(keys):
            rank = self._ranks.get(key)
            if rank is None or (lowest is not None and (rank,) > (lowest,)):
                return taken
            del self._ranks[key]
            self._last_rank = rank
        return len(keys)

    def _push(self, entry: tuple[Rank, Key]) -> None:
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._offered) + 64:
            self._heap = [(live, key) for key, live in self._offered.items()]
            heapq.heapify(self._heap)


class LRU(Ranked[int]):
    """Least recently used first; of one prompt, its tail first."""

    def next_rank(self, previous: int | None) -> int:
        return self._touches

    def touch_path(self, keys: Sequence[Key], now: float) -> None:
        first = self._touches + 1
        self._touches += len(keys)
        self._ranks.update(zip(keys, range(first, first + len(keys)), strict=True))

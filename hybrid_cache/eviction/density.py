"""The default policy: evicts the block with the fewest expected hits per second of residence, as reuse.py has
learned."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from hybrid_cache.eviction.base import EvictionPolicy, Key, Use
from hybrid_cache.eviction.cohorts import BUCKETS, EDGES, bucket_of
from hybrid_cache.eviction.reuse import ReuseModel

JUNK: Final = -(1 << 10)  # the logarithm of no worth at all
REFRESH_REQUESTS: Final = 32
SLACK_OFFERS: Final = 1024

Cell = tuple[int, int, int]  # class id, logarithm of a hit's worth, age bucket


class ReuseDensity(EvictionPolicy):
    """The policy: a cell for each class and age bucket, the cell of least density first, in it the oldest block.

    The model outlives evictions; it remembers up to `max_history` blocks, BYTES_PER_BLOCK each (reuse.py).
    """

    def __init__(self, max_history: int = 1_000_000, *, model: ReuseModel | None = None) -> None:
        self.model = model or ReuseModel(max_history)
        self._offers = 0
        self._offered: dict[Key, int] = {}  # the number of the offer tells live entries from stale ones
        self._cells: dict[Cell, list[tuple[float, int, Key]]] = {}
        self._order: list[tuple[float, Cell]] = []
        self._sorted_at = float("-inf")
        self._cleared_offers = 0  # those before have left no stale entries
        self._requests = 0
        self._refreshing = False  # densities are being computed
        self._useless: OrderedDict[Key, None] = OrderedDict()  # blocks that a request called useless
        self._max_useless = max_history

    def begin(self, use: Use) -> None:
        for _ in self.begin_steps(use):
            pass

    def begin_steps(self, use: Use) -> Iterator[None]:
        use = self.heed(use)
        if use.path:
            yield from self.model.observe_steps(use)
        # Often at first, when every request teaches something.
        if self._refreshing or self._requests % min(REFRESH_REQUESTS, 1 + self._requests // 16) == 0:
            self._refreshing = not self.model.refresh()
            if not self._refreshing:
                self._rank()
        self._requests += 1

    def heed(self, use: Use) -> Use:
        """The part of a request's path that may be used again. The rest leaves first, unless other requests have used
        it."""
        if use.useful is None:
            if self._useless:
                for key in use.path:
                    self._useless.pop(key, None)
            return use
        for key in use.path[use.useful :]:
            if not self.knows(key):
                self._useless[key] = None
        while len(self._useless) > self._max_useless:
            self._useless.popitem(last=False)
        return use._replace(path=use.path[: use.useful], useful=None)

    def knows(self, key: Key) -> bool:
        """Whether a request has used the block that may come again."""
        return self.model.knows(key)

    def touch(self, key: Key, now: float) -> None:
        if key in self._offered:
            self.offer(key, now)

    def touch_path(self, keys: Sequence[Key], now: float) -> None:
        """A touch is of no account for what is not offered."""

    def offer(self, key: Key, now: float) -> None:
        at, class_id, scale = self.place(key, now)
        if self._offers - self._cleared_offers > 4 * len(self._offered) + SLACK_OFFERS:
            self._drop_stale()
        self._offers += 1
        self._offered[key] = self._offers
        self._put((class_id, scale, bucket_of(max(0.0, now - at))), (at, self._offers, key))

    def take_path(self, keys: Sequence[Key], now: float) -> int:
        if now > self._sorted_at or not self._order:
            return 0
        cell = self._order[0][1]
        entries = self._cells[cell]
        oldest = entries[0][0] if entries else float("inf")
        taken = 0
        while taken < len(keys):
            at, class_id, scale = self.place(keys[taken], now)
            if at >= oldest or cell != (class_id, scale, bucket_of(max(0.0, now - at))):
                break
            taken += self.num_alike(keys[taken:])
        return taken

    def num_alike(self, keys: Sequence[Key]) -> int:
        """How many of the first blocks surely have the same place as the first one."""
        if self._useless:
            keys = list(next(groupby(keys, self._useless.__contains__))[1])
        return self.model.num_alike(keys)

    def withdraw(self, key: Key) -> None:
        self._offered.pop(key, None)

    def forget(self, key: Key) -> None:
        self._offered.pop(key, None)

    def pop_victim(self, now: float, incoming: Key | None = None) -> Key:
        """As in the protocol; returns `incoming` itself if it is worth less than everything offered."""
        if now > self._sorted_at:
            self._move_on(now)
        while True:
            worth, cell = self._order[0]
            entries = self._cells[cell]
            while entries and not self._is_live(entries[0]):
                heapq.heappop(entries)
            if not entries:
                heapq.heappop(self._order)
                del self._cells[cell]
                continue
            if incoming is not None and worth >= self._worth_of(incoming, now):
                return incoming
            key = heapq.heappop(entries)[2]
            del self._offered[key]
            return key

    def place(self, key: Key, now: float) -> tuple[float, int, int]:
        """Time of the last use, class id, and the logarithm of what a hit is worth (four to the octave)."""
        # A window block or snapshot is as good as the block it belongs to.
        block_hash = key[1] if isinstance(key, tuple) else key
        return *self.model.class_of(block_hash, now), JUNK if block_hash in self._useless else 0

    def _worth_of(self, key: Key, now: float) -> float:
        at, class_id, scale = self.place(key, now)
        return self._worth((class_id, scale, bucket_of(max(0.0, now - at))))

    def _worth(self, cell: Cell) -> float:
        class_id, scale, bucket = cell
        factor: float = 2.0 ** (scale / 4)
        return self.model.density(class_id, bucket) * factor

    def _is_live(self, entry: tuple[float, int, Key]) -> bool:
        return self._offered.get(entry[2]) == entry[1]

    def _put(self, cell: Cell, entry: tuple[float, int, Key]) -> None:
        entries = self._cells.get(cell)
        if entries is None:
            entries = self._cells[cell] = []
            heapq.heappush(self._order, (self._worth(cell), cell))
        heapq.heappush(entries, entry)

    def _move_on(self, now: float) -> None:
        """Moves blocks that have grown out of their cell's age."""
        self._sorted_at = now
        for cell in list(self._cells):
            class_id, scale, bucket = cell
            if bucket + 1 == BUCKETS:
                continue
            entries = self._cells[cell]
            while entries and entries[0][0] + EDGES[bucket + 1] <= now:
                entry = heapq.heappop(entries)
                if self._is_live(entry):
                    # Rounding may say that it has not grown at all.
                    self._put((class_id, scale, max(bucket + 1, bucket_of(now - entry[0]))), entry)

    def _rank(self) -> None:
        """Orders the cells by the present densities."""
        self._order = [(self._worth(cell), cell) for cell in self._cells]
        heapq.heapify(self._order)

    def _drop_stale(self) -> None:
        """Drops stale entries. It looks at all entries, so it runs once in several times as many offers."""
        self._cleared_offers = self._offers
        self._cells = {cell: live for cell, entries in self._cells.items() if (live := self._live_of(entries))}
        self._rank()

    def _live_of(self, entries: list[tuple[float, int, Key]]) -> list[tuple[float, int, Key]]:
        live = [entry for entry in entries if self._is_live(entry)]
        heapq.heapify(live)
        return live

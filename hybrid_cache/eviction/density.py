"""The default policy: evict what promises the fewest hits per second of room it takes.

How long a block waits for its next use is learned online, per class of blocks, from everything that was ever requested,
evicted or not. A class is what can be told of a block when it is used: how much of its request had been seen before, how
much was new, how often the block was used, whether it ends the request, and the category of the request. Nothing is
configured per workload.

For a class let h[i] be the probability that a block whose age reached bucket i is reused within it (a Kaplan-Meier estimate:
blocks too young to have reached the bucket are not counted). The worth of a block of age a is its best prospect,

    density(a) = max over b > a of  E[hits in [a, b)] / E[seconds in [a, b)]

which is Gittins' index of the problem how long to keep it; least hit density (Beckmann et al., NSDI'18) is a relative.
Rare classes lean on coarser ones (dropping features from the right), those on all blocks, those on a hazard that falls with
age, so that a cache that knows nothing yet is an LRU cache.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from math import log2
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybrid_cache.eviction.base import EvictionPolicy, Key, Use

# Ages in seconds, two buckets per octave from half a second to 1.5 hours; the last bucket is open.
EDGES: Final = (0.0, *(0.5 * 2 ** (i / 2) for i in range(28)))
BUCKETS: Final = len(EDGES)
PRIOR_BLOCKS: Final = 100.0  # a few requests' worth
PRIOR_PROBABILITY: Final = 0.3  # the hazard at birth: PRIOR_PROBABILITY / (age + PRIOR_AGE_S)
PRIOR_AGE_S: Final = 60.0
HALF_LIFE_S: Final = 3600.0  # of what was learned
REFRESH_REQUESTS: Final = 32
MAX_CATEGORIES: Final = 64  # names come from request metadata; past this many they share one

Class = tuple[int, ...]
Cell = tuple[int, int, int]  # class id, logarithm of a hit's worth, age bucket


class _Request:
    """What is remembered of a request: when it was, and which of its blocks still wait for their next use, by class."""

    __slots__ = ("at", "keys", "waiting")

    def __init__(self, at: float, keys: Sequence[Key]) -> None:
        self.at = at
        self.keys = keys
        self.waiting: dict[int, int] = {}


class ReuseModel:
    """Reuse of blocks by class and age, learned from requests. Knows nothing of what is cached."""

    def __init__(self, max_history: int, prior: float = PRIOR_BLOCKS) -> None:
        self.max_history = max_history
        self.prior = prior  # observations a class needs before it counts as much as its coarser one
        self.places: dict[Key, tuple[_Request, int]] = {}  # last use of a block: request and class id
        self._density: list[list[float]] = []
        self._rows: dict[Class, int] = {}  # of classes and coarser classes in `_density`
        self._uses: OrderedDict[Key, int] = OrderedDict()
        self._ids: dict[Class, int] = {}
        self._classes: list[Class] = []
        self._reused: list[list[float]] = []  # blocks, by class id and age bucket
        self._reached: list[list[float]] = []
        self._aging: list[deque[_Request]] = [deque() for _ in EDGES]  # requests that wait to reach the edge
        self._requests: deque[_Request] = deque()
        self._categories: dict[str, int] = {}
        self._learned_at = 0.0
        self.unknown = self._id(())
        self._weight = 1.0  # of an observation now, relative to one at the start: forgetting without touching the past
        self.refresh()

    def observe(self, use: Use) -> None:
        """Learns from the blocks a request uses again, and starts to wait for all of its blocks."""
        self._age(use.now)
        seen = self._learn(use)
        shape = self._shape(len(use.path), seen)
        category = self._category(use.category)
        last = len(use.path) - 1
        classes: list[Class] = []
        for offset, key in enumerate(use.path):
            count = self._uses[key] = self._uses.get(key, 0) + 1
            classes.append((*shape, _frequency(count), int(offset == last), category))
        self._await(use.now, use.path, classes)

    def observe_classes(self, now: float, uses: Sequence[tuple[Key, Class]]) -> None:
        """As `observe`, for a caller with classes of its own."""
        keys = [key for key, _ in uses]
        self._age(now)
        self._learn(Use(now, keys))
        for key in keys:
            self._uses[key] = self._uses.get(key, 0) + 1
        self._await(now, keys, [key_class for _, key_class in uses])

    def class_of(self, key: Key, now: float) -> tuple[float, int]:
        """Time of the last use and class id; an unknown block is one of which nothing can be told."""
        place = self.places.get(key)
        return (now, self.unknown) if place is None else (place[0].at, place[1])

    def density(self, class_id: int, bucket: int) -> float:
        """Worth of a block in hits per second, as of the last refresh."""
        key = self._classes[class_id]
        while key not in self._rows:  # younger than the last refresh
            key = key[:-1]
        return self._density[self._rows[key]][bucket]

    def refresh(self) -> None:
        """Computes all densities anew."""
        hazard = self._hazard()
        alive = np.cumprod(1 - hazard, axis=1)
        before = np.concatenate((np.ones((len(hazard), 1)), alive[:, :-1]), axis=1)
        hits = np.cumsum(before * hazard, axis=1)
        seconds = np.cumsum(before * (1 - hazard / 2) * WIDTHS, axis=1)
        zero = np.zeros((len(hazard), 1))
        hits, seconds = np.concatenate((zero, hits), axis=1), np.concatenate((zero, seconds), axis=1)
        density = np.empty_like(hazard)
        for start in range(BUCKETS):
            gained = hits[:, start + 1 :] - hits[:, start : start + 1]
            spent = seconds[:, start + 1 :] - seconds[:, start : start + 1]
            density[:, start] = (gained / np.maximum(spent, 1e-300)).max(axis=1)
        self._density = density.tolist()

    # Learning

    def _await(self, now: float, keys: Sequence[Key], classes: Iterable[Class]) -> None:
        request = _Request(now, keys)
        for key, key_class in zip(keys, classes, strict=True):
            class_id = self._id(key_class)
            request.waiting[class_id] = request.waiting.get(class_id, 0) + 1
            self.places[key] = (request, class_id)
        self._aging[0].append(request)
        self._requests.append(request)
        self._age(now)
        self._trim()

    def _learn(self, use: Use) -> int:
        """Counts the reuses; returns how many leading blocks were known."""
        previous: _Request | None = None
        bucket = 0
        for offset, key in enumerate(use.path):
            place = self.places.get(key)
            if place is None:
                return offset
            request, class_id = place
            if request is not previous:
                previous, bucket = request, bucket_of(use.now - request.at)
            self._reused[class_id][bucket] += self._weight
            request.waiting[class_id] -= 1
        return len(use.path)

    def _age(self, now: float) -> None:
        elapsed = now - self._learned_at
        if elapsed > 0:
            self._learned_at = now
            self._weight *= 2 ** (elapsed / HALF_LIFE_S)
            if self._weight > 1e100:
                self._rescale()
        for bucket, edge in enumerate(EDGES):
            queue = self._aging[bucket]
            while queue and queue[0].at + edge <= now:
                request = queue.popleft()
                for class_id, blocks in request.waiting.items():
                    self._reached[class_id][bucket] += blocks * self._weight
                if bucket + 1 < BUCKETS:
                    self._aging[bucket + 1].append(request)

    def _rescale(self) -> None:
        for table in (self._reused, self._reached):
            for row in table:
                row[:] = [value / self._weight for value in row]
        self._weight = 1.0

    def _trim(self) -> None:
        while len(self._uses) > self.max_history and len(self._requests) > 1:
            request = self._requests.popleft()
            for key in request.keys:
                if (place := self.places.get(key)) and place[0] is request:
                    del self.places[key], self._uses[key]

    # Classes

    def _shape(self, blocks: int, seen: int) -> tuple[int, int]:
        share = 0 if not seen else 1 if seen < blocks / 2 else 2
        return share, int(log2(blocks - seen + 1))

    def _category(self, name: str) -> int:
        if name not in self._categories and len(self._categories) < MAX_CATEGORIES:
            self._categories[name] = len(self._categories)
        return self._categories.get(name, MAX_CATEGORIES)

    def _id(self, key: Class) -> int:
        class_id = self._ids.get(key)
        if class_id is None:
            class_id = self._ids[key] = len(self._ids)
            self._classes.append(key)
            self._reused.append([0.0] * BUCKETS)
            self._reached.append([0.0] * BUCKETS)
        return class_id

    def _hazard(self) -> NDArray[np.float64]:
        reused: dict[Class, NDArray[np.float64]] = {}
        reached: dict[Class, NDArray[np.float64]] = {}
        for key, class_id in self._ids.items():
            own_reused = np.array(self._reused[class_id]) / self._weight
            own_reached = np.array(self._reached[class_id]) / self._weight
            for length in range(len(key) + 1):
                coarser = key[:length]
                reused[coarser] = reused.get(coarser, 0.0) + own_reused
                reached[coarser] = reached.get(coarser, 0.0) + own_reached
        hazard: dict[Class, NDArray[np.float64]] = {(): BIRTH_HAZARD}
        for key in sorted(reused, key=len):
            base = hazard[key[:-1]] if key else BIRTH_HAZARD
            hazard[key] = (reused[key] + self.prior * base) / (reached[key] + self.prior)
        self._rows = {key: row for row, key in enumerate(hazard)}
        stacked: NDArray[np.float64] = np.minimum(np.array(list(hazard.values())), 0.999)
        return stacked


WIDTHS: Final = np.append(np.diff(EDGES), EDGES[-1])
BIRTH_HAZARD: Final = 1 - np.exp(-PRIOR_PROBABILITY * WIDTHS / (np.array(EDGES) + PRIOR_AGE_S))


def bucket_of(age_s: float) -> int:
    """Index of the age bucket, the largest i with EDGES[i] <= age_s."""
    if age_s < EDGES[1]:
        return 0
    guess = min(BUCKETS - 1, int(2 * log2(2 * age_s)) + 1)
    # Logarithms of edges may land on either side of an integer.
    if EDGES[guess] > age_s:
        return guess - 1
    return guess + 1 if guess + 1 < BUCKETS and EDGES[guess + 1] <= age_s else guess


def _frequency(count: int) -> int:
    return 0 if count == 1 else 1 if count == 2 else 2 if count <= 4 else 3 if count <= 16 else 4


class ReuseDensity(EvictionPolicy):
    """The policy: a cell for each class and age bucket, the cell of least density first, in it the oldest block.

    The model outlives evictions; it remembers up to `max_history` blocks (about 250 bytes each).
    """

    def __init__(self, max_history: int = 1_000_000, *, model: ReuseModel | None = None) -> None:
        self.model = model or ReuseModel(max_history)
        self._offers = 0
        self._offered: dict[Key, int] = {}  # the number of the offer tells live entries from stale ones
        self._cells: dict[Cell, list[tuple[float, int, Key]]] = {}
        self._order: list[tuple[float, Cell]] = []
        self._sorted_at = float("-inf")
        self._requests = 0

    def begin(self, use: Use) -> None:
        self.model.observe(use)
        # Often at first, when every request teaches something.
        if self._requests % min(REFRESH_REQUESTS, 1 + self._requests // 16) == 0:
            self.model.refresh()
            self._sort()
        self._requests += 1

    def touch(self, key: Key, now: float) -> None:
        if key in self._offered:
            self.offer(key, now)

    def offer(self, key: Key, now: float) -> None:
        at, class_id, scale = self.place(key, now)
        self._offers += 1
        self._offered[key] = self._offers
        self._put((class_id, scale, bucket_of(max(0.0, now - at))), (at, self._offers, key))

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
        return *self.model.class_of(key[1] if isinstance(key, tuple) else key, now), 0

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

    def _sort(self) -> None:
        """Orders the cells by densities that have just been computed."""
        self._cells = {cell: live for cell, entries in self._cells.items() if (live := self._live_of(entries))}
        self._order = [(self._worth(cell), cell) for cell in self._cells]
        heapq.heapify(self._order)

    def _live_of(self, entries: list[tuple[float, int, Key]]) -> list[tuple[float, int, Key]]:
        live = [entry for entry in entries if self._is_live(entry)]
        heapq.heapify(live)
        return live

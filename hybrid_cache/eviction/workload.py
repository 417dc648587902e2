"""Workload-aware eviction ("KVCache Cache in the Wild", §4.2): evict what is least likely to be reused soon.

A request's category w has a probability p of being reused at all and exponential reuse times of rate λ, e(x) = exp(-λx). A block
that was last used `age` ago by category w is reused within the next `life` seconds with

    joint          P = p (e(age) - e(age + life))
    conditional    P / (1 - p + p e(age))            given that it has not been reused yet

The block with the lowest P leaves, of equals the one farthest from the root. Within a category P falls with age, so only the
least recently used block of each category is a candidate, its head. The paper looks at all W heads for every eviction. Here a
level is chosen that a few heads are below. When each other head will fall to it follows from its age, so that until then only
the few have to be compared: O(log W) per eviction, and O(W) when none is below the level any more, or too many are.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, inf, log
from typing import Final

from hybrid_cache.eviction.base import EvictionPolicy, Key, Use

LIFE_S: Final = 60.0
MAX_CATEGORIES: Final = 256  # names come from request metadata; past this many they share one
MAX_PLACES: Final = 1 << 20  # of blocks announced and not stored yet
WINDOW_PARTS: Final = 600
OTHER: Final = "other"
HEADS_BELOW: Final = 4  # heads below a level just chosen
MAX_HEADS_BELOW: Final = 12
SLACK_ENTRIES: Final = 4096
LEVEL_SLACK: Final = 1e-6  # against rounding: heads are looked at a little before they reach the level


@dataclass(frozen=True, slots=True)
class ReuseFit:
    """Reuse of one category: how many of its blocks are reused (`probability`), and how fast (`rate`, 1/s; 0 = never)."""

    rate: float = 1 / 300
    probability: float = 0.5


UNKNOWN: Final = ReuseFit()


def reuse_priority(fit: ReuseFit, age_s: float, life_s: float, *, conditional: bool) -> float:
    """Probability of reuse within `life_s`, see the head of this file. A use that a clock set back puts ahead is one of now."""
    if fit.rate == 0.0:
        return 0.0
    age_s = max(0.0, age_s)
    alive = exp(-fit.rate * age_s)
    joint = fit.probability * (alive - exp(-fit.rate * (age_s + life_s)))
    if not conditional:
        return joint
    waits = 1.0 - fit.probability + fit.probability * alive
    return joint / waits if waits else 0.0  # a reuse that was certain has not come


@dataclass(slots=True)
class _Counts:
    accesses: int = 0
    reuses: int = 0
    reuse_seconds: float = 0.0

    def add(self, other: "_Counts", sign: int) -> None:
        self.accesses += sign * other.accesses
        self.reuses += sign * other.reuses
        self.reuse_seconds += sign * other.reuse_seconds


class ReuseStatistics:
    """Accesses and reuses per category over a sliding window. A reuse belongs to the category of the access before."""

    MIN_REUSE_S: Final = 0.3  # anything faster is one burst, not a reuse

    def __init__(self, window_s: float = float("inf"), max_history: int = 1_000_000) -> None:
        self.window_s = window_s
        self.max_history = max_history
        self._last: OrderedDict[Key, tuple[float, str]] = OrderedDict()  # survives eviction
        self._window: deque[tuple[float, dict[str, _Counts]]] = deque()
        self.counts: dict[str, _Counts] = {}

    def record(self, use: Use, category: str) -> None:
        fresh: dict[str, _Counts] = {category: _Counts(accesses=len(use.path))}
        for key in use.path:
            before = self._last.pop(key, None)
            self._last[key] = (use.now, category)
            if before is not None and use.now - before[0] > self.MIN_REUSE_S:
                counts = fresh.setdefault(before[1], _Counts())
                counts.reuses += 1
                counts.reuse_seconds += use.now - before[0]
        while len(self._last) > self.max_history:
            self._last.popitem(last=False)
        self._add(use.now, fresh)

    def fits(self) -> dict[str, ReuseFit]:
        """A maximum-likelihood fit of each category, however little is known of it."""
        return {category: fit_counts(counts) for category, counts in self.counts.items() if counts.accesses}

    def _add(self, now: float, fresh: dict[str, _Counts]) -> None:
        for category, counts in fresh.items():
            self.counts.setdefault(category, _Counts()).add(counts, +1)
        if self.window_s == float("inf"):
            return
        self._remember(now, fresh)
        while self._window[0][0] < now - self.window_s:
            for category, counts in self._window.popleft()[1].items():
                self.counts[category].add(counts, -1)

    def _remember(self, now: float, fresh: dict[str, _Counts]) -> None:
        """Keeps counts until they leave the window; those of a WINDOW_PARTS-th of it leave together.

        Where the clock was set back, what lies ahead counts from now on, so that it leaves some day.
        """
        if self._window and now < self._window[-1][0]:
            self._window = deque((min(at, now), counts) for at, counts in self._window)
        if not self._window or now - self._window[-1][0] > self.window_s / WINDOW_PARTS:
            self._window.append((now, fresh))
            return
        part = self._window[-1][1]
        for category, counts in fresh.items():
            part.setdefault(category, _Counts()).add(counts, +1)


def fit_counts(counts: _Counts) -> ReuseFit:
    # The access that a reuse belongs to may have left the window, and sums that shrink leave a rounding error.
    seconds = max(counts.reuse_seconds, ReuseStatistics.MIN_REUSE_S * counts.reuses)
    rate = counts.reuses / seconds if counts.reuses else 0.0
    return ReuseFit(rate, min(0.999, counts.reuses / max(1, counts.accesses)))


def fit_offline(uses: Iterable[Use]) -> dict[str, ReuseFit]:
    """Fits of a recorded workload, as the paper profiles them in the background."""
    statistics = ReuseStatistics()
    for use in uses:
        statistics.record(use, use.category)
    return statistics.fits()


_Entry = tuple[float, int, int, str]  # priority or time, minus the offset, index and name of the category


class _Queue:
    """Blocks of one category, least recently used first, and the parts of their priority that do not depend on age."""

    __slots__ = ("entry", "entry_touch", "heap", "index", "lost", "probability", "rate", "within")

    def __init__(self, index: int, fit: ReuseFit, life_s: float) -> None:
        self.index = index
        self.heap: list[tuple[int, Key]] = []
        self.entry: _Entry | None = None  # the one that counts, of `_below` or `_above`
        self.entry_touch = 0  # of the head it was made for
        self.set_fit(fit, life_s)

    def set_fit(self, fit: ReuseFit, life_s: float) -> None:
        """`within` = p (1 - e(life)), `lost` = 1 - p; see `reuse_priority`."""
        self.rate = fit.rate
        self.probability = fit.probability
        self.within = fit.probability * (1.0 - exp(-fit.rate * life_s))
        self.lost = 1.0 - fit.probability

    def priority(self, at: float, now: float, conditional: bool) -> float:
        alive = exp(-self.rate * max(0.0, now - at))
        if conditional:
            waits = self.lost + self.probability * alive
            return self.within * alive / waits if waits else 0.0
        return self.within * alive

    def falls_to(self, level: float, at: float, conditional: bool) -> float:
        """The time at which the priority of a block last used `at` is `level`: `priority` solved for `now`."""
        share, whole = (
            (level * self.lost, self.within - level * self.probability) if conditional else (level, self.within)
        )
        if share >= whole or self.rate == 0.0:
            return at
        return at - log(share / whole) / self.rate if share > 0.0 else inf


@dataclass(slots=True)
class _Block:
    touch: int
    at: float
    category: str
    offset: int
    offered: bool = False


class WorkloadAware(EvictionPolicy):
    """The policy. With `fits` it is the paper's offline form; without, it refits itself on a sliding window."""

    REFIT_S: Final = 30.0
    WINDOW_S: Final = 600.0
    MIN_REUSES: Final = 50
    MIN_ACCESSES: Final = 1000  # enough to say that a category is hardly ever reused

    def __init__(
        self, *, fits: Mapping[str, ReuseFit] | None = None, life_s: float = LIFE_S, conditional: bool = True
    ) -> None:
        self.life_s = life_s
        self.conditional = conditional
        self._fits = dict(fits or {})
        self._statistics = None if fits is not None else ReuseStatistics(self.WINDOW_S)
        self._refit_at = float("-inf")
        self._queues: dict[str, _Queue] = {}
        self._blocks: dict[Key, _Block] = {}
        self._places: OrderedDict[Key, tuple[str, int]] = OrderedDict()  # of the blocks of requests under way
        self._known_categories: set[str] = set()
        self._entries = 0  # in the heaps of all queues, stale ones included
        self._touches = 0
        self._below: list[_Entry] = []  # heads below the level by priority at `_ranked_at`
        self._above: list[_Entry] = []  # the other heads by the time at which they fall to the level
        self._level = 0.0
        self._ranked_at: float | None = None

    def begin(self, use: Use) -> None:
        category = self._known(use.category)
        if self._statistics is not None:
            self._refit(use.now, self._statistics)
            self._statistics.record(use, category)
        for offset, key in enumerate(use.path):
            self._places[key] = (category, offset)
        while len(self._places) > MAX_PLACES:
            self._places.popitem(last=False)

    def touch(self, key: Key, now: float) -> None:
        block = self._blocks.get(key)
        category, offset = self._places.pop(key, (block.category, block.offset) if block else (OTHER, 0))
        self._touches += 1
        offered = block.offered if block else False
        self._blocks[key] = block = _Block(self._touches, now, category, offset, offered)
        if offered:
            self._push(key, block)

    def offer(self, key: Key, now: float) -> None:
        if key not in self._blocks:
            self.touch(key, now)
        block = self._blocks[key]
        block.offered = True
        self._push(key, block)

    def withdraw(self, key: Key) -> None:
        if block := self._blocks.get(key):
            block.offered = False

    def forget(self, key: Key) -> None:
        self._blocks.pop(key, None)

    def pop_victim(self, now: float, incoming: Key | None = None) -> Key:
        if self._ranked_at != now:
            self._move_on(now)
        while True:
            if not self._below:
                self._rank_all(now)
            entry = heapq.heappop(self._below)
            category = entry[3]
            queue = self._queues[category]
            if queue.entry is not entry:
                continue  # replaced by a later one
            touch, key = queue.heap[0] if queue.heap else (-1, None)
            block = self._blocks.get(key)
            if block is not None and block.offered and block.touch == touch == queue.entry_touch:
                heapq.heappop(queue.heap)
                del self._blocks[key]
                self._rank(category, queue, now)
                return key
            self._rank(category, queue, now)

    # Ranking the heads of the categories

    def _move_on(self, now: float) -> None:
        """Priorities fall as time passes: of the heads below the level, and of those that have now reached it."""
        if self._ranked_at is None or len(self._below) > MAX_HEADS_BELOW:
            self._rank_all(now)
            return
        self._ranked_at = now
        below, self._below = self._below, []
        while self._above and self._above[0][0] <= now:
            below.append(heapq.heappop(self._above))
        for entry in below:
            queue = self._queues[entry[3]]
            if queue.entry is entry:
                self._rank(entry[3], queue, now)

    def _rank_all(self, now: float) -> None:
        """Chooses a level that a few heads are below."""
        self._ranked_at = now
        self._below, self._above = [], []
        priorities = []
        for queue in self._queues.values():
            if (head := self._head(queue)) is not None:
                priorities.append(queue.priority(head.at, now, self.conditional))
        self._level = sorted(priorities)[:HEADS_BELOW][-1]
        for category, queue in self._queues.items():
            self._rank(category, queue, now)

    def _rank(self, category: str, queue: _Queue, now: float) -> None:
        """Enters the category with its present head; what it was entered with before counts no more."""
        block = self._head(queue)
        if block is None:
            queue.entry = None
            return
        queue.entry_touch = block.touch
        priority = queue.priority(block.at, now, self.conditional)
        if priority <= self._level:
            queue.entry = (priority, -block.offset, queue.index, category)
            heapq.heappush(self._below, queue.entry)
        else:
            falls_at = queue.falls_to(self._level * (1 + LEVEL_SLACK), block.at, self.conditional)
            queue.entry = (falls_at, 0, queue.index, category)
            heapq.heappush(self._above, queue.entry)

    def _head(self, queue: _Queue) -> _Block | None:
        """The block that goes next, if any does; its key is at the top of the heap."""
        heap = queue.heap
        while heap:
            touch, key = heap[0]
            block = self._blocks.get(key)
            if block is not None and block.offered and block.touch == touch:
                return block
            heapq.heappop(heap)
        return None

    def _push(self, key: Key, block: _Block) -> None:
        queue = self._queues.get(block.category)
        if queue is None:
            queue = _Queue(len(self._queues), self._fits.get(block.category, UNKNOWN), self.life_s)
            self._queues[block.category] = queue
        heapq.heappush(queue.heap, (block.touch, key))
        self._entries += 1
        if self._ranked_at is not None and queue.heap[0] == (block.touch, key):
            self._rank(block.category, queue, self._ranked_at)
            if len(self._above) + len(self._below) > 4 * len(self._queues) + 64:
                self._ranked_at = None  # mostly replaced entries: rank anew when next asked
        if self._entries > 4 * len(self._blocks) + SLACK_ENTRIES:
            self._drop_stale()

    def _drop_stale(self) -> None:
        for queue in self._queues.values():
            # A block that was withdrawn and offered again has equal entries.
            queue.heap = list({entry for entry in queue.heap if self._is_live(entry)})
            heapq.heapify(queue.heap)
        self._entries = sum(len(queue.heap) for queue in self._queues.values())
        self._ranked_at = None

    def _is_live(self, entry: tuple[int, Key]) -> bool:
        block = self._blocks.get(entry[1])
        return block is not None and block.offered and block.touch == entry[0]

    # Categories and their fits

    def _known(self, category: str) -> str:
        if category not in self._known_categories and len(self._known_categories) < MAX_CATEGORIES:
            self._known_categories.add(category)
        return category if category in self._known_categories else OTHER

    def _refit(self, now: float, statistics: ReuseStatistics) -> None:
        if 0.0 <= now - self._refit_at < self.REFIT_S:
            return
        self._refit_at = now
        for category, counts in statistics.counts.items():
            if counts.reuses >= self.MIN_REUSES:
                self._fits[category] = fit_counts(counts)
            elif counts.accesses >= self.MIN_ACCESSES:
                rate = self._fits.get(category, UNKNOWN).rate
                self._fits[category] = ReuseFit(rate, max(1e-4, (counts.reuses + 0.5) / (counts.accesses + 1)))
        for category, queue in self._queues.items():
            queue.set_fit(self._fits.get(category, UNKNOWN), self.life_s)
        self._ranked_at = None

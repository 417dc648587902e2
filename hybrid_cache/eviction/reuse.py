"""How soon blocks are used again, learned online from everything that was ever requested, evicted or not.

A class sums up a block at its use: how much of its request had been seen before and how much was new; how often the
block was used; whether it ends the request; and the category of the request. Nothing is configured per workload.

For a class let h[i] be the probability that a block whose age reached bucket i is reused within it (a Kaplan-Meier estimate:
blocks too young to have reached the bucket are not counted). The worth of a block of age a is its best prospect,

    density(a) = max over b > a of  E[hits in [a, b)] / E[seconds in [a, b)]

which is Gittins' index of the problem how long to keep it; least hit density (Beckmann et al., NSDI'18) is a relative.
Rare classes lean on coarser ones (dropping features from the right). Those lean on all blocks, and all blocks on a
hazard that falls with age. So a cache that knows nothing yet is an LRU cache. All blocks lean longer than a class does:
no block is older than the cache, so at first young blocks are known not to come back and old ones are not.

What is remembered has bounds: BYTES_PER_BLOCK for the last use of each of `max_history` blocks, and STATE_BYTES for all counts,
whatever requests say. So has the work of one call of `refresh`: it computes densities for ROWS_AT_ONCE classes at a time.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from math import log2
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_cache.eviction.base import BEGIN_STEP, Key, Use
from hybrid_cache.eviction.cohorts import BUCKETS, EDGES, MAX_COHORTS, Cohort, Cohorts, bucket_of
from hybrid_cache.eviction.last_uses import LastUse, LastUses

PRIOR_BLOCKS: Final = 100.0  # a few requests' worth
PRIOR_OF_ALL_BLOCKS: Final = 800.0
PRIOR_PROBABILITY: Final = 0.3  # the hazard at birth: PRIOR_PROBABILITY / (age + PRIOR_AGE_S)
PRIOR_AGE_S: Final = 60.0
HALF_LIFE_S: Final = 3600.0  # of what was learned
MAX_WEIGHT: Final = 1e100
MAX_CATEGORIES: Final = 64  # names come from request metadata; past this many they share one
BYTES_PER_BLOCK: Final = 480  # remembered, at most: the hash, the entry, a cohort that no other block belongs to
MAX_CLASSES: Final = 512  # coarser ones included; past this many a new one is counted with the next coarser one
ROWS_AT_ONCE: Final = 128  # classes whose densities one call of `refresh` computes
BYTES_PER_CLASS: Final = 4096  # in all tables
BYTES_PER_COUNT: Final = 112  # of one class in one cohort: an entry of a dict that has just grown, and a number
STATE_BYTES: Final = MAX_CLASSES * (BYTES_PER_CLASS + MAX_COHORTS * BYTES_PER_COUNT)

Class = tuple[int, ...]


class _Run(NamedTuple):
    """Neighbours on a path that had the same last use, and how often they were used before."""

    before: LastUse | None
    uses: int
    blocks: int


class ReuseModel:
    """Reuse of blocks by class and age, learned from requests. Knows nothing of what is cached."""

    def __init__(
        self, max_history: int, prior: float = PRIOR_BLOCKS, prior_of_all: float = PRIOR_OF_ALL_BLOCKS
    ) -> None:
        self.max_history = max_history
        self.prior = prior  # observations a class needs before it counts as much as its coarser one
        self.prior_of_all = prior_of_all  # the same of all blocks, before they count as much as BIRTH_HAZARD
        self._uses = LastUses()
        self._density: list[list[float]] = []  # by class id and age bucket
        self._fresh: list[list[float]] = []  # the same, being computed
        self._hazards: NDArray[np.float64] | None = None  # those that they are computed of
        self._ids: dict[Class, int] = {}  # a class comes after its coarser ones
        self._coarser: list[int] = []
        self._levels: list[list[int]] = []  # ids of the classes with so many features
        self._reused = np.zeros((MAX_CLASSES, BUCKETS))  # blocks, by class id and age bucket
        self._reached = np.zeros((MAX_CLASSES, BUCKETS))
        self._cohorts = Cohorts()
        self._categories: dict[str, int] = {}
        self._learned_at = float("-inf")  # clocks begin anywhere
        self.unknown = self._id(())
        self._weight = 1.0  # of an observation now, relative to one at the start: forgetting without touching the past
        self.refresh()

    def observe(self, use: Use) -> None:
        """Learns from the blocks a request uses again, and starts to wait for all of its blocks."""
        for _ in self.observe_steps(use):
            pass

    def observe_steps(self, use: Use) -> Iterator[None]:
        """The same in steps, between which nothing else may be learned."""
        if not use.path:
            return
        self._age(use.now)
        seen, runs = yield from self._learn(use)
        shape = self._shape(len(use.path), seen)
        category = self._category(use.category)
        cohort = Cohort(use.now)

        def class_of(uses: int, blocks: int, *, is_end: bool) -> int:
            class_id = self._id((*shape, _frequency(uses + 1), int(is_end), category))
            cohort.add(class_id, blocks)
            return class_id

        # Blocks of one request that were used as often are of one class.
        earlier = Counter[int]()
        for run in runs:
            earlier[run.uses] += run.blocks
        last = runs.pop()
        earlier[last.uses] -= 1
        classes = {uses: class_of(uses, count, is_end=False) for uses, count in earlier.items() if count}
        end = class_of(last.uses, 1, is_end=True)
        rest = last.before and self._uses.take_end(last.before, use.path[len(use.path) - last.blocks :])
        self._uses.put(use.path[-1:], cohort, end, last.uses + 1, None)  # a prefix is of use without its tail
        stop, put = len(use.path) - 1, 0
        for before, uses, blocks in (last._replace(before=rest, blocks=last.blocks - 1), *reversed(runs)):
            start = stop - blocks
            if blocks:
                self._uses.put(use.path[start:stop], cohort, classes[uses], uses + 1, before)
            stop, put = start, put + blocks
            if put >= BEGIN_STEP:
                put = 0
                yield
        self._wait(use.now, cohort)

    def observe_classes(self, now: float, uses: Sequence[tuple[Key, Class]]) -> None:
        """As `observe`, for a caller with classes of its own."""
        keys = [key for key, _ in uses]
        self._age(now)
        for _ in self._learn(Use(now, keys)):
            pass
        self._await(now, keys, [key_class for _, key_class in uses])

    def knows(self, key: Key) -> bool:
        """Whether the block is known."""
        return key in self._uses

    def class_of(self, key: Key, now: float) -> tuple[float, int]:
        """Time of the last use and class id of a known block."""
        place = self._uses.get(key)
        return (now, self.unknown) if place is None else (place.cohort.at, place.class_id)

    def num_alike(self, keys: Sequence[Key]) -> int:
        """How many of the first blocks are known by the same use as the first one."""
        return self._uses.num_alike(keys)

    def density(self, class_id: int, bucket: int) -> float:
        """Worth of a block in hits per second, as of the last refresh."""
        while class_id >= len(self._density):  # younger than the last refresh
            class_id = self._coarser[class_id]
        return self._density[class_id][bucket]

    def refresh(self) -> bool:
        """Continues computing all densities; returns whether that is finished, so that `density` uses the new ones."""
        if self._hazards is None:
            self._hazards = self._hazard()
            if len(self._hazards) > ROWS_AT_ONCE:
                return False
        start = len(self._fresh)
        self._fresh += _densities(self._hazards[start : start + ROWS_AT_ONCE])
        if len(self._fresh) < len(self._hazards):
            return False
        self._density, self._fresh, self._hazards = self._fresh, [], None
        return True

    # Learning

    def _await(self, now: float, keys: Sequence[Key], classes: Iterable[Class]) -> None:
        cohort = Cohort(now)
        used: list[tuple[Key, int, LastUse | None]] = []
        for key, key_class in zip(keys, classes, strict=True):
            class_id = self._id(key_class)
            cohort.add(class_id)
            used.append((key, class_id, self._uses.get(key)))
        for key, class_id, before in reversed(used):  # a prefix is of use without its tail
            self._uses.put([key], cohort, class_id, 1 if before is None else before.uses + 1, before)
        self._wait(now, cohort)

    def _wait(self, now: float, cohort: Cohort) -> None:
        self._cohorts.enter(cohort)
        self._age(now)
        self._uses.keep(self.max_history)

    def _learn(self, use: Use) -> Generator[None, None, tuple[int, list[_Run]]]:
        """Counts the reuses, in steps. Returns how many leading blocks were known, and all blocks as runs."""
        seen, learned, runs = 0, 0, list[_Run]()
        for place, blocks in self._uses.runs_of(use.path, BEGIN_STEP):
            runs.append(_Run(place, 0 if place is None else place.uses, blocks))
            if place is not None:
                self._count_reuse(use.now, place, blocks)
                seen += blocks
            learned += blocks
            if learned >= BEGIN_STEP:
                learned = 0
                yield
        return seen, runs

    def _count_reuse(self, now: float, place: LastUse, blocks: int) -> None:
        cohort = place.cohort.counted_in()
        bucket = bucket_of(now - cohort.at)
        # One by one: the sum rounds as if each block were counted alone.
        counted = np.full(blocks + 1, self._weight)
        counted[0] = self._reused[place.class_id, bucket]
        self._reused[place.class_id, bucket] = np.add.accumulate(counted)[-1]
        cohort.remove(place.class_id, blocks)

    def _age(self, now: float) -> None:
        elapsed = now - self._learned_at
        if elapsed > 0:
            self._learned_at = now
            kept = 0.5 ** (elapsed / HALF_LIFE_S)  # 0 after some weeks
            if self._weight > MAX_WEIGHT * kept:
                self._rescale(kept)
            else:
                self._weight /= kept
        for bucket, class_id, blocks in self._cohorts.reached(now):
            self._reached[class_id, bucket] += blocks * self._weight

    def _rescale(self, kept: float) -> None:
        self._reused *= kept / self._weight
        self._reached *= kept / self._weight
        self._weight = 1.0

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
        if class_id is not None:
            return class_id
        coarser = self._id(key[:-1]) if key else 0
        if len(self._ids) >= MAX_CLASSES:
            return coarser
        class_id = self._ids[key] = len(self._ids)
        self._coarser.append(coarser)
        if len(key) == len(self._levels):
            self._levels.append([])
        self._levels[len(key)].append(class_id)
        return class_id

    def _hazard(self) -> NDArray[np.float64]:
        count = len(self._ids)
        reused, reached = self._reused[:count] / self._weight, self._reached[:count] / self._weight
        coarser = np.array(self._coarser)
        for level in reversed(self._levels[1:]):
            np.add.at(reused, coarser[level], reused[level])
            np.add.at(reached, coarser[level], reached[level])
        hazard = np.empty_like(reused)
        for level in self._levels:
            base, prior = (hazard[coarser[level]], self.prior) if level[0] else (BIRTH_HAZARD, self.prior_of_all)
            hazard[level] = (reused[level] + prior * base) / (reached[level] + prior)
        least: NDArray[np.float64] = np.minimum(hazard, 0.999)
        return least


def _densities(hazard: NDArray[np.float64]) -> list[list[float]]:
    """Density by class and age bucket, of the hazards of some classes: the best ratio over all horizons."""
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
    rows: list[list[float]] = density.tolist()
    return rows


WIDTHS: Final = np.append(np.diff(EDGES), EDGES[-1])
BIRTH_HAZARD: Final = 1 - np.exp(-PRIOR_PROBABILITY * WIDTHS / (np.array(EDGES) + PRIOR_AGE_S))


def _frequency(count: int) -> int:
    return 0 if count == 1 else 1 if count == 2 else 2 if count <= 4 else 3 if count <= 16 else 4

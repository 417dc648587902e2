"""Requests of about the same age, and how many of their blocks still wait for their next use.

A survival estimate needs to know how many blocks reach each age. The policy keeps no requests for that, only counts by
class. It merges cohorts of nearly equal age: a cohort that has reached an edge joins the one before it if they are less
than a GAP of the next edge's age apart. So there are MAX_COHORTS of them at most, however many requests come.
"""

from collections import deque
from collections.abc import Iterator
from math import log2
from typing import Final

# Ages in seconds, two buckets per octave from half a second to 1.5 hours; the last bucket is open.
EDGES: Final = (0.0, *(0.5 * 2 ** (i / 2) for i in range(28)))
BUCKETS: Final = len(EDGES)
AGE_ERROR: Final = 0.01
"""At an edge, a cohort's age is wrong by at most this share. So is a rate of reuse learned from it. A bucket spans 41 %
of an age and PRIOR_BLOCKS (reuse.py) leave an estimate uncertain by 10 %; beside both it can be neglected."""
GAP: Final = AGE_ERROR * (
    1 - 2**-0.5
)  # joined at one edge after the other, cohorts err by the sum of a geometric series
# Between two edges so many are at least a gap apart; below the first edge there are as many as that has gaps.
MAX_COHORTS: Final = int(1 / GAP) + 1 + (BUCKETS - 2) * (int((1 - 2**-0.5) / GAP) + 2)


class Cohort:
    """Blocks last used at about `at`: how many of each class still wait for their next use."""

    __slots__ = ("at", "joined", "waiting")

    def __init__(self, at: float) -> None:
        self.at = at
        self.waiting: dict[int, int] = {}
        self.joined: Cohort | None = None  # the one whose counts hold ours

    def counted_in(self) -> "Cohort":
        """Where its blocks are counted now; at most one step per bucket away."""
        cohort = self
        while cohort.joined is not None:
            cohort = cohort.joined
        return cohort

    def add(self, class_id: int, blocks: int = 1) -> None:
        self.waiting[class_id] = self.waiting.get(class_id, 0) + blocks

    def remove(self, class_id: int, blocks: int = 1) -> None:
        """Blocks were used again. Cohorts past the last edge count nothing any more."""
        left = self.waiting.get(class_id, 0) - blocks
        if left > 0:
            self.waiting[class_id] = left
        else:
            self.waiting.pop(class_id, None)

    def join(self, other: "Cohort") -> None:
        for class_id, blocks in self.waiting.items():
            other.waiting[class_id] = other.waiting.get(class_id, 0) + blocks
        self.waiting = {}
        self.joined = other


class Cohorts:
    """All cohorts, each in the queue of the edge that it reaches next."""

    def __init__(self) -> None:
        self._queues: list[deque[Cohort]] = [deque() for _ in EDGES]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def enter(self, cohort: Cohort) -> None:
        self._queues[0].append(cohort)

    def reached(self, now: float) -> Iterator[tuple[int, int, int]]:
        """The blocks that have reached an edge since the last call: (bucket that begins there, class id, blocks)."""
        for bucket, edge in enumerate(EDGES):
            queue = self._queues[bucket]
            while queue and queue[0].at + edge <= now:
                cohort = queue.popleft()
                for class_id, blocks in cohort.waiting.items():
                    yield bucket, class_id, blocks
                self._move(cohort, bucket + 1)

    def _move(self, cohort: Cohort, bucket: int) -> None:
        if bucket == BUCKETS:
            cohort.waiting = {}
            return
        if not cohort.waiting:
            return
        queue = self._queues[bucket]
        if queue and cohort.at - queue[-1].at <= EDGES[bucket] * GAP:
            cohort.join(queue[-1])
        else:
            queue.append(cohort)


def bucket_of(age_s: float) -> int:
    """Index of the age bucket, the largest i with EDGES[i] <= age_s."""
    if age_s < EDGES[1]:
        return 0
    guess = min(BUCKETS - 1, int(2 * log2(2 * age_s)) + 1)
    # Logarithms of edges may land on either side of an integer.
    if EDGES[guess] > age_s:
        return guess - 1
    return guess + 1 if guess + 1 < BUCKETS and EDGES[guess + 1] <= age_s else guess

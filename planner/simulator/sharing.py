"""Equal sharing in virtual time: flows on a link, and requests in a decode batch, all advance alike.

Virtual time V moves at `speed(k)` while k flows are active: B/k bytes per second on a link, 1/step(k) tokens per second
in a batch. A flow of size s that joins at V ends when V reaches V + s, whatever comes and goes meanwhile. So one heap
of finish marks gives the next end. Events of an older `version` are stale.

No float is ever compared with a tolerance: V grows until its spacing exceeds any tolerance, and `finish <= V + 1e-9` then
loops for ever. The end event itself says that the head is done.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class FairShare:
    """Flows that share a capacity equally."""

    __slots__ = ("_count", "_heap", "_marks", "_speed", "_updated_at", "_virtual", "version")

    def __init__(self, speed: Callable[[int], float]) -> None:
        self._speed = speed
        self._heap: list[tuple[float, int, Any]] = []
        self._virtual = 0.0
        self._updated_at = 0.0
        self._count = 0
        self._marks = 0.0  # sum of finish marks: what is left in total is this minus k·V
        self.version = 0

    def __len__(self) -> int:
        return len(self._heap)

    def items(self) -> list[Any]:
        """The flows there are, in no order."""
        return [item for _, _, item in self._heap]

    def add(self, now: float, size: float, item: Any) -> None:
        """A flow of `size` joins."""
        self._advance(now)
        self._count += 1
        mark = self._virtual + size
        heappush(self._heap, (mark, self._count, item))
        self._marks += mark
        self.version += 1

    def next_end(self, now: float) -> float | None:
        """When the next flow ends if nothing changes; None while idle, infinite while nothing moves."""
        if not self._heap:
            return None
        speed = self._speed(len(self._heap))
        if speed <= 0:
            return float("inf")
        return now + max(0.0, self._heap[0][0] - self._virtual) / speed

    def pop_ended(self, now: float) -> list[Any]:
        """The flows that end now. Call at the time `next_end` gave, with the version unchanged."""
        mark, _, item = heappop(self._heap)
        self._updated_at = now
        self._virtual = mark
        self._marks -= mark
        ended = [item]
        while self._heap and self._heap[0][0] <= mark:
            other, _, item = heappop(self._heap)
            self._marks -= other
            ended.append(item)
        if not self._heap:
            self._virtual = self._marks = 0.0
        self.version += 1
        return ended

    def pop_all(self, now: float) -> list[Any]:
        """Ends all flows, wherever they are."""
        items = [item for _, _, item in sorted(self._heap, key=lambda flow: flow[:2])]
        self._heap.clear()
        self._updated_at = now
        self._virtual = self._marks = 0.0
        self.version += 1
        return items

    def change_speed(self, now: float, speed: Callable[[int], float]) -> None:
        """From now on V moves at another speed."""
        self._advance(now)
        self._speed = speed
        self.version += 1

    def remaining(self, now: float) -> float:
        """What all flows together have still to go."""
        self._advance(now)
        return max(0.0, self._marks - len(self._heap) * self._virtual)

    def virtual_time(self, now: float) -> float:
        self._advance(now)
        return self._virtual

    def _advance(self, now: float) -> None:
        if self._heap:
            self._virtual += (now - self._updated_at) * self._speed(len(self._heap))
        self._updated_at = now

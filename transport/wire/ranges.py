"""Sets of half-open byte ranges: what arrived, what is missing, what may leave."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class RangeSet:
    """Disjoint ranges `[start, stop)`, sorted; ranges that touch are one."""

    __slots__ = ("_starts", "_stops", "num_bytes")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.num_bytes = 0
        for start, stop in ranges:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> int:
        """Unites with `[start, stop)`; returns how many bytes are new."""
        _check(start, stop)
        if start == stop:
            return 0
        lo = bisect_left(self._stops, start)  # first range that ends at or after our start
        hi = bisect_right(self._starts, stop)  # first range that begins after our stop
        before = sum(self._stops[i] - self._starts[i] for i in range(lo, hi))
        if lo < hi:
            start = min(start, self._starts[lo])
            stop = max(stop, self._stops[hi - 1])
        self._starts[lo:hi] = [start]
        self._stops[lo:hi] = [stop]
        gained = stop - start - before
        self.num_bytes += gained
        return gained

    def subtract(self, start: int, stop: int) -> int:
        """Removes `[start, stop)`; returns how many bytes went."""
        _check(start, stop)
        if start == stop:
            return 0
        lo = bisect_right(self._stops, start)
        hi = bisect_left(self._starts, stop)
        if lo >= hi:
            return 0
        kept = [(self._starts[lo], start), (stop, self._stops[hi - 1])]
        kept = [(a, b) for a, b in kept if a < b]
        before = sum(self._stops[i] - self._starts[i] for i in range(lo, hi))
        self._starts[lo:hi] = [a for a, _ in kept]
        self._stops[lo:hi] = [b for _, b in kept]
        lost = before - sum(b - a for a, b in kept)
        self.num_bytes -= lost
        return lost

    def overlap(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of `[start, stop)` that are in the set, in order."""
        _check(start, stop)
        if start == stop:
            return []
        lo = bisect_right(self._stops, start)
        hi = bisect_left(self._starts, stop)
        return [(max(start, self._starts[i]), min(stop, self._stops[i])) for i in range(lo, hi)]

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of `[start, stop)` that are not in the set, in order."""
        gaps, at = [], start
        for begin, end in self.overlap(start, stop):
            if at < begin:
                gaps.append((at, begin))
            at = end
        if at < stop:
            gaps.append((at, stop))
        return gaps

    def covers(self, start: int, stop: int) -> bool:
        """True when every byte of `[start, stop)` is in the set."""
        _check(start, stop)
        if start == stop:
            return True
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and stop <= self._stops[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    def __len__(self) -> int:
        """Number of separate ranges."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RangeSet({list(self)})"


def _check(start: int, stop: int) -> None:
    if not 0 <= start <= stop:
        raise ValueError(f"not a range: [{start}, {stop})")

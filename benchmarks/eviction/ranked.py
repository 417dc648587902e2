"""FIFO, LFU and GDSF: each gives an item a rank when it is touched and evicts the lowest."""

from hybrid_cache.eviction.ranked import Ranked


class FIFO(Ranked[int]):
    """First stored, first out."""

    def next_rank(self, previous: int | None) -> int:
        return previous or self._touches


class LFU(Ranked[tuple[int, int]]):
    """Least often used first, the least recently used among equals. Counts start at 1 and are lost on eviction."""

    def next_rank(self, previous: tuple[int, int] | None) -> tuple[int, int]:
        return (previous[0] + 1 if previous else 1, self._touches)


class GDSF(Ranked[tuple[int, int, int]]):
    """Greedy-dual-size-frequency (Cherkasova 1998) for equal sizes and costs: LFU whose counts age with the clock L."""

    def next_rank(self, previous: tuple[int, int, int] | None) -> tuple[int, int, int]:
        # (priority, touch, count): touches are unique, so the count is never compared.
        count = previous[2] + 1 if previous else 1
        clock = self._last_rank[0] if self._last_rank else 0
        return (clock + count, self._touches, count)

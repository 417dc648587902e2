"""The sizes of a transfer's ranges, as runs of equal ones: a long prompt has a million ranges of a few sizes."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, repeat
from typing import Final

MAX_KEPT_RUNS: Final = 16  # of a transfer that has ended
DIGEST_STEP: Final = 1 << 15  # sizes that are hashed in one go


@dataclass(frozen=True, slots=True)
class SizesOutline:
    """What tells the sizes of one transfer from those of another."""

    digest: bytes
    num_ranges: int
    total_bytes: int


class RangeSizes:
    """Bytes of range after range. The ranges are laid end to end into one line of bytes."""

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        """Each run is a size and how many ranges have it."""
        self.runs = tuple((size, count) for size, count in runs if count)
        if any(size < 0 or count < 0 for size, count in self.runs):
            raise ValueError("a range of negative size")
        self._firsts = [0, *accumulate(count for _, count in self.runs)]
        self._starts = [0, *accumulate(size * count for size, count in self.runs)]
        self.num_ranges = self._firsts[-1]
        self.total_bytes = self._starts[-1]

    @classmethod
    def of(cls, sizes: "Iterable[int] | RangeSizes") -> "RangeSizes":
        """Sizes one by one as runs."""
        if isinstance(sizes, RangeSizes):
            return sizes
        return cls((size, sum(1 for _ in same)) for size, same in groupby(sizes))

    def __repr__(self) -> str:
        return f"RangeSizes({self.total_bytes} bytes in {self.num_ranges} ranges)"

    def between(self, first: int, stop: int) -> Iterator[int]:
        """The sizes of ranges `[first, stop)`."""
        for begin, (size, count) in zip(self._firsts, self.runs, strict=False):
            yield from repeat(size, max(0, min(stop, begin + count) - max(first, begin)))

    def offset(self, index: int) -> int:
        """The first byte of range `index`; where the line ends for the index after the last. Raises IndexError."""
        if not 0 <= index <= self.num_ranges:
            raise IndexError(f"range {index} of {self.num_ranges}")
        if index == self.num_ranges:
            return self.total_bytes
        run = bisect_right(self._firsts, index) - 1
        return self._starts[run] + (index - self._firsts[run]) * self.runs[run][0]

    def at(self, offset: int) -> int:
        """The range of the line's byte at `offset`. Raises IndexError."""
        if not 0 <= offset < self.total_bytes:
            raise IndexError(f"byte {offset} of {self.total_bytes}")
        run = bisect_right(self._starts, offset) - 1
        return self._firsts[run] + (offset - self._starts[run]) // self.runs[run][0]

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal sizes, whatever runs they were told in. Not cheap: some milliseconds for a million ranges."""
        digest = hashlib.blake2b(digest_size=16)
        for size, count in self.runs:
            one = size.to_bytes(8, "little")
            whole, rest = divmod(count, DIGEST_STEP)
            step = one * (DIGEST_STEP if whole else 0)
            for _ in range(whole):
                digest.update(step)
            digest.update(one * rest)
        return digest.digest()

    def kept(self) -> "RangeSizes | SizesOutline":
        """What to remember of them for long: their outline, where they take memory; where they do not, no digest yet."""
        if len(self.runs) <= MAX_KEPT_RUNS:
            return self
        return SizesOutline(self.digest, self.num_ranges, self.total_bytes)


def consecutive(indexes: Iterable[int | range]) -> list[range]:
    """Indexes as ranges of consecutive ones, in the order given."""
    if isinstance(indexes, range) and indexes.step == 1:
        return [indexes] if indexes else []
    found: list[range] = []
    for each in indexes:
        runs = [range(each, each + 1)] if isinstance(each, int) else consecutive(each)
        for run in runs:
            if found and found[-1].stop == run.start:
                found[-1] = range(found[-1].start, run.stop)
            else:
                found.append(run)
    return found

"""The bound of class-based eviction on a trace: hits if every class were held for its best time, chosen in hindsight.

python -m benchmarks.cache.bound --trace FILE [--capacity-frac F ...]

A block's class at each use is the default policy's: how much of its request was seen before, how much is new, how often the
block was used, whether it ends the request, category. Each class is held for one time after each use; capacity bounds
the blocks held on average. The best times are a fractional knapsack over the concave hulls of (seconds held, hits). Real caches
must learn and are bounded at every moment, but may reconsider as a request goes on; this bound has seen the future of each class.
"""

import argparse
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.cache.traces import RecordedTrace, read_trace

HOLDS_S = tuple(0.5 * 2 ** (step / 2) for step in range(26))
Class = tuple[int, int, int, bool, str]
Point = tuple[float, float]  # block seconds, hits


def bound(trace: RecordedTrace, capacity: int) -> float:
    """Hits per block of the trace."""
    seconds_left = capacity * trace.rows[-1].now
    hits = 0.0
    steps = [step for points in _curves(trace) for step in _hull_steps(points)]
    for seconds, gained in sorted(steps, key=lambda step: step[1] / step[0], reverse=True):
        part = min(1.0, seconds_left / seconds)
        hits += gained * part
        seconds_left -= seconds * part
        if seconds_left <= 0:
            break
    return hits / trace.blocks


def _curves(trace: RecordedTrace) -> list[list[Point]]:
    """For each class, block seconds and hits by holding time."""
    gaps: dict[Class, list[float]] = defaultdict(list)
    for key_class, gap in _uses(trace):
        gaps[key_class].append(gap)
    return [
        [(sum(min(g, hold) for g in group), sum(g < hold for g in group)) for hold in HOLDS_S]
        for group in gaps.values()
    ]


def _uses(trace: RecordedTrace) -> Iterator[tuple[Class, float]]:
    """Class and time to the next use, of each use of a block."""
    following: dict[int, float] = {}
    gaps = []
    for row in reversed(trace.rows):
        gaps.append([following.get(key, float("inf")) - row.now for key in row.path])
        following.update(dict.fromkeys(row.path, row.now))
    uses: dict[int, int] = defaultdict(int)
    for row, of_row in zip(trace.rows, reversed(gaps), strict=True):
        seen = next((index for index, key in enumerate(row.path) if key not in uses), len(row.path))
        share = 0 if not seen else 1 if seen < len(row.path) / 2 else 2
        for offset, (key, gap) in enumerate(zip(row.path, of_row, strict=True)):
            uses[key] += 1
            frequency = bisect_left((1, 2, 4, 16), uses[key])
            yield (
                (share, (len(row.path) - seen + 1).bit_length(), frequency, offset == len(row.path) - 1, row.type),
                gap,
            )


def _hull_steps(points: Sequence[Point]) -> list[Point]:
    """The concave hull from the origin on, as steps of falling hits per second."""
    hull: list[Point] = [(0.0, 0.0)]
    for x, y in points:
        while len(hull) > 1 and (y - hull[-1][1]) * (hull[-1][0] - hull[-2][0]) >= (hull[-1][1] - hull[-2][1]) * (
            x - hull[-1][0]
        ):
            hull.pop()
        if y > hull[-1][1]:
            hull.append((x, y))
    return [(x - a, y - b) for (a, b), (x, y) in pairwise(hull) if x > a]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache.bound")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--capacity-frac", type=float, action="append", help="of the footprint (default 0.01 0.02)")
    arguments = parser.parse_args(argv)
    trace = read_trace(arguments.trace)
    for fraction in arguments.capacity_frac or (0.01, 0.02):
        capacity = round(trace.footprint * fraction)
        print(f"capacity_blocks={capacity}  bound={bound(trace, capacity):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Replays a trace through a pool and counts hits."""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks.cache.traces import RecordedRequest, RecordedTrace, categories
from benchmarks.eviction.choice import COMPARED
from benchmarks.eviction.pools import ChainPool, FlatPool, leading
from hybrid_cache.eviction.base import EvictionPolicy, Use
from hybrid_cache.eviction.workload import WorkloadAware, fit_offline

NEVER = 1 << 60
CLASSICS = ("lru", "fifo", "lfu", "gdsf", "sieve", "s3fifo", "arc")


@dataclass(frozen=True, slots=True)
class Result:
    """`hit_ratio` = hits / lookups, both in blocks."""

    policy: str
    capacity_blocks: int
    lookups: int
    hits: int
    hit_ratio: float
    seconds: float
    evictions_per_s: float

    def table(self) -> dict[str, str | int | float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Counts:
    """Hits of each request, in blocks, and evictions."""

    hits: Sequence[int]
    evictions: int


Replay = Callable[[RecordedTrace, int], Counts]


def run(name: str, trace: RecordedTrace, capacity: int, replay: Replay) -> Result:
    started = time.perf_counter()
    counts = replay(trace, capacity)
    seconds = time.perf_counter() - started
    hits = sum(counts.hits)
    return Result(
        policy=name,
        capacity_blocks=capacity,
        lookups=trace.blocks,
        hits=hits,
        hit_ratio=hits / trace.blocks,
        seconds=round(seconds, 3),
        evictions_per_s=round(counts.evictions / seconds, 1),
    )


def margin(results: Sequence[Result]) -> dict[str, str | int | float]:
    """How far the default is above the best classic, in points of hit ratio; of results at one capacity."""
    default = next(result for result in results if result.policy == "default")
    best = max((result for result in results if result.policy in CLASSICS), key=lambda result: result.hits)
    points = round(100 * (default.hit_ratio - best.hit_ratio), 2)
    return {"capacity_blocks": default.capacity_blocks, "best_classic": best.policy, "margin_points": points}


def flat_replays() -> dict[str, Replay]:
    """A hit is any cached block. The stream is every request's blocks in order, no warm-up."""
    names = [name for name in COMPARED if name != "default"]
    return {
        "default": lambda trace, capacity: _chains(trace, capacity, COMPARED["default"](capacity)),
        **{name: _flat(COMPARED[name]) for name in names},
        "belady": _flat_belady,
    }


def prefix_replays() -> dict[str, Replay]:
    """A hit is a cached block all of whose predecessors are cached; a request uses its blocks tail first, no warm-up."""
    names = [name for name in COMPARED if name not in ("default", "wa")]
    return {
        "default": lambda trace, capacity: _chains(trace, capacity, COMPARED["default"](capacity)),
        **{name: _passive(COMPARED[name]) for name in names},
        "wa": lambda trace, capacity: _workload(trace, capacity, WorkloadAware(), FlatPool),
        "wa-joint-offline": lambda trace, capacity: _workload(trace, capacity, _literal(trace), FlatPool),
        "wal": lambda trace, capacity: _workload(trace, capacity, WorkloadAware(), ChainPool),
        "belady": _chain_belady,
    }


def _flat(make: Callable[[int], EvictionPolicy]) -> Replay:
    def replay(trace: RecordedTrace, capacity: int) -> Counts:
        pool = FlatPool(capacity, make(capacity))
        hits = []
        for row in trace.rows:
            pool.policy.begin(Use(row.now, row.path, row.type))
            hits.append(sum([pool.access(key, row.now) for key in row.path]))
        return Counts(hits, pool.evictions)

    return replay


def _passive(make: Callable[[int], EvictionPolicy]) -> Replay:
    def replay(trace: RecordedTrace, capacity: int) -> Counts:
        pool = FlatPool(capacity, make(capacity))
        hits = [pool.request(Use(row.now, row.path, row.type)) for row in trace.rows]
        return Counts(hits, pool.evictions)

    return replay


def _chains(trace: RecordedTrace, capacity: int, policy: EvictionPolicy) -> Counts:
    pool = ChainPool(capacity, policy)
    hits = [pool.request(Use(row.now, row.path, row.type)) for row in trace.rows]
    return Counts(hits, pool.evictions)


def _workload(
    trace: RecordedTrace, capacity: int, policy: EvictionPolicy, make: type[FlatPool] | type[ChainPool]
) -> Counts:
    pool = make(capacity, policy)
    return Counts([pool.request(use) for use in categorised(trace)], pool.evictions)


def categorised(trace: RecordedTrace) -> Iterator[Use]:
    for row, category in zip(trace.rows, categories(trace.rows), strict=True):
        yield Use(row.now, row.path, category)


def _literal(trace: RecordedTrace) -> WorkloadAware:
    """The paper's form: fitted on the first half of the trace."""
    half = trace.rows[-1].now / 2
    return WorkloadAware(fits=fit_offline(use for use in categorised(trace) if use.now < half), conditional=False)


# Bélady's optimum: evict what is used again last. It knows the future, nothing else can reach it.


def _next_uses(rows: Sequence[RecordedRequest]) -> list[list[int]]:
    """For each block of each request the next request that uses it."""
    later: dict[int, int] = {}
    result: list[list[int]] = [[]] * len(rows)
    for index in range(len(rows) - 1, -1, -1):
        path = rows[index].path
        result[index] = [later.get(key, NEVER) for key in path]
        later.update(dict.fromkeys(path, index))
    return result


def _flat_belady(trace: RecordedTrace, capacity: int) -> Counts:
    stream = [key for row in trace.rows for key in row.path]
    following = [NEVER] * len(stream)
    seen: dict[int, int] = {}
    for index in range(len(stream) - 1, -1, -1):
        following[index] = seen.get(stream[index], NEVER)
        seen[stream[index]] = index
    heap: list[tuple[int, int]] = []
    resident: dict[int, int] = {}
    hits = evictions = 0
    for key, after in zip(stream, following, strict=True):
        if key in resident:
            hits += 1
        elif len(resident) >= capacity:
            while True:
                negative, victim = heapq.heappop(heap)
                if resident.get(victim) == -negative:
                    break
            del resident[victim]
            evictions += 1
        resident[key] = after
        heapq.heappush(heap, (-after, key))
    return Counts([hits], evictions)


class _Oracle:
    """Chains whose leaf with the latest next use leaves first; a block that is not used again is not stored at all."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evictions = 0
        self._after: dict[int, int] = {}
        self._children: dict[int, int] = {}
        self._parent: dict[int, int | None] = {}
        self._heap: list[tuple[int, int]] = []

    def request(self, path: Sequence[int], after: Sequence[int]) -> int:
        hits = leading(self._children, path)
        for key, next_use in zip(path[:hits], after, strict=False):
            self._after[key] = next_use
            self._offer(key)
        for index in range(hits, len(path)):
            if after[index] == NEVER or not self._make_room(after[index]):
                break
            self._add(path[index], path[index - 1] if index else None, after[index])
        return hits

    def _make_room(self, after: int) -> bool:
        while len(self._after) >= self.capacity:
            negative, key = self._heap[0]
            if self._after.get(key) != -negative or self._children[key]:
                heapq.heappop(self._heap)
                continue
            if -negative <= after:
                return False
            self._drop(key)
        return True

    def _add(self, key: int, parent: int | None, after: int) -> None:
        self._after[key], self._parent[key], self._children[key] = after, parent, 0
        if parent is not None:
            self._children[parent] += 1
        self._offer(key)

    def _drop(self, key: int) -> None:
        self.evictions += 1
        del self._after[key], self._children[key]
        parent = self._parent.pop(key)
        if parent is not None:
            self._children[parent] -= 1
            self._offer(parent)

    def _offer(self, key: int) -> None:
        if not self._children[key]:
            heapq.heappush(self._heap, (-self._after[key], key))


def _chain_belady(trace: RecordedTrace, capacity: int) -> Counts:
    pool = _Oracle(capacity)
    hits = [pool.request(row.path, after) for row, after in zip(trace.rows, _next_uses(trace.rows), strict=True)]
    return Counts(hits, pool.evictions)

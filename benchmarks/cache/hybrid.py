"""A hybrid model's prefix cache on a trace: which snapshots of the linear states to keep, and what to evict.

The model is a 1T hybrid (KDA : MLA = 3 : 1, PrfaaS table 5): 17,280 B of KV per token and a state of 173.925 MiB, as much as
20.6 blocks of 512 tokens. A prefill continues from length L if the KV of [0, L) and a state at L are cached; a state serves no
other length. One pool of bytes holds both.

The cache is a radix tree whose nodes end where states are, or were:

    root ── [0, 14) state ── [14, 31) state       dropping the inner state leaves a tombstone: its KV still serves the outer one
                     └────── [14, 90) state

Systems differ in where they take states (`points`) and in what leaves first (`score`, the lowest):

    vllm-align    a state at every block boundary; least recently used
    sglang        states at the last boundary and at branch points (also vLLM's sparse retention, PR #45845); least recently used
    marconi       the same points; recency + alpha x FLOP efficiency, normalised (MLSys'25); the best alpha in hindsight
    ours          the same points; learned density of hits x FLOPs saved per byte of the whole prefix
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.cache.traces import RecordedRequest, RecordedTrace
from hybrid_cache.eviction.snapshot_density import SnapshotModel

KV_BYTES_PER_TOKEN: Final = 17_280
STATE_BYTES: Final = round(173.925 * (1 << 20))
# Assumed, the paper gives none: 32e9 active parameters; 15 MLA layers with 64 heads of 192 + 128 dimensions, causal.
FLOPS_PER_TOKEN: Final = 2 * 32e9
FLOPS_PER_TOKEN_SQUARED: Final = 15 * 64 * (192 + 128)
DEFAULT_POOLS_GB: Final = (40.0, 100.0, 400.0)
ALPHAS: Final = (0.0, 0.25, 0.5, 1.0, 2.0)


def prefill_flops(tokens: int) -> float:
    return FLOPS_PER_TOKEN * tokens + FLOPS_PER_TOKEN_SQUARED * tokens**2


@dataclass(eq=False, slots=True)
class BlockRange:
    """Blocks [start, end) of some prompts; `keys` are theirs. `state` says whether the state at `end` is there."""

    start: int
    keys: list[int]
    parent: "BlockRange | None"
    state: bool = False
    used: float = 0.0
    order: int = 0
    children: set["BlockRange"] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.start + len(self.keys)

    @property
    def last_key(self) -> int:
        return self.keys[-1]


class CacheSystem:
    """A system's decisions; the base evicts the least recently used."""

    every_boundary = False

    def observe(self, row: RecordedRequest, full: Sequence[int]) -> None:
        pass

    def rank(self, segments: Sequence[BlockRange], now: float) -> list[float]:
        return [segment.order for segment in segments]


class EveryBoundary(CacheSystem):
    every_boundary = True


class Marconi(CacheSystem):
    """Recency and FLOP efficiency, each scaled to [0, 1] over the candidates."""

    def __init__(self, alpha: float, block_size: int) -> None:
        self.alpha = alpha
        self.block_size = block_size

    def rank(self, segments: Sequence[BlockRange], now: float) -> list[float]:
        recency = _scaled([1.0 / (now - segment.used + 1e-3) for segment in segments])
        efficiency = _scaled([self._efficiency(segment) for segment in segments])
        return [r + self.alpha * e for r, e in zip(recency, efficiency, strict=True)]

    def _efficiency(self, segment: BlockRange) -> float:
        saved = prefill_flops(segment.end * self.block_size) - prefill_flops(segment.start * self.block_size)
        return saved / _freed_bytes(segment, self.block_size)


class Ours(CacheSystem):
    """As `SnapshotDensity` decides in a node."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.model = SnapshotModel()

    def observe(self, row: RecordedRequest, full: Sequence[int]) -> None:
        self.model.observe(row.now, full)

    def rank(self, segments: Sequence[BlockRange], now: float) -> list[float]:
        return [self._worth(segment, now) for segment in segments]

    def _worth(self, segment: BlockRange, now: float) -> float:
        if not segment.state:
            return 0.0  # a leaf that nothing can continue from
        tokens = segment.end * self.block_size
        size = STATE_BYTES + tokens * KV_BYTES_PER_TOKEN
        return self.model.density(segment.last_key, now) * prefill_flops(tokens) / size


def _scaled(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def _freed_bytes(segment: BlockRange, block_size: int) -> float:
    state = STATE_BYTES if segment.state else 0
    return state if segment.children else state + len(segment.keys) * block_size * KV_BYTES_PER_TOKEN


class HybridPool:
    """The radix tree and its bytes."""

    def __init__(self, capacity_bytes: float, block_size: int, system: CacheSystem) -> None:
        self.capacity = capacity_bytes
        self.block_bytes = block_size * KV_BYTES_PER_TOKEN
        self.system = system
        self.used = 0.0
        self._home: dict[int, BlockRange] = {}
        self._segments: set[BlockRange] = set()
        self._order = 0

    def request(self, row: RecordedRequest, full: Sequence[int]) -> int:
        """One prefill over full blocks; returns the blocks of its hit."""
        now = row.now
        attention = next((i for i, key in enumerate(full) if key not in self._home), len(full))
        path = self._path(full, attention)
        hit = max((s.end for s in path if s.state and s.end <= attention), default=0)
        self.system.observe(row, full)
        self._touch(path, hit, now)
        if attention and attention < len(full) and path[-1].end > attention:
            path[-1] = self._split(path[-1], attention)
        for start, end in self._pieces(attention, len(full)):
            parent = path[-1] if path else None
            piece = BlockRange(start, list(full[start:end]), parent, state=True, used=now)
            if not self._fits(piece, path, now):
                break
            self._insert(piece)
            path.append(piece)
        self._snapshot_where_computed(path, hit, attention, len(full), now)
        self._touch(path, len(full), now)
        return hit

    def _pieces(self, attention: int, length: int) -> list[tuple[int, int]]:
        if self.system.every_boundary:
            return [(i, i + 1) for i in range(attention, length)]
        return [(attention, length)] if attention < length else []

    def _snapshot_where_computed(
        self, path: list[BlockRange], hit: int, attention: int, length: int, now: float
    ) -> None:
        """States that the prefill passes: at the branch point, or at its end if only the KV was there."""
        for segment in path:
            wanted = segment.end in (attention, length) or self.system.every_boundary
            if not segment.state and hit < segment.end and wanted:
                segment.state = True
                if self._make_room(STATE_BYTES, path, now):
                    self.used += STATE_BYTES
                else:
                    segment.state = False

    def _path(self, full: Sequence[int], attention: int) -> list[BlockRange]:
        path: list[BlockRange] = []
        at = 0
        while at < attention:
            path.append(self._home[full[at]])
            at = path[-1].end
        return path

    def _touch(self, path: list[BlockRange], hit: int, now: float) -> None:
        for segment in reversed(path):
            self._order += 1
            segment.used, segment.order = now, self._order

    def _split(self, segment: BlockRange, at: int) -> BlockRange:
        """Cuts a segment before block `at`; the upper part has no state."""
        cut = at - segment.start
        upper = BlockRange(segment.start, segment.keys[:cut], segment.parent, used=segment.used, order=segment.order)
        segment.keys, segment.start = segment.keys[cut:], at
        if segment.parent is not None:
            segment.parent.children.discard(segment)
            segment.parent.children.add(upper)
        segment.parent = upper
        upper.children.add(segment)
        self._segments.add(upper)
        self._home.update(dict.fromkeys(upper.keys, upper))
        return upper

    def _insert(self, segment: BlockRange) -> None:
        self.used += len(segment.keys) * self.block_bytes + STATE_BYTES
        if segment.parent is not None:
            segment.parent.children.add(segment)
        self._segments.add(segment)
        self._home.update(dict.fromkeys(segment.keys, segment))

    # Room

    def _fits(self, piece: BlockRange, path: list[BlockRange], now: float) -> bool:
        size = len(piece.keys) * self.block_bytes + STATE_BYTES
        return size <= self.capacity and self._make_room(size, path, now)

    def _make_room(self, size: float, path: list[BlockRange], now: float) -> bool:
        if self.used + size <= self.capacity:
            return True
        own = set(path)
        # With children only a state can go; Marconi keeps those of true branch points, LRU order does the same for the others.
        candidates = [
            s for s in self._segments if s not in own and (not s.children or (s.state and len(s.children) == 1))
        ]
        if not candidates:
            return False
        heap = [
            (score, index, segment)
            for index, (score, segment) in enumerate(zip(self.system.rank(candidates, now), candidates, strict=True))
        ]
        heapq.heapify(heap)
        count = len(heap)
        while self.used + size > self.capacity and heap:
            score, _, victim = heapq.heappop(heap)
            if victim not in self._segments or (victim.children and not victim.state):
                continue
            parent = self._evict(victim)
            if parent is not None and parent not in own and not parent.children and parent in self._segments:
                count += 1
                heapq.heappush(heap, (score, count, parent))
        return self.used + size <= self.capacity

    def _evict(self, segment: BlockRange) -> BlockRange | None:
        """Drops the state, of a leaf the KV as well, and then what is left without use above it. Returns a new leaf."""
        if segment.state:
            segment.state = False
            self.used -= STATE_BYTES
        if segment.children:
            return None
        self._segments.discard(segment)
        self.used -= len(segment.keys) * self.block_bytes
        for key in segment.keys:
            del self._home[key]
        if segment.parent is None:
            return None
        segment.parent.children.discard(segment)
        return segment.parent


def replay(trace: RecordedTrace, pool_bytes: float, system: CacheSystem) -> tuple[float, float]:
    """Token hit ratio over all input tokens, and FLOPs saved."""
    pool = HybridPool(pool_bytes, trace.block_size, system)
    tokens = hits = 0
    saved = 0.0
    for row in trace.rows:
        # The last prompt token is computed in any case, so a hit ends before it; half-filled blocks are never cached.
        full = row.path[: (row.input_length - 1) // trace.block_size]
        hit = pool.request(row, full) * trace.block_size
        tokens += row.input_length
        hits += hit
        saved += prefill_flops(hit)
        assert pool.used <= pool.capacity + 1
    return hits / tokens, saved


def compare(trace: RecordedTrace, pools_gb: Sequence[float] | None) -> list[dict[str, str | int | float]]:
    """Token hits and FLOPs saved of all systems; `flops_vs_sglang` is relative."""
    tables: list[dict[str, str | int | float]] = []
    for pool_gb in pools_gb or DEFAULT_POOLS_GB:
        size = pool_gb * 1e9
        measured = {
            "vllm-align": replay(trace, size, EveryBoundary()),
            "sglang": replay(trace, size, CacheSystem()),
        }
        marconi = [(replay(trace, size, Marconi(alpha, trace.block_size)), alpha) for alpha in ALPHAS]
        best, alpha = max(marconi, key=lambda result: result[0][1])
        measured[f"marconi (alpha {alpha})"] = best
        measured["ours"] = replay(trace, size, Ours(trace.block_size))
        for name, (ratio, flops) in measured.items():
            tables.append(
                {
                    "policy": name,
                    "pool_gb": pool_gb,
                    "token_hit_ratio": round(ratio, 4),
                    "pflops_saved": round(flops / 1e15, 1),
                    "flops_vs_sglang": round(flops / measured["sglang"][1], 3) if measured["sglang"][1] else 0.0,
                }
            )
    return tables

"""The policy of prefill nodes with linear states: its unit is a snapshot with the KV that leads to it.

A prefill can continue only from a snapshot, so KV after the last snapshot of a chain is worth nothing, and a snapshot is worth

    hits per second (learned, as in density.py)  x  prefill saved per hit / bytes of its whole prefix

The last factor is Marconi's FLOP efficiency (MLSys'25), taken over the whole prefix. What is learned is when a prompt
continues exactly from a snapshot rather than from a later one: the end of a prompt is a tip; once a longer prompt has
continued from it, it lies in the shadow of the new tip; where prompts part there is a branch point.
"""

from collections import OrderedDict, deque
from collections.abc import Generator, Iterator, Sequence
from enum import IntEnum
from math import log2
from typing import Final

from hybrid_cache.eviction.base import BEGIN_STEP, Key, Use
from hybrid_cache.eviction.cohorts import bucket_of
from hybrid_cache.eviction.density import JUNK, ReuseDensity
from hybrid_cache.eviction.reuse import ReuseModel
from hybrid_cache.layout.layout import ModelLayout

PRIOR_SNAPSHOTS: Final = 4.0  # one request makes one or two, not dozens as of blocks
# Length at which attention costs as much as all else: 32e9 active parameters, 15 layers of 64 heads of 192 + 128 dimensions.
QUADRATIC_TOKENS: Final = 208_000
SCALES_PER_OCTAVE: Final = 4
LAST_RESORT: Final = 1 << 9


class SnapshotKind(IntEnum):
    TIP = 0
    BRANCH = 5
    SHADOW = 9


class SnapshotModel:
    """Learns from prompts how snapshots are reused; keys are the block hashes that prompts consist of."""

    REFRESH_REQUESTS: Final = 32

    def __init__(self, max_history: int = 1_000_000) -> None:
        self.reuse = ReuseModel(max_history, PRIOR_SNAPSHOTS, PRIOR_SNAPSHOTS)
        self.max_history = max_history
        self._uses: dict[Key, int] = {}  # of snapshots
        self.depth: OrderedDict[Key, int] = OrderedDict()  # of blocks seen, in blocks; the least recently used first
        self._requests = 0
        self._refreshing = False  # densities are being computed

    def observe(self, now: float, path: Sequence[Key]) -> bool:
        """A prompt of full blocks arrives; says whether there are new densities."""
        steps = self.observe_steps(now, path)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return bool(end.value)

    def observe_steps(self, now: float, path: Sequence[Key]) -> Generator[None, None, bool]:
        """The same in steps, between which no other prompt may arrive."""
        if not path:
            return False
        seen = yield from self._known(path)
        deepest = next((index for index in range(seen - 1, -1, -1) if path[index] in self._uses), None)
        shape = (0 if not seen else 1 if seen < len(path) / 2 else 2, (len(path) - seen + 1).bit_length())
        for stop in range(len(path), 0, -BEGIN_STEP):  # a prefix is of use without its tail
            start, before = max(0, stop - BEGIN_STEP), len(self.depth)
            keys = path[start:stop][::-1]
            if seen < stop:
                deque(map(self.depth.__setitem__, keys, range(stop, start, -1)), maxlen=0)
            if len(self.depth) - before < len(keys):  # what is new is at the end already
                deque(map(self.depth.move_to_end, keys), maxlen=0)
            yield
        if deepest is not None:
            key = path[deepest]
            self._uses[key] += 1
            self.reuse.observe_classes(now, [(key, (SnapshotKind.SHADOW, min(3, self._uses[key]), *shape))])
        if deepest is None or deepest < len(path) - 1:
            self._note(now, path[-1], (SnapshotKind.TIP, 0, *shape))
        if 0 < seen < len(path) and (deepest is None or deepest < seen - 1):
            self._note(now, path[seen - 1], (SnapshotKind.BRANCH, 0, *shape))
        self._trim()
        due = self._refreshing or self._requests % min(self.REFRESH_REQUESTS, 1 + self._requests // 16) == 0
        self._refreshing = due and not self.reuse.refresh()
        self._requests += 1
        return due and not self._refreshing

    def _known(self, path: Sequence[Key]) -> Generator[None, None, int]:
        """How many leading blocks were seen before."""
        for start in range(0, len(path), BEGIN_STEP):
            part = path[start : start + BEGIN_STEP]
            if not all(map(self.depth.__contains__, part)):
                return start + next(index for index, key in enumerate(part) if key not in self.depth)
            yield
        return len(path)

    def density(self, key: Key, now: float) -> float:
        """Expected hits per second of the snapshot at the end of a block."""
        at, class_id = self.reuse.class_of(key, now)
        return self.reuse.density(class_id, bucket_of(max(0.0, now - at)))

    def _note(self, now: float, key: Key, key_class: tuple[int, ...]) -> None:
        self._uses.setdefault(key, 0)
        self.reuse.observe_classes(now, [(key, key_class)])

    def _trim(self) -> None:
        while len(self.depth) > self.max_history:
            oldest, _ = self.depth.popitem(last=False)
            self._uses.pop(oldest, None)


def efficiency(num_tokens: int, layout: ModelLayout) -> float:
    """Prefill saved by a hit of that length, in tokens' worth of linear work, per byte of its prefix."""
    return num_tokens * (1 + num_tokens / QUADRATIC_TOKENS) / layout.kv_bytes(num_tokens)


class SnapshotDensity(ReuseDensity):
    """The policy, for `PrefixCache` over a layout with state groups."""

    def __init__(self, layout: ModelLayout, max_history: int = 1_000_000) -> None:
        if not layout.state_groups:
            raise ValueError("without linear states there are no snapshots to keep; use ReuseDensity")
        self.snapshots = SnapshotModel(max_history)
        super().__init__(model=self.snapshots.reuse)
        self.layout = layout
        self._live: dict[Key, set[int]] = {}  # groups that hold a state at the end of a block
        self._serves: OrderedDict[Key, Key] = OrderedDict()  # window block -> the snapshot it is kept for
        self._tail = max((len(layout.window_blocks(group, 1 << 40)) for group in layout.window_groups), default=0)

    def knows(self, key: Key) -> bool:
        return key in self.snapshots.depth

    def begin_steps(self, use: Use) -> Iterator[None]:
        use = self.heed(use)
        if (yield from self.snapshots.observe_steps(use.now, use.path)):
            self._rank()
        for key in use.path[len(use.path) - self._tail :] if self._tail else ():
            self._serves[key] = use.path[-1]
            self._serves.move_to_end(key)
        while len(self._serves) > self.snapshots.max_history:
            self._serves.popitem(last=False)

    def touch(self, key: Key, now: float) -> None:
        if isinstance(key, tuple) and key[0] in self.layout.state_groups:
            self._live.setdefault(key[1], set()).add(key[0])
        super().touch(key, now)

    def forget(self, key: Key) -> None:
        self._lose(key)
        super().forget(key)

    def pop_victim(self, now: float, incoming: Key | None = None) -> Key:
        victim = super().pop_victim(now)
        if self._lose(victim) and isinstance(victim, tuple):
            # The KV below the lost snapshot, and its other parts, have become junk.
            for related in (victim[1], *((group, victim[1]) for group in range(len(self.layout.groups)))):
                if related in self._offered:
                    self.offer(related, now)
        return victim

    def place(self, key: Key, now: float) -> tuple[float, int, int]:
        block_hash = key[1] if isinstance(key, tuple) else key
        if not isinstance(key, tuple):
            return now, self.model.unknown, LAST_RESORT if block_hash in self._live else JUNK
        if key[0] in self.layout.window_groups:
            block_hash = self._serves.get(block_hash, block_hash)
        whole = len(self._live.get(block_hash, ())) == len(self.layout.state_groups)
        if not whole or block_hash not in self.snapshots.depth:
            return now, self.model.unknown, JUNK
        at, class_id = self.model.class_of(block_hash, now)
        tokens = self.snapshots.depth[block_hash] * self.layout.block_size
        return at, class_id, round(SCALES_PER_OCTAVE * log2(efficiency(tokens, self.layout)))

    def num_alike(self, keys: Sequence[Key]) -> int:
        if keys[0] in self._live or not self._live.keys().isdisjoint(keys):
            return 1
        return len(keys)

    def _lose(self, key: Key) -> bool:
        """Notes that a state is gone; returns whether the key was a state."""
        if not isinstance(key, tuple) or key[1] not in self._live or key[0] not in self._live[key[1]]:
            return False
        self._live[key[1]].discard(key[0])
        if not self._live[key[1]]:
            del self._live[key[1]]
        return True

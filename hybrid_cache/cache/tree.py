"""The tree of cached prefixes and its pages: how requests lock it, how it grows, and how it shrinks.

Runs of blocks are in blocks.py, what a request holds of the tree in reservation.py. Paths are long: what is done for each
block is done in C, for a run at a time.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Container, Generator, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Final

from hybrid_cache.cache.blocks import BlockRun, Companion, Pages
from hybrid_cache.cache.events import EventLog
from hybrid_cache.cache.integrity import STEP, IntegrityCheck
from hybrid_cache.cache.lookup import full_hit
from hybrid_cache.cache.pool import PagePool
from hybrid_cache.cache.reservation import Purpose, ReservedPages, block_pages, full_group_parts, rows_of
from hybrid_cache.errors import OutOfPages, UnchainedHashes
from hybrid_cache.eviction.base import EvictionPolicy
from hybrid_cache.layout.layout import ModelLayout

FIRST_AT_ONCE: Final = 2  # and eight times more each time
MOST_AT_ONCE: Final = 1024  # ancestors that a policy is asked about in one go


class _Gone:
    """Blocks that were taken out of the tree, children first, and their pages."""

    def __init__(self) -> None:
        self.hashes: list[bytes] = []
        self._pages: list[list[int]] = []

    def add(self, hashes: list[bytes], pages: list[int]) -> None:
        """The end of a run."""
        self.hashes += reversed(hashes)
        self._pages.append(pages)

    def pages(self) -> list[int]:
        """Of all blocks, parents first."""
        return list(chain.from_iterable(reversed(self._pages)))


class PrefixTree:
    """Runs and companions over one pool of pages. Unlocked blocks leave when room is needed."""

    def __init__(self, layout: ModelLayout, num_pages: int, eviction: EvictionPolicy, events: EventLog) -> None:
        self.layout = layout
        self.pool = PagePool(num_pages)
        self.evictable_pages = 0
        # Called while an evicted block's bytes are still in its pages: (group, hash, pages).
        self.on_evict: Callable[[int, bytes, Pages], None] | None = None
        self._eviction = eviction
        self._events = events
        self._blocks: dict[Any, BlockRun] = {}  # the run of each block, by its hash
        self._runs: dict[BlockRun, None] = {}
        self._companions: tuple[dict[bytes, Companion], ...] = tuple({} for _ in layout.groups)
        # The lookup's view of each group: a block holds every full-attention group at once.
        self.held = tuple(
            self._blocks if group in layout.full_groups else self._companions[group]
            for group in range(len(layout.groups))
        )
        self._companion_groups = layout.companion_groups
        self._width = block_pages(layout)
        self._parts = full_group_parts(layout)
        self._stamp = 0  # how many checks have begun
        self._check: IntegrityCheck | None = None  # under way

    def __repr__(self) -> str:
        return f"PrefixTree({self.pool!r}, {len(self._blocks)} blocks)"

    @property
    def num_pages(self) -> int:
        """Pages of all blocks and companions."""
        companions = sum(
            len(held) * self.layout.pages_per_block(group) for group, held in enumerate(self._companions) if held
        )
        return len(self._blocks) * self._width + companions

    def companion_pages(self, group: int, block_hash: bytes) -> Pages:
        """The pages of a window's block or a snapshot; empty unless it is held."""
        companion = self._companions[group].get(block_hash)
        return companion.pages if companion is not None else ()

    def check_integrity(self, holds: Collection[ReservedPages], step: int = STEP) -> Generator[None, None, None]:
        """Whether every page, lock and link is accounted for now, `holds` being all there are: looks in steps, between which
        anything may happen here but another check. Raises IntegrityError.
        """
        assert self._check is None, "one check at a time"
        self._stamp += 1
        self._check = IntegrityCheck(
            self._stamp, self._blocks, self._runs, self._companions, holds, self.pool, self.evictable_pages, step=step
        )
        try:
            yield from self._check.run()
        finally:
            self._check = None

    # Locks

    def lock_prefix(self, hold: ReservedPages, cached: int, purpose: Purpose) -> None:
        """Locks what a request shares: the first `cached` tokens, with the companions that a prefill continues from."""
        self.lock_path(hold, cached // self.layout.block_size)
        if purpose is not Purpose.PREFILL or not cached:
            return
        for group in self.layout.window_groups:
            for index in self.layout.window_blocks(group, cached):
                self._lock_companion(hold, self._companions[group][hold.hashes[index]])
        for group in self.layout.state_groups:
            self._lock_companion(hold, self._companions[group][hold.hashes[hold.locked - 1]])

    def lock_path(self, hold: ReservedPages, blocks: int) -> int:
        """Locks the request's blocks up to `blocks`, all cached, as far as it does not do so yet; returns how many pages were
        evictable till now.
        """
        unlocked = 0
        for run, stop in _way(self._blocks, hold, blocks):
            if self._check is not None:
                self._check.keep((run,))
            is_offered = stop == len(run.hashes) and run.is_tail_free
            before = hold.path.pop()[1] if hold.path and hold.path[-1][0] is run else 0
            unlocked += run.move_hold(before, stop)
            hold.path.append((run, stop))
            hold.locked = run.first + stop
            if is_offered:
                self._eviction.withdraw(run.hashes[-1])
        self.evictable_pages -= unlocked * self._width
        return unlocked * self._width

    def _lock_companion(self, hold: ReservedPages, companion: Companion) -> None:
        if self._check is not None:
            self._check.keep((companion,))
        if not companion.locks:
            self.evictable_pages -= len(companion.pages)
            self._eviction.withdraw(companion.key)
        companion.locks += 1
        hold.companions.append(companion)

    def num_locked(self, hashes: Sequence[bytes]) -> int:
        """The held blocks of a path of cached blocks: a request that holds a block holds all before it."""

        def is_unlocked(index: int) -> bool:
            run = self._blocks[hashes[index]]
            return index - run.first >= run.locked

        return bisect_left(range(len(hashes)), True, key=is_unlocked)

    def unlock_steps(self, hold: ReservedPages, now: float, step: int) -> Iterator[None]:
        """`unlock` in steps of so many blocks, tail first. Between them the hold locks what is left of it."""
        while self._width and hold.locked > step:
            self._unlock_companions(hold, now)
            self.unlock_from(hold, hold.locked - step, now)
            yield
        self.unlock(hold, now)

    def unlock(self, hold: ReservedPages, now: float) -> None:
        """Undoes all locks of a request."""
        # Tail first, so that age alone already evicts tails before heads.
        self._unlock_companions(hold, now)
        self.unlock_from(hold, 0, now)

    def _unlock_companions(self, hold: ReservedPages, now: float) -> None:
        if self._check is not None:
            self._check.keep(hold.companions)
        while hold.companions:
            companion = hold.companions.pop()
            companion.locks -= 1
            self._eviction.touch(companion.key, now)
            if not companion.locks:
                self.evictable_pages += len(companion.pages)
                self._eviction.offer(companion.key, now)

    def unlock_from(self, hold: ReservedPages, start: int, now: float) -> None:
        """Undoes the locks of a request's blocks from `start` on."""
        if hold.locked <= start:
            return
        hashes = hold.hashes[start : hold.locked]
        hashes.reverse()
        tail, end = hold.path[-1]
        while hold.locked > start:
            run, stop = hold.path.pop()
            if self._check is not None:
                self._check.keep((run,))
            if (left := max(0, start - run.first)) > 0:
                hold.path.append((run, left))
            hold.locked = run.first + left
            self.evictable_pages -= run.move_hold(stop, left) * self._width
            self._prune(run)
        if not self._width:
            return
        self._eviction.touch_path(hashes, now)
        if end == len(tail.hashes) and tail.is_tail_free:
            self._eviction.offer(hashes[0], now)

    # Growing

    def commit_blocks(self, hold: ReservedPages, full_blocks: int) -> None:
        """A request's own blocks up to `full_blocks` join the tree; where one is there already, ours stays its own."""
        # What is held of a path is its beginning: others may have stored more of it meanwhile.
        held = full_hit(self._blocks, hold.hashes, full_blocks)
        self.lock_path(hold, held)
        start = hold.locked
        if start >= full_blocks:
            return
        if len(hold.own) < (full_blocks - hold.own_first) * self._width:
            raise ValueError(f"{hold.request_id!r} has no pages of its own for block {full_blocks - 1}")
        added, pages = hold.hashes[start:full_blocks], hold.take_own(start, full_blocks, self._width)
        run, stop = hold.path.pop() if hold.path else (None, 0)
        if run is not None and self._check is not None:
            self._check.keep((run,))
        if run is not None and stop == len(run.hashes) and stop not in run.forks:
            run.hashes += added
            run.pages += pages
        else:
            if run is not None:
                run.add_fork(stop, 1)
                hold.path.append((run, stop))
            run, stop = BlockRun(added.copy(), pages, run, stop, self._stamp), 0
            self._runs[run] = None
        run.move_hold(stop, stop + len(added))
        hold.path.append((run, stop + len(added)))
        hold.locked = full_blocks
        self._blocks.update(zip(added, repeat(run)))
        for group in self.layout.full_groups:
            self._events.stored(group, added)

    def commit_companions(self, hold: ReservedPages, full_blocks: int, unfilled: Container[tuple[int, int]]) -> None:
        """The same for window blocks and aligned snapshots, but those of `unfilled`."""
        for group, index in [key for key in hold.own_windows if key not in unfilled]:
            if index < full_blocks and hold.hashes[index] not in self._companions[group]:
                self._add_companion(hold, index, group, hold.own_windows.pop((group, index)))
        for group, length in [key for key in hold.own_states if key not in unfilled]:
            blocks, rest = divmod(length, self.layout.block_size)
            if not rest and blocks <= full_blocks and hold.hashes[blocks - 1] not in self._companions[group]:
                self._add_companion(hold, blocks - 1, group, hold.own_states.pop((group, length)))

    def _add_companion(self, hold: ReservedPages, index: int, group: int, pages: Pages) -> None:
        block_hash = hold.hashes[index]
        companion = Companion(self._blocks[block_hash], index, group, pages, self._stamp)
        self._companions[group][block_hash] = companion
        companion.locks = 1
        hold.companions.append(companion)
        self._events.stored(group, (block_hash,))

    # Shrinking

    def allocate(self, count: int, now: float) -> list[int]:
        """`count` pages; evicts others if necessary. Raises OutOfPages."""
        free = self.pool.num_free
        if count > free:
            if count > free + self.evictable_pages:
                raise OutOfPages(count, free + self.evictable_pages)
            self.evict(count - free, now)
        return self.pool.allocate(count)

    def evict(self, num_pages: int, now: float) -> None:
        """Evicts the policy's victims until `num_pages` more pages are free. As many must be evictable."""
        gone = _Gone()
        try:
            while num_pages > 0:
                key: Any = self._eviction.pop_victim(now)
                if isinstance(key, tuple):
                    num_pages -= self._evict_companion(key)
                    continue
                run = self._blocks[key]
                assert run.hashes[-1] == key
                assert run.is_tail_free
                self._keep_leaving(run)
                self._cut(run, 1, gone)
                num_pages -= self._width
                if self._companion_groups:
                    num_pages -= self._drop_companions_of(key)
                num_pages -= self._take_with(run, num_pages, now, gone)
                self._lose_end(run, now)
        finally:  # their pages are free, whatever has become of the next one
            self._on_blocks_gone(gone)

    def _take_with(self, run: BlockRun, num_pages: int, now: float, gone: _Gone) -> int:
        """Takes out the ancestors in the same run that are the next victims, as far as so many pages need: more of them each
        time. Returns how many pages that frees.
        """
        kept, before, wanted = run.kept, len(gone.hashes), FIRST_AT_ONCE
        while num_pages > 0 and len(run.hashes) > kept:
            count = min(wanted, MOST_AT_ONCE, -(-num_pages // self._width), len(run.hashes) - kept)
            hashes = _alone(self._companions, run.hashes[: -count - 1 : -1])
            taken = self._eviction.take_path(hashes, now) if hashes else 0
            self._cut(run, taken, gone)
            if taken < count:
                break
            num_pages, wanted = num_pages - taken * self._width, 8 * wanted
        return (len(gone.hashes) - before) * self._width

    def _cut(self, run: BlockRun, count: int, gone: _Gone) -> None:
        """Takes out the last blocks of a run."""
        if not count:
            return
        start = len(run.hashes) - count
        hashes, pages = run.hashes[start:], run.pages[start * self._width :]
        del run.hashes[start:], run.pages[start * self._width :]
        deque(map(self._blocks.__delitem__, hashes), maxlen=0)
        gone.add(hashes, pages)

    def _lose_end(self, run: BlockRun, now: float) -> None:
        """The last blocks of a run have left: the one before them may go now."""
        end: BlockRun | None = run
        if not run.hashes:
            end = self._detach(run)
            if end is None or run.at < len(end.hashes):
                return
        if end is not None and end.is_tail_free:
            self._eviction.offer(end.hashes[-1], now)

    def _detach(self, run: BlockRun) -> BlockRun | None:
        """A run without blocks leaves the tree; returns the one that it went on from."""
        del self._runs[run]
        if run.parent is not None:
            if self._check is not None:
                self._check.keep((run.parent,))
            run.parent.add_fork(run.at, -1)
        return run.parent

    def drop(self, hashes: Sequence[bytes], now: float) -> None:
        """Removes the blocks of a chain, its last one first, up to the first that is held or has children."""
        gone = _Gone()
        for block_hash in reversed(hashes):
            run = self._blocks.get(block_hash)
            if run is None:
                continue
            if run.hashes[-1] != block_hash or not run.is_tail_free:
                break
            self._keep_leaving(run)
            self._drop_companions_of(block_hash)
            if not self._width:
                self._prune(run)
                continue
            self._eviction.forget(block_hash)
            self._cut(run, 1, gone)
            self._lose_end(run, now)
        self._on_blocks_gone(gone)

    def _evict_companion(self, key: tuple[Any, ...]) -> int:
        group, block_hash = key
        companion = self._companions[group][block_hash]
        freed = self._drop_companion(companion)
        self._prune(companion.run)
        return freed

    def _on_blocks_gone(self, gone: _Gone) -> None:
        """Finishes the removal of blocks that were taken out of the tree."""
        self.evictable_pages -= len(gone.hashes) * self._width
        # The first block's pages lie on top again, so the next block gets them in order.
        pages = gone.pages()
        self.pool.free(pages)
        for group, part in zip(self.layout.full_groups, self._parts, strict=True):
            self._events.removed(group, gone.hashes)
            if self.on_evict is not None:
                for block_hash, of_block in zip(gone.hashes, reversed(rows_of(pages, self._width, part)), strict=True):
                    self.on_evict(group, block_hash, of_block)

    def _drop_companions_of(self, block_hash: bytes) -> int:
        """Drops what cannot stay without a block; returns the number of pages that this frees."""
        freed = 0
        for group in self._companion_groups:
            companion = self._companions[group].get(block_hash)
            if companion is not None:
                self._eviction.forget(companion.key)
                freed += self._drop_companion(companion)
        return freed

    def _drop_companion(self, companion: Companion) -> int:
        """Frees the pages of a companion; returns their number."""
        assert not companion.locks
        if self._check is not None:
            self._check.keep((companion,))
        group, block_hash = companion.key
        del self._companions[group][block_hash]
        self.evictable_pages -= len(companion.pages)
        if self.on_evict is not None:
            self.on_evict(group, block_hash, companion.pages)
        self.pool.free(companion.pages)
        self._events.removed(group, (block_hash,))
        return len(companion.pages)

    def _prune(self, run: BlockRun) -> None:
        # Without full attention a block is only a place for companions.
        end: BlockRun | None = run
        while end is not None and not self._width:
            while end.is_tail_free and not _are_held(self._companions, end.hashes[-1]):
                self._keep_leaving(end)
                self._cut(end, 1, _Gone())
            if end.hashes or end not in self._runs:
                return
            end = self._detach(end)

    def _keep_leaving(self, run: BlockRun) -> None:
        """For the check that is under way, before a run's last block leaves, and its companions with it."""
        if self._check is None:
            return
        held = (self._companions[group].get(run.hashes[-1]) for group in self._companion_groups)
        self._check.keep([companion for companion in held if companion is not None])
        self._check.keep((run,))


def _way(blocks: Mapping[bytes, BlockRun], hold: ReservedPages, end: int) -> list[tuple[BlockRun, int]]:
    """What leads on from the path of a hold to its first `end` blocks, all cached: each run with how many blocks of it.
    Raises UnchainedHashes.
    """
    if end <= hold.locked:
        return []
    way, (held, used) = [], hold.path[-1] if hold.path else (None, 0)
    run: BlockRun | None = blocks[hold.hashes[end - 1]]
    while run is not None:
        start, stop = used if run is held else 0, end - run.first
        if run.hashes[start:stop] != hold.hashes[run.first + start : end]:
            break
        way.append((run, stop))
        if run is held or (run.parent is held and run.at == used):
            return way[::-1]
        end, run = run.first, run.parent
    raise UnchainedHashes(f"the first {end} blocks of {hold.request_id!r} are cached, but not one after the other")


def _alone(companions: Sequence[Mapping[bytes, Companion]], hashes: list[bytes]) -> list[bytes]:
    """The first of these blocks, up to one that has a companion."""
    for held in companions:
        if held and not held.keys().isdisjoint(hashes):
            del hashes[next(index for index, each in enumerate(hashes) if each in held) :]
    return hashes


def _are_held(companions: Sequence[Mapping[bytes, Companion]], block_hash: bytes) -> bool:
    """Whether a block has companions."""
    return any(block_hash in held for held in companions)

"""Checks a cache: every page has one holder, every lock a reservation, every run the one it goes on from.

A check of a million blocks takes some time, so it is made in steps, between which the cache may change. It judges what
there was when it began: what is about to change is noted first, if the check has not come to it (`keep`). A run's stamp is
the number of the last check that has seen it, or of the last one before the run came.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple, TypeVar

import numpy as np

from hybrid_cache.cache.blocks import BlockRun, Companion, Item
from hybrid_cache.cache.pool import PagePool
from hybrid_cache.cache.reservation import ReservedPages
from hybrid_cache.errors import IntegrityError

STEP: Final = 1024  # blocks or pages that are looked at in one go: less than a millisecond
BLOCKS_OF_RUN: Final = 8  # that are looked at as fast as what a run has but once
MOST_HOLDERS: Final = 255  # a page with more is said to have so many

T = TypeVar("T")
Blocks = Mapping[bytes, BlockRun]
Companions = Sequence[Mapping[bytes, Companion]]


class _Hold(NamedTuple):
    """What a reservation held when the check began."""

    request_id: str
    hashes: Sequence[bytes]
    path: Sequence[tuple[BlockRun, int]]
    used: Sequence[Sequence[bytes]]  # the blocks of that path, run by run
    companions: Sequence[Companion]
    own_pages: Sequence[int]


class _KeptRun(NamedTuple):
    """A run as it was when the check began."""

    run: BlockRun
    hashes: Sequence[bytes]
    pages: Sequence[int]
    holds: Mapping[int, int]
    forks: Mapping[int, int]

    @property
    def evictable_pages(self) -> int:
        """Pages of blocks that no request uses."""
        return len(self.pages) - max(self.holds, default=0) * (len(self.pages) // max(1, len(self.hashes)))


class IntegrityCheck:
    """One check. The cache calls `keep` before anything in it changes, until `run` has ended."""

    def __init__(
        self,
        number: int,
        blocks: Blocks,
        runs: Collection[BlockRun],
        companions: Companions,
        holds: Collection[ReservedPages],
        pool: PagePool,
        evictable_pages: int,
        *,
        step: int = STEP,
    ) -> None:
        """`number` is above the stamps of all that is there."""
        self._step = step
        self._number = number
        self._table, self._tables = blocks, companions
        self._runs = list(runs)
        self._companions = [companion for group in companions for companion in group.values()]
        self._holds = [
            _Hold(
                hold.request_id, hold.hashes, list(hold.path), [run.hashes[:stop] for run, stop in hold.path],
                list(hold.companions), hold.own_pages(),
            )
            for hold in holds
        ]  # fmt: skip
        self._listed = len(blocks) + len(self._companions)
        self._free = pool.free_pages()
        self._evictable_pages = evictable_pages
        self._holders = np.zeros(pool.num_pages, np.uint8)  # of each page
        self._found_evictable = self._found = 0
        self._kept_runs: list[_KeptRun] = []
        self._kept_blocks = 0  # of those runs, or what takes as long
        self._kept_companions: list[tuple[Companion, int]] = []
        # Numbers that must come to nothing: of a companion, of a run up to a block.
        self._locks: dict[Companion, int] = {}
        self._uses: dict[tuple[BlockRun, int], int] = {}
        self._forks: dict[tuple[BlockRun, int], int] = {}
        self._wrong = ""

    def keep(self, items: Iterable[Item]) -> None:
        """These are about to change: locks, forks, blocks, or that they are there at all."""
        number = self._number
        for item in items:
            if item.stamp >= number:
                continue
            item.stamp = number
            if isinstance(item, BlockRun):
                self._kept_runs.append(
                    _KeptRun(item, item.hashes.copy(), item.pages.copy(), item.holds.copy(), item.forks.copy())
                )
                self._kept_blocks += len(item.hashes) + BLOCKS_OF_RUN
            else:
                self._kept_companions.append((item, item.locks))
                self._place(item)

    def run(self) -> Iterator[None]:
        """Looks at everything, step by step. Raises IntegrityError."""
        yield  # what there is has been listed
        for pages in self._parts(self._free):
            self._count_pages(pages)
            yield
        for hold in self._holds:
            yield from self._look_at_hold(hold)
        while self._runs:
            self.keep((self._runs.pop(),))
            if self._kept_blocks >= self._step:
                yield from self._look_at_kept()
        yield from self._look_at_kept()
        for companions in self._parts(self._companions):
            self.keep(companions)
            yield from self._look_at_kept()
        self._conclude()

    def _parts(self, items: list[T]) -> Iterator[list[T]]:
        """A list from its end on, which grows shorter: a million items are not let go of in one go either."""
        while items:
            yield items[-self._step :]
            del items[-self._step :]

    def _look_at_kept(self) -> Iterator[None]:
        looked, pages = 0, list[int]()
        while self._kept_runs:
            kept = self._kept_runs.pop()
            self._kept_blocks -= len(kept.hashes) + BLOCKS_OF_RUN
            for start in range(0, len(kept.hashes), self._step):
                more = min(self._step, len(kept.hashes) - start)
                if looked + more > self._step:
                    self._count_pages(pages)
                    looked, pages = 0, []
                    yield
                looked += more
                pages += self._pages_of_blocks(kept, start)
            self._look_at_run(kept)
            looked += BLOCKS_OF_RUN
        while self._kept_companions:
            some = self._kept_companions[-self._step :]
            del self._kept_companions[-self._step :]
            self._look_at_companions(some)
            yield
        self._count_pages(pages)
        yield

    def _pages_of_blocks(self, kept: _KeptRun, start: int) -> Sequence[int]:
        """Of some blocks of a run. Those of them that it still has lie under their hashes."""
        width = len(kept.pages) // len(kept.hashes)
        here = kept.run.hashes[start : start + self._step]
        if any(self._table.get(block_hash) is not kept.run for block_hash in here):
            self._wrong = self._wrong or f"a block of {kept.run!r} is not under its hash"
        return kept.pages[start * width : (start + self._step) * width]

    def _look_at_run(self, kept: _KeptRun) -> None:
        run, blocks = kept.run, len(kept.hashes)
        self._found += blocks
        self._found_evictable += kept.evictable_pages
        if not blocks or max((*kept.holds, *kept.forks), default=0) > blocks:
            self._wrong = self._wrong or f"blocks of {run!r} are in use and not there"
        for stop, holds in kept.holds.items():
            _add(self._uses, (run, stop), holds)
        for at, forks in kept.forks.items():
            _add(self._forks, (run, at), forks)
        if run.parent is not None:
            _add(self._forks, (run.parent, run.at), -1)

    def _place(self, item: Companion) -> None:
        """Every companion lies where its key says."""
        group, block_hash = item.key
        if self._tables[group].get(block_hash) is not item or self._table.get(block_hash) is not item.run:
            self._wrong = self._wrong or f"{item!r} is not its block's"

    def _look_at_hold(self, hold: _Hold) -> Iterator[None]:
        for (run, stop), used in zip(hold.path, hold.used, strict=True):
            for start in range(0, stop, self._step):
                some = used[start : start + self._step]
                if some != hold.hashes[run.first + start : run.first + start + len(some)] or len(used) < stop:
                    raise IntegrityError(f"reservation {hold.request_id!r} locks a path that is not its own")
                yield
            _add(self._uses, (run, stop), -1)
        for companion in hold.companions:
            _add(self._locks, companion, -1)
        for start in range(0, len(hold.own_pages), self._step):
            self._count_pages(hold.own_pages[start : start + self._step])
            yield

    def _look_at_companions(self, looked: Sequence[tuple[Companion, int]]) -> None:
        self._count_pages(list(chain.from_iterable(companion.pages for companion, _ in looked)))
        self._found += len(looked)
        for companion, locks in looked:
            if locks:
                _add(self._locks, companion, locks)
            else:
                self._found_evictable += len(companion.pages)

    def _count_pages(self, held: Sequence[int]) -> None:
        pages = np.array(held, np.int64)
        foreign = pages[(pages < 0) | (pages >= self._holders.size)]
        if foreign.size:
            raise IntegrityError(f"page {foreign[0]} is not of this pool")
        some, count = np.unique(pages, return_counts=True)
        self._holders[some] = np.minimum(self._holders[some] + count, MOST_HOLDERS)

    def _conclude(self) -> None:
        if self._wrong or self._found != self._listed:
            raise IntegrityError(
                self._wrong or f"{self._found} blocks and states are in runs, {self._listed} are listed"
            )
        wrong = np.flatnonzero(self._holders != 1)
        if wrong.size:
            raise IntegrityError(f"pages lost or held twice: {wrong[:8].tolist()} ({wrong.size} in all)")
        if self._found_evictable != self._evictable_pages:
            raise IntegrityError(f"{self._found_evictable} pages are evictable, {self._evictable_pages} were counted")
        items: list[tuple[Item, int]] = [(run, more) for (run, _), more in self._uses.items()]
        for item, more in (*items, *self._locks.items()):
            if item.stamp < self._number:
                raise IntegrityError(f"{item!r} is in use but not cached")
            raise IntegrityError(f"{item!r} is locked {more:+d} times more than it is used")
        for (run, at), more in self._forks.items():
            if run.stamp < self._number:
                raise IntegrityError(f"{run!r} is not there and has orphans")
            raise IntegrityError(f"{run!r} counts {more:+d} runs more than go on after {at} of its blocks")


def _add(balance: dict[T, int], item: T, number: int) -> None:
    """Numbers that must come to nothing: of an item for which they do nothing is left."""
    if left := balance.get(item, 0) + number:
        balance[item] = left
    else:
        balance.pop(item, None)

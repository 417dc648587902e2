"""Checks a cache: every page has one holder, every lock a reservation, every block its parent.

A check of a million blocks takes most of a second, so it is made in steps, between which the cache may change. It judges what
there was when it began: what is about to change is noted first, if the check has not come to it (`keep`). A block's stamp is
the number of the last check that has seen it, or of the last one before the block came.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np

from hybrid_cache.cache.blocks import BlockNode, Companion, Item
from hybrid_cache.cache.pool import PagePool
from hybrid_cache.cache.reservation import ReservedPages
from hybrid_cache.errors import IntegrityError

STEP: Final = 1024  # blocks or pages that are looked at in one go: a millisecond
PARTS: Final = 256
MOST_HOLDERS: Final = 255  # a page with more is said to have so many

T = TypeVar("T")
Nodes = Mapping[bytes, BlockNode]
Companions = Sequence[Mapping[bytes, Companion]]


class _Hold(NamedTuple):
    """What a reservation held when the check began."""

    request_id: str
    hashes: Sequence[bytes]
    nodes: Sequence[BlockNode]
    companions: Sequence[Companion]
    own_pages: Sequence[Sequence[int]]


class IntegrityCheck:
    """One check. The cache calls `keep` before anything in it changes, until `run` has ended."""

    def __init__(
        self,
        number: int,
        nodes: Nodes,
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
        self._table, self._tables = nodes, companions
        self._nodes = list(nodes.values())
        self._companions = [companion for group in companions for companion in group.values()]
        self._holds = [
            _Hold(
                hold.request_id, hold.hashes, list(hold.nodes), list(hold.companions),
                [*hold.own_blocks, *hold.own_windows.values(), *hold.own_states.values()],
            )
            for hold in holds
        ]  # fmt: skip
        self._listed = len(self._nodes) + len(self._companions)
        self._free = pool.free_pages()
        self._evictable_pages = evictable_pages
        self._holders = np.zeros(pool.num_pages, np.uint8)  # of each page
        self._found_evictable = self._found = 0
        self._kept: list[tuple[Item, int, int]] = []
        self._locks, self._children = _Balance[Item](), _Balance[bytes]()
        self._wrong = ""

    def keep(self, items: Iterable[Item]) -> None:
        """These are about to change: locks, children, or that they are there at all."""
        number = self._number
        for item in items:
            if item.stamp < number:
                item.stamp = number
                self._kept.append((item, item.locks, item.children if isinstance(item, BlockNode) else 0))
                self._place(item)

    def run(self) -> Iterator[None]:
        """Looks at everything, step by step. Raises IntegrityError."""
        yield  # what there is has been listed: some milliseconds for a million blocks
        for pages in self._parts(self._free):
            self._count_pages([pages])
            yield
        for hold in self._holds:
            yield from self._look_at_hold(hold)
        for nodes in self._parts(self._nodes):
            self._look_at_nodes(self._fresh(nodes))
            yield from self._look_at_kept()
        for companions in self._parts(self._companions):
            self._look_at_companions(self._fresh(companions))
            yield from self._look_at_kept()
        self._conclude()

    def _parts(self, items: list[T]) -> Iterator[list[T]]:
        """A list from its end on, which grows shorter: a million items are not let go of in one go either."""
        while items:
            yield items[-self._step :]
            del items[-self._step :]

    def _fresh(self, items: Sequence[Item]) -> list[tuple[Item, int, int]]:
        """Those that were not kept, as they are."""
        number = self._number
        fresh = [item for item in items if item.stamp < number]
        for item in fresh:
            item.stamp = number
            self._place(item)
        return [(item, item.locks, item.children if isinstance(item, BlockNode) else 0) for item in fresh]

    def _look_at_kept(self) -> Iterator[None]:
        while self._kept:
            some, self._kept = self._kept[: self._step], self._kept[self._step :]
            self._look_at_nodes([each for each in some if isinstance(each[0], BlockNode)])
            self._look_at_companions([each for each in some if isinstance(each[0], Companion)])
            yield
        yield

    def _place(self, item: Item) -> None:
        """Every item lies where its key says."""
        if isinstance(item, BlockNode):
            if self._table.get(item.hash) is not item:
                self._wrong = self._wrong or f"{item!r} is not under its hash"
            return
        group, block_hash = item.key
        if self._tables[group].get(block_hash) is not item or self._table.get(block_hash) is not item.node:
            self._wrong = self._wrong or f"{item!r} is not its node's"

    def _look_at_hold(self, hold: _Hold) -> Iterator[None]:
        for start in range(0, len(hold.nodes), self._step):
            nodes = hold.nodes[start : start + self._step]
            if [node.hash for node in nodes] != list(hold.hashes[start : start + len(nodes)]):
                raise IntegrityError(f"reservation {hold.request_id!r} locks a path that is not its own")
            for node in nodes:
                self._locks.add(node.hash, node, -1)
            yield
        for companion in hold.companions:
            self._locks.add(companion.node.hash, companion, -1)
        for start in range(0, len(hold.own_pages), self._step):
            self._count_pages(hold.own_pages[start : start + self._step])
            yield

    def _look_at_nodes(self, looked: Sequence[tuple[Item, int, int]]) -> None:
        nodes = [node for node, _, _ in looked if isinstance(node, BlockNode)]
        self._count_pages([node.pages for node in nodes])
        self._found += len(nodes)
        counted = Counter([node.parent for node in nodes])
        for node, locks, children in looked:
            assert isinstance(node, BlockNode)
            if locks:
                self._locks.add(node.hash, node, locks)
            else:
                self._found_evictable += len(node.pages)
            if children and children != (here := counted.pop(node.hash, 0)):
                self._children.add(node.hash, node.hash, children - here)
        counted.pop(None, None)
        for parent, count in counted.items():
            assert parent is not None
            self._children.add(parent, parent, -count)

    def _look_at_companions(self, looked: Sequence[tuple[Item, int, int]]) -> None:
        self._count_pages([companion.pages for companion, _, _ in looked])
        self._found += len(looked)
        for companion, locks, _ in looked:
            assert isinstance(companion, Companion)
            if locks:
                self._locks.add(companion.node.hash, companion, locks)
            else:
                self._found_evictable += len(companion.pages)

    def _count_pages(self, held: Sequence[Sequence[int]]) -> None:
        pages = np.fromiter(chain.from_iterable(held), np.int64)
        foreign = pages[(pages < 0) | (pages >= self._holders.size)]
        if foreign.size:
            raise IntegrityError(f"page {foreign[0]} is not of this pool")
        some, count = np.unique(pages, return_counts=True)
        self._holders[some] = np.minimum(self._holders[some] + count, MOST_HOLDERS)

    def _conclude(self) -> None:
        if self._wrong or self._found != self._listed:
            raise IntegrityError(self._wrong or "a block lies under two hashes")
        wrong = np.flatnonzero(self._holders != 1)
        if wrong.size:
            raise IntegrityError(f"pages lost or held twice: {wrong[:8].tolist()} ({wrong.size} in all)")
        if self._found_evictable != self._evictable_pages:
            raise IntegrityError(f"{self._found_evictable} pages are evictable, {self._evictable_pages} were counted")
        for item, more in self._locks.left():
            if item.stamp < self._number:
                raise IntegrityError(f"{item!r} is in use but not cached")
            raise IntegrityError(f"{item!r} is locked {more:+d} times more than it is used")
        for block_hash, more in self._children.left():
            node = self._table.get(block_hash)
            if node is None or node.stamp < self._number:
                raise IntegrityError(f"block {block_hash[:4].hex()} is not there and has orphans")
            raise IntegrityError(f"{node!r} counts {more:+d} children more than it has")


class _Balance(Generic[T]):
    """Numbers that must come to nothing for every item, in parts that are each quick to grow."""

    def __init__(self) -> None:
        self._parts: list[dict[T, int]] = [{} for _ in range(PARTS)]

    def add(self, block_hash: bytes, item: T, number: int) -> None:
        part = self._parts[block_hash[0]]
        if sum_ := part.get(item, 0) + number:
            part[item] = sum_
        else:
            part.pop(item, None)

    def left(self) -> Iterator[tuple[T, int]]:
        for part in self._parts:
            yield from part.items()

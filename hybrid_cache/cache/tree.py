"""The tree of cached prefixes and its pages: how requests lock it, how it grows, and how it shrinks.

A block with its locks is in blocks.py, what a request holds of the tree in reservation.py. Paths are long: a cache
spends most of its time in these loops.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Container, Generator, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Final

from hybrid_cache.cache.blocks import BlockNode, Companion, Pages
from hybrid_cache.cache.events import EventLog
from hybrid_cache.cache.integrity import STEP, IntegrityCheck
from hybrid_cache.cache.lookup import full_hit
from hybrid_cache.cache.pool import PagePool
from hybrid_cache.cache.reservation import Purpose, ReservedPages, full_group_parts
from hybrid_cache.errors import OutOfPages
from hybrid_cache.eviction.base import EvictionPolicy
from hybrid_cache.layout.layout import ModelLayout

FIRST_AT_ONCE: Final = 2  # and eight times more each time
MOST_AT_ONCE: Final = 512  # ancestors that a policy is asked about in one go
UNUSED: Final = (1, 0)  # children and locks of a block that nothing but one block after it needs

_uses: Final = attrgetter("children", "locks")
_hash: Final = attrgetter("hash")
_pages: Final = attrgetter("pages")


class PrefixTree:
    """Nodes and companions over one pool of pages. Unlocked ones leave when room is needed."""

    def __init__(self, layout: ModelLayout, num_pages: int, eviction: EvictionPolicy, events: EventLog) -> None:
        self.layout = layout
        self.pool = PagePool(num_pages)
        self.evictable_pages = 0
        # Called while an evicted block's bytes are still in its pages: (group, hash, pages).
        self.on_evict: Callable[[int, bytes, Pages], None] | None = None
        self._eviction = eviction
        self._events = events
        self._nodes: dict[Any, BlockNode] = {}  # by hash
        self._companions: tuple[dict[bytes, Companion], ...] = tuple({} for _ in layout.groups)
        # The lookup's view of each group: nodes hold every full-attention group at once.
        self.held = tuple(
            self._nodes if group in layout.full_groups else self._companions[group]
            for group in range(len(layout.groups))
        )
        self._companion_groups = layout.companion_groups
        self._node_pages = sum(layout.pages_per_block(group) for group in layout.full_groups)
        self._node_parts = full_group_parts(layout)
        self._stamp = 0  # how many checks have begun
        self._check: IntegrityCheck | None = None  # under way

    def __repr__(self) -> str:
        return f"PrefixTree({self.pool!r}, {len(self._nodes)} blocks)"

    @property
    def num_pages(self) -> int:
        """Pages of all blocks and companions."""
        companions = sum(
            len(held) * self.layout.pages_per_block(group) for group, held in enumerate(self._companions) if held
        )
        return len(self._nodes) * self._node_pages + companions

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
            self._stamp, self._nodes, self._companions, holds, self.pool, self.evictable_pages, step=step
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
            self._lock_companion(hold, self._companions[group][hold.nodes[-1].hash])

    def lock_path(self, hold: ReservedPages, blocks: int) -> int:
        """Locks the request's blocks up to `blocks`, all cached, as far as it does not do so yet; returns how many pages were
        evictable till now.
        """
        path = hold.nodes
        locked = list(map(self._nodes.__getitem__, hold.hashes[len(path) : blocks]))
        if self._check is not None:
            self._check.keep(locked)
        unlocked = len(locked) - _num_locked(locked)
        for node in locked:
            node.locks += 1
        path += locked
        self.evictable_pages -= unlocked * self._node_pages
        # Only the last one can be without children, and others were not offered.
        if unlocked and path[-1].locks == 1 and not path[-1].children:
            self._eviction.withdraw(path[-1].hash)
        return unlocked * self._node_pages

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
        return bisect_left(hashes, True, key=lambda block_hash: not self._nodes[block_hash].locks)

    def unlock_steps(self, hold: ReservedPages, now: float, step: int) -> Iterator[None]:
        """`unlock` in steps of so many blocks, tail first. Between them the hold locks what is left of it."""
        while self._node_pages and len(hold.nodes) > step:
            self._unlock_companions(hold, now)
            self._unlock_path(hold, now, len(hold.nodes) - step)
            yield
        self.unlock(hold, now)

    def unlock(self, hold: ReservedPages, now: float) -> None:
        """Undoes all locks of a request."""
        # Tail first, so that age alone already evicts tails before heads.
        self._unlock_companions(hold, now)
        self.unlock_from(hold, 0, now)

    def unlock_from(self, hold: ReservedPages, start: int, now: float) -> None:
        """Undoes the locks of a request's blocks from `start` on."""
        if not self._node_pages:
            self._unlock_empty(hold, start)
        elif len(hold.nodes) > start:
            self._unlock_path(hold, now, start)

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

    def _unlock_path(self, hold: ReservedPages, now: float, start: int) -> None:
        left = hold.nodes[start:]
        if self._check is not None:
            self._check.keep(left)
        hashes = hold.hashes[start : len(hold.nodes)]
        del hold.nodes[start:]
        for node in left:
            node.locks -= 1
        self.evictable_pages += (len(left) - _num_locked(left)) * self._node_pages
        hashes.reverse()
        self._eviction.touch_path(hashes, now)
        tail = left[-1]
        if not tail.locks and not tail.children:
            self._eviction.offer(tail.hash, now)

    def _unlock_empty(self, hold: ReservedPages, start: int) -> None:
        if self._check is not None:
            self._check.keep(hold.nodes[start:])
        while len(hold.nodes) > start:
            node = hold.nodes.pop()
            node.locks -= 1
            self._prune(node)

    # Growing

    def commit_blocks(self, hold: ReservedPages, full_blocks: int) -> None:
        """A request's own blocks up to `full_blocks` join the tree; where one is there already, ours stays its own."""
        path, own, first = hold.nodes, hold.own_blocks, hold.first_own
        # What is held of a path is its beginning: others may have stored more of it meanwhile.
        held = full_hit(self._nodes, hold.hashes, full_blocks)
        if held > len(path):
            self.lock_path(hold, held)
        start = len(path)
        if start >= full_blocks:
            return
        added, count = hold.hashes[start:full_blocks], full_blocks - start
        parents: list[bytes | None] = [None, *added[:-1]]
        if path:
            if self._check is not None:
                self._check.keep((path[-1],))
            path[-1].children += 1
            parents[0] = path[-1].hash
        ours = own[start - first : full_blocks - first]
        stamp, one, run = repeat(self._stamp), repeat(1), repeat(added.copy())
        new = list(map(BlockNode, added, parents, ours, stamp, range(start, full_blocks), one, one, run))
        new[-1].children = 0
        self._nodes.update(zip(added, new, strict=True))
        path += new
        own[start - first : full_blocks - first] = [()] * count
        for group in self.layout.full_groups:
            self._events.stored(group, added)

    def commit_companions(self, hold: ReservedPages, full_blocks: int, unfilled: Container[tuple[int, int]]) -> None:
        """The same for window blocks and aligned snapshots, but those of `unfilled`."""
        for group, index in [key for key in hold.own_windows if key not in unfilled]:
            if index < full_blocks and hold.hashes[index] not in self._companions[group]:
                self._add_companion(hold, hold.nodes[index], group, hold.own_windows.pop((group, index)))
        for group, length in [key for key in hold.own_states if key not in unfilled]:
            blocks, rest = divmod(length, self.layout.block_size)
            if not rest and blocks <= full_blocks and hold.hashes[blocks - 1] not in self._companions[group]:
                self._add_companion(hold, hold.nodes[blocks - 1], group, hold.own_states.pop((group, length)))

    def _add_companion(self, hold: ReservedPages, node: BlockNode, group: int, pages: Pages) -> None:
        companion = self._companions[group][node.hash] = Companion(node, group, pages, self._stamp)
        companion.locks = 1
        hold.companions.append(companion)
        self._events.stored(group, (node.hash,))

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
        policy, nodes = self._eviction, self._nodes
        left: list[BlockNode] = []
        try:
            while num_pages > 0:
                key: Any = policy.pop_victim(now)
                if isinstance(key, tuple):
                    num_pages -= self._evict_companion(key)
                    continue
                if self._check is not None:
                    self._keep_leaving(nodes[key])
                last = _take_out(self._nodes, nodes[key])
                assert not last.locks
                assert not last.children
                left.append(last)
                num_pages -= self._node_pages
                if self._companion_groups:
                    num_pages -= self._drop_companions_of(last)
                for ancestors in self._taken_with(last, num_pages, now):
                    left += ancestors
                    num_pages -= len(ancestors) * self._node_pages
                self._lose_child(left[-1], now)
        finally:  # their pages are free, whatever has become of the next one
            self._on_nodes_gone(left)

    def _taken_with(self, node: BlockNode, num_pages: int, now: float) -> Iterator[list[BlockNode]]:
        """Takes out the ancestors that are the next victims, as far as so many pages need: more of them each time."""
        wanted = FIRST_AT_ONCE
        while num_pages > 0:
            wanted = min(wanted, MOST_AT_ONCE, -(-num_pages // self._node_pages))
            path = _leaving_with(self._nodes, self._companions, node, wanted)
            hashes = list(map(_hash, path))
            taken = self._eviction.take_path(hashes, now) if hashes else 0
            if not taken:
                return
            del path[taken:]
            if self._check is not None:
                self._check.keep(path)
            del path[0].run[-taken:]
            deque(map(self._nodes.__delitem__, hashes[:taken]), maxlen=0)
            yield path
            if taken < len(hashes):
                return
            node, num_pages, wanted = path[-1], num_pages - taken * self._node_pages, 8 * wanted

    def _lose_child(self, node: BlockNode, now: float) -> None:
        """For the parent of a node that has left."""
        if node.parent is None:
            return
        parent = self._nodes[node.parent]
        if self._check is not None:
            self._check.keep((parent,))
        parent.children -= 1
        if not parent.children and not parent.locks:
            self._eviction.offer(parent.hash, now)

    def drop(self, hashes: Sequence[bytes], now: float) -> None:
        """Removes the blocks of a chain, its last one first, up to the first that is held or has children."""
        left: list[BlockNode] = []
        for block_hash in reversed(hashes):
            node = self._nodes.get(block_hash)
            if node is None:
                continue
            if node.locks or node.children:
                break
            if self._check is not None:
                self._keep_leaving(node)
            self._drop_companions_of(node)
            if not self._node_pages:
                self._prune(node)
                continue
            self._eviction.forget(block_hash)
            left.append(_take_out(self._nodes, node))
            self._lose_child(node, now)
        self._on_nodes_gone(left)

    def _evict_companion(self, key: tuple[Any, ...]) -> int:
        group, block_hash = key
        companion = self._companions[group][block_hash]
        freed = self._drop_companion(companion)
        self._prune(companion.node)
        return freed

    def _on_nodes_gone(self, left: Sequence[BlockNode]) -> None:
        """Finishes the removal of nodes that were taken out of the tree, children first."""
        self.evictable_pages -= len(left) * self._node_pages
        hashes, pages_of = list(map(_hash, left)), list(map(_pages, left))
        # The first block's pages lie on top again, so the next block gets them in order.
        self.pool.free(list(chain.from_iterable(reversed(pages_of))))
        for group, part in zip(self.layout.full_groups, self._node_parts, strict=True):
            self._events.removed(group, hashes)
            if self.on_evict is not None:
                for block_hash, pages in zip(hashes, pages_of, strict=True):
                    self.on_evict(group, block_hash, pages[part])

    def _drop_companions_of(self, node: BlockNode) -> int:
        """Drops what cannot stay without `node`; returns the number of pages that this frees."""
        freed = 0
        for group in self._companion_groups:
            companion = self._companions[group].get(node.hash)
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

    def _prune(self, node: BlockNode) -> None:
        # Without full attention a node is only a place for companions.
        empty: BlockNode | None = node
        while empty and not (self._node_pages or empty.locks or empty.children or self._has_companions(empty)):
            if self._check is not None:
                self._keep_leaving(empty)
            _take_out(self._nodes, empty)
            empty = None if empty.parent is None else self._nodes[empty.parent]
            if empty is not None:
                empty.children -= 1

    def _keep_leaving(self, node: BlockNode) -> None:
        """For the check that is under way, before a node leaves, and its companions with it."""
        assert self._check is not None
        held = (self._companions[group].get(node.hash) for group in self._companion_groups)
        self._check.keep([companion for companion in held if companion is not None])
        self._check.keep((node,) if node.parent is None else (node, self._nodes[node.parent]))

    def _has_companions(self, node: BlockNode) -> bool:
        return any(node.hash in self._companions[group] for group in self._companion_groups)


def _num_locked(path: Sequence[BlockNode]) -> int:
    """The locked blocks of a part of a path: they are its beginning."""
    return bisect_left(path, True, key=lambda node: not node.locks)


def _leaving_with(
    nodes: Mapping[bytes, BlockNode], companions: Sequence[Mapping[bytes, Companion]], node: BlockNode, most: int
) -> list[BlockNode]:
    """The nearest ancestors, all of one run, that nothing but `node` keeps from leaving, and that nothing leaves with."""
    if node.parent is None or (parent := nodes[node.parent]).children != 1:
        return []
    path = list(map(nodes.__getitem__, reversed(parent.run[-most:])))
    uses = list(map(_uses, path))
    if uses.count(UNUSED) < len(uses):
        del path[next(index for index, each in enumerate(uses) if each != UNUSED) :]
    for held in companions:
        if path and held and not held.keys().isdisjoint(map(_hash, path)):
            del path[next(index for index, each in enumerate(path) if each.hash in held) :]
    return path


def _take_out(nodes: dict[Any, BlockNode], node: BlockNode) -> BlockNode:
    """It has no children: it is the last one of its run."""
    del nodes[node.hash]
    last = node.run.pop()
    assert last == node.hash
    return node

"""The hybrid prefix cache of one node: which pages hold what, who uses them, what may leave.

A request reserves (shared prefix locked, own pages allocated), fills its pages, commits (full blocks become prefix
blocks) and releases. Own pages are transfer-cache blocks: never matched, never evicted, gone with the reservation.

    tokens     [0, cached)           [cached, full blocks)      [.., num_tokens)
    pages      prefix, locked        own -> prefix at commit    own (half a block: never matched)

Single-threaded and pure: the owner serialises calls, passes `now` and moves the bytes.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, TypeAlias

from hybrid_cache.blocks import Companion, Item, Node, Pages
from hybrid_cache.errors import DuplicateReservation, IntegrityError, OutOfPages, UnknownReservation
from hybrid_cache.events import BlocksStored, CacheCleared, CacheEvent, EventLog, Medium
from hybrid_cache.eviction.base import EvictionPolicy, Key, Use
from hybrid_cache.eviction.choice import default_policy
from hybrid_cache.layout import ModelLayout
from hybrid_cache.lookup import PrefixHit, longest_common_hit
from hybrid_cache.pool import PagePool
from hybrid_cache.reservation import Hold, Purpose, Reservation, full_group_parts
from hybrid_cache.snapshots import BranchPoints, Prefill, SnapshotPolicy

Keys: TypeAlias = Sequence[tuple[int, int]]

EVENT_LIMIT: Final = 1 << 20  # hashes kept for a reader that does not come


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """Pages by use; free + prefix + transfer = total. `pages_locked` are prefix pages some request uses right now."""

    pages_total: int
    pages_free: int
    pages_prefix: int
    pages_transfer: int
    pages_locked: int
    reservations: int
    page_bytes: int


class PrefixCache:
    """Groups of KVCache over one pool of pages, matched by chained block hashes."""

    def __init__(
        self,
        layout: ModelLayout,
        num_pages: int,
        *,
        eviction: EvictionPolicy | None = None,
        snapshots: SnapshotPolicy | None = None,
        event_limit: int | None = None,
    ) -> None:
        """`event_limit`: hashes kept for `take_events`, EVENT_LIMIT unless given; 0 where nobody will ask."""
        self.layout = layout
        self._pool = PagePool(num_pages)
        self._eviction = eviction if eviction is not None else default_policy(layout)
        self._snapshots = snapshots or BranchPoints()
        self._nodes: dict[bytes, Node] = {}
        self._companions: tuple[dict[bytes, Companion], ...] = tuple({} for _ in layout.groups)
        # What a lookup sees of each group: nodes hold every full-attention group at once.
        self._held = tuple(
            self._nodes if group in layout.full_groups else self._companions[group]
            for group in range(len(layout.groups))
        )
        self._companion_groups = layout.companion_groups
        self._pages_per_block = tuple(layout.pages_per_block(group) for group in range(len(layout.groups)))
        self._node_pages = sum(self._pages_per_block[group] for group in layout.full_groups)
        self._node_parts = full_group_parts(layout)
        self._evictable_pages = 0
        self._holds: dict[str, Hold] = {}
        self._events = EventLog(EVENT_LIMIT if event_limit is None else event_limit)
        # Called while an evicted block's bytes are still in its pages: (group, hash, pages).
        self.on_evict: Callable[[int, bytes, Pages], None] | None = None

    def __repr__(self) -> str:
        return f"PrefixCache({self._pool!r}, {len(self._nodes)} blocks, {len(self._holds)} reservations)"

    # Reading

    def match(self, hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """How much of a prompt's first `num_tokens` tokens is cached. Changes nothing."""
        return longest_common_hit(self.layout, self._held, hashes, num_tokens)

    def held(self, group: int) -> Container[bytes]:
        """The hashes that a group can be matched at."""
        return self._held[group]

    def pages_of(self, group: int, block_hash: bytes) -> Pages:
        """The pages of a window's block or a snapshot; empty unless it is held."""
        companion = self._companions[group].get(block_hash)
        return companion.pages if companion is not None else ()

    def report(self) -> PoolReport:
        prefix = self._prefix_pages()
        free = self._pool.num_free
        return PoolReport(
            pages_total=self._pool.num_pages,
            pages_free=free,
            pages_prefix=prefix,
            pages_transfer=self._pool.num_pages - free - prefix,
            pages_locked=prefix - self._evictable_pages,
            reservations=len(self._holds),
            page_bytes=self.layout.page_bytes,
        )

    def snapshot(self) -> tuple[BlocksStored, ...]:
        """Everything that can be matched, one entry per group, parents before children."""
        return tuple(BlocksStored(group, tuple(held)) for group, held in enumerate(self._held))

    def take_events(self) -> list[CacheEvent]:
        """Changes since the last call. A reader that stayed away too long gets CacheCleared and a snapshot instead."""
        events = self._events.take()
        return [CacheCleared(Medium.MEMORY), *self.snapshot()] if events is None else events

    # Transactions

    def reserve(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        *,
        now: float,
        ttl_s: float,
        purpose: Purpose,
        category: str = "",
    ) -> Reservation:
        """Locks the reusable prefix and allocates pages for the rest of `num_tokens` tokens, or changes nothing.

        `hashes` are those of the full blocks; blocks without one stay private to the request. `category` is the kind of
        request for workload-aware eviction. Raises OutOfPages and DuplicateReservation.
        """
        if request_id in self._holds:
            raise DuplicateReservation(f"request {request_id!r} already holds a reservation")
        if num_tokens <= 0:
            raise ValueError(f"num_tokens must be positive, not {num_tokens}")
        hashes = list(hashes[: num_tokens // self.layout.block_size])
        hit = self.match(hashes, num_tokens)
        cached = hit.num_tokens if purpose is Purpose.PREFILL else hit.attention_tokens
        hold = Hold(request_id, hashes, num_tokens, now + ttl_s)
        self._lock_prefix(hold, cached, purpose)
        try:
            self._allocate_own(hold, cached, self._snapshot_lengths(num_tokens, hit, purpose), now)
        except OutOfPages:
            self._unlock(hold, now)
            raise
        self._holds[request_id] = hold
        if purpose not in (Purpose.PROMOTION, Purpose.ATTENTION):  # the request itself is still to come
            self._eviction.begin(Use(now, hashes, category))
        return Reservation(hold, self.layout, purpose, cached)

    def pin(self, request_id: str, hashes: Sequence[bytes], num_tokens: int, *, now: float, ttl_s: float) -> int:
        """Locks the longest prefix that a prefill could reuse, without pages of its own; returns its tokens.

        Ends like a reservation: `release`, `abort` or `expire`. Raises DuplicateReservation.
        """
        if request_id in self._holds:
            raise DuplicateReservation(f"request {request_id!r} already holds a reservation")
        length = self.match(hashes, num_tokens).num_tokens
        blocks = list(hashes[: length // self.layout.block_size])
        hold = Hold(request_id, blocks, length, now + ttl_s)
        self._lock_prefix(hold, length, Purpose.PREFILL)
        self._holds[request_id] = hold
        return length

    def commit(
        self, request_id: str, filled_tokens: int, now: float, unfilled: Container[tuple[int, int]] = ()
    ) -> None:
        """Full blocks and aligned snapshots within the first `filled_tokens` tokens become prefix blocks.

        `unfilled` stay the request's own: (group, block) of windows and (group, length) of states that nobody wrote.

        May be called as prefill goes on. Where a block is cached already, the older one stays and ours goes at release.
        Raises UnknownReservation.
        """
        hold = self._hold(request_id)
        full_blocks = min(filled_tokens, hold.num_tokens) // self.layout.block_size
        full_blocks = min(full_blocks, len(hold.hashes))
        self._commit_blocks(hold, full_blocks)
        self._commit_companions(hold, full_blocks, unfilled)

    def release(self, request_id: str, now: float) -> None:
        """Unlocks what the request shares and frees what is its own. Unknown ids are fine."""
        hold = self._holds.pop(request_id, None)
        if hold is not None:
            self._pool.free(hold.own_pages())
            self._unlock(hold, now)

    def abort(self, request_id: str, now: float) -> None:
        """The request will not be finished: what it did not commit is gone. Unknown ids are fine."""
        self.release(request_id, now)

    def renew(self, request_id: str, *, now: float, ttl_s: float) -> None:
        """Extends the lease of a reservation. Raises UnknownReservation."""
        self._hold(request_id).deadline = now + ttl_s

    def expire(self, now: float) -> list[str]:
        """Aborts reservations whose lease has ended and names them. Nobody may write to their pages any more."""
        ended = [request_id for request_id, hold in self._holds.items() if hold.deadline <= now]
        for request_id in ended:
            self.abort(request_id, now)
        return ended

    def shrink(self, num_pages: int, now: float) -> int:
        """Evicts until `num_pages` more pages are free, or nothing can leave; returns how many more there are."""
        before = self._pool.num_free
        self._evict(min(num_pages, self._evictable_pages), now)
        return self._pool.num_free - before

    def clear(self, now: float) -> None:
        """Drops everything that is not in use."""
        self._evict(self._evictable_pages, now)

    # Locks (paths are long: these loops and those of eviction are what a cache spends its time on)

    def _hold(self, request_id: str) -> Hold:
        try:
            return self._holds[request_id]
        except KeyError:
            raise UnknownReservation(f"no reservation {request_id!r}") from None

    def _lock_prefix(self, hold: Hold, cached: int, purpose: Purpose) -> None:
        self._lock_path(hold, cached // self.layout.block_size)
        if purpose is not Purpose.PREFILL or not cached:
            return
        for group in self.layout.window_groups:
            for index in self.layout.window_blocks(group, cached):
                self._lock_companion(hold, self._companions[group][hold.hashes[index]])
        for group in self.layout.state_groups:
            self._lock_companion(hold, self._companions[group][hold.nodes[-1].hash])

    def _lock_path(self, hold: Hold, blocks: int) -> None:
        """Locks the request's blocks up to `blocks`, all of which are cached, as far as it does not do so yet."""
        nodes, path = self._nodes, hold.nodes
        unlocked = 0
        for block_hash in hold.hashes[len(path) : blocks]:
            node = nodes[block_hash]
            unlocked += not node.locks
            node.locks += 1
            path.append(node)
        self._evictable_pages -= unlocked * self._node_pages
        # Only the last one can be without children, and others were not offered.
        if unlocked and path[-1].locks == 1 and not path[-1].children:
            self._eviction.withdraw(path[-1].hash)

    def _lock_companion(self, hold: Hold, companion: Companion) -> None:
        if not companion.locks:
            self._evictable_pages -= len(companion.pages)
            self._eviction.withdraw(companion.key)
        companion.locks += 1
        hold.companions.append(companion)

    def _unlock(self, hold: Hold, now: float) -> None:
        # Tail first, so that age alone already evicts tails before heads.
        for companion in reversed(hold.companions):
            companion.locks -= 1
            self._eviction.touch(companion.key, now)
            if not companion.locks:
                self._evictable_pages += len(companion.pages)
                self._eviction.offer(companion.key, now)
        if not self._node_pages:
            self._unlock_empty(hold)
        elif hold.nodes:
            self._unlock_path(hold, now)

    def _unlock_path(self, hold: Hold, now: float) -> None:
        path = hold.nodes
        unlocked = 0
        for node in path:
            node.locks -= 1
            unlocked += not node.locks
        self._evictable_pages += unlocked * self._node_pages
        self._eviction.touch_path(hold.hashes[len(path) - 1 :: -1], now)
        tail = path[-1]
        if not tail.locks and not tail.children:
            self._eviction.offer(tail.hash, now)

    def _unlock_empty(self, hold: Hold) -> None:
        for node in reversed(hold.nodes):
            node.locks -= 1
            self._prune(node)

    # Allocation

    def _snapshot_lengths(self, num_tokens: int, hit: PrefixHit, purpose: Purpose) -> set[int]:
        if purpose is Purpose.ATTENTION:
            return set()
        if purpose is not Purpose.PREFILL or not self._companion_groups:
            return {num_tokens}
        prefill = Prefill(
            num_tokens=num_tokens,
            cached_tokens=hit.num_tokens,
            attention_tokens=hit.attention_tokens,
            block_size=self.layout.block_size,
        )
        wanted = {length for length in self._snapshots.lengths(prefill) if hit.num_tokens < length <= num_tokens}
        return wanted | ({num_tokens} - {hit.num_tokens})

    def _allocate_own(self, hold: Hold, cached: int, lengths: set[int], now: float) -> None:
        try:
            self._allocate_for(hold, cached, lengths, now)
        except OutOfPages:
            # Extra snapshots serve later prompts; this one needs only its end.
            if lengths <= {hold.num_tokens}:
                raise
            self._allocate_for(hold, cached, {hold.num_tokens}, now)

    def _allocate_for(self, hold: Hold, cached: int, lengths: Iterable[int], now: float) -> None:
        size = self._pages_per_block
        first, stop = cached // self.layout.block_size, -(-hold.num_tokens // self.layout.block_size)
        windows, states = self._own_companions(hold, sorted(lengths)) if self._companion_groups else ((), ())
        count = (stop - first) * self._node_pages
        count += sum([size[group] for owned in (windows, states) for group, _ in owned])
        pages = self._allocate(count, now)
        hold.first_own = first
        hold.own_blocks = self._blocks_of(pages, stop - first)
        if self._companion_groups:
            rest = iter(pages[(stop - first) * self._node_pages :])
            hold.own_windows = {key: tuple(islice(rest, size[key[0]])) for key in windows}
            hold.own_states = {key: tuple(islice(rest, size[key[0]])) for key in states}

    def _own_companions(self, hold: Hold, lengths: Sequence[int]) -> tuple[Keys, Keys]:
        """The window blocks (group, block) and snapshots (group, length) that a request needs room for."""
        windows = []
        for group in self.layout.window_groups:
            # A landing takes its whole tail from the wire; a prefill finds what lies before `cached` locked.
            shared = {companion.node.index for companion in hold.companions if companion.group == group}
            tail = {index for length in lengths for index in self.layout.window_blocks(group, length)}
            windows += [(group, index) for index in sorted(tail - shared)]
        return windows, [(group, length) for group in self.layout.state_groups for length in lengths]

    def _blocks_of(self, pages: Sequence[int], count: int) -> list[Pages]:
        """The first `pages`, dealt out to `count` blocks. Group after group, so that the blocks of one lie side by side."""
        columns, start = [], 0
        for group in self.layout.full_groups:
            size = self._pages_per_block[group]
            end = start + count * size
            columns += [pages[start + offset : end : size] for offset in range(size)]
            start = end
        return list(zip(*columns, strict=True)) if columns else [()] * count

    def _allocate(self, count: int, now: float) -> list[int]:
        free = self._pool.num_free
        if count > free:
            if count > free + self._evictable_pages:
                raise OutOfPages(count, free + self._evictable_pages)
            self._evict(count - free, now)
        return self._pool.allocate(count)

    # Growing and shrinking the tree

    def _commit_blocks(self, hold: Hold, full_blocks: int) -> None:
        nodes, path, own, first = self._nodes, hold.nodes, hold.own_blocks, hold.first_own
        added = []
        parent = path[-1] if path else None
        for index in range(len(path), full_blocks):
            block_hash = hold.hashes[index]
            if block_hash in nodes:
                self._lock_path(hold, index + 1)
                parent = path[-1]
                continue
            parent = nodes[block_hash] = Node(block_hash, parent, own[index - first])
            own[index - first] = ()
            path.append(parent)
            added.append(block_hash)
        for group in self.layout.full_groups:
            self._events.stored(group, added)

    def _commit_companions(self, hold: Hold, full_blocks: int, unfilled: Container[tuple[int, int]]) -> None:
        for group, index in [key for key in hold.own_windows if key not in unfilled]:
            if index < full_blocks and hold.hashes[index] not in self._companions[group]:
                self._add_companion(hold, hold.nodes[index], group, hold.own_windows.pop((group, index)))
        for group, length in [key for key in hold.own_states if key not in unfilled]:
            blocks, rest = divmod(length, self.layout.block_size)
            if not rest and blocks <= full_blocks and hold.hashes[blocks - 1] not in self._companions[group]:
                self._add_companion(hold, hold.nodes[blocks - 1], group, hold.own_states.pop((group, length)))

    def _add_companion(self, hold: Hold, node: Node, group: int, pages: Pages) -> None:
        companion = self._companions[group][node.hash] = Companion(node, group, pages)
        companion.locks = 1
        hold.companions.append(companion)
        self._events.stored(group, (node.hash,))

    def _evict(self, num_pages: int, now: float) -> None:
        """What the policy likes least leaves, until `num_pages` more are free. As many must be evictable."""
        policy, nodes, node_pages = self._eviction, self._nodes, self._node_pages
        left: list[bytes] = []
        left_pages: list[Pages] = []
        while num_pages > 0:
            key = policy.pop_victim(now)
            if not isinstance(key, bytes):
                num_pages -= self._evict_companion(key)
                continue
            node = nodes.pop(key)
            assert not node.locks
            assert not node.children
            left.append(node.hash)
            left_pages.append(node.pages)
            num_pages -= node_pages
            if self._companion_groups:
                num_pages -= self._drop_companions_of(node)
            parent = node.parent
            if parent is not None:
                parent.children -= 1
                if not parent.children and not parent.locks:
                    policy.offer(parent.hash, now)
        self._on_nodes_gone(left, left_pages)

    def _evict_companion(self, key: Key) -> int:
        assert isinstance(key, tuple)
        group, block_hash = key
        companion = self._companions[group][block_hash]
        freed = self._drop_companion(companion)
        self._prune(companion.node)
        return freed

    def _on_nodes_gone(self, hashes: Sequence[bytes], pages_of: Sequence[Pages]) -> None:
        """What remains to be done for nodes that were taken out of the tree, children first."""
        self._evictable_pages -= len(hashes) * self._node_pages
        # Those of the first block lie on top again: what takes their place gets them in order.
        self._pool.free(list(chain.from_iterable(reversed(pages_of))))
        for group, part in zip(self.layout.full_groups, self._node_parts, strict=True):
            self._events.removed(group, hashes)
            if self.on_evict is not None:
                for block_hash, pages in zip(hashes, pages_of, strict=True):
                    self.on_evict(group, block_hash, pages[part])

    def _drop_companions_of(self, node: Node) -> int:
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
        group, block_hash = companion.key
        del self._companions[group][block_hash]
        self._evictable_pages -= len(companion.pages)
        if self.on_evict is not None:
            self.on_evict(group, block_hash, companion.pages)
        self._pool.free(companion.pages)
        self._events.removed(group, (block_hash,))
        return len(companion.pages)

    def _prune(self, node: Node) -> None:
        # Without full attention a node is only a place for companions.
        empty: Node | None = node
        while empty and not (self._node_pages or empty.locks or empty.children or self._has_companions(empty)):
            del self._nodes[empty.hash]
            empty = empty.parent
            if empty is not None:
                empty.children -= 1

    def _has_companions(self, node: Node) -> bool:
        return any(node.hash in self._companions[group] for group in self._companion_groups)

    # Books

    def _prefix_pages(self) -> int:
        companions = sum(
            len(held) * self.layout.pages_per_block(group) for group, held in enumerate(self._companions) if held
        )
        return len(self._nodes) * self._node_pages + companions

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page, lock and link is accounted for. Reads everything: for probes."""
        self._check_pages()
        self._check_locks()
        self._check_tree()

    def _check_pages(self) -> None:
        held = [page for node in self._nodes.values() for page in node.pages]
        held += [page for group in self._companions for companion in group.values() for page in companion.pages]
        held += [page for hold in self._holds.values() for page in hold.own_pages()]
        self._pool.check_integrity(held)
        evictable = sum(self._node_pages for node in self._nodes.values() if not node.locks)
        evictable += sum(len(c.pages) for group in self._companions for c in group.values() if not c.locks)
        if evictable != self._evictable_pages:
            raise IntegrityError(f"{evictable} pages are evictable, {self._evictable_pages} were counted")

    def _check_locks(self) -> None:
        locks: dict[Item, int] = {}
        for hold in self._holds.values():
            if [node.hash for node in hold.nodes] != hold.hashes[: len(hold.nodes)]:
                raise IntegrityError(f"reservation {hold.request_id!r} locks a path that is not its own")
            held: list[Item] = [*hold.nodes, *hold.companions]
            for item in held:
                locks[item] = locks.get(item, 0) + 1
        companions = [companion for group in self._companions for companion in group.values()]
        items: list[Item] = [*self._nodes.values(), *companions]
        for item in items:
            if item.locks != locks.pop(item, 0):
                raise IntegrityError(f"{item!r} is not locked as often as it is used")
        if locks:
            raise IntegrityError(f"in use but not cached: {list(locks)[:4]}")

    def _check_tree(self) -> None:
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            if node.parent is None:
                continue
            if self._nodes.get(node.parent.hash) is not node.parent:
                raise IntegrityError(f"{node!r} is an orphan")
            children[node.parent.hash] = children.get(node.parent.hash, 0) + 1
        for block_hash, node in self._nodes.items():
            if node.hash != block_hash or node.children != children.get(block_hash, 0):
                raise IntegrityError(f"{node!r} has {children.get(block_hash, 0)} children")
        for group, held in enumerate(self._companions):
            for block_hash, companion in held.items():
                if self._nodes.get(block_hash) is not companion.node or companion.key != (group, block_hash):
                    raise IntegrityError(f"{companion!r} is not its node's")

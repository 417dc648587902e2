"""The hybrid prefix cache of one node: which pages hold what, who uses them, what may leave.

A request reserves (shared prefix locked, own pages allocated), fills its pages, commits (full blocks become prefix
blocks) and releases. Own pages are transfer-cache blocks: never matched, never evicted, gone with the reservation.

    tokens     [0, cached)           [cached, full blocks)      [.., num_tokens)
    pages      prefix, locked        own -> prefix at commit    own (half a block: never matched)

Single-threaded and pure: the owner serialises calls, passes `now` and moves the bytes.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from hybrid_cache.blocks import Companion, Item, Node, Pages
from hybrid_cache.errors import DuplicateReservation, IntegrityError, OutOfPages, UnknownReservation
from hybrid_cache.events import BlocksStored, CacheCleared, CacheEvent, EventLog, Medium
from hybrid_cache.eviction.base import EvictionPolicy, Use
from hybrid_cache.eviction.choice import default_policy
from hybrid_cache.layout import ModelLayout
from hybrid_cache.lookup import PrefixHit, longest_common_hit
from hybrid_cache.pool import PagePool
from hybrid_cache.reservation import Hold, Purpose, Reservation
from hybrid_cache.snapshots import BranchPoints, Prefill, SnapshotPolicy

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
        self._pages_per_block = tuple(layout.pages_per_block(group) for group in range(len(layout.groups)))
        self._node_pages = sum(self._pages_per_block[group] for group in layout.full_groups)
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
        hold = Hold(request_id=request_id, hashes=hashes, num_tokens=num_tokens, deadline=now + ttl_s)
        self._lock_prefix(hold, cached, purpose)
        try:
            self._allocate_own(hold, cached, self._snapshot_lengths(num_tokens, hit, purpose), now)
        except OutOfPages:
            self._unlock(hold, now)
            raise
        self._holds[request_id] = hold
        if purpose not in (Purpose.PROMOTION, Purpose.ATTENTION):  # the request itself is still to come
            self._eviction.begin(Use(now, hashes, category))
        return self._describe(hold, cached, purpose)

    def pin(self, request_id: str, hashes: Sequence[bytes], num_tokens: int, *, now: float, ttl_s: float) -> int:
        """Locks the longest prefix that a prefill could reuse, without pages of its own; returns its tokens.

        Ends like a reservation: `release`, `abort` or `expire`. Raises DuplicateReservation.
        """
        if request_id in self._holds:
            raise DuplicateReservation(f"request {request_id!r} already holds a reservation")
        length = self.match(hashes, num_tokens).num_tokens
        blocks = list(hashes[: length // self.layout.block_size])
        hold = Hold(request_id=request_id, hashes=blocks, num_tokens=length, deadline=now + ttl_s)
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
        while self._evictable_pages and self._pool.num_free - before < num_pages:
            self._evict_one(now)
        return self._pool.num_free - before

    def clear(self, now: float) -> None:
        """Drops everything that is not in use."""
        while self._evictable_pages:
            self._evict_one(now)

    # Locks (paths are long: these loops and those of eviction are what a cache spends its time on)

    def _hold(self, request_id: str) -> Hold:
        try:
            return self._holds[request_id]
        except KeyError:
            raise UnknownReservation(f"no reservation {request_id!r}") from None

    def _lock_prefix(self, hold: Hold, cached: int, purpose: Purpose) -> None:
        blocks = cached // self.layout.block_size
        for block_hash in hold.hashes[:blocks]:
            self._lock_node(hold, self._nodes[block_hash])
        if purpose is not Purpose.PREFILL or not cached:
            return
        for group in self.layout.window_groups:
            for index in self.layout.window_blocks(group, cached):
                self._lock_companion(hold, hold.nodes[index].companions[group])
        for group in self.layout.state_groups:
            self._lock_companion(hold, hold.nodes[-1].companions[group])

    def _lock_node(self, hold: Hold, node: Node) -> None:
        if not node.locks:
            self._evictable_pages -= self._node_pages
            if not node.children:  # others were not offered
                self._eviction.withdraw(node.hash)
        node.locks += 1
        hold.nodes.append(node)

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
            self._unlock_empty(hold, now)
            return
        touch = self._eviction.touch
        for node in reversed(hold.nodes):
            node.locks -= 1
            touch(node.hash, now)
            if not node.locks:
                self._evictable_pages += self._node_pages
                if not node.children:
                    self._eviction.offer(node.hash, now)

    def _unlock_empty(self, hold: Hold, now: float) -> None:
        for node in reversed(hold.nodes):
            node.locks -= 1
            self._prune(node, now)

    # Allocation

    def _snapshot_lengths(self, num_tokens: int, hit: PrefixHit, purpose: Purpose) -> set[int]:
        if purpose is Purpose.ATTENTION:
            return set()
        if purpose is not Purpose.PREFILL or len(self.layout.full_groups) == len(self.layout.groups):
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
        lengths = sorted(lengths)
        first, stop = cached // self.layout.block_size, -(-hold.num_tokens // self.layout.block_size)
        windows = []
        for group in self.layout.window_groups:
            # A landing takes its whole tail from the wire; a prefill finds what lies before `cached` locked.
            shared = {companion.node.index for companion in hold.companions if companion.group == group}
            tail = {index for length in lengths for index in self.layout.window_blocks(group, length)}
            windows += [(group, index) for index in sorted(tail - shared)]
        states = [(group, length) for group in self.layout.state_groups for length in lengths]
        size = self._pages_per_block
        count = (stop - first) * self._node_pages + sum([size[group] for group, _ in windows + states])
        pages = iter(self._allocate(count, now))
        # Group after group, so that the blocks of one lie side by side.
        full = [_cut(pages, stop - first, size[group]) for group in self.layout.full_groups]
        hold.own_nodes = dict(zip(range(first, stop), zip(*full, strict=True), strict=False))
        hold.own_windows = {key: tuple(islice(pages, size[key[0]])) for key in windows}
        hold.own_states = {key: tuple(islice(pages, size[key[0]])) for key in states}

    def _allocate(self, count: int, now: float) -> list[int]:
        available = self._pool.num_free + self._evictable_pages
        if count > available:
            raise OutOfPages(count, available)
        pool = self._pool
        while pool.num_free < count:
            self._evict_one(now)
        return pool.allocate(count)

    def _describe(self, hold: Hold, cached: int, purpose: Purpose) -> Reservation:
        count = -(-hold.num_tokens // self.layout.block_size)
        blocks: list[list[Pages]] = [[] for _ in self.layout.groups]
        states: list[dict[int, Pages]] = [{} for _ in self.layout.groups]
        for position, group in enumerate(self.layout.full_groups):
            blocks[group] = [node.pages[position] for node in hold.nodes]
            blocks[group] += [own[position] for own in hold.own_nodes.values()]
        for group in self.layout.window_groups:
            blocks[group] = [()] * count
        for companion in hold.companions:
            if companion.group in self.layout.state_groups:
                states[companion.group][cached] = companion.pages
            else:
                blocks[companion.group][companion.node.index] = companion.pages
        for (group, index), pages in hold.own_windows.items():
            blocks[group][index] = pages
        for (group, length), pages in hold.own_states.items():
            states[group][length] = pages
        return Reservation(
            request_id=hold.request_id,
            purpose=purpose,
            num_tokens=hold.num_tokens,
            cached_tokens=cached,
            blocks=tuple(tuple(group) for group in blocks),
            states=tuple(states),
        )

    # Growing and shrinking the tree

    def _commit_blocks(self, hold: Hold, full_blocks: int) -> None:
        added = []
        parent = hold.nodes[-1] if hold.nodes else None
        for index in range(len(hold.nodes), full_blocks):
            block_hash = hold.hashes[index]
            node = self._nodes.get(block_hash)
            if node is None:
                pages = hold.own_nodes.pop(index) if self._node_pages else ()
                node = self._nodes[block_hash] = Node(block_hash, parent, pages)
                node.locks = 1
                hold.nodes.append(node)
                added.append(block_hash)
            else:
                self._lock_node(hold, node)
            parent = node
        for group in self.layout.full_groups:
            self._events.stored(group, added)

    def _commit_companions(self, hold: Hold, full_blocks: int, unfilled: Container[tuple[int, int]]) -> None:
        for group, index in [key for key in hold.own_windows if key not in unfilled]:
            if index < full_blocks and group not in hold.nodes[index].companions:
                self._add_companion(hold, hold.nodes[index], group, hold.own_windows.pop((group, index)))
        for group, length in [key for key in hold.own_states if key not in unfilled]:
            blocks, rest = divmod(length, self.layout.block_size)
            if not rest and blocks <= full_blocks and group not in hold.nodes[blocks - 1].companions:
                self._add_companion(hold, hold.nodes[blocks - 1], group, hold.own_states.pop((group, length)))

    def _add_companion(self, hold: Hold, node: Node, group: int, pages: Pages) -> None:
        companion = Companion(node, group, pages)
        companion.locks = 1
        hold.companions.append(companion)
        node.companions[group] = self._companions[group][node.hash] = companion
        self._events.stored(group, (node.hash,))

    def _evict_one(self, now: float) -> None:
        key = self._eviction.pop_victim(now)
        if isinstance(key, tuple):
            group, block_hash = key
            companion = self._companions[group][block_hash]
            self._drop_companion(companion)
            self._prune(companion.node, now)
        else:
            assert isinstance(key, bytes)
            self._drop_node(self._nodes.pop(key), now)

    def _drop_companion(self, companion: Companion) -> None:
        assert not companion.locks
        node = companion.node
        del node.companions[companion.group]
        del self._companions[companion.group][node.hash]
        self._evictable_pages -= len(companion.pages)
        if self.on_evict is not None:
            self.on_evict(companion.group, node.hash, companion.pages)
        self._pool.free(companion.pages)
        self._events.removed(companion.group, (node.hash,))

    def _drop_node(self, node: Node, now: float) -> None:
        """What remains to be done for a node that was taken out of `_nodes`."""
        assert not node.locks
        assert not node.children
        if node.companions:
            for companion in list(node.companions.values()):
                self._eviction.forget(companion.key)
                self._drop_companion(companion)
        self._evictable_pages -= self._node_pages
        block_hash, on_evict = node.hash, self.on_evict
        for group, pages in zip(self.layout.full_groups, node.pages, strict=True):
            if on_evict is not None:
                on_evict(group, block_hash, pages)
            self._pool.free(pages)
            self._events.removed(group, (block_hash,))
        parent = node.parent
        if parent is not None:
            parent.children -= 1
            if self._node_pages and not parent.locks and not parent.children:
                self._eviction.offer(parent.hash, now)

    def _prune(self, node: Node, now: float) -> None:
        # Without full attention a node is only a place for companions.
        empty: Node | None = node
        while empty and not (self._node_pages or empty.locks or empty.children or empty.companions):
            self._drop_node(self._nodes.pop(empty.hash), now)
            empty = empty.parent

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
        held = [page for node in self._nodes.values() for pages in node.pages for page in pages]
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
                if self._nodes[block_hash].companions.get(group) is not companion:
                    raise IntegrityError(f"{companion!r} is not its node's")


def _cut(pages: Iterator[int], blocks: int, pages_per_block: int) -> list[Pages]:
    """The next pages, block by block."""
    own = islice(pages, blocks * pages_per_block)
    return list(zip(*[own] * pages_per_block, strict=True))

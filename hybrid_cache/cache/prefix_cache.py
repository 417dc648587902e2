"""The hybrid prefix cache of one node: transactions of requests over the tree of cached prefixes (tree.py).

A request reserves (shared prefix locked, own pages allocated), fills its pages, commits (full blocks become prefix
blocks) and releases. Own pages are transfer-cache blocks: never matched, never evicted, gone with the reservation.

    tokens     [0, cached)           [cached, full blocks)      [.., num_tokens)
    pages      prefix, locked        own -> prefix at commit    own (half a block: never matched)

Single-threaded and pure: the owner serialises calls, passes `now` and moves the bytes.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hybrid_cache.cache.allocation import deal, need_of
from hybrid_cache.cache.blocks import Pages
from hybrid_cache.cache.events import BlocksStored, CacheCleared, CacheEvent, EventLog, Medium
from hybrid_cache.cache.integrity import STEP
from hybrid_cache.cache.lookup import PrefixHit, longest_common_hit
from hybrid_cache.cache.policy_news import PolicyNews
from hybrid_cache.cache.reservation import NO_HINTS, Hints, Purpose, Reservation, ReservedPages
from hybrid_cache.cache.snapshots import BranchPoints, Prefill, SnapshotPolicy
from hybrid_cache.cache.tree import PrefixTree
from hybrid_cache.errors import DuplicateReservation, OutOfPages, UnknownReservation
from hybrid_cache.eviction.base import EvictionPolicy, Use
from hybrid_cache.eviction.choice import default_policy
from hybrid_cache.layout.layout import ModelLayout

EVENT_LIMIT: Final = 1 << 20  # hashes kept for an absent reader
HITS_REMEMBERED: Final = 4096  # to know which prefixes have been of use lately


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
        event_limit: int = EVENT_LIMIT,
    ) -> None:
        """`event_limit`: hashes kept for `take_events`; 0 if nothing reads events."""
        self.layout = layout
        self._eviction = eviction if eviction is not None else default_policy(layout)
        self._snapshots = snapshots or BranchPoints()
        self._events = EventLog(event_limit)
        self._tree = PrefixTree(layout, num_pages, self._eviction, self._events)
        self._holds: dict[str, ReservedPages] = {}
        self._news = PolicyNews(self._eviction)
        self._found: OrderedDict[bytes, float] = OrderedDict()  # last blocks of the hits of late, and when that was

    def __repr__(self) -> str:
        return f"PrefixCache({self._tree!r}, {len(self._holds)} reservations)"

    @property
    def on_evict(self) -> Callable[[int, bytes, Pages], None] | None:
        """Called while an evicted block's bytes are still in its pages: (group, hash, pages)."""
        return self._tree.on_evict

    @on_evict.setter
    def on_evict(self, hook: Callable[[int, bytes, Pages], None] | None) -> None:
        self._tree.on_evict = hook

    # Reading

    def match(self, hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """How much of a prompt's first `num_tokens` tokens is cached. Changes nothing."""
        return longest_common_hit(self.layout, self._tree.held, hashes, num_tokens)

    def reusable(self, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose) -> int:
        """Tokens of a prompt that a request of `purpose` need not be given again."""
        return _cached(self.match(hashes, num_tokens), purpose)

    def attention_pages_wanted(self, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose) -> int:
        """Pages of full attention that `reserve` would take from free or evictable ones, never from other holders."""
        block_size = self.layout.block_size
        cached = self.reusable(hashes, num_tokens, purpose)
        blocks = -(-num_tokens // block_size) - self._tree.num_locked(hashes[: cached // block_size])
        return blocks * sum(self.layout.pages_per_block(group) for group in self.layout.full_groups)

    def held(self, group: int) -> Container[bytes]:
        """The hashes that a group can be matched at."""
        return self._tree.held[group]

    def pages_of(self, group: int, block_hash: bytes) -> Pages:
        """The pages of a window's block or a snapshot; empty unless it is held."""
        return self._tree.companion_pages(group, block_hash)

    def report(self) -> PoolReport:
        prefix = self._tree.num_pages
        free = self._tree.pool.num_free
        return PoolReport(
            pages_total=self._tree.pool.num_pages,
            pages_free=free,
            pages_prefix=prefix,
            pages_transfer=self._tree.pool.num_pages - free - prefix,
            pages_locked=prefix - self._tree.evictable_pages,
            reservations=len(self._holds),
            page_bytes=self.layout.page_bytes,
        )

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return self._tree.pool.num_free

    @property
    def evictable_pages(self) -> int:
        """Pages of prefixes that no request holds."""
        return self._tree.evictable_pages

    def snapshot(self) -> tuple[BlocksStored, ...]:
        """Everything that can be matched, one entry per group, parents before children."""
        return tuple(BlocksStored(group, tuple(held)) for group, held in enumerate(self._tree.held))

    def snapshot_parts(self, most_hashes: int) -> Iterator[BlocksStored]:
        """The same in parts, each as of when it is asked for. What changes meanwhile, `take_events` tells: a reader that
        hears of it after the parts that were read before knows all.
        """
        for group, held in enumerate(self._tree.held):
            keys = list(held)  # some milliseconds for a million
            for start in range(0, len(keys), most_hashes):
                if some := tuple([key for key in keys[start : start + most_hashes] if key in held]):
                    yield BlocksStored(group, some)

    def take_events(self) -> list[CacheEvent]:
        """Changes since the last call. A reader that comes too late gets CacheCleared and a snapshot instead."""
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
        purpose: Purpose,
        hints: Hints = NO_HINTS,
        begins: bool = True,
        pinned: str = "",
    ) -> Reservation:
        """Locks the reusable prefix and allocates pages for the rest of `num_tokens` tokens, or changes nothing.

        `hashes` are those of the full blocks; blocks without one stay private to the request. Unless it `begins` now, the
        eviction policy hears of the request by `begin_steps`. The locks of a hold named `pinned`, of `pin_steps` for the
        same prompt, become its own. Raises OutOfPages, UnchainedHashes and DuplicateReservation.
        """
        if request_id in self._holds:
            raise DuplicateReservation(f"request {request_id!r} already holds a reservation")
        if num_tokens <= 0:
            raise ValueError(f"num_tokens must be positive, not {num_tokens}")
        hashes = list(hashes[: num_tokens // self.layout.block_size])
        hit = self.match(hashes, num_tokens)
        cached = _cached(hit, purpose)
        hold = ReservedPages(request_id, hashes, num_tokens)
        if pinned in self._holds:
            _take_over(self._holds, self._tree, pinned, hold, cached // self.layout.block_size, now)
        self._holds[request_id] = hold
        try:
            self._tree.lock_prefix(hold, cached, purpose)
            hit_end = hold.hashes[hold.locked - 1] if hold.locked else None
            lengths = _snapshot_lengths(self.layout, self._snapshots, num_tokens, hit, purpose, hints)
            _allocate_own(self.layout, self._tree, hold, cached, lengths, now)
            if begins:
                for _ in self.begin_steps(request_id, purpose, hints, now):
                    pass
        except BaseException:  # the caller learns of no hold that it could release
            self.release(request_id, now)
            raise
        if hit_end is not None:
            self._found[hit_end] = now
            self._found.move_to_end(hit_end)
            if len(self._found) > HITS_REMEMBERED:
                self._found.popitem(last=False)
        return Reservation(hold, self.layout, purpose, cached)

    def begin_steps(self, request_id: str, purpose: Purpose, hints: Hints, now: float) -> Iterator[None]:
        """Has the eviction policy hear of a request that has reserved, in steps between which the cache may be used. One that
        is not through when the next one begins is finished at once.
        """
        if purpose in (Purpose.ANSWER, Purpose.PROMOTION, Purpose.ATTENTION):  # the request is still to come
            return iter(())
        useful = None if hints.useful_tokens is None else hints.useful_tokens // self.layout.block_size
        use = Use(now, self._hold(request_id).hashes, hints.category, useful)
        return self._news.steps(use)

    def pin(self, request_id: str, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose = Purpose.PREFILL) -> int:
        """Locks the longest prefix that a request of `purpose` could reuse, without pages of its own; returns its tokens.

        Ends like a reservation: `release` or `abort`. Raises UnchainedHashes and DuplicateReservation.
        """
        if request_id in self._holds:
            raise DuplicateReservation(f"request {request_id!r} already holds a reservation")
        length = self.reusable(hashes, num_tokens, purpose)
        blocks = list(hashes[: length // self.layout.block_size])
        hold = ReservedPages(request_id, blocks, length)
        self._tree.lock_prefix(hold, length, purpose)
        self._holds[request_id] = hold
        return length

    def pin_steps(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose, step: int
    ) -> Iterator[None]:
        """Locks the blocks that a request of `purpose` could reuse, so many in a step. Between steps the cache may be used:
        each one goes on from what is cached then. Ends like a reservation. Raises UnchainedHashes and DuplicateReservation.
        """
        if request_id in self._holds:
            raise DuplicateReservation(f"request {request_id!r} already holds a reservation")
        block_size = self.layout.block_size
        hold = self._holds[request_id] = ReservedPages(request_id, list(hashes[: num_tokens // block_size]), num_tokens)
        while self._holds.get(request_id) is hold:
            blocks = self.reusable(hold.hashes, num_tokens, purpose) // block_size
            hold.pages_ahead += self._tree.lock_path(hold, min(blocks, hold.locked + step))
            if hold.locked >= blocks:
                return
            yield

    def pages_ahead(self, pinned: str) -> int:
        """Pages that `pin_steps` has locked first for a hold, whatever requests have locked them since."""
        hold = self._holds.get(pinned)
        return 0 if hold is None else hold.pages_ahead

    def commit(
        self, request_id: str, filled_tokens: int, now: float, unfilled: Container[tuple[int, int]] = ()
    ) -> None:
        """Full blocks and aligned snapshots within the first `filled_tokens` tokens become prefix blocks.

        `unfilled` stay the request's own: (group, block) of windows and (group, length) of states that were not written.

        May be called as prefill goes on. Where a block is cached already, the older one stays and ours goes at release.
        Raises UnknownReservation.
        """
        hold = self._hold(request_id)
        full_blocks = min(filled_tokens, hold.num_tokens) // self.layout.block_size
        full_blocks = min(full_blocks, len(hold.hashes))
        self._tree.commit_blocks(hold, full_blocks)
        self._tree.commit_companions(hold, full_blocks, unfilled)

    def release(self, request_id: str, now: float) -> None:
        """Unlocks what the request shares and frees what is its own. Unknown ids are fine."""
        hold = self._holds.pop(request_id, None)
        if hold is not None:
            self._tree.pool.free(hold.own_pages())
            self._tree.unlock(hold, now)

    def release_steps(self, request_id: str, now: float, step: int) -> Iterator[None]:
        """`release` in steps of so many blocks, between which the cache may be used. One in between ends it at once."""
        hold = self._holds.get(request_id)
        if hold is None:
            return
        self._tree.pool.free(hold.let_go())
        for _ in self._tree.unlock_steps(hold, now, step):
            yield
            if self._holds.get(request_id) is not hold:
                return
        del self._holds[request_id]

    def abort(self, request_id: str, now: float) -> None:
        """The request will not be finished: what it did not commit is gone. Unknown ids are fine."""
        self.release(request_id, now)

    def shrink(self, num_pages: int, now: float) -> int:
        """Evicts until `num_pages` more pages are free, or nothing can leave; returns how many more there are."""
        before = self._tree.pool.num_free
        self._tree.evict(min(num_pages, self._tree.evictable_pages), now)
        return self._tree.pool.num_free - before

    def drop(self, hashes: Sequence[bytes], keep_tokens: int, *, unused_since: float, now: float) -> int:
        """Drops the end of a prefix, down to its first `keep_tokens` tokens; returns how many more pages are free.
        Blocks stay that are in use, have children, or were found by a request since `unused_since`.
        """
        before = self._tree.pool.num_free
        end = hashes[keep_tokens // self.layout.block_size :]
        found = [index for index, each in enumerate(end) if self._found.get(each, unused_since) > unused_since]
        self._tree.drop(end[found[-1] + 1 :] if found else end, now)
        return self._tree.pool.num_free - before

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every page, lock and link is accounted for. Reads everything in one go."""
        for _ in self.integrity_steps():
            pass

    def integrity_steps(self, step: int = STEP) -> Generator[None, None, None]:
        """The same in steps of so many blocks, between which the cache may be used, but not checked again. What there was
        when the first one was taken is judged.
        """
        return self._tree.check_integrity(self._holds.values(), step)

    def _hold(self, request_id: str) -> ReservedPages:
        try:
            return self._holds[request_id]
        except KeyError:
            raise UnknownReservation(f"no reservation {request_id!r}") from None


def _cached(hit: PrefixHit, purpose: Purpose) -> int:
    """Tokens of a hit that a request need not be given again."""
    return hit.num_tokens if purpose is Purpose.PREFILL else hit.attention_tokens


def _take_over(
    holds: dict[str, ReservedPages], tree: PrefixTree, pinned: str, hold: ReservedPages, blocks: int, now: float
) -> None:
    """Locks of a hold become those of another, which shares so many blocks: fewer, if a state has left meanwhile."""
    before = holds[pinned]
    shared = min(blocks, before.locked)
    if shared and before.hashes[shared - 1] != hold.hashes[shared - 1]:
        raise ValueError(f"{pinned!r} holds another prompt")
    del holds[pinned]
    tree.unlock_from(before, shared, now)
    hold.path, hold.locked = before.path, before.locked


def _snapshot_lengths(
    layout: ModelLayout, snapshots: SnapshotPolicy, num_tokens: int, hit: PrefixHit, purpose: Purpose, hints: Hints
) -> set[int]:
    if purpose is Purpose.ATTENTION:
        return set()
    if purpose not in (Purpose.PREFILL, Purpose.ANSWER) or not layout.companion_groups:
        return {num_tokens}
    prefill = Prefill(
        num_tokens=num_tokens,
        cached_tokens=hit.num_tokens,
        attention_tokens=hit.attention_tokens,
        block_size=layout.block_size,
    )
    branches = {length for length in hints.branch_tokens if not length % layout.block_size}
    if hints.useful_tokens is not None:  # the last boundary is no more likely to be of use than any other
        chosen = {length for length in snapshots.lengths(prefill) if length <= hints.useful_tokens}
    else:
        chosen = set(snapshots.lengths(prefill))
    wanted = {length for length in chosen | branches if hit.num_tokens < length <= num_tokens}
    if purpose is Purpose.ANSWER:  # a state of the past cannot be had any more
        return wanted & {num_tokens}
    return wanted | ({num_tokens} - {hit.num_tokens})


def _allocate_own(
    layout: ModelLayout, tree: PrefixTree, hold: ReservedPages, cached: int, lengths: set[int], now: float
) -> None:
    try:
        _allocate_for(layout, tree, hold, cached, lengths, now)
    except OutOfPages:
        # Extra snapshots serve later prompts; this one needs only its end.
        if lengths <= {hold.num_tokens}:
            raise
        _allocate_for(layout, tree, hold, cached, {hold.num_tokens}, now)


def _allocate_for(
    layout: ModelLayout, tree: PrefixTree, hold: ReservedPages, cached: int, lengths: Iterable[int], now: float
) -> None:
    need = need_of(layout, hold, cached, lengths)
    deal(layout, hold, need, tree.allocate(need.num_pages(layout), now))

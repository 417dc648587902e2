"""The prefix cache of a simulated node: the real `PrefixCache`, whose pages are never filled.

A page holds the full-attention KV of one block, so the pool counts in blocks; a linear state takes as many pages as its bytes
are worth.
"""

from collections.abc import Hashable, Sequence
from functools import partial
from math import ceil, inf
from typing import Final, cast

from hybrid_cache.cache.lookup import longest_common_hit
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.errors import OutOfPages
from hybrid_cache.eviction import POLICIES, default_policy
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState, SlidingWindow
from planner.decisions.views import room_beside
from planner.errors import InputError
from planner.model.profile import KvSize
from planner.simulator.nodes.dense import DenseCache
from planner.simulator.nodes.endless import EndlessCache

MOST_PAGES: Final = 30_000_000  # of all nodes: a list of the free ones takes 36 B each


def layout_of(kv: KvSize, block_size: int) -> ModelLayout:
    """A layout with the sizes of `kv`, each kind of layer rolled into one."""
    groups = []
    if kv.bytes_per_token:
        groups.append(KVCacheGroup(FullAttention(*_halves(kv.bytes_per_token)), (0,)))
    for index, window in enumerate(kv.windows, 1):
        k_and_v = _halves(window.bytes_per_token)
        groups.append(KVCacheGroup(SlidingWindow(window.window_tokens, *k_and_v), (index,)))
    if kv.fixed_bytes:
        groups.append(KVCacheGroup(LinearState(ceil(kv.fixed_bytes)), (len(groups),)))
    return ModelLayout(model="simulated", dtype="uint8", block_size=block_size, groups=tuple(groups))


def _halves(bytes_per_token: float) -> tuple[int, int]:
    whole = ceil(bytes_per_token / 2) * 2
    return whole, whole // 2


def pages_within(layout: ModelLayout, capacity_bytes: float) -> int:
    """Pages of caches that are so large together. Raises InputError for more than can be kept."""
    pages = capacity_bytes // layout.page_bytes
    if not pages <= MOST_PAGES:
        most_gb = MOST_PAGES * layout.page_bytes / 1e9
        raise InputError(
            f"caches of {capacity_bytes / 1e9:g} GB over all nodes: at most {most_gb:,.0f} GB of this model are simulated"
        )
    return max(1, int(pages))


class NodeCache:
    """Prefixes of one node."""

    def __init__(self, layout: ModelLayout, capacity_bytes: float, eviction: str = "lru") -> None:
        pages = pages_within(layout, capacity_bytes)
        # "default" is what nodes run: hit density learned from the requests, at about twice the cost of LRU.
        policy = default_policy(layout) if eviction == "default" else POLICIES[eviction](pages)
        self.layout = layout
        self.cache = PrefixCache(layout, pages, eviction=policy, event_limit=0)
        # The cache's own `match`, with one call less: every prompt asks every node.
        self.match = partial(
            longest_common_hit, layout, [self.cache.held(group) for group in range(len(layout.groups))]
        )
        self._held: set[str] = set()
        self._room: tuple[int, int] | None = None  # tokens without and with eviction, until something changes

    def begin(self, request_id: str, hashes: Sequence[Hashable], num_tokens: int, now: float) -> int:
        """Reserves for a prefill; returns the cached prefix. A request too large for the pool is computed without it."""
        held = self._reserve(request_id, hashes, num_tokens, now, Purpose.PREFILL)
        return self.match(hashes, num_tokens).num_tokens if held is None else held

    def expect(self, request_id: str, hashes: Sequence[Hashable], num_tokens: int, now: float) -> int:
        """Reserves for KVCache that will land; returns how much of its attention need not be sent."""
        return self._reserve(request_id, hashes, num_tokens, now, Purpose.LANDING) or 0

    def _reserve(
        self, request_id: str, hashes: Sequence[Hashable], num_tokens: int, now: float, purpose: Purpose
    ) -> int | None:
        try:
            self._room = None
            names = cast(Sequence[bytes], hashes)  # a cache compares them, and never looks into them
            reservation = self.cache.reserve(request_id, names, num_tokens, now=now, purpose=purpose)
        except OutOfPages:
            return None
        self._held.add(request_id)
        return reservation.cached_tokens

    def room_tokens(self, attention_tokens: int) -> int:
        """For how many tokens of a prompt, beyond its own prefix, there are pages: as nodes report it and gateways read it."""
        if self._room is None:
            layout, free = self.layout, self.cache.free_pages
            self._room = layout.tokens_within(free), layout.tokens_within(free + self.cache.evictable_pages)
        return room_beside(*self._room, attention_tokens)

    def fill(self, request_id: str, num_tokens: int, now: float) -> None:
        """The KVCache is there: its blocks may be reused, and stay locked."""
        if request_id in self._held:
            self._room = None
            self.cache.commit(request_id, num_tokens, now)

    def let_go(self, request_id: str, now: float) -> None:
        """These blocks are not read or written for this request any more."""
        if request_id in self._held:
            self._held.discard(request_id)
            self._room = None
            self.cache.release(request_id, now)

    def end(self, request_id: str, num_tokens: int, now: float) -> None:
        """The prefill is done: its blocks may be reused."""
        self.fill(request_id, num_tokens, now)
        self.let_go(request_id, now)


SimulatedCache = NodeCache | EndlessCache | DenseCache


def cache_of(layout: ModelLayout, capacity_bytes: float, eviction: str = "lru") -> SimulatedCache:
    """A node's cache of that size, by the least work that finds the same; an infinite one never evicts."""
    if capacity_bytes == inf:
        return EndlessCache(layout)
    if eviction == "lru" and DenseCache.serves(layout):
        return DenseCache(layout, pages_within(layout, capacity_bytes))
    return NodeCache(layout, capacity_bytes, eviction)

"""The prefix cache of a simulated node whose model has full attention alone, evicted by LRU: what `NodeCache` finds, by counts.

A block takes one page, and no page is ever read, so pages are counted. A request locks its blocks from the first one on, and
lets them go from the last one on. So blocks leave in the order in which they were let go, and a prompt's tail leaves before
what stands before it. A test holds it together with `NodeCache`.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from hybrid_cache.cache.lookup import MISS, PrefixHit, full_hit
from hybrid_cache.layout.layout import ModelLayout
from planner.decisions.views import room_beside


class _Hold:
    """What a request locks, `hashes[:locked]`, and how many pages are its own."""

    __slots__ = ("hashes", "locked", "num_tokens", "own")

    def __init__(self, hashes: Sequence[Hashable], num_tokens: int, locked: int) -> None:
        self.hashes = hashes
        self.num_tokens = num_tokens
        self.locked = locked
        self.own = 0


class DenseCache:
    """Prefixes of one node; the methods are those of `NodeCache`."""

    def __init__(self, layout: ModelLayout, num_pages: int) -> None:
        assert self.serves(layout)
        self.layout = layout
        self._size = layout.block_size
        self._free = num_pages
        self._locks: dict[Hashable, int] = {}  # of each block that is cached
        self._unlocked: OrderedDict[Hashable, None] = OrderedDict()  # the next one to leave first
        self._holds: dict[str, _Hold] = {}
        self._hit = MISS  # the last one: most prompts find as much as the one before

    @staticmethod
    def serves(layout: ModelLayout) -> bool:
        """Whether a block of this model is one page, and all that there is of it."""
        return layout.full_groups == (0,) and len(layout.groups) == 1 and layout.pages_per_block(0) == 1

    def match(self, hashes: Sequence[Hashable], num_tokens: int) -> PrefixHit:
        """How much of a prompt's first `num_tokens` tokens is cached."""
        locks, limit = self._locks, min(num_tokens // self._size, len(hashes))
        if not limit or hashes[0] not in locks:
            return MISS
        # Most nodes hold the system prompt and no more of a prompt.
        alone = limit == 1 or hashes[1] not in locks
        tokens = self._size if alone else full_hit(locks, hashes, limit) * self._size
        if tokens != self._hit.num_tokens:
            self._hit = PrefixHit(tokens, tokens)
        return self._hit

    def begin(self, request_id: str, hashes: Sequence[Hashable], num_tokens: int, now: float) -> int:
        """Reserves for a prefill; returns the cached prefix. A request too large for the pool is computed without it."""
        held = self._reserve(request_id, hashes, num_tokens)
        return self.match(hashes, num_tokens).num_tokens if held is None else held

    def expect(self, request_id: str, hashes: Sequence[Hashable], num_tokens: int, now: float) -> int:
        """Reserves for KVCache that will land; returns how much of its attention need not be sent."""
        return self._reserve(request_id, hashes, num_tokens) or 0

    def _reserve(self, request_id: str, hashes: Sequence[Hashable], num_tokens: int) -> int | None:
        """Tokens of the cached prefix, which is locked then; None where there is no room for the rest."""
        assert request_id not in self._holds
        cached = self.match(hashes, num_tokens).num_tokens
        hold = _Hold(hashes, num_tokens, cached // self._size)
        self._lock(hashes[: hold.locked])
        missing = -(-num_tokens // self._size) - hold.locked
        lacking = missing - self._free
        if lacking > len(self._unlocked):
            self._unlock(hold)
            return None
        if lacking > 0:
            pop, locks = self._unlocked.popitem, self._locks
            for _ in range(lacking):
                del locks[pop(last=False)[0]]
            self._free += lacking
        self._free -= missing
        hold.own = missing
        self._holds[request_id] = hold
        return cached

    def _lock(self, blocks: Sequence[Hashable]) -> None:
        locks, unlocked = self._locks, self._unlocked
        for block in blocks:
            if count := locks[block]:
                locks[block] = count + 1
            else:
                locks[block] = 1
                del unlocked[block]

    def _unlock(self, hold: _Hold) -> None:
        """Its tail first."""
        locks, unlocked = self._locks, self._unlocked
        for block in reversed(hold.hashes[: hold.locked]):
            locks[block] = count = locks[block] - 1
            if not count:
                unlocked[block] = None

    def room_tokens(self, attention_tokens: int) -> int:
        """For how many tokens of a prompt, beyond its own prefix, there are pages: as nodes report it and gateways read it."""
        free, size = self._free, self._size
        return room_beside(free * size, (free + len(self._unlocked)) * size, attention_tokens)

    def fill(self, request_id: str, num_tokens: int, now: float) -> None:
        """The KVCache is there: its blocks may be reused, and stay locked."""
        hold = self._holds.get(request_id)
        if hold is None:
            return
        full = min(min(num_tokens, hold.num_tokens) // self._size, len(hold.hashes))
        locks, unlocked = self._locks, self._unlocked
        for block in hold.hashes[hold.locked : full]:
            count = locks.get(block)
            if count is None:
                locks[block] = 1
                hold.own -= 1
                continue
            if not count:
                del unlocked[block]
            locks[block] = count + 1
        hold.locked = max(hold.locked, full)

    def let_go(self, request_id: str, now: float) -> None:
        """These blocks are not read or written for this request any more."""
        hold = self._holds.pop(request_id, None)
        if hold is not None:
            self._free += hold.own
            self._unlock(hold)

    def end(self, request_id: str, num_tokens: int, now: float) -> None:
        """The prefill is done: its blocks may be reused."""
        self.fill(request_id, num_tokens, now)
        self.let_go(request_id, now)

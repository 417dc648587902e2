"""Context caching: prefixes that a client pays to keep.

A context is a prefix that was prefilled once and stays until it expires, whatever eviction would like. A reservation of
its own holds it. So the pool's rules apply to it as to any running request: never evicted, counted as locked. A use of
the prefix lets it live for its whole time again.

It has an owner. What an owner has is counted in tokens of distinct blocks: a conversation that is kept turn by turn
counts once. A named owner may fill only a share of the contexts' room, so that others find some. A prefix beyond that
is kept as far as it fits. Contexts without an owner (`owner` is empty) are shared, and may have all of it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.errors import CacheError, DuplicateReservation, UnknownReservation
from hybrid_cache.layout.layout import ModelLayout

MAX_CONTEXTS: Final = 4096  # of a node
MAX_OF_OWNER: Final = 512
OWNER_SHARE: Final = 0.5  # of what contexts may hold: a second owner finds as much as the first one has


class NotCached(CacheError):
    """The prefix to keep is not in the cache (any more): prefill it first."""


class TooManyContexts(CacheError):
    """The contexts together may not hold more pages than configured."""


class OverBudget(CacheError):
    """The owner may not keep that much more."""


@dataclass(frozen=True, slots=True)
class Context:
    """A pinned prefix of `num_tokens` tokens, until `expires_at`; whenever it is used, `ttl_s` longer from then on."""

    context_id: str
    num_tokens: int
    expires_at: float
    ttl_s: float
    owner: str = ""
    end: bytes = b""  # the hash of its last block

    def uses(self, hashes: Sequence[bytes], block_size: int) -> bool:
        """Whether a prompt of blocks `hashes` begins with it."""
        blocks = self.num_tokens // block_size
        return len(hashes) >= blocks and hashes[blocks - 1] == self.end


class ContextCache:
    """create, extend, use, expire.

    `max_share` bounds what contexts hold of the pool, so that requests always find room, `owner_share` what an owner has of that.
    """

    def __init__(self, cache: PrefixCache, *, max_share: float = 0.5, owner_share: float = OWNER_SHARE) -> None:
        if not 0 < max_share < 1:
            raise ValueError(f"max_share must lie between 0 and 1, not {max_share}")
        if not 0 < owner_share <= 1:
            raise ValueError(f"owner_share must lie between 0 and 1, not {owner_share}")
        self._cache = cache
        self._max_pages = int(max_share * cache.report().pages_total)
        self._max_pages_of_owner = int(owner_share * self._max_pages)
        self._contexts: dict[str, Context] = {}
        self._blocks: dict[str, tuple[bytes, ...]] = {}  # of each context
        self._all = _Held(cache.layout)
        self._owned: dict[str, _Held] = {}

    def create(
        self,
        context_id: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        *,
        now: float,
        ttl_s: float,
        owner: str = "",
        budget_tokens: int | None = None,
    ) -> tuple[Context, int]:
        """Keeps the longest cached prefix of the prompt; returns it, and how many of its tokens were not kept under this id.

        A context that is there already goes on for `ttl_s`, and grows if more of its prompt is cached by now. What
        is beyond the owner's share is not kept. With a `budget_tokens` that is all that `owner` may have. Raises NotCached,
        TooManyContexts, OverBudget, and DuplicateReservation for an id of another owner's or of another prompt.
        """
        before = self._contexts.get(context_id)
        size = self._cache.layout.block_size
        cached = self._cache.match(hashes, num_tokens).num_tokens
        found = self._within_share(owner, hashes, cached)
        if before is not None:
            if before.owner != owner or not before.uses(hashes, size):
                raise DuplicateReservation(f"context {context_id!r} already exists with other tokens")
            if found <= before.num_tokens:
                return self._renewed(before, now, ttl_s), 0
        elif not found:
            if cached:
                raise OverBudget(f"{owner!r} has its {self._max_pages_of_owner} pages of what contexts may hold here")
            raise NotCached(f"nothing of context {context_id!r} is cached")
        blocks = tuple(hashes[: found // size])
        self._check(context_id, owner, blocks, before, budget_tokens)
        if before is not None:
            self.delete(context_id, now)  # its blocks stay where they are: nothing is allocated here
        pinned = self._cache.pin(_name(context_id), hashes, found)
        self._blocks[context_id] = blocks
        self._all.add(blocks)
        self._owned.setdefault(owner, _Held(self._cache.layout)).add(blocks)
        context = Context(context_id, pinned, now + ttl_s, ttl_s, owner, blocks[-1])
        self._contexts[context_id] = context
        return context, pinned - (before.num_tokens if before is not None else 0)

    def extend(self, context_id: str, *, now: float, ttl_s: float, owner: str = "") -> Context:
        """Lets a context live until `now + ttl_s`, whatever its time was. Raises UnknownReservation."""
        before = self._contexts.get(context_id)
        if before is None or before.owner != owner:
            raise UnknownReservation(f"no context {context_id!r}")
        context = self._contexts[context_id] = replace(before, expires_at=now + ttl_s, ttl_s=ttl_s)
        return context

    def use(self, hashes: Sequence[bytes], now: float) -> list[Context]:
        """A request has found the blocks `hashes` cached: the contexts among them live on for their whole time."""
        size = self._cache.layout.block_size
        used = [context for context in self._contexts.values() if context.uses(hashes, size)]
        return [self._renewed(context, now, context.ttl_s) for context in used]

    def delete(self, context_id: str, now: float) -> None:
        """Ends a context; its blocks become evictable. Unknown ids are fine."""
        context = self._contexts.pop(context_id, None)
        if context is None:
            return
        blocks = self._blocks.pop(context_id)
        self._all.remove(blocks)
        self._owned[context.owner].remove(blocks)
        if not self._owned[context.owner].num_contexts:
            del self._owned[context.owner]
        self._cache.release(_name(context_id), now)

    def expire(self, now: float) -> list[str]:
        """Ends the contexts whose time is over and names them."""
        over = [context.context_id for context in self._contexts.values() if context.expires_at <= now]
        for context_id in over:
            self.delete(context_id, now)
        return over

    def get(self, context_id: str) -> Context | None:
        return self._contexts.get(context_id)

    def list(self) -> tuple[Context, ...]:
        return tuple(self._contexts.values())

    @property
    def pinned_tokens(self) -> int:
        """The tokens of all contexts together, each block counted once."""
        return self._all.num_tokens

    def owned_tokens(self, owner: str) -> int:
        """The tokens of an owner's contexts together."""
        held = self._owned.get(owner)
        return held.num_tokens if held is not None else 0

    def _renewed(self, context: Context, now: float, ttl_s: float) -> Context:
        """The longest promise holds: a request for a shorter time never shortens an earlier one."""
        renewed = replace(context, expires_at=max(context.expires_at, now + ttl_s), ttl_s=max(context.ttl_s, ttl_s))
        self._contexts[context.context_id] = renewed
        return renewed

    def _within_share(self, owner: str, hashes: Sequence[bytes], cached_tokens: int) -> int:
        """How many of `cached_tokens`, which are reusable, the owner may have kept beside what it has."""
        if not owner:
            return cached_tokens
        size = self._cache.layout.block_size
        owned = self._owned.get(owner) or _Held(self._cache.layout)
        fitting = owned.fitting(hashes[: cached_tokens // size], self._max_pages_of_owner) * size
        return cached_tokens if fitting >= cached_tokens else self._cache.match(hashes, fitting).num_tokens

    def _check(
        self,
        context_id: str,
        owner: str,
        blocks: Sequence[bytes],
        before: Context | None,
        budget_tokens: int | None,
    ) -> None:
        owned = self._owned.get(owner)
        tokens = owned.with_tokens(blocks) if owned is not None else len(blocks) * self._cache.layout.block_size
        if budget_tokens is not None and tokens > budget_tokens:
            raise OverBudget(f"with context {context_id!r} there would be {tokens} tokens of {budget_tokens} allowed")
        if before is None and owned is not None and owned.num_contexts >= MAX_OF_OWNER:
            raise OverBudget(f"there are {owned.num_contexts} contexts already")
        if before is None and len(self._contexts) >= MAX_CONTEXTS:
            raise TooManyContexts(f"there are {len(self._contexts)} contexts already")
        if self._all.with_pages(blocks) > self._max_pages:
            raise TooManyContexts(f"with context {context_id!r} they would hold more than {self._max_pages} pages")


class _Held:
    """The blocks of some contexts, each counted once."""

    def __init__(self, layout: ModelLayout) -> None:
        self.num_contexts = 0
        self._block_size = layout.block_size
        self._block_pages = sum(layout.pages_per_block(group) for group in layout.full_groups)
        # Window tails and states of a context, as if no two ended at the same block.
        self._end_pages = sum(
            layout.pages_per_block(group) * len(layout.window_blocks(group, 1 << 40)) for group in layout.window_groups
        ) + sum(layout.pages_per_block(group) for group in layout.state_groups)
        self._uses: Counter[bytes] = Counter()

    @property
    def num_tokens(self) -> int:
        return len(self._uses) * self._block_size

    def add(self, blocks: Sequence[bytes]) -> None:
        self.num_contexts += 1
        self._uses.update(blocks)

    def remove(self, blocks: Sequence[bytes]) -> None:
        self.num_contexts -= 1
        for block in blocks:
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]

    def with_tokens(self, blocks: Sequence[bytes]) -> int:
        """The tokens, were these blocks among them."""
        return self._with(blocks) * self._block_size

    def with_pages(self, blocks: Sequence[bytes]) -> int:
        """The pages of that."""
        return self._with(blocks) * self._block_pages + (self.num_contexts + 1) * self._end_pages

    def fitting(self, blocks: Sequence[bytes], max_pages: int) -> int:
        """How many of `blocks`, from the first one on, another context may have within `max_pages`."""
        room = (max_pages - (self.num_contexts + 1) * self._end_pages) // max(1, self._block_pages) - len(self._uses)
        for number, block in enumerate(blocks):
            room -= block not in self._uses
            if room < 0:
                return number
        return len(blocks)

    def _with(self, blocks: Sequence[bytes]) -> int:
        return len(self._uses) + sum(block not in self._uses for block in blocks)


def _name(context_id: str) -> str:
    return f"context:{context_id}"

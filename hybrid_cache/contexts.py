"""Context caching: prefixes that a client pays to keep.

A context is a prefix that was prefilled once and stays until it expires, whatever eviction would like. It is held by a
reservation of its own, so the pool's rules (never evicted, counted as locked) apply to it like to any running request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_cache.errors import CacheError, UnknownReservation
from hybrid_cache.prefix_cache import PrefixCache


class NotCached(CacheError):
    """The prefix to keep is not in the cache (any more): prefill it first."""


class TooManyContexts(CacheError):
    """The contexts together may not hold more pages than configured."""


@dataclass(frozen=True, slots=True)
class Context:
    """A pinned prefix of `num_tokens` tokens, until `expires_at`."""

    context_id: str
    num_tokens: int
    expires_at: float


class ContextCache:
    """create, extend, expire. `max_share` bounds what contexts may lock of the pool, so that requests always find room."""

    def __init__(self, cache: PrefixCache, *, max_share: float = 0.5) -> None:
        if not 0 < max_share < 1:
            raise ValueError(f"max_share must lie between 0 and 1, not {max_share}")
        self._cache = cache
        self._max_share = max_share
        self._contexts: dict[str, Context] = {}

    def create(self, context_id: str, hashes: Sequence[bytes], num_tokens: int, *, now: float, ttl_s: float) -> Context:
        """Keeps the longest cached prefix of the prompt. Raises NotCached, TooManyContexts, DuplicateReservation."""
        if not self._cache.match(hashes, num_tokens).num_tokens:
            raise NotCached(f"nothing of context {context_id!r} is cached")
        pinned = self._cache.pin(_name(context_id), hashes, num_tokens)
        report = self._cache.report()
        if report.pages_locked > self._max_share * report.pages_total:
            self._cache.release(_name(context_id), now)
            raise TooManyContexts(f"context {context_id!r} would lock more than {self._max_share:.0%} of the pool")
        context = self._contexts[context_id] = Context(context_id, pinned, now + ttl_s)
        return context

    def extend(self, context_id: str, *, now: float, ttl_s: float) -> Context:
        """Lets a context live until `now + ttl_s`. Raises UnknownReservation."""
        if context_id not in self._contexts:
            raise UnknownReservation(f"no context {context_id!r}")
        before = self._contexts[context_id]
        context = self._contexts[context_id] = Context(context_id, before.num_tokens, now + ttl_s)
        return context

    def delete(self, context_id: str, now: float) -> None:
        """Ends a context; its blocks become evictable. Unknown ids are fine."""
        if self._contexts.pop(context_id, None) is not None:
            self._cache.release(_name(context_id), now)

    def expire(self, now: float) -> list[str]:
        """Ends the contexts whose time is over and names them."""
        over = [context.context_id for context in self._contexts.values() if context.expires_at <= now]
        for context_id in over:
            self.delete(context_id, now)
        return over

    def list(self) -> tuple[Context, ...]:
        return tuple(self._contexts.values())


def _name(context_id: str) -> str:
    return f"context:{context_id}"

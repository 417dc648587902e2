"""Context caching: prefixes that stay in memory until a time, because somebody asked for it."""

import math
from collections.abc import Callable
from typing import Final

from hybrid_cache.contexts import Context, ContextCache, NotCached, TooManyContexts
from hybrid_cache.errors import DuplicateReservation, UnknownReservation
from node.errors import NodeRefusal
from node.pages import MAX_TOKENS, Pages, split_hashes
from transport.control.proto import node_pb2 as pb

MAX_TTL_S: Final = 86400.0


class Contexts:
    """All contexts of a node. They end with their time, with `delete`, or with the agent."""

    def __init__(self, pages: Pages, now: Callable[[], float]) -> None:
        self._pages = pages
        self._contexts = ContextCache(pages.cache)
        self._now = now

    async def create(self, request: pb.ContextRequest) -> Context:
        """Keeps the longest cached prefix of a prompt, read back from an SSD if need be. Raises NodeRefusal."""
        ttl_s = _ttl_s(request)
        hashes = split_hashes(request.block_hashes)
        if not request.context_id or not 0 < request.num_tokens <= MAX_TOKENS:
            raise NodeRefusal("bad_request", "a context has an id and at least one token")
        await self._pages.bring_back(hashes, request.num_tokens)
        try:
            return self._contexts.create(request.context_id, hashes, request.num_tokens, now=self._now(), ttl_s=ttl_s)
        except NotCached as exc:
            raise NodeRefusal("not_cached", str(exc)) from exc
        except TooManyContexts as exc:
            raise NodeRefusal("no_capacity", str(exc)) from exc
        except DuplicateReservation as exc:
            raise NodeRefusal("context_exists", str(exc)) from exc

    def extend(self, request: pb.ContextRequest) -> Context:
        """Lets a context live for `ttl_s` from now. Raises NodeRefusal."""
        try:
            return self._contexts.extend(request.context_id, now=self._now(), ttl_s=_ttl_s(request))
        except UnknownReservation as exc:
            raise NodeRefusal("unknown_context", str(exc)) from exc

    def delete(self, context_id: str) -> bool:
        """Ends a context. False for an unknown id."""
        known = any(context.context_id == context_id for context in self._contexts.list())
        self._contexts.delete(context_id, self._now())
        self._pages.changed()
        return known

    def expire(self) -> None:
        """Ends those whose time is over."""
        if self._contexts.expire(self._now()):
            self._pages.changed()

    def end_all(self) -> None:
        """The node ends."""
        for context in self._contexts.list():
            self.delete(context.context_id)

    def messages(self) -> list[pb.Context]:
        """What is kept, and how long still."""
        return [as_message(context, self._now()) for context in self._contexts.list()]


def as_message(context: Context, now: float) -> pb.Context:
    """A context as callers hear of it."""
    return pb.Context(
        context_id=context.context_id, num_tokens=context.num_tokens, ttl_s=max(0.0, context.expires_at - now)
    )


def _ttl_s(request: pb.ContextRequest) -> float:
    if not (math.isfinite(request.ttl_s) and 0 < request.ttl_s <= MAX_TTL_S):
        raise NodeRefusal("bad_request", f"ttl_s is {request.ttl_s}, allowed is up to {MAX_TTL_S:.0f}")
    return request.ttl_s

"""Context caching: prefixes that stay in memory until a time, on request."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from hybrid_cache.errors import DuplicateReservation, UnchainedHashes, UnknownReservation
from hybrid_cache.pinning import Context, ContextCache, NotCached, OverBudget, TooManyContexts
from node.errors import NodeRefusal
from node.kvcache.pages import MAX_TOKENS, ArenaPages
from node.kvcache.prompt_hashes import split_hashes
from transport.control.proto import node_pb2 as pb

MAX_TTL_S: Final = 86400.0
MAX_NAME_CHARS: Final = 200
TELL_S: Final = 1.0  # watchers hear of a context that lives on no oftener


class PinnedContexts:
    """All contexts of a node. They end with their time, with `delete`, or with the agent."""

    def __init__(self, pages: ArenaPages, now: Callable[[], float]) -> None:
        self._pages = pages
        self._contexts = ContextCache(pages.cache)
        self._now = now
        pages.on_found = self._found
        pages.pinned_tokens = lambda: self._contexts.pinned_tokens

    async def create(self, request: pb.ContextRequest) -> pb.Context:
        """Keeps the longest cached prefix of a prompt, read back from an SSD if need be. Raises NodeRefusal."""
        ttl_s = _ttl_s(request)
        hashes = split_hashes(request.block_hashes)
        if max(len(request.context_id), len(request.owner)) > MAX_NAME_CHARS:
            raise NodeRefusal(
                "bad_request", f"the name of a context or an owner has {MAX_NAME_CHARS} characters at most"
            )
        if not request.context_id or not 0 < request.num_tokens <= MAX_TOKENS:
            raise NodeRefusal("bad_request", "a context has an id and at least one token")
        await self._pages.bring_back(hashes, request.num_tokens)
        try:
            context, added = self._contexts.create(
                request.context_id,
                hashes,
                request.num_tokens,
                now=self._now(),
                ttl_s=ttl_s,
                owner=request.owner,
                budget_tokens=request.budget_tokens or None,
            )
        except UnchainedHashes as exc:
            raise NodeRefusal("bad_request", str(exc)) from exc
        except NotCached as exc:
            raise NodeRefusal("not_cached", str(exc)) from exc
        except TooManyContexts as exc:
            raise NodeRefusal("no_capacity", str(exc)) from exc
        except OverBudget as exc:
            raise NodeRefusal("over_budget", str(exc)) from exc
        except DuplicateReservation as exc:
            raise NodeRefusal("context_exists", str(exc)) from exc
        told = self._message(context, added)
        self._pages.tell(pb.NodeEvent(context=told))
        return told

    def extend(self, request: pb.ContextRequest) -> pb.Context:
        """Lets a context live for `ttl_s` from now. Raises NodeRefusal."""
        try:
            context = self._contexts.extend(
                request.context_id, now=self._now(), ttl_s=_ttl_s(request), owner=request.owner
            )
        except UnknownReservation as exc:
            raise NodeRefusal("unknown_context", str(exc)) from exc
        told = self._message(context)
        self._pages.tell(pb.NodeEvent(context=told))
        return told

    def delete(self, context_id: str, owner: str = "") -> bool:
        """Ends a context. False for an unknown id, and for another owner's."""
        context = self._contexts.get(context_id)
        if context is None or context.owner != owner:
            return False
        self._contexts.delete(context_id, self._now())
        self._pages.changed()
        self._ended(context)
        return True

    def expire(self) -> None:
        """Ends those whose time is over."""
        before = {context.context_id: context for context in self._contexts.list()}
        if over := self._contexts.expire(self._now()):
            self._pages.changed()
            for context_id in over:
                self._ended(before[context_id])

    def end_all(self) -> None:
        """The node ends."""
        for context in self._contexts.list():
            self.delete(context.context_id, context.owner)

    def messages(self) -> list[pb.Context]:
        """What is kept, and how long still."""
        return [self._message(context) for context in self._contexts.list()]

    def _found(self, hashes: Sequence[bytes]) -> None:
        """A request uses these cached blocks."""
        if not (kept := self._contexts.list()):
            return
        before = {context.context_id: context.expires_at for context in kept}
        for context in self._contexts.use(hashes, self._now()):
            if context.expires_at - before[context.context_id] >= TELL_S:
                self._pages.tell(pb.NodeEvent(context=self._message(context)))

    def _ended(self, context: Context) -> None:
        told = self._message(context)
        told.ended = True
        self._pages.tell(pb.NodeEvent(context=told))

    def _message(self, context: Context, added_tokens: int = 0) -> pb.Context:
        return pb.Context(
            context_id=context.context_id,
            num_tokens=context.num_tokens,
            ttl_s=max(0.0, context.expires_at - self._now()),
            owner=context.owner,
            whole_ttl_s=context.ttl_s,
            added_tokens=added_tokens,
            owned_tokens=self._contexts.owned_tokens(context.owner),
        )


def _ttl_s(request: pb.ContextRequest) -> float:
    if not (math.isfinite(request.ttl_s) and 0 < request.ttl_s <= MAX_TTL_S):
        raise NodeRefusal("bad_request", f"ttl_s is {request.ttl_s}; it must be at most {MAX_TTL_S:.0f}")
    return request.ttl_s

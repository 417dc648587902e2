"""What a node says that it keeps, and for whom."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil
from typing import Any, Final

from transport.control.proto import node_pb2 as pb

MAX_LOST: Final = 4096  # of a node that has ended; as many as it can have kept


class PinState(StrEnum):
    """How a context stands."""

    KEPT = "kept"
    LOST = "lost"  # its node has ended since
    UNREACHABLE = "unreachable"  # unknown while its node does not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPrefix:
    """A context: a prefix of `num_tokens` tokens, for `left_s` when its node said so, and for `ttl_s` after each use.

    `expires_at` is that by the gateway's clock, once it has heard.

    `owned_tokens` are all of its owner's on that node; `added_tokens` those that this answer of a node is about.
    """

    context_id: str
    num_tokens: int
    left_s: float
    ttl_s: float
    owner: str
    expires_at: float = 0.0
    owned_tokens: int = 0
    added_tokens: int = 0
    has_ended: bool = False
    state: PinState = PinState.KEPT

    def told(self, now: float, state: PinState) -> dict[str, Any]:
        """As a client reads it."""
        left_s = max(0, ceil(self.expires_at - now))
        said = {"id": self.context_id, "object": "context", "tokens": self.num_tokens, "ttl_s": round(self.ttl_s)}
        return said | {"expires_in_s": left_s, "status": str(state)}


def kept_from(context: pb.Context) -> PinnedPrefix:
    """A context as a value."""
    return PinnedPrefix(
        context_id=context.context_id,
        num_tokens=context.num_tokens,
        left_s=context.ttl_s,
        ttl_s=context.whole_ttl_s,
        owner=context.owner,
        owned_tokens=context.owned_tokens,
        added_tokens=context.added_tokens,
        has_ended=context.ended,
    )


class PinnedPrefixes:
    """Those of one node, as it has told them."""

    def __init__(self) -> None:
        self._all: dict[str, PinnedPrefix] = {}
        self._owned: dict[str, int] = {}

    def described(self, contexts: Iterable[PinnedPrefix], now: float, *, is_same_process: bool) -> None:
        """A node says all that it keeps. What another process of it has kept before is lost."""
        before, self._all, self._owned = self._all, {}, {}
        if not is_same_process:
            lost = [each for each in before.values() if each.expires_at > now][:MAX_LOST]
            self._all = {each.context_id: replace(each, state=PinState.LOST) for each in lost}
        for each in contexts:
            self.heard(each, now)

    def heard(self, kept: PinnedPrefix, now: float) -> None:
        """One has been made, lives on or has ended."""
        self._owned[kept.owner] = kept.owned_tokens
        if not kept.owned_tokens:
            del self._owned[kept.owner]
        if kept.has_ended:
            self._all.pop(kept.context_id, None)
        else:
            self._all[kept.context_id] = replace(kept, expires_at=now + kept.left_s)

    def forget(self, context_id: str) -> None:
        self._all.pop(context_id, None)

    def get(self, context_id: str, now: float) -> PinnedPrefix | None:
        """None for one whose time is over, too."""
        kept = self._all.get(context_id)
        return kept if kept is not None and kept.expires_at > now else None

    def of(self, owner: str, now: float) -> Iterator[PinnedPrefix]:
        """An owner's, whose time is not over."""
        return (each for each in self._all.values() if each.owner == owner and each.expires_at > now)

    def owned_tokens(self, owner: str) -> int:
        """What an owner has there together."""
        return self._owned.get(owner, 0)

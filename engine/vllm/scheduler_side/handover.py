"""One request of vLLM and its pages: its part in transfers of KVCache, and its progress.

local         ask for pages ─ load what the agent has cached ─ compute, save whole blocks ─ give back
prefill leg   same, with a ticket: layers leave while the rest computes ─ held until delivered ─ finish
landing       wait for it ─ load ─ compute the last token ─ decode          it fails: go on as local
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from engine.openai.api import KVTransfer
from hybrid_cache.hashing.block_hash import Inset
from transport.control.messages import Delivered, JobPages


class HandoverRoute(Enum):
    """A request's part in transfers of KVCache."""

    LOCAL = "local"
    LEG = "prefill leg"
    LANDING = "landing"


class HandoverPhase(Enum):
    """How far a request's pages are."""

    NEW = "new"  # a local prompt whose turn has not come: a queue of them must not hold the pages that landings need
    ASKED = "asked"
    GRANTED = "granted"
    LOADING = "loading"
    COMPUTING = "computing"
    HELD = "held"  # a leg that waits for its delivery
    DELIVERED = "delivered"
    OVER = "over"  # nothing more to load or save


@dataclass(slots=True, kw_only=True)
class Handover:
    """One request and its pages."""

    request: Any
    route: HandoverRoute
    prompt: list[int]
    transfer: KVTransfer
    insets: tuple[Inset, ...] = ()  # what stands in the prompt beside its tokens
    phase: HandoverPhase = HandoverPhase.OVER
    errand: int = 0
    deadline_s: float = 0.0
    asked_s: float = 0.0
    pages: JobPages | None = None
    offered_from: int = 0  # tokens that vLLM had when it was offered the rest
    cached_tokens: int = 0  # loaded from pages, or found in vLLM's own cache
    saved_tokens: int = 0
    unsaved_states: set[tuple[int, int]] = field(default_factory=set)
    unfilled_windows: set[tuple[int, int]] = field(default_factory=set)
    computing_s: float = 0.0
    computed_from: int | None = None  # tokens that vLLM had when it began to compute
    outcome: Delivered | None = None
    reason: str = ""
    recomputed: str = ""  # a landing's: why its KVCache could not be used
    finished: bool = False

    @property
    def prefill_tokens(self) -> int:
        """Tokens whose KVCache another node can compute: all but the last."""
        return len(self.prompt) - 1

    def lacks_state(self, length: int) -> bool:
        """Whether its pages have been left without a state after so many tokens, as where drafts were in it."""
        return any(at == length for _, at in self.unsaved_states)

    def answer(self) -> dict[str, Any] | None:
        """The `kv_transfer_params` of its answer."""
        if self.route is not HandoverRoute.LEG:
            return {"recomputed": True, "reason": self.recomputed} if self.recomputed else None
        if self.outcome is None:
            return {"delivered": False, "reason": self.reason or "ended_early"}
        return {
            "delivered": True,
            "num_tokens": self.prefill_tokens,
            "cached_tokens": self.cached_tokens,
            "bytes_total": self.outcome.bytes_total,
            "bytes_before_prefill_end": self.outcome.bytes_before_prefill_end,
            "prefill_start_s": max(0.0, self.computing_s - self.asked_s),
            "prefill_end_s": self.outcome.prefill_end_s,
            "delivered_s": self.outcome.delivered_s,
            "link": self.outcome.link,
        }


@dataclass(slots=True)
class HandoverCounts:
    """What happened since the last look."""

    fallbacks: Counter[str] = field(default_factory=Counter)
    legs: Counter[str] = field(default_factory=Counter)
    landed_tokens: int = 0
    cached_tokens: int = 0
    delivered_bytes: int = 0
    overlapped_bytes: int = 0  # of them, those that left before their prefill ended

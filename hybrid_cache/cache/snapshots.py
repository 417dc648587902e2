"""Admission of snapshots: at which lengths a prefill keeps its linear states (and window tails).

A snapshot serves its exact length only, so the policy predicts where later prompts will leave this one.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Facts about a prefill before it starts; lengths in tokens."""

    num_tokens: int
    cached_tokens: int  # it continues from here
    attention_tokens: int  # earlier prompts share this much with it
    block_size: int

    @property
    def last_boundary(self) -> int:
        return self.num_tokens // self.block_size * self.block_size


class SnapshotPolicy(Protocol):
    """Chooses block-aligned lengths in (cached_tokens, num_tokens] worth a snapshot."""

    def lengths(self, prefill: Prefill) -> Set[int]: ...


class BranchPoints:
    """The last boundary, and where this prompt leaves a shared prefix that has no state (Marconi, SGLang)."""

    def lengths(self, prefill: Prefill) -> Set[int]:
        return {prefill.last_boundary, prefill.attention_tokens}

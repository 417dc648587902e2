"""How many sequences decode runs at once: as many as its profile says, or as the memory beside the weights holds.

A sequence holds the KVCache of its prompt and, in the mean over its time, of half its answer. Prompts that cross the line hold
theirs, too: at a rate, rate × transfer time of them at once (Little).
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from planner.errors import Infeasible
from planner.model.profile import DecodeProfile
from planner.model.site import Site, Workload


class BatchLimit(StrEnum):
    """What limits decode batches."""

    PROFILE = "max_running"
    MEMORY = "memory"
    TBT = "tbt_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeMemory:
    """Of one decode instance, all its GPUs together. `staged_bytes` are held by prompts that cross the line.

    `kv_copies` of KVCache are kept, as in `MemoryProfile`.
    """

    hardware: str
    room_bytes: float
    context_tokens: float
    context_bytes: float
    kv_copies: float = 1.0
    staged_bytes: float = 0.0

    @property
    def most_running(self) -> int:
        """The sequences that fit at once; at least one, for which prompts that would cross wait."""
        return max(1, int((self.room_bytes - self.staged_bytes) / self.context_bytes))

    def limited(self, decode: DecodeProfile) -> DecodeProfile:
        """A profile whose batches fit."""
        return decode if decode.max_running <= self.most_running else replace(decode, max_running=self.most_running)

    def with_staged(self, staged_bytes: float) -> "DecodeMemory":
        return replace(self, staged_bytes=staged_bytes)

    def __str__(self) -> str:
        staged = f", {self.staged_bytes / 1e9:.3g} GB held by prompts that cross the line" if self.staged_bytes else ""
        return (
            f"{self.room_bytes / 1e9:,.4g} GB for KVCache, {self.context_bytes / 1e9:.3g} GB of them for a mean context of "
            f"{self.context_tokens:,.0f} tokens{staged}"
        )


def memory_of(site: Site, hardware: str) -> DecodeMemory | None:
    """None where the profile does not say it of this hardware. Raises Infeasible where a mean context does not fit."""
    memory = site.profile.memory.get(hardware)
    if memory is None:
        return None
    kv, workload = site.profile.kv_size(), site.workload
    context_tokens = mean_prompt(workload) + workload.output_tokens / 2
    found = DecodeMemory(
        hardware=hardware,
        room_bytes=memory.kv_bytes,
        context_tokens=context_tokens,
        context_bytes=memory.needed_bytes(kv(context_tokens), kv.fixed_bytes),
        kv_copies=memory.kv_copies,
    )
    if found.context_bytes > found.room_bytes:
        raise Infeasible(f"memory of {hardware}: {found}; give an instance more GPUs, or shorten prompts or answers")
    return None if not found.context_bytes else found


def decode_of(site: Site, hardware: str) -> DecodeProfile:
    """Decode on this hardware, its batches within its memory."""
    decode, memory = site.profile.decode_on(hardware), memory_of(site, hardware)
    return decode if memory is None else memory.limited(decode)


def mean_prompt(workload: Workload) -> float:
    """Tokens of a whole prompt, what is cached included, as far as it is known."""
    lengths, hit_ratio = workload.lengths, workload.hit_ratio or 0.0
    if lengths.cached is not None:
        return float(lengths.weights @ (lengths.uncached + lengths.cached))
    uncached = float(lengths.weights @ lengths.uncached)
    return uncached / (1 - hit_ratio) if hit_ratio < 1 else workload.longest_prompt_tokens or uncached

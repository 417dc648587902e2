"""What mixes tokens in one layer: what it keeps of a prompt, how many weights it has, and what it computes at least."""

from dataclasses import dataclass
from math import ceil
from typing import Final, TypeAlias

from hybrid_cache.layout.spec import FullAttention, KVCacheSpec, LinearState, SlidingWindow

SCALED: Final = 128  # latents that have one scale


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes of a number in KVCache, in recurrent states, and in the states of convolutions."""

    kv: float
    state: float
    convolution: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAttention:
    """Attention with K and V of each of `kv_heads`, over all tokens or the last `window` ones."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    is_gated: bool = False

    def specs(self, element: ElementBytes) -> tuple[KVCacheSpec, ...]:
        """What is kept."""
        k_bytes = round(self.kv_heads * self.key_dim * element.kv)
        both = k_bytes + round(self.kv_heads * self.value_dim * element.kv)
        if self.window is None:
            return (FullAttention(both, k_bytes, self.key_dim, self.value_dim),)
        return (SlidingWindow(self.window, both, k_bytes, self.key_dim, self.value_dim),)

    def weights(self, hidden: int) -> int:
        """Of q, k, v, a gate if there is one, and the output."""
        queries = self.heads * self.key_dim * (2 if self.is_gated else 1)
        return hidden * (queries + self.kv_heads * (self.key_dim + self.value_dim) + self.heads * self.value_dim)

    def flops(self, num_tokens: float) -> float:
        """Of scores and sums over all pairs of tokens; a window's are few, and count as none."""
        return 0.0 if self.window else self.heads * (self.key_dim + self.value_dim) * num_tokens**2


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """MLA: a latent of `rank` and `rope_dim` per token for all heads. An indexer keeps `index_dim` more and makes it sparse."""

    heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int = 0
    index_dim: int = 0

    def specs(self, element: ElementBytes) -> tuple[KVCacheSpec, ...]:
        """What is kept: of an indexer, keys of 8 bits with a scale of 4 bytes.

        Sparse attention reads latents of 8 bits with a scale for each 128, and leaves positions in 16 bits.
        """
        latent = round((self.rank + self.rope_dim) * element.kv)
        if self.index_dim and element.kv == 1:
            latent = self.rank + 4 * ceil(self.rank / SCALED) + 2 * self.rope_dim
        index = self.index_dim + 4 if self.index_dim else 0
        return (FullAttention(latent + index, round(self.rank * element.kv)),)

    def weights(self, hidden: int) -> int:
        """Of both low-rank paths, and the output."""
        queries = self.heads * (self.nope_dim + self.rope_dim)
        asked = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        kept = hidden * (self.rank + self.rope_dim) + self.rank * self.heads * (self.nope_dim + self.value_dim)
        return asked + kept + self.heads * self.value_dim * hidden

    def flops(self, num_tokens: float) -> float:
        """Of scores and sums over all pairs of tokens; sparse ones count as none."""
        return 0.0 if self.index_dim else self.heads * (self.nope_dim + self.rope_dim + self.value_dim) * num_tokens**2


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMixer:
    """Linear attention, Mamba, a short convolution: a recurrent state, and the last columns of a convolution."""

    recurrent: int  # elements
    convolution: int  # elements
    weight_columns: int  # weights for each element of the hidden state

    def specs(self, element: ElementBytes) -> tuple[KVCacheSpec, ...]:
        """What is kept."""
        size = round(self.recurrent * element.state + self.convolution * element.convolution)
        return (LinearState(size),) if size else ()

    def weights(self, hidden: int) -> int:
        """Of its projections."""
        return hidden * self.weight_columns

    def flops(self, num_tokens: float) -> float:
        """Beyond its projections, which count as weights do: few, and linear in length."""
        return 0.0


TokenMixer: TypeAlias = HeadAttention | LatentAttention | StateMixer


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Weights that all tokens use, and those of experts: each token uses `chosen` experts."""

    dense: int = 0
    expert: int = 0  # of one of them
    experts: int = 0
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """One layer. Some families give each of both parts a layer of its own, some have attention beside a state."""

    mixers: tuple[TokenMixer, ...]
    feed_forward: FeedForward = FeedForward()

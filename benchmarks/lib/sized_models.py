"""Layouts of models that people serve, their bytes scaled down and their number of layers and blocks kept."""

from dataclasses import dataclass
from typing import Final

from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState

LEAST_BYTES: Final = 2  # of a token in one layer: K and V


@dataclass(frozen=True, slots=True)
class SizedModel:
    """Layers of full attention with so many bytes of a token in each, and layers with a recurrent state."""

    name: str
    attention_layers: int
    token_bytes: int
    k_bytes: int
    native_block: int
    state_layers: int = 0
    state_bytes: int = 0

    @property
    def layers(self) -> int:
        return self.attention_layers + self.state_layers

    def layout(self, block_tokens: int, scale: int) -> ModelLayout:
        """With `scale` times fewer bytes per token and state."""
        token_bytes = max(LEAST_BYTES, self.token_bytes // scale)
        k_bytes = max(1, token_bytes * self.k_bytes // self.token_bytes)
        attention = tuple(range(self.attention_layers))
        groups = [KVCacheGroup(FullAttention(token_bytes, k_bytes), attention)]
        if self.state_layers:
            state = LinearState(max(1, self.state_bytes // scale))
            groups.append(KVCacheGroup(state, tuple(range(self.attention_layers, self.layers))))
        return ModelLayout(f"{self.name}/{scale}", "u8", block_tokens, tuple(groups))

    def scale_within(self, num_tokens: int, max_bytes: int) -> int:
        """The smallest power of two that makes a prompt's KVCache fit."""
        scale = 1
        while scale < self.token_bytes and self.layout(16, scale).kv_bytes(num_tokens) > max_bytes:
            scale *= 2
        return scale


def _native(state_bytes: int, token_bytes: int) -> int:
    """vLLM gives attention blocks the size of a state: so many tokens, in steps of 16."""
    return -(-state_bytes // (16 * token_bytes)) * 16


def _hybrid(name: str, layers: tuple[int, int], token_bytes: int, k_bytes: int, state_bytes: int) -> SizedModel:
    attention, states = layers
    return SizedModel(name, attention, token_bytes, k_bytes, _native(state_bytes, token_bytes), states, state_bytes)


MODELS: Final = {
    model.name: model
    for model in (
        SizedModel("tiny", 4, 4096, 2048, 16),  # what the others are compared with, at slabs of as many bytes
        SizedModel("dense-70b", 80, 4096, 2048, 16),  # 8 heads of 128, bfloat16
        SizedModel("v3-mla", 61, 1152, 1152, 64),  # latents of 576
        _hybrid("qwen3-next", (12, 36), 2048, 1024, 2_146_304),  # 2 heads of 256; Gated DeltaNet in float32
        _hybrid("kimi-linear-48b", (7, 20), 1152, 1152, 2_170_880),
        _hybrid("hybrid-1t", (15, 45), 1152, 1152, 4_052_765),  # 173.925 MiB of states
    )
}

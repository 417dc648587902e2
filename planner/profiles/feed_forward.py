"""The weights behind the attention of each layer: an MLP, or experts, some for each token."""

from math import ceil
from typing import Any, Final

from planner.model.reading import Range
from planner.profiles.config import ModelConfig
from planner.profiles.mixers import FeedForward
from transport.control.settings import SettingsError

GATED: Final = 3  # matrices of an MLP: gate, up and down
UNGATED: Final = 2
FACTOR: Final = Range(0, 100)
_UNGATED: Final = ("apertus", "starcoder2")  # families whose MLPs have no gate
# Families whose `intermediate_size` is that of an expert.
_EXPERT_SIZED: Final = (
    "gpt_oss", "granitemoe", "granitemoehybrid", "llama4_text", "minimax", "minimax_m1", "minimax_m2", "minimax_text_01",
    "mixtral", "olmoe", "phimoe",
)  # fmt: skip


def feed_forward(config: ModelConfig, layer: int) -> FeedForward:
    """What layer number `layer` has. Raises SettingsError."""
    if not _is_sparse(config, layer):
        inner = config.whole("intermediate_size_mlp", "shared_intermediate_size", "intermediate_size", least=1)
        if config.has("block_auto_adjust_ff_dim"):
            inner = _adjusted(config, inner)
        return FeedForward(dense=(UNGATED if config.model_type in _UNGATED else GATED) * config.hidden * inner)
    size = _expert_size(config)
    shared = config.whole("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
    if not shared:
        default = 1 if config.model_type == "llama4_text" else 0
        shared = size * config.whole(
            "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=default
        )
    experts, each = num_experts(config), GATED * config.hidden * size
    return FeedForward(
        dense=GATED * config.hidden * shared + config.hidden * experts,
        expert=each, experts=experts, chosen=min(experts, chosen_experts(config)),
    )  # fmt: skip


def _adjusted(config: ModelConfig, inner: int) -> int:
    """LFM2's: two thirds of what is said, times a factor, rounded up."""
    factor = FACTOR.of("block_ffn_dim_multiplier", config.table.get("block_ffn_dim_multiplier", 1.0))
    step = config.whole("block_multiple_of", default=256, least=1)
    return step * ceil(int(factor * int(2 * inner / 3)) / step)


def num_experts(config: ModelConfig) -> int:
    """0 for a dense model. Raises SettingsError."""
    return config.whole("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", default=0)


def chosen_experts(config: ModelConfig) -> int:
    """Experts that a token uses. Raises SettingsError."""
    return config.whole(
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k_experts"
    )


def expert_layer(config: ModelConfig) -> FeedForward:
    """Nemotron-H's: ungated, and in a smaller width where there is a latent. Raises SettingsError."""
    experts, width = num_experts(config), config.whole("moe_latent_size", default=config.hidden)
    shared = config.whole("moe_shared_expert_intermediate_size", default=0) * config.whole(
        "n_shared_experts", default=1
    )
    around = 0 if width == config.hidden else 2 * config.hidden * width
    return FeedForward(
        dense=UNGATED * config.hidden * shared + config.hidden * experts + around,
        expert=UNGATED * width * config.whole("moe_intermediate_size", least=1),
        experts=experts, chosen=min(experts, chosen_experts(config)),
    )  # fmt: skip


def _expert_size(config: ModelConfig) -> int:
    names = ["moe_intermediate_size", "expert_ffn_hidden_size"]
    if config.model_type in _EXPERT_SIZED:
        names.append("intermediate_size")
    return config.whole(*names, least=1)


def _is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether the layer has experts. Families say it in five ways."""
    if not num_experts(config):
        return False
    kinds = config.rows("mlp_layer_types", config.num_layers)
    if kinds is not None:
        return _is_expert_kind(kinds[layer], layer)
    if "moe_layers" in config.table:
        return layer in config.numbers("moe_layers")
    if layer < config.whole("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", default=0):
        return False
    frequency = config.table.get("moe_layer_freq")
    if isinstance(frequency, list):
        return bool(config.numbers("moe_layer_freq")[layer]) if layer < len(frequency) else True
    if layer % config.whole("moe_layer_freq", default=1, least=1):
        return False
    step = config.whole("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", default=1)
    return layer not in config.numbers("mlp_only_layers") and step > 0 and (layer + 1) % step == 0


def _is_expert_kind(kind: Any, layer: int) -> bool:
    if kind not in ("dense", "sparse"):
        raise SettingsError(f"mlp_layer_types[{layer}] = {kind!r}: must be 'dense' or 'sparse'")
    return bool(kind == "sparse")

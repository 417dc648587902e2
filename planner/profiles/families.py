"""Families of models: which layers a config.json stands for.

A family is known by `model_type`. What no family here reads is refused: a hybrid taken for a dense model would be planned with
KVCache that it does not have.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from planner.profiles.config import ModelConfig, family_unknown
from planner.profiles.feed_forward import UNGATED, expert_layer, feed_forward
from planner.profiles.layer_kinds import STATE, WINDOW, layer_kinds
from planner.profiles.mixers import FeedForward, HeadAttention, LatentAttention, ModelLayer, StateMixer, TokenMixer
from transport.control.settings import SettingsError, shown

OfConfig: TypeAlias = Callable[[ModelConfig], TokenMixer]


def _head_attention(config: ModelConfig, window: int | None = None) -> HeadAttention:
    """Grouped, multi-query or plain attention. MiMo has other heads in its windows."""
    swa = "swa_" if window is not None and config.has("swa_num_key_value_heads") else ""
    heads = config.whole(f"{swa}num_attention_heads", "num_attention_heads", "n_head", least=1)
    head_dim = config.whole(f"{swa}head_dim", "head_dim", default=max(1, config.hidden // heads), least=1)
    return HeadAttention(
        heads=heads,
        kv_heads=config.whole(f"{swa}num_key_value_heads", "num_key_value_heads", default=heads, least=1),
        key_dim=head_dim,
        value_dim=config.whole(f"{swa}v_head_dim", "v_head_dim", default=head_dim, least=1),
        window=window,
        is_gated=config.model_type in GATED_ATTENTION,
    )


def _latent_attention(config: ModelConfig) -> LatentAttention:
    return LatentAttention(
        heads=config.whole("num_attention_heads", least=1),
        rank=config.whole("kv_lora_rank", least=1),
        rope_dim=config.whole("qk_rope_head_dim"),
        nope_dim=config.whole("qk_nope_head_dim", least=1),
        value_dim=config.whole("v_head_dim", least=1),
        query_rank=config.whole("q_lora_rank", default=0),
        index_dim=config.whole("index_head_dim", default=0),
    )


def _delta_net(config: ModelConfig) -> StateMixer:
    """Gated DeltaNet: one state of keys by values for each value head; q, k and v go through the convolution."""
    keys = config.whole("linear_num_key_heads", least=1) * config.whole("linear_key_head_dim", least=1)
    value_heads, value_dim = (
        config.whole("linear_num_value_heads", least=1),
        config.whole("linear_value_head_dim", least=1),
    )
    channels = 2 * keys + value_heads * value_dim
    return StateMixer(
        recurrent=value_heads * config.whole("linear_key_head_dim") * value_dim,
        convolution=channels * (config.whole("linear_conv_kernel_dim", least=1) - 1),
        weight_columns=channels + 2 * value_heads * value_dim + 2 * value_heads,  # q, k, v; gate, output; decays
    )


def _kimi_delta(config: ModelConfig) -> StateMixer:
    """KDA: a square state for each head, a convolution for each of q, k, v. Kimi's own file keeps its sizes in a table."""
    inner = config.part("linear_attn_config") or config
    heads = inner.whole("linear_num_heads", "num_heads", least=1)
    head_dim = inner.whole("linear_head_dim", "head_dim", least=1)
    kernel = inner.whole("linear_conv_kernel_dim", "short_conv_kernel_size", least=1)
    return StateMixer(
        recurrent=heads * head_dim**2,
        convolution=3 * heads * head_dim * (kernel - 1),
        weight_columns=4 * heads * head_dim + 2 * head_dim + heads,  # q, k, v, output; two low-rank gates; beta
    )


def _mamba(config: ModelConfig) -> StateMixer:
    """Mamba-2."""
    heads = config.whole("mamba_num_heads", "mamba_n_heads", least=1)
    inner = heads * config.whole("mamba_head_dim", "mamba_d_head", least=1)
    state = config.whole("ssm_state_size", "mamba_d_state", least=1)
    groups = config.whole("n_groups", "mamba_n_groups", default=1)
    channels = inner + 2 * groups * state
    return StateMixer(
        recurrent=inner * state,
        convolution=channels * (config.whole("conv_kernel", "mamba_d_conv", least=1) - 1),
        weight_columns=channels + 2 * inner + heads,
    )


def _lightning(config: ModelConfig) -> StateMixer:
    """Lightning attention: a square state for each head."""
    heads = config.whole("num_attention_heads", least=1)
    head_dim = config.whole("head_dim", default=max(1, config.hidden // heads), least=1)
    return StateMixer(recurrent=heads * head_dim**2, convolution=0, weight_columns=5 * heads * head_dim)


def _short_convolution(config: ModelConfig) -> StateMixer:
    """LFM2: a convolution and no state."""
    columns = config.whole("conv_L_cache", least=2) - 1
    return StateMixer(recurrent=0, convolution=config.hidden * columns, weight_columns=4 * config.hidden)


def _attention_of(config: ModelConfig) -> OfConfig:
    """Hybrids have MLA or heads, as their files say."""
    return _latent_attention if config.has("kv_lora_rank") else _head_attention


def _layers(config: ModelConfig, full: OfConfig, state: OfConfig | None = None) -> tuple[ModelLayer, ...]:
    """A mixer of its kind and a feed-forward part in every layer."""
    layers = []
    for at, (kind, window) in enumerate(layer_kinds(config)):
        if kind == STATE and state is None:
            raise SettingsError(f"layer {at} is linear, which a model of type {config.model_type} is not known to have")
        mixer: TokenMixer
        match kind:
            case _ if kind == STATE and state is not None:
                mixer = state(config)
            case _ if kind == WINDOW:
                mixer = _head_attention(config, window)
            case _:
                mixer = full(config)
        layers.append(ModelLayer((mixer,), feed_forward(config, at)))
    return tuple(layers)


def _dense(config: ModelConfig) -> tuple[ModelLayer, ...]:
    return _layers(config, _head_attention)


def _mla(config: ModelConfig) -> tuple[ModelLayer, ...]:
    return _layers(config, _latent_attention)


def _hybrid(state: OfConfig) -> Callable[[ModelConfig], tuple[ModelLayer, ...]]:
    def layers(config: ModelConfig) -> tuple[ModelLayer, ...]:
        found = _layers(config, _attention_of(config), state)
        if not any(isinstance(mixer, StateMixer) for layer in found for mixer in layer.mixers):
            raise SettingsError("missing: layer_types or full_attention_interval, which say what layers are linear")
        return found

    return layers


def _side_by_side(config: ModelConfig) -> tuple[ModelLayer, ...]:
    """Falcon-H1: attention and Mamba in every layer."""
    return tuple(
        ModelLayer((_head_attention(config), _mamba(config)), feed_forward(config, at))
        for at in range(config.num_layers)
    )


def _nemotron(config: ModelConfig) -> tuple[ModelLayer, ...]:
    """Nemotron-H: each layer is a mixer or an MLP, by a pattern of letters or a list of kinds."""
    pattern = config.table.get("hybrid_override_pattern")
    kinds = (
        list(pattern)
        if isinstance(pattern, str)
        else config.table.get("layers_block_type") or config.table.get("layer_types")
    )
    if not isinstance(kinds, list) or not kinds:
        raise SettingsError("missing: hybrid_override_pattern or layers_block_type")
    return tuple(_nemotron_layer(config, at, kind) for at, kind in enumerate(kinds))


def _nemotron_layer(config: ModelConfig, at: int, kind: Any) -> ModelLayer:
    match kind:
        case "M" | "mamba" | "linear_attention":
            return ModelLayer((_mamba(config),))
        case "*" | "attention" | "full_attention":
            return ModelLayer((_head_attention(config),))
        case "-" | "mlp":
            return ModelLayer(
                (), FeedForward(dense=UNGATED * config.hidden * config.whole("intermediate_size", least=1))
            )
        case "E" | "moe":
            return ModelLayer((), expert_layer(config))
        case _:
            raise SettingsError(f"hybrid_override_pattern[{at}] = {shown(kind)}: must be M, *, - or E")


GATED_ATTENTION: Final = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
_DENSE: Final = (
    "apertus", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm2", "internlm3",
    "llama", "llama4_text", "mimo", "mimo_v2_flash", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "olmo2",
    "olmo3", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3", "qwen3_moe",
    "qwen3_vl_text", "qwen3_vl_moe_text", "seed_oss", "smollm3", "starcoder2", "yi",
)  # fmt: skip
_MLA: Final = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "mistral4",
    "minicpm3",
)
SHARING: Final = ("use_cla", "num_kv_shared_layers")
FAMILIES: Final = MappingProxyType[str, Callable[[ModelConfig], tuple[ModelLayer, ...]]](
    dict.fromkeys(_DENSE, _dense)
    | dict.fromkeys(_MLA, _mla)
    | {name: _hybrid(_delta_net) for name in GATED_ATTENTION}
    | {
        name: _hybrid(_lightning)
        for name in ("minimax", "minimax_text_01", "minimax_m1", "bailing_moe_linear", "bailing_hybrid")
    }
    | {name: _hybrid(_short_convolution) for name in ("lfm2", "lfm2_moe")}
    | {name: _hybrid(_mamba) for name in ("granitemoehybrid", "bamba")}
    | {"kimi_linear": _hybrid(_kimi_delta), "falcon_h1": _side_by_side, "nemotron_h": _nemotron}
)


def model_layers(config: ModelConfig, family: str | None = None) -> tuple[ModelLayer, ...]:
    """The layers of a model, read as `family` where that is given. Raises SettingsError naming the key."""
    asked = family or config.model_type
    if asked not in FAMILIES:
        if family:
            raise SettingsError(f"--family {family}: must be one of {', '.join(sorted(FAMILIES))}")
        raise family_unknown(config, ", ".join(sorted(FAMILIES)))
    for key in SHARING:
        if config.has(key):
            raise SettingsError(
                f"{key} = {shown(config.table[key])}: layers share KVCache, which is not read; give --kv-bytes-per-token"
            )
    return FAMILIES[asked](ModelConfig(asked, config.table))

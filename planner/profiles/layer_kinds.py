"""Which layers of a model keep all tokens, the last ones of a window, or a state: families say it in many ways."""

from typing import Final, TypeAlias

from planner.profiles.config import ModelConfig
from transport.control.settings import SettingsError, shown

FULL: Final = "full"
WINDOW: Final = "window"
STATE: Final = "state"
LayerKind: TypeAlias = tuple[str, int | None]  # and the tokens of a window
_FULL: Final[LayerKind] = (FULL, None)
_STATE: Final[LayerKind] = (STATE, None)
_KINDS: Final = {
    "full_attention": FULL, "attention": FULL, "global": FULL, "sliding_attention": WINDOW, "chunked_attention": WINDOW,
    "indexed_attention": FULL, "linear_attention": STATE, "mamba": STATE, "conv": STATE,
}  # fmt: skip
# Models without `layer_types` in which only every so many layers see all tokens.
_PATTERNS: Final = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "exaone4": 4}


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """The kind of each layer. Raises SettingsError naming the key."""
    count = config.num_layers
    for name in ("layer_types", "layers_block_type"):
        if (named := config.rows(name, count)) is not None:
            return [_named(config, f"{name}[{at}]", kind) for at, kind in enumerate(named)]
    if (inner := config.part("linear_attn_config")) is not None:
        full = inner.numbers("full_attn_layers")  # counted from 1
        return [_FULL if at + 1 in full else _STATE for at in range(count)]
    for name, full_value in (("hybrid_layer_pattern", 0), ("attn_type_list", 1)):
        if config.rows(name, count) is not None:
            other = _STATE if name == "attn_type_list" else (WINDOW, _window(config))
            return [_FULL if each == full_value else other for each in config.numbers(name)]
    if config.has("attn_layer_indices"):
        return [_FULL if at in config.numbers("attn_layer_indices") else _STATE for at in range(count)]
    every = config.whole("full_attention_interval", "layer_group_size", default=0)
    if every:
        # What does not fill a group at the end is full attention.
        return [_FULL if (at + 1) % every == 0 or at >= count // every * every else _STATE for at in range(count)]
    return _sliding(config, count)


def _sliding(config: ModelConfig, count: int) -> list[LayerKind]:
    if config.model_type == "llama4_text":
        chunk, every = (
            config.whole("attention_chunk_size", default=0),
            config.whole("no_rope_layer_interval", default=4),
        )
        ropes = config.numbers("no_rope_layers") or tuple((at + 1) % max(1, every) for at in range(count))
        return [(WINDOW, chunk) if chunk and at < len(ropes) and ropes[at] else _FULL for at in range(count)]
    if config.model_type == "mimo_v2_flash" or not _slides(config):
        return [_FULL] * count
    window = _window(config)
    if pattern := config.whole("sliding_window_pattern", default=_PATTERNS.get(config.model_type, 0)):
        return [_FULL if (at + 1) % pattern == 0 else (WINDOW, window) for at in range(count)]
    first = config.whole("max_window_layers", default=0) if config.has("use_sliding_window") else 0
    return [_FULL if at < first else (WINDOW, window) for at in range(count)]


def _slides(config: ModelConfig) -> bool:
    """Qwen's files have a window that is not used unless they say so."""
    used = config.table.get("use_sliding_window")
    return config.has("sliding_window") and bool(not config.model_type.startswith("qwen") if used is None else used)


def _window(config: ModelConfig) -> int:
    return config.whole("sliding_window", "sliding_window_size", "attention_chunk_size", least=1)


def _named(config: ModelConfig, place: str, kind: object) -> LayerKind:
    if not isinstance(kind, str) or kind not in _KINDS:
        raise SettingsError(f"{place} = {shown(kind)}: must be one of {', '.join(_KINDS)}")
    found = _KINDS[kind]
    if kind == "chunked_attention":
        return found, config.whole("attention_chunk_size", least=1)
    return found, _window(config) if found == WINDOW else None

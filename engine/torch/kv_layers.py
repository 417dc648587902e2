"""Cache layers for transformers models that report what they store, and can be filled from outside.

They keep the semantics of transformers' dynamic layers (5.19, cache_utils.py); added: `on_kv` hears each chunk's new
K and V before attention runs over them, `on_state` hears that a linear layer's states are final for the chunk.
"""

# transformers ships partial annotations that its own multiple inheritance contradicts.
# mypy: disable-error-code="misc,override,no-untyped-call,assignment,return-value"

from collections.abc import Callable
from typing import Any, Final

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from engine.errors import ModelError

MIN_CAPACITY_TOKENS: Final = 256

OnKV = Callable[
    [int, int, torch.Tensor, torch.Tensor], None
]  # layer, start token, new K, new V [1, heads, tokens, dim]
OnState = Callable[[int], None]  # layer


class _Watched:
    """The listeners of one layer."""

    layer: int
    on_kv: OnKV
    on_state: OnState

    def watch(self, layer: int, on_kv: OnKV, on_state: OnState) -> None:
        self.layer, self.on_kv, self.on_state = layer, on_kv, on_state


class _Growing(DynamicLayer, _Watched):
    """Full attention in a buffer that doubles: appending a token does not copy the past."""

    def __init__(self, expected_tokens: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.expected_tokens = expected_tokens
        self.buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        self.append(key_states, value_states)
        self.on_kv(self.layer, start, key_states, value_states)
        return self.keys, self.values

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        start = self.get_seq_length()
        stop = start + keys.shape[-2]
        k_buffer, v_buffer = self._reserve(stop, keys, values)
        k_buffer[:, :, start:stop] = keys
        v_buffer[:, :, start:stop] = values
        self.keys, self.values = k_buffer[:, :, :stop], v_buffer[:, :, :stop]

    def _reserve(self, tokens: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.buffers is not None and self.buffers[0].shape[-2] >= tokens:
            return self.buffers
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        capacity = max(self.expected_tokens, MIN_CAPACITY_TOKENS, tokens + tokens // 2)
        grown = tuple(part.new_empty((*part.shape[:2], capacity, part.shape[-1])) for part in (keys, values))
        length = self.get_seq_length()
        if length:
            for new, old in zip(grown, (self.keys, self.values), strict=True):
                new[:, :, :length] = old
        self.buffers = (grown[0], grown[1])
        return self.buffers

    def fill(self, keys: torch.Tensor, values: torch.Tensor, num_tokens: int) -> None:
        self.append(keys, values)

    def stored_from(self, num_tokens: int) -> int:
        """First token whose KV a prefix of `num_tokens` needs."""
        return 0


class _Sliding(DynamicSlidingWindowLayer, _Watched):
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.cumulative_length
        full = super().update(key_states, value_states, *args, **kwargs)
        self.on_kv(self.layer, start, key_states, value_states)
        return full[0], full[1]

    def fill(self, keys: torch.Tensor, values: torch.Tensor, num_tokens: int) -> None:
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.cumulative_length = num_tokens

    def stored_from(self, num_tokens: int) -> int:
        return max(0, num_tokens - (self.sliding_window - 1))


class _Linear(LinearAttentionLayer, _Watched):
    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        # Models update the convolution first and the recurrent state last: now both are final.
        updated: torch.Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        if state_idx == self.number_of_states - 1:
            self.on_state(self.layer)
        return updated

    def states(self) -> list[torch.Tensor]:
        """Convolution states, then recurrent ones, in the order in which a snapshot keeps them."""
        stored = (*self.conv_states.values(), *self.recurrent_states.values())
        return [state for state in stored if state is not None]

    def fill_states(self, conv: dict[int, torch.Tensor], recurrent: dict[int, torch.Tensor]) -> None:
        for index, state in conv.items():
            self.dtype, self.device = state.dtype, state.device
            self.conv_states[index] = state
            self.conv_kernel_size[index] = state.shape[-1]
            self.is_conv_states_initialized[index] = True
            self.has_previous_state[index] = True
        for index, state in recurrent.items():
            self.recurrent_states[index] = state
            self.is_recurrent_states_initialized[index] = True


class _LinearAndFull(_Linear, _Growing, LinearAttentionAndFullAttentionLayer):
    def __init__(self, expected_tokens: int = 0, number_of_states: int = 1, **kwargs: Any) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.expected_tokens = expected_tokens
        self.buffers = None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionAndFullAttentionLayer.lazy_initialization(self, *args, **kwargs)


class _LinearAndSliding(_Linear, _Sliding, LinearAttentionAndSlidingWindowAttentionLayer):
    def __init__(self, sliding_window: int, number_of_states: int = 1, **kwargs: Any) -> None:
        LinearAttentionAndSlidingWindowAttentionLayer.__init__(self, sliding_window, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionAndSlidingWindowAttentionLayer.lazy_initialization(self, *args, **kwargs)


class _FullElsewhere(DynamicLayer):
    """Full attention that another stage computes: only its length is known here."""

    cumulative_length = 0

    def get_seq_length(self) -> int:
        return self.cumulative_length


class _SlidingElsewhere(DynamicSlidingWindowLayer):
    """The same of a window, whose length transformers calls so."""


AttentionLayer = _Growing | _Sliding
LinearLayer = _Linear

# The names are those of `layer_types` in a model's config; "moe" and "mlp" layers keep nothing.
_LAYER_CLASSES: Final[dict[str, type[Any]]] = {
    "full_attention": _Growing,
    "sliding_attention": _Sliding,
    "chunked_attention": _Sliding,
    "conv": _Linear,
    "linear_attention": _Linear,
    "hybrid": _LinearAndFull,
    "hybrid_sliding": _LinearAndSliding,
    "moe": _Linear,
    "mlp": _Linear,
}


class SequenceCache(Cache):
    """The KVCache of one sequence, one watched layer per model layer; of a share of the layers, theirs."""

    layers: list[Any]

    def __init__(
        self, config: Any, expected_tokens: int, on_kv: OnKV, on_state: OnState, share: range | None = None
    ) -> None:
        types, arguments = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        made = []
        for number, (kind, kwargs) in enumerate(zip(types, arguments, strict=False)):
            if share is None or number in share:
                layer = _make(kind, expected_tokens, kwargs)
                layer.watch(number, on_kv, on_state)
            else:
                layer = _elsewhere(kind, kwargs)
            made.append(layer)
        super().__init__(layers=made)

    def note_length(self, num_tokens: int) -> None:
        """Tells layers that are computed elsewhere what this share has seen: masks and positions may be made of any layer."""
        for layer in self.layers:
            if isinstance(layer, _FullElsewhere | _SlidingElsewhere):
                layer.cumulative_length = num_tokens

    def attention_layers(self) -> dict[int, Any]:
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, AttentionLayer)}

    def linear_layers(self) -> dict[int, Any]:
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, LinearLayer)}


def _make(kind: str, expected_tokens: int, arguments: dict[str, Any]) -> Any:
    try:
        layer_class = _LAYER_CLASSES[kind]
    except KeyError:
        raise ModelError(f"layers of type {kind!r} are not supported; known: {', '.join(_LAYER_CLASSES)}") from None
    if issubclass(layer_class, _Growing):
        arguments = {**arguments, "expected_tokens": expected_tokens}
    return layer_class(**arguments)


def _elsewhere(kind: str, arguments: dict[str, Any]) -> Any:
    """In the place of a layer that is not of this share."""
    layer_class = _LAYER_CLASSES[kind]
    if issubclass(layer_class, _Sliding):
        return _SlidingElsewhere(arguments["sliding_window"])
    return _FullElsewhere() if issubclass(layer_class, _Growing) else LinearAttentionLayer(**arguments)

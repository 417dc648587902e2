"""Sequences of different lengths in one forward call: their caches seen as one, their states in one tensor.

layer               | what it gets of a batch
linear, convolution | states [sequences, ...]: each sequence's own are rows of it, so what is updated is theirs at once
attention           | K and V of each sequence for itself: nothing is padded, nothing masked, nothing copied
MLA                 | takes K and V apart between cache and attention: such a module is run once per sequence
"""

# transformers ships partial annotations that its own multiple inheritance contradicts.
# mypy: disable-error-code="misc,no-untyped-call"

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine.torch.cache_argument import cache_argument
from engine.torch.exact_rows import ExactRows, each_for_itself
from engine.torch.kv_layers import SequenceCache

ATTENTION: Final = "prfaas_by_sequence"  # the name that transformers knows our attention by


class _Ragged(list[torch.Tensor]):
    """K or V of several sequences, [1, heads, tokens, dim] each. `window`: of the layer, in tokens."""

    window: int | None = None


class _Layer(LinearAttentionCacheLayerMixin):
    """One layer of all sequences, as a model's forward uses it for one more token of each."""

    is_sliding = False

    def __init__(self, layers: Sequence[Any]) -> None:
        first = layers[0]
        super().__init__(getattr(first, "number_of_states", 0))
        self._layers = layers
        self._window: int | None = getattr(first, "sliding_window", None)
        for index in range(self.number_of_states):
            self.conv_states[index] = _joined([layer.conv_states for layer in layers], index)
            self.recurrent_states[index] = _joined([layer.recurrent_states for layer in layers], index)
            self.has_previous_state[index] = first.has_previous_state[index]

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[_Ragged, _Ragged]:
        with each_for_itself():
            rows = zip(self._layers, keys.split(1), values.split(1), strict=True)
            updated = [layer.update(k, v) for layer, k, v in rows]
        all_keys, all_values = (_Ragged(part) for part in zip(*updated, strict=True))
        all_keys.window = self._window
        return all_keys, all_values

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        states = self.recurrent_states[state_idx]
        assert states is not None
        return states.copy_(recurrent_states)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("a convolution that does not update its states in place")

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("sequences without states")


class BatchCache(Cache):
    """The caches of several sequences, for one step of all. Make one for each step."""

    def __init__(self, caches: Sequence[SequenceCache]) -> None:
        self.caches = caches
        super().__init__(layers=[_Layer(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)])


@contextmanager
def together(model: Any, num_sequences: int) -> Iterator[None]:
    """In it `model` takes a BatchCache and one token of each sequence."""
    before = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION  # which has no masks either: transformers leaves them to it
    try:
        with ExactRows(num_sequences):
            yield
    finally:
        model.config._attn_implementation = before


def run_latent_attention_by_sequence(model: Any) -> None:
    """Modules that take latent K and V apart (MLA) run once per sequence of a batch; nothing else changes for them."""
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            module.forward = partial(_by_sequence, module.forward, cache_argument(module))


def _by_sequence(forward: Callable[..., Any], cache_name: str, *args: Any, **kwargs: Any) -> Any:
    cache = kwargs.pop(cache_name, None)
    if not isinstance(cache, BatchCache):
        return forward(*args, **{cache_name: cache}, **kwargs)
    caches = cache.caches
    with each_for_itself():
        outputs = [
            forward(*_row(args, i, len(caches)), **{cache_name: each}, **_row(kwargs, i, len(caches)))[0]
            for i, each in enumerate(caches)
        ]
        return torch.cat(outputs), None


def _row(value: Any, index: int, num_rows: int) -> Any:
    """The arguments of one sequence, out of a batch's."""
    if isinstance(value, torch.Tensor):
        return value[index : index + 1] if value.dim() and value.shape[0] == num_rows else value
    if isinstance(value, dict):
        return {name: _row(each, index, num_rows) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_row(each, index, num_rows) for each in value)
    return value


def _joined(states: Sequence[dict[int, torch.Tensor | None]], index: int) -> torch.Tensor | None:
    """The states of all sequences as one tensor; theirs are rows of it from now on."""
    parts = [each[index] for each in states]
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    if _is_one(tensors):
        first = tensors[0]
        return first.as_strided((len(tensors), *first.shape[1:]), (first.numel(), *first.stride()[1:]))
    whole = torch.cat(tensors)
    for each, row in zip(states, whole.split(1), strict=True):
        each[index] = row
    return whole


def _is_one(parts: Sequence[torch.Tensor]) -> bool:
    """Whether the parts follow each other in one storage, as they do when the same sequences made the step before."""
    storage, start, size = parts[0].untyped_storage().data_ptr(), parts[0].data_ptr(), parts[0].nbytes
    return all(
        part.data_ptr() == start + i * size and part.untyped_storage().data_ptr() == storage
        for i, part in enumerate(parts)
    )


def _attention(module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[Any, None]:
    if not isinstance(key, _Ragged):
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    with each_for_itself():
        outputs = [
            sdpa_attention_forward(module, q, k, v, _window_mask(k, key.window), **kwargs)[0]
            for q, k, v in zip(query.split(1), key, value, strict=True)
        ]
        return torch.cat(outputs), None


def _window_mask(key: torch.Tensor, window: int | None) -> torch.Tensor | None:
    # A full window comes with a mask that hides nothing, and kernels with masks add up in another order.
    if window is None or key.shape[-2] < window:
        return None
    return torch.ones((1, 1, 1, key.shape[-2]), dtype=torch.bool)


AttentionInterface.register(ATTENTION, _attention)

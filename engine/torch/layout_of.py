"""Derives the layout of a model's KVCache from the cache that the model itself fills.

One token is run and the cache inspected: true for every architecture transformers knows, with no table of head counts
and latent ranks to keep in step with it.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from engine.errors import ModelError
from engine.torch.cache_argument import cache_argument
from engine.torch.kv_layers import SequenceCache
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, KVCacheSpec, LinearState, SlidingWindow

_KIND_ORDER: Final = (FullAttention, SlidingWindow, LinearState)


def probe(model: Any) -> SequenceCache:
    """The cache of `model` after one token."""
    cache = SequenceCache(model.config, 1, on_kv=lambda *_: None, on_state=lambda *_: None)
    if not cache.attention_layers():
        raise ModelError("models without any attention layer are not supported: they cannot know a token's position")
    with torch.inference_mode():
        model(input_ids=torch.zeros((1, 1), dtype=torch.long), use_cache=True, **{cache_argument(model): cache})
    return cache


def layout_of(cache: SequenceCache, model: str, dtype: str, block_size: int) -> ModelLayout:
    """The layout that fits a probed cache. `model` is an identity: equal strings mean interchangeable KVCache."""
    specs: dict[KVCacheSpec, list[int]] = {}
    for number, layer in cache.attention_layers().items():
        if layer.is_initialized:
            specs.setdefault(_attention_spec(layer), []).append(number)
    for number, layer in cache.linear_layers().items():
        if states := layer.states():
            specs.setdefault(_state_spec(states), []).append(number)
    ordered = sorted(specs.items(), key=lambda item: _KIND_ORDER.index(type(item[0])))
    groups = tuple(KVCacheGroup(spec, tuple(layers)) for spec, layers in ordered)
    return ModelLayout(model=model, dtype=dtype, block_size=block_size, groups=groups)


def _attention_spec(layer: Any) -> KVCacheSpec:
    k_bytes, v_bytes = (part[0, :, 0].nbytes for part in (layer.keys, layer.values))
    heads = {"k_vector": layer.keys.shape[-1], "v_vector": layer.values.shape[-1]}
    window = getattr(layer, "sliding_window", None)
    if window is None:
        return FullAttention(bytes_per_token=k_bytes + v_bytes, k_bytes_per_token=k_bytes, **heads)
    return SlidingWindow(window=window, bytes_per_token=k_bytes + v_bytes, k_bytes_per_token=k_bytes, **heads)


def _state_spec(states: Sequence[torch.Tensor]) -> LinearState:
    parts = tuple((state.nbytes, str(state.dtype).removeprefix("torch."), int(state.shape[-1])) for state in states)
    return LinearState(sum(state.nbytes for state in states), parts)

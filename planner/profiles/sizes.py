"""S_kv of a model from its layers: the layout that a node would have, in the planner's terms."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, KVCacheSpec, LinearState, SlidingWindow
from planner.model.profile import KvSize, ProfileWindow
from planner.profiles.mixers import ElementBytes, ModelLayer

BLOCK_TOKENS: Final = 64  # of no consequence for sizes


def layout_of_layers(model: str, dtype: str, layers: Sequence[ModelLayer], element: ElementBytes) -> ModelLayout:
    """Layers that keep the same are one group."""
    groups: dict[KVCacheSpec, list[int]] = defaultdict(list)
    for at, layer in enumerate(layers):
        for mixer in layer.mixers:
            for spec in mixer.specs(element):
                groups[spec].append(at)
    return ModelLayout(model, dtype, BLOCK_TOKENS, tuple(KVCacheGroup(spec, tuple(at)) for spec, at in groups.items()))


def kv_size_of(layout: ModelLayout, provenance: str, error: float | None) -> KvSize:
    """The sum over the groups of a layout."""
    fixed, per_token = 0, 0
    windows: dict[int, int] = defaultdict(int)
    for group in layout.groups:
        match group.spec:
            case LinearState(bytes_per_snapshot=size):
                fixed += size * len(group.layers)
            case SlidingWindow(window=window, bytes_per_token=size):
                windows[window] += size * len(group.layers)
            case FullAttention(bytes_per_token=size):
                per_token += size * len(group.layers)
    return KvSize(
        fixed_bytes=fixed,
        bytes_per_token=per_token,
        windows=tuple(ProfileWindow(window, size) for window, size in sorted(windows.items())),
        provenance=provenance,
        error=error,
    )


def described(layout: ModelLayout) -> str:
    """What the groups of a layout keep, in a line."""
    parts = []
    for group in layout.groups:
        count = len(group.layers)
        match group.spec:
            case LinearState(bytes_per_snapshot=size):
                parts.append(f"{count} states of {size:,} B")
            case SlidingWindow(window=window, bytes_per_token=size):
                parts.append(f"{count} windows of {window:,} tokens with {size:,} B each")
            case FullAttention(bytes_per_token=size):
                parts.append(f"{count} full attention with {size:,} B per token")
    return ", ".join(parts)

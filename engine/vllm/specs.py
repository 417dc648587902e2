"""vLLM's KV cache specs (vllm.v1.kv_cache_interface), read: what each layer keeps, and what equal bytes would not mean.

A spec of a kind, or with a setting, that is not known here is refused: KVCache of it would be moved by rules of another.

With drafts a recurrent state has room for them. Its convolution keeps as many columns more, behind those that a server without
drafts has. Each draft has a block for the state after it. What a prompt leaves is the first columns and the first block.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from engine.vllm.layout import CacheLayer, LayerKind
from hybrid_cache.errors import LayoutError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ATTENTION: Final = {
    "FullAttentionSpec": LayerKind.FULL,
    "MLAAttentionSpec": LayerKind.FULL,
    "SinkFullAttentionSpec": LayerKind.FULL,
    "SlidingWindowSpec": LayerKind.WINDOW,
    "SlidingWindowMLASpec": LayerKind.WINDOW,
}
STATE: Final = "MambaSpec"
# Fields that are read below, or that do not change what a block holds. Of a field that a newer release adds only the default is
# known: that is how it was before.
KNOWN: Final = _names(
    """
    block_size dcp_sharded block_stride_alignment max_tp_shards num_kv_heads head_size head_size_v dtype kv_quant_mode
    page_size_padded num_head_slots state_content_bytes tokens_per_state sliding_window attention_chunk_size non_causal
    sink_len cache_dtype_str alignment model_version cache_role is_index_group_leader non_causal_multi_token_decode
    extra_retained_tokens bounded_replay
    shapes dtypes mamba_type mamba_cache_mode num_speculative_blocks num_prefill_checkpoint_blocks
    prefill_checkpoint_alignment num_heads tp_replicated
    """
)
INDEXER: Final = "indexer"
CONVOLVED: Final = {"MAMBA2": 2, "GDN_ATTN": 2, "SHORT_CONV": 1}
"""Recurrent states that begin with the columns of a convolution: how many tensors each consists of."""


def cache_layers(vllm_config: Any, kv_cache_config: Any) -> list[CacheLayer]:
    """The layers of a stage that are transferred, as one rank has them. Raises LayoutError for what cannot be."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise LayoutError(f"{name} = {getattr(parallel, name)}: the connector does not support context parallelism")
    heads = vllm_config.model_config.get_total_num_kv_heads()
    return [
        cache_layer(name, table, _layer_spec(group.kv_cache_spec, name), parallel.tensor_parallel_size, heads)
        for table, group in enumerate(kv_cache_config.kv_cache_groups)
        if group.enable_kv_transfer
        for name in group.layer_names
    ]


def layer_names(kv_cache_config: Any) -> frozenset[str]:
    """The names of the layers that a rank has."""
    return frozenset(name for group in kv_cache_config.kv_cache_groups for name in group.layer_names)


def state_forms(kv_cache_config: Any) -> list[str]:
    """What recurrent states consist of: states of one size may differ in that, and must not be mistaken."""
    states = [spec for _, spec in _specs(kv_cache_config) if type(spec).__name__ == STATE]
    return sorted({f"{_shapes(spec)}{spec.dtypes}".replace("torch.", "") for spec in states})


def attention_of(kv_cache_config: Any) -> Iterator[tuple[str, Any]]:
    """The attention layers of a rank, each with its spec."""
    return ((name, spec) for name, spec in _specs(kv_cache_config) if type(spec).__name__ in ATTENTION)


def packing(spec: Any, ranks: int, fp8: str) -> str:
    """How an attention layer's blocks are filled, where it is not heads of tokens of K and V; empty where it is.

    `fp8`: what the platform means by it. A layer with other slots than heads keeps several heads in one, or K and V of a
    head in two: which heads are beside which follows from the number of ranks.
    """
    found = []
    mode = getattr(spec.kv_quant_mode, "name", str(spec.kv_quant_mode))
    if mode != "NONE":
        found.append(f"{mode} {spec.dtype}")
    if "fp8" in f"{mode} {spec.dtype} {getattr(spec, 'cache_dtype_str', '')}".lower():
        found.append(fp8)
    if getattr(spec, "num_head_slots", None) is not None:
        found.append(f"slots={spec.num_head_slots} of tp{ranks}")
    if getattr(spec, "state_content_bytes", None) is not None:
        found.append(f"content={spec.state_content_bytes}")
    if getattr(getattr(spec, "cache_role", None), "value", "") == INDEXER:
        found.append(f"{INDEXER} {spec.dtype}")
    return " ".join(found).replace("torch.", "")


def cache_layer(name: str, table: int, spec: Any, ranks: int, heads: int) -> CacheLayer:
    """A layer of a rank by its spec, and by the model's number of KV heads. Raises LayoutError."""
    _check(name, spec)
    if type(spec).__name__ == STATE:
        gap_at, gap_bytes = _gap(name, spec)
        return CacheLayer(
            name=name,
            table=table,
            kind=LayerKind.STATE,
            block_tokens=spec.block_size,
            part_bytes=spec.state_content_size_bytes - gap_bytes,
            parts=1 if spec.tp_replicated else ranks,
            gap_at=gap_at,
            gap_bytes=gap_bytes,
        )
    kind = ATTENTION[type(spec).__name__]
    return CacheLayer(
        name=name,
        table=table,
        kind=kind,
        block_tokens=spec.block_size,
        part_bytes=spec.unpadded_page_size_bytes,
        parts=min(ranks, spec.max_tp_shards or heads),
        window=spec.sliding_window if kind is LayerKind.WINDOW else 0,
    )


def _check(name: str, spec: Any) -> None:
    kind = type(spec).__name__
    if kind not in ATTENTION and kind != STATE:
        raise LayoutError(f"{name}: KVCache of kind {kind} cannot be transferred")
    for field in dataclasses.fields(spec):
        if field.name not in KNOWN and getattr(spec, field.name) != field.default:
            value = getattr(spec, field.name)
            raise LayoutError(f"{name}: {field.name} = {value!r} of its KV cache spec is not known to the connector")
    if kind != STATE and spec.tokens_per_state != 1:
        raise LayoutError(f"{name}: {spec.tokens_per_state} tokens per cache entry cannot be transferred")
    if getattr(spec, "extra_retained_tokens", 0):
        raise LayoutError(f"{name}: a window with {spec.extra_retained_tokens} extra tokens cannot be transferred")
    if getattr(spec, "bounded_replay", False):
        raise LayoutError(f"{name}: a window whose tokens are computed again cannot be transferred")


def _gap(name: str, spec: Any) -> tuple[int, int]:
    """Where a state has room for drafts, and how many bytes of it. Raises LayoutError for one that is laid out otherwise."""
    drafts = spec.num_speculative_blocks
    if not drafts:
        return 0, 0
    kind = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    if CONVOLVED.get(kind) != len(spec.shapes) or len(spec.shapes[0]) != 2 or spec.shapes[0][0] <= drafts:
        raise LayoutError(f"{name}: how a state of kind {kind}, {_shapes(spec)}, has room for drafts is not known")
    columns, width = spec.shapes[0]
    column_bytes = width * spec.dtypes[0].itemsize
    return (columns - drafts) * column_bytes, drafts * column_bytes


def _shapes(spec: Any) -> tuple[tuple[int, ...], ...]:
    """Of a state, without what it has for drafts."""
    first, *others = map(tuple, spec.shapes)
    if spec.num_speculative_blocks:
        first = (first[0] - spec.num_speculative_blocks, *first[1:])
    return (first, *others)


def _specs(kv_cache_config: Any) -> Iterator[tuple[str, Any]]:
    for group in kv_cache_config.kv_cache_groups:
        yield from ((name, _layer_spec(group.kv_cache_spec, name)) for name in group.layer_names)


def _layer_spec(spec: Any, name: str) -> Any:
    return spec.kv_cache_specs[name] if hasattr(spec, "kv_cache_specs") else spec

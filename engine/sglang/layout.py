"""Maps SGLang's host pages to blocks of ours, and refuses servers that have no such blocks.

A page of SGLang is a block, its number of tokens `block_size`. In the memory layout `layer_first` rows of a page are
consecutive in each layer's K and V, as they are in a slab:

    host pool  | K of layer 0: row of each token ... | ... | V of layer 0 | ...        rows of a page: [page_tokens, heads, head]
    slab       | K rows of a block | V rows of a block |                               one for each layer

A page's name is SGLang's own: SHA-256 over its parent's name and its tokens, in hex. It is a name of 32 bytes, as ours are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.errors import PagesInvalid
from hybrid_cache.hashing.block_hash import HASH_BYTES
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention

ARRANGEMENT: Final = "layer_first"
POOL: Final = "MHATokenToKVPoolHost"
KV_POOL: Final = "kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPool:
    """SGLang's pool of pages in host memory. `kind` is its class, `arrangement` its memory layout; `dtype` as torch names it."""

    kind: str
    arrangement: str
    page_tokens: int
    layers: int
    draft_layers: int
    heads: int
    head_elements: int
    v_head_elements: int
    dtype: str
    item_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The number of parts of a server's KVCache: tensor, pipeline, context parallel ranks, and copies of the engine
    (`dp_rank` is not 0 in the others).
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    dp_rank: int = 0


def refusal_of(pool: HostPool, ranks: Ranks) -> str | None:
    """The reason why KVCache of this pool cannot be kept as blocks; None if it can."""
    for name, count in (("tensor", ranks.tensor), ("pipeline", ranks.pipeline), ("context", ranks.context)):
        if count > 1:
            return f"{count} {name} parallel ranks: pages of one rank only are supported so far"
    if ranks.dp_rank:
        return "data parallel attention: one engine to a node"
    if pool.kind != POOL:
        return f"host pool {pool.kind}: only attention with equal heads for K and V ({POOL}) is supported, no MLA, no hybrids"
    if pool.draft_layers:
        return f"{pool.draft_layers} layers of a draft model: speculative decoding is not supported"
    if pool.arrangement != ARRANGEMENT:
        return f"memory layout {pool.arrangement}: start the server with --hicache-mem-layout {ARRANGEMENT}"
    return None


def layout_of(identity: str, pool: HostPool) -> ModelLayout:
    """The layout of a server's KVCache; `identity` names its model and settings. For pools that are not refused."""
    k_bytes = pool.heads * pool.head_elements * pool.item_bytes
    v_bytes = pool.heads * pool.v_head_elements * pool.item_bytes
    spec = FullAttention(
        bytes_per_token=k_bytes + v_bytes,
        k_bytes_per_token=k_bytes,
        k_vector=pool.head_elements,
        v_vector=pool.v_head_elements,
    )
    return ModelLayout(
        model=f"{identity}/sglang",
        dtype=pool.dtype,
        block_size=pool.page_tokens,
        groups=(KVCacheGroup(spec, tuple(range(pool.layers))),),
    )


def names_of(keys: Sequence[str]) -> list[bytes]:
    """Names of pages as block hashes. Raises PagesInvalid for what is no name of SGLang's."""
    try:
        names = [bytes.fromhex(key) for key in keys]
    except ValueError as exc:
        raise PagesInvalid(f"no names of pages: {exc}") from exc
    if any(len(name) != HASH_BYTES for name in names):
        raise PagesInvalid(f"names of pages have {HASH_BYTES} bytes")
    return names

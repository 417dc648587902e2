"""The layout of scripted nodes."""

from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState

BLOCK_SIZE = 16
LAYOUT = ModelLayout(
    model="scripted",
    dtype="float32",
    block_size=BLOCK_SIZE,
    groups=(
        KVCacheGroup(FullAttention(bytes_per_token=64, k_bytes_per_token=32), (0,)),
        KVCacheGroup(LinearState(bytes_per_snapshot=256), (1,)),
    ),
)

"""The policies by name, and the one that a cache takes by default."""

from collections.abc import Callable
from typing import Final

from hybrid_cache.eviction.arc import ARC
from hybrid_cache.eviction.base import EvictionPolicy
from hybrid_cache.eviction.density import ReuseDensity
from hybrid_cache.eviction.ranked import FIFO, GDSF, LFU, LRU
from hybrid_cache.eviction.s3fifo import S3FIFO
from hybrid_cache.eviction.sieve import SIEVE
from hybrid_cache.eviction.snapshot_density import SnapshotDensity
from hybrid_cache.eviction.workload import WorkloadAware
from hybrid_cache.layout.layout import ModelLayout

# For a pool of so many items.
POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "default": lambda capacity: ReuseDensity(max_history=max(1_000_000, 4 * capacity)),
    "lru": lambda _: LRU(),
    "fifo": lambda _: FIFO(),
    "lfu": lambda _: LFU(),
    "gdsf": lambda _: GDSF(),
    "sieve": lambda _: SIEVE(),
    "s3fifo": S3FIFO,
    "arc": ARC,
    "wa": lambda _: WorkloadAware(),
}


DEFAULT: Final = "default"
HISTORY_BLOCKS: Final = 1_000_000


def default_policy(layout: ModelLayout, history_blocks: int = HISTORY_BLOCKS) -> EvictionPolicy:
    """Hit density: of whole snapshots where the model has linear states, of blocks elsewhere."""
    return SnapshotDensity(layout, history_blocks) if layout.state_groups else ReuseDensity(history_blocks)


def policy_named(
    name: str, layout: ModelLayout, num_pages: int, history_blocks: int = HISTORY_BLOCKS
) -> EvictionPolicy:
    """The policy of one of the names in POLICIES for a cache of `num_pages` pages. The default one learns from the last
    uses of `history_blocks` blocks.
    """
    if name == DEFAULT:
        return default_policy(layout, history_blocks)
    block_pages = sum(layout.pages_per_block(group) for group in layout.full_groups)
    return POLICIES[name](max(1, num_pages // max(1, block_pages)))

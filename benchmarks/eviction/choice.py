"""All policies by name: those of a node, and the classics beside them."""

from collections.abc import Callable
from typing import Final

from benchmarks.eviction.arc import ARC
from benchmarks.eviction.ranked import FIFO, GDSF, LFU
from benchmarks.eviction.s3fifo import S3FIFO
from benchmarks.eviction.sieve import SIEVE
from hybrid_cache.eviction import POLICIES, EvictionPolicy

# For a pool of so many items.
COMPARED: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    **POLICIES,
    "fifo": lambda _: FIFO(),
    "lfu": lambda _: LFU(),
    "gdsf": lambda _: GDSF(),
    "sieve": lambda _: SIEVE(),
    "s3fifo": S3FIFO,
    "arc": ARC,
}

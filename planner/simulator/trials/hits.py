"""The hits of a trace: as logged, in a pool of some size, or in one that never evicts."""

import numpy as np

from planner.errors import InputError
from planner.model.profile import Floats, KvSize
from planner.model.workload import Trace, infinite_cache_hits
from planner.simulator.nodes.caches import NodeCache, layout_of


def finite_cache_hits(trace: Trace, kv: KvSize, cache_gb: float) -> Floats:
    """Tokens that one pool of `cache_gb` GB finds cached, by the real cache; requests are served one after the other."""
    if trace.blocks is None:
        return np.zeros(len(trace))
    cache = NodeCache(layout_of(kv, trace.block_size), cache_gb * 1e9)
    hits = np.zeros(len(trace))
    for index, ids in enumerate(trace.blocks):
        hashes = tuple(block.to_bytes(32, "little") for block in ids)
        now, size = float(trace.arrival_s[index]), int(trace.prompt_tokens[index])
        hits[index] = cache.begin(str(index), hashes, size, now)
        cache.end(str(index), size, now)
    return hits


def hits_of(trace: Trace, kv: KvSize | None = None, cache_gb: float | None = None) -> Floats:
    """Cached tokens per request: from a finite pool, as logged, or with a cache that never evicts."""
    if trace.cached_tokens is not None and (cache_gb is None or trace.blocks is None):
        return trace.cached_tokens
    if cache_gb is None:
        return infinite_cache_hits(trace)
    if kv is None:
        raise InputError("cache_gb: a finite cache needs a site file (-c) for S_kv")
    return finite_cache_hits(trace, kv, cache_gb)

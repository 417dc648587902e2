"""The hits of a trace: as logged, in a pool of some size, or in one that never evicts."""

from math import inf

import numpy as np

from planner.decisions.views import ClusterKind
from planner.errors import InputError
from planner.model.fitting import FoundPrefixes
from planner.model.profile import Floats, KvSize
from planner.model.site import Site
from planner.model.workload import Trace, infinite_cache_hits
from planner.simulator.nodes.caches import cache_of, layout_of
from planner.simulator.trials.prefixes import find_prefixes


def finite_cache_hits(trace: Trace, kv: KvSize, cache_gb: float) -> Floats:
    """Tokens that one pool of `cache_gb` GB finds cached, by the real cache; requests are served one after the other."""
    if trace.blocks is None or not cache_gb:
        return np.zeros(len(trace))
    layout = layout_of(kv, trace.block_size)
    cache = cache_of(layout, cache_gb * 1e9)
    hits = np.zeros(len(trace))
    for index, ids in enumerate(trace.blocks):
        hashes = tuple(block.to_bytes(32, "little") for block in ids)
        now, size = float(trace.arrival_s[index]), int(trace.prompt_tokens[index])
        hits[index] = cache.begin(str(index), hashes, size, now)
        cache.end(str(index), size, now)
    return hits


def hits_of(trace: Trace, kv: KvSize | None = None, cache_gb: float | None = None) -> Floats | None:
    """Cached tokens per request: from a finite pool, as logged, or with a cache that never evicts.

    None where nothing is known of them: the trace names no blocks. Raises InputError if a pool is asked for all the same.
    """
    if cache_gb is None:
        if trace.cached_tokens is not None:
            return trace.cached_tokens
        return infinite_cache_hits(trace) if trace.blocks is not None else None
    if trace.blocks is None:
        raise InputError(f"cache_gb={cache_gb:g}: the trace names no blocks (hash_ids): its cache hits cannot be known")
    if kv is None:
        raise InputError("cache_gb: a finite cache needs a site file (-c) for S_kv")
    return finite_cache_hits(trace, kv, cache_gb)


def pd_prefixes(trace: Trace, site: Site, increment_tokens: int, cache_gb: float | None = None) -> FoundPrefixes | None:
    """What the PD clusters' nodes find cached, as plans have it: all that is answered lands there.

    `cache_gb` is a node's; without it the site's counts, and caches of a cluster that says nothing never evict. None where the
    trace says nothing of prefixes.
    """
    if trace.blocks is None and cache_gb is None:
        logged = trace.cached_tokens
        return None if logged is None else FoundPrefixes.everywhere(trace, logged, increment_tokens)
    pools = site.of_kind(ClusterKind.PD)
    total_gb = sum(_node_gb(cluster.cache_gb, cache_gb) * cluster.instances for cluster in pools if cluster.instances)
    if trace.blocks is None or not total_gb:
        hits = hits_of(trace, site.profile.kv_size(), total_gb)
        return None if hits is None else FoundPrefixes.everywhere(trace, hits, increment_tokens)
    curve, decode = site.profile.prefill_on(pools[0].hardware), site.profile.decode_on(pools[0].hardware)
    return find_prefixes(
        trace, site.profile.kv_size(), total_gb, increment_tokens,
        lambda computed, answer: curve(computed) + answer * decode.full_step_s,
    )  # fmt: skip


def _node_gb(of_site: float | None, asked: float | None) -> float:
    if asked is not None:
        return asked
    return inf if of_site is None else of_site

from pathlib import Path

import pytest

from benchmarks.cache.traces import read_trace
from hybrid_cache.cache.lookup import PrefixHit
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose
from hybrid_cache.eviction.base import EvictionPolicy
from hybrid_cache.eviction.ranked import LRU
from hybrid_cache.eviction.snapshot_density import SnapshotDensity, efficiency
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState
from tests.hybrid_cache.builders import FULL, STATE, hashes_of, make_layout, prefill, reserve

ROWS = read_trace(Path(__file__).parent / "fixtures" / "mooncake_synthetic.jsonl.xz").rows
ONE_T = ModelLayout(
    "1t",
    "bfloat16",
    512,
    (
        KVCacheGroup(FullAttention(1152, 1152), tuple(range(15))),
        KVCacheGroup(LinearState(4_052_765), tuple(range(15, 60))),
    ),
)


def hit_tokens(policy: EvictionPolicy, pool_bytes: float) -> int:
    cache = PrefixCache(ONE_T, int(pool_bytes // ONE_T.page_bytes), eviction=policy)
    hits = 0
    for row in ROWS:
        hashes = [key.to_bytes(32) for key in row.path]
        reservation = cache.reserve("r", hashes, row.input_length - 1, now=row.now, purpose=Purpose.PREFILL)
        hits += reservation.cached_tokens
        cache.commit("r", row.input_length - 1, row.now)
        cache.release("r", row.now)
    cache.check_integrity()
    return hits


def test_beats_recency_in_a_real_cache():
    assert hit_tokens(SnapshotDensity(ONE_T), 40e9) > 1.5 * hit_tokens(LRU(), 40e9)


def test_snapshot_leaves_first_and_its_kv_follows():
    cache = PrefixCache(make_layout(FULL, STATE), 19)
    prompt = list(range(16))
    prefill(cache, prompt)
    reserve(cache, "next", [50] * 40)
    assert cache.match(hashes_of(prompt), 16) == PrefixHit(0, 16)
    cache.release("next", 1.0)
    reserve(cache, "more", [60] * 64)
    assert cache.match(hashes_of(prompt), 16).attention_tokens < 16
    cache.check_integrity()


def test_long_prefixes_save_more_per_byte():
    assert efficiency(65_536, ONE_T) > 2 * efficiency(4096, ONE_T)


def test_needs_states():
    with pytest.raises(ValueError, match="linear states"):
        SnapshotDensity(make_layout(FULL))

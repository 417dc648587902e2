import tracemalloc

import pytest

from hybrid_cache.events import BlocksStored, Medium
from hybrid_cache.index import PrefixIndex
from hybrid_cache.lookup import PrefixHit
from hybrid_cache.store import (
    BYTES_PER_HASH,
    BYTES_PER_PREFIX,
    DropReplica,
    Placement,
    PrefixStore,
    Replicate,
    StoreConfig,
)
from tests.hybrid_cache.builders import FULL, hashes_of, make_layout

CHAIN = tuple(hashes_of(list(range(32))))
IDLE = {"a": 0.0, "b": 0.0, "c": 0.0}


def make_store(*holders: str, **config) -> PrefixStore:
    index = PrefixIndex(make_layout(FULL))
    for holder in holders:
        index.apply(holder, BlocksStored(0, CHAIN))
    return PrefixStore(index, StoreConfig(min_tokens=4, **config))


def test_get_prefers_the_longest_hit_then_the_idlest_node():
    store = make_store("a", "b")
    assert store.get(CHAIN, 32, {"a": 3.0, "b": 1.0, "c": 0.0}, now=0.0) == Placement("b", PrefixHit(32, 32))
    assert store.get(hashes_of([9] * 32), 32, IDLE, now=0.0).node_id is None


def test_put_goes_where_there_is_room():
    store = make_store()
    assert store.put({"a": 0.0, "b": 5.0}, {"a": 1, "b": 9}, 4) == "b"
    assert store.put({"a": 0.0}, {"a": 1}, 4) is None


def test_concurrent_demand_makes_replicas_and_quiet_drops_them():
    store = make_store("a")
    for _ in range(5):
        store.get(CHAIN, 32, IDLE, now=0.0)
    assert store.replicate(IDLE, now=0.0) == [Replicate("a", "b", CHAIN, 32, "hot")]
    store.index.apply("b", BlocksStored(0, CHAIN))
    assert store.replicate(IDLE, now=1.0) == []
    assert store.replicate(IDLE, now=300.0) == [DropReplica("b", CHAIN)]
    assert store.replicate({"a": 0.0}, now=300.0) == []


def test_one_request_is_no_demand():
    store = make_store("a")
    store.get(CHAIN, 32, IDLE, now=0.0)
    assert store.replicate(IDLE, now=0.0) == []


def test_overloaded_node_hands_over():
    store = make_store("a")
    store.get(CHAIN, 32, IDLE, now=0.0)
    assert store.rebalance({"a": 9.0, "b": 0.0, "c": 1.0}, now=0.0) == [Replicate("a", "b", CHAIN, 32, "rebalance")]
    assert store.rebalance({"a": 1.0, "b": 1.0}, now=0.0) == []


def test_what_only_an_engine_has_is_not_copied():
    store = make_store()
    store.index.apply("a", BlocksStored(0, CHAIN, Medium.ENGINE))
    for _ in range(9):
        store.get(CHAIN, 32, IDLE, now=0.0)
    assert store.replicate(IDLE, now=0.0) == []
    assert store.rebalance({"a": 9.0, "b": 0.0, "c": 1.0}, now=0.0) == []
    store.index.apply("b", BlocksStored(0, CHAIN, Medium.SSD))
    assert store.replicate(IDLE, now=0.0) == [Replicate("b", "c", CHAIN, 32, "hot")]


def test_what_is_remembered_of_prefixes_is_bounded_in_bytes():
    store, limit = make_store(max_tracked_bytes=1 << 20), 1 << 20
    store.index = PrefixIndex(make_layout(FULL))
    tracemalloc.start()
    try:
        for number in range(200):  # long prompts that have nothing in common, and as many short ones
            for blocks in (300, 1):
                chain = tuple((number * 1000 + blocks + index).to_bytes(32) for index in range(blocks))
                store.index.apply("a", BlocksStored(0, chain))
                store.get(chain, len(chain) * 4, IDLE, now=float(number))
                store.index.drop("a")
                assert store.tracked_bytes <= limit
        del chain
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert limit / 8 < taken <= limit


@pytest.mark.parametrize(
    "limit", [{"max_tracked": 2}, {"max_tracked_bytes": 2 * (BYTES_PER_PREFIX + 8 * BYTES_PER_HASH)}]
)
def test_the_prefix_asked_for_longest_ago_is_forgotten_first(limit):
    store = make_store("a", **limit)
    for length in (8, 16, 8, 24):
        for _ in range(4):
            store.get(CHAIN[: length // 4], length, IDLE, now=0.0)
    kept = [decision.num_tokens for decision in store.replicate(IDLE, now=0.0)]
    assert sorted(kept) == [8, 24]


def test_limits_of_nothing_are_refused():
    with pytest.raises(ValueError, match="max_replicas"):
        StoreConfig(max_replicas=0)

import tracemalloc

import pytest

from hybrid_cache.cache.events import BlocksStored, Medium
from hybrid_cache.cache.lookup import PrefixHit
from hybrid_cache.index.index import PrefixIndex
from hybrid_cache.index.store import (
    BYTES_PER_HASH,
    BYTES_PER_PREFIX,
    DropReplica,
    PrefixPlacement,
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
    assert store.get(CHAIN, 32, {"a": 3.0, "b": 1.0, "c": 0.0}, now=0.0) == PrefixPlacement("b", PrefixHit(32, 32))
    assert store.get(hashes_of([9] * 32), 32, IDLE, now=0.0).node_id is None


def test_put_goes_where_there_is_room():
    store = make_store()
    assert store.put({"a": 0.0, "b": 5.0}, {"a": 1, "b": 9}, 4) == "b"
    assert store.put({"a": 0.0}, {"a": 1}, 4) is None


def test_concurrent_demand_makes_replicas_and_quiet_drops_them():
    store = make_store("a")
    for _ in range(5):
        store.get(CHAIN, 32, IDLE, now=0.0)
    (copy,) = store.replicate(IDLE, now=0.0)
    assert copy == Replicate("a", "b", CHAIN, 32, "hot")
    assert store.replicate({"a": 0.0}, now=0.0) == []
    store.index.apply("b", BlocksStored(0, CHAIN))
    store.copied(copy, 0, now=1.0)
    assert (store.replicate(IDLE, now=1.0), store.cold(IDLE, now=1.0)) == ([], [])
    assert (store.replicate(IDLE, now=300.0), store.cold(IDLE, now=300.0)) == ([], [DropReplica("b", CHAIN)])
    assert store.cold({"a": 0.0}, now=300.0) == []  # its node is not there
    assert store.num_copies == 1


def test_of_a_copy_only_what_was_copied_is_given_up_and_only_once():
    store = make_store("a")
    store.index.apply("b", BlocksStored(0, CHAIN[:3]))
    for _ in range(5):
        store.get(CHAIN, 32, IDLE, now=0.0)
    (copy,) = store.replicate(IDLE, now=0.0)
    had = store.held_tokens(copy)
    store.index.apply("b", BlocksStored(0, CHAIN))
    store.copied(copy, had, now=0.0)
    (drop,) = store.cold(IDLE, now=300.0)
    assert drop == DropReplica("b", CHAIN, keep_tokens=12)
    store.dropped(drop)
    assert (store.num_copies, store.cold(IDLE, now=600.0)) == (0, [])


def test_the_last_holder_keeps_a_cold_copy_and_what_was_evicted_is_forgotten():
    store = make_store("a", "b")
    store.copied(Replicate("a", "b", CHAIN, 32, "hot"), 0, now=0.0)
    assert [drop.node_id for drop in store.cold(IDLE, now=300.0)] == ["b"]
    store.index.drop("a")
    assert store.cold(IDLE, now=300.0) == []
    store.index.drop("b")
    assert (store.cold(IDLE, now=300.0), store.num_copies) == ([], 0)


def test_copies_outlive_the_memory_of_their_demand_and_are_bounded():
    store = make_store("a", "b", max_tracked=1, max_copies=2)
    store.copied(Replicate("a", "b", CHAIN, 32, "hot"), 0, now=0.0)
    for length in (8, 16, 24):
        store.get(CHAIN[: length // 4], length, IDLE, now=0.0)
    assert store.cold(IDLE, now=300.0) == [DropReplica("b", CHAIN)]
    for blocks in (2, 4):
        store.copied(Replicate("a", "b", CHAIN[:blocks], blocks * 4, "hot"), 0, now=0.0)
    assert [len(drop.hashes) for drop in store.cold(IDLE, now=300.0)] == [2, 4]


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

import pytest

from hybrid_cache.events import BlocksStored, Medium
from hybrid_cache.index import PrefixIndex
from hybrid_cache.lookup import PrefixHit
from hybrid_cache.store import DropReplica, Placement, PrefixStore, Replicate, StoreConfig
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


def test_tracking_is_bounded():
    store = make_store("a", max_tracked=2)
    for length in (8, 16, 24, 32):
        store.get(CHAIN[: length // 4], length, IDLE, now=0.0)
    assert len(store._demand) == 2
    with pytest.raises(ValueError, match="max_replicas"):
        StoreConfig(max_replicas=0)

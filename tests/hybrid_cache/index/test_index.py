import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.cache.events import BlocksRemoved, BlocksStored, CacheCleared, Medium
from hybrid_cache.cache.lookup import MISS, PrefixHit
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.index.holders import PARTS
from hybrid_cache.index.index import TIDY_WORK, PrefixIndex
from tests.hybrid_cache.builders import FULL, STATE, WINDOW, hashes_of, make_layout, prefill

CHAIN = hashes_of(list(range(40)))


def test_hits_are_per_node():
    index = PrefixIndex(make_layout(FULL))
    index.apply("a", BlocksStored(0, tuple(CHAIN)))
    index.apply("b", BlocksStored(0, tuple(CHAIN[:3])))
    assert index.match("a", CHAIN, 40) == PrefixHit(40, 40)
    assert index.match("b", CHAIN, 40) == PrefixHit(12, 12)
    assert index.match("c", CHAIN, 40) == MISS
    index.apply("a", BlocksRemoved(0, tuple(CHAIN[5:])))
    assert index.match("a", CHAIN, 40) == PrefixHit(20, 20)
    index.drop("a")
    assert index.nodes() == ("b",)
    assert index.match("a", CHAIN, 40) == MISS
    assert len(index) == 3


@pytest.mark.parametrize("medium", [Medium.ENGINE, Medium.SSD])
def test_a_model_without_full_attention_is_matched_in_several_media(medium):
    index = PrefixIndex(make_layout(WINDOW, STATE))
    for group in (0, 1):
        index.apply("a", BlocksStored(group, tuple(CHAIN[:3])))
        index.apply("a", BlocksStored(group, tuple(CHAIN[3:6]), medium))
    assert index.match("a", CHAIN, 40) == index.match_all(CHAIN, 40)["a"].hit
    assert index.match("a", CHAIN, 40).num_tokens == 24


def test_bits_of_dropped_nodes_are_reused():
    index = PrefixIndex(make_layout(FULL))
    for round_ in range(50):
        index.apply(f"n{round_}", BlocksStored(0, tuple(CHAIN)))
        index.drop(f"n{round_}")
    index.apply("last", BlocksStored(0, tuple(CHAIN)))
    fresh = PrefixIndex(make_layout(FULL))
    fresh.apply("last", BlocksStored(0, tuple(CHAIN)))
    assert len(pickle.dumps(index)) == len(pickle.dumps(fresh))


def test_cleared_node_stays_known():
    index = PrefixIndex(make_layout(FULL))
    index.apply("a", BlocksStored(0, tuple(CHAIN)))
    index.apply("a", CacheCleared())
    assert index.nodes() == ("a",)
    assert len(index) == 0


def test_memory_is_bounded():
    index = PrefixIndex(make_layout(FULL, STATE), max_blocks=8)
    index.apply("a", BlocksStored(0, tuple(CHAIN)))
    index.apply("a", BlocksStored(1, tuple(CHAIN[:2])))
    assert len(index) == 8
    assert index.forgotten_blocks == 4


def test_foreign_groups_are_refused():
    with pytest.raises(ValueError, match="group 7"):
        PrefixIndex(make_layout()).apply("a", BlocksStored(7, ()))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(1, 30)), max_size=12))
def test_index_agrees_with_the_caches_it_hears(prompts):
    layout = make_layout(FULL, WINDOW, STATE)
    caches = {name: PrefixCache(layout, 60) for name in "ab"}
    index = PrefixIndex(layout)
    for now, (name, variant, length) in enumerate(prompts):
        tokens = [*range(8), *([variant] * 40)][:length]
        prefill(caches[name], tokens, now=float(now))
        for event in caches[name].take_events():
            index.apply(name, event)
    for name in index.nodes():
        for variant in range(3):
            hashes = hashes_of([*range(8), *([variant] * 40)])
            assert index.match(name, hashes, 48) == caches[name].match(hashes, 48)


def test_media_of_a_node_are_told_apart():
    index = PrefixIndex(make_layout(FULL))
    index.apply("a", BlocksStored(0, tuple(CHAIN)))
    index.apply("a", BlocksStored(0, tuple(CHAIN[4:]), Medium.SSD))
    index.apply("a", BlocksRemoved(0, tuple(CHAIN[4:])))
    assert index.match("a", CHAIN, 40) == PrefixHit(40, 40)
    assert index.nodes() == ("a",)
    index.apply("a", BlocksRemoved(0, (CHAIN[6],), Medium.SSD))
    assert index.match("a", CHAIN, 40) == PrefixHit(24, 24)  # a disk has holes anywhere
    index.apply("a", CacheCleared(Medium.MEMORY))
    assert index.match("a", CHAIN, 40) == MISS
    index.apply("a", BlocksStored(0, tuple(CHAIN[:4])))
    assert index.match("a", CHAIN, 40) == PrefixHit(24, 24)
    index.apply("a", CacheCleared())
    assert len(index) == 0


def test_what_only_an_engine_has_cannot_be_moved():
    index = PrefixIndex(make_layout(FULL))
    index.apply("a", BlocksStored(0, tuple(CHAIN[:4])))
    index.apply("b", BlocksStored(0, tuple(CHAIN)))
    index.apply("a", BlocksStored(0, tuple(CHAIN[:6]), Medium.ENGINE))
    hits = {node: index.match(node, CHAIN, 40) for node in "abc"}
    assert hits == {"a": PrefixHit(24, 24), "b": PrefixHit(40, 40), "c": MISS}
    assert [index.movable_tokens(node, CHAIN, hits[node]) for node in "abc"] == [16, 40, 0]
    index.apply("a", BlocksStored(0, tuple(CHAIN[4:8]), Medium.SSD))
    assert index.movable_tokens("a", CHAIN, index.match("a", CHAIN, 40)) == 32
    index.apply("a", CacheCleared(Medium.MEMORY))
    index.apply("a", CacheCleared(Medium.SSD))
    assert index.match("a", CHAIN, 40) == PrefixHit(24, 24)
    assert index.movable_tokens("a", CHAIN, PrefixHit(24, 24)) == 0


STORED = st.tuples(
    st.sampled_from("abcd"),
    st.sampled_from([*Medium, Medium.MEMORY, Medium.ENGINE]),
    st.integers(0, 2),
    st.integers(0, 40),
    st.lists(st.integers(0, 39), max_size=3),
)
GONE = st.tuples(st.sampled_from("abcd"), st.sampled_from([*Medium, None, "dropped"]))
CHAIN_OF_160 = hashes_of(list(range(160)))


class Untidy(PrefixIndex):
    """Bits of nodes that are gone stay in the table."""

    def tidy(self) -> int:
        return 0


@pytest.mark.parametrize("num_states", [0, 1, 2])
@given(
    st.lists(st.one_of(STORED, STORED, GONE), max_size=14),
    st.integers(0, 170),
    st.sampled_from([0, 0, 62, 128]),
    st.sampled_from([PrefixIndex, Untidy]),
)
def test_all_nodes_at_once_are_told_what_each_is_told(num_states, events, num_tokens, strangers, index_class):
    """Attention in memory and in an engine's cache is prefix-closed, as both keep it; on an SSD there may be holes."""
    index = index_class(make_layout(FULL, *[STATE] * num_states))
    chain = CHAIN_OF_160
    for number in range(strangers):  # so that bits are beyond those of one plane
        index.apply(f"s{number}", BlocksStored(0, tuple(chain[:3])))
    for node, *event in events:
        match event:
            case ["dropped"]:
                index.drop(node)
            case [medium]:
                index.apply(node, CacheCleared(medium))
            case medium, group, length, holes:
                group = min(group, len(index.layout.groups) - 1)
                index.apply(node, BlocksStored(group, tuple(chain[:length][:: 1 + 4 * group]), medium))
                if medium is Medium.SSD or group:
                    index.apply(node, BlocksRemoved(group, tuple(chain[hole] for hole in holes), medium))
    everyone = index.match_all(chain, num_tokens)
    assert set(everyone) == set(index.nodes())
    for node in {"a", "b", "c", "d", "s0"} & set(everyone):
        holding = everyone[node]
        hit = index.match(node, chain, num_tokens)
        assert holding == (hit, index.movable_tokens(node, chain, hit))


def many_hashes(count, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.bytes(32) for _ in range(count))


def test_a_dropped_node_leaves_the_table_in_steps_and_serves_nothing_meanwhile():
    index = PrefixIndex(make_layout(FULL))
    known = (*CHAIN, *many_hashes(20 * TIDY_WORK))
    for start in range(0, len(known), 4096):
        index.apply("a", BlocksStored(0, known[start : start + 4096]))
    index.apply("b", BlocksStored(0, tuple(CHAIN[:3])))
    index.drop("a")
    assert index.match("a", CHAIN, 40) == MISS
    assert index.match_all(CHAIN, 40).keys() == {"b"}
    steps = []
    while work := index.tidy():
        steps.append(work)
        assert index.match("b", CHAIN, 40) == PrefixHit(12, 12)
    assert len(index) == 3
    assert len(steps) > 10
    assert max(steps) <= TIDY_WORK + 2 * len(known) / PARTS  # no step does more than a part beyond its limit


def test_a_snapshot_that_comes_during_a_drop_wins():
    index = PrefixIndex(make_layout(FULL))
    index.apply("a", BlocksStored(0, (*CHAIN, *many_hashes(5 * TIDY_WORK))))
    index.drop("a")
    index.apply("a", CacheCleared())
    index.apply("a", BlocksStored(0, tuple(CHAIN[:5])))
    assert index.match("a", CHAIN, 40) == PrefixHit(20, 20)
    index.drop("a")
    index.apply("a", BlocksStored(0, tuple(CHAIN[:2])))
    while index.tidy():
        assert index.match("a", CHAIN, 40) == PrefixHit(8, 8)
    assert len(index) == 2


def test_what_is_forgotten_first_was_heard_of_first():
    index = PrefixIndex(make_layout(FULL), max_blocks=2000)
    old, new = many_hashes(2000, 1), many_hashes(1000, 2)
    index.apply("a", BlocksStored(0, old))
    index.apply("a", BlocksStored(0, new))
    assert len(index) == 2000
    assert index.forgotten_blocks == 1000
    kept = sum(bool(index.match("a", [each], 4).num_tokens) for each in new)
    assert kept > 950  # parts of the table differ in size


def test_a_thousand_nodes_take_a_bit_each_and_those_that_are_gone_make_room():
    index = PrefixIndex(make_layout(FULL))

    def found() -> dict[str, int]:
        return {node: index.match(node, CHAIN, 40).num_tokens for node in index.nodes()}

    for number in range(1000):
        medium = (Medium.MEMORY, Medium.ENGINE, Medium.SSD)[number % 3]
        index.apply(f"n{number}", BlocksStored(0, tuple(CHAIN[: number % 10 + 1]), medium))
    assert found() == {f"n{number}": 4 * (number % 10 + 1) for number in range(1000)}
    size = index.memory_bytes
    for number in range(0, 1000, 2):
        index.drop(f"n{number}")
    while index.tidy():
        pass
    for number in range(0, 1000, 2):
        index.apply(f"n{number}", BlocksStored(0, tuple(CHAIN)))
    assert found() == {f"n{number}": 40 if number % 2 == 0 else 4 * (number % 10 + 1) for number in range(1000)}
    assert index.memory_bytes < 1.1 * size

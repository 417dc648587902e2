import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.cache.events import BlocksRemoved, BlocksStored, CacheCleared, Medium
from hybrid_cache.cache.lookup import PrefixHit
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.errors import OutOfPages
from hybrid_cache.index.digest import CacheDigest, DigestCleared, DigestPart, named_at
from hybrid_cache.index.digests import DigestIndex
from hybrid_cache.index.index import NOTHING, PrefixIndex
from hybrid_cache.layout.layout import ModelLayout
from tests.hybrid_cache.builders import BLOCK, FULL, STATE, WINDOW, hashes_of, make_layout, prefill

CHAIN = hashes_of(list(range(BLOCK * 96)))
TOKENS = BLOCK * len(CHAIN)


def told(index: DigestIndex, node_id: str, digest: CacheDigest) -> None:
    for event in digest.take():
        index.apply(node_id, event)


def holds(
    index: DigestIndex, node_id: str, blocks: int, states: tuple[int, ...] = (), medium: Medium = Medium.MEMORY
) -> None:
    digest = CacheDigest()
    digest.stored(0, CHAIN[:blocks], medium, is_sampled=True)
    if states:
        digest.stored(1, [CHAIN[at - 1] for at in states], medium, is_sampled=False)
    told(index, node_id, digest)


def test_a_hit_ends_with_the_last_named_block():
    index = DigestIndex(make_layout(FULL))
    holds(index, "a", 60)
    holds(index, "b", 96)
    found = index.match_all(CHAIN, TOKENS)
    named = named_at(CHAIN, 60)
    expected = (named[-1] + 1) * BLOCK
    assert found["a"].hit == PrefixHit(expected, expected)
    assert found["a"].movable_tokens == expected
    assert found["b"].hit.num_tokens > expected
    assert index.match_all(hashes_of([7] * TOKENS), TOKENS) == {"a": NOTHING, "b": NOTHING}


def test_a_state_makes_a_hit_exact():
    index = DigestIndex(make_layout(FULL, STATE))
    holds(index, "a", 60, states=(20, 60))
    found = index.match_all(CHAIN, TOKENS)
    assert found["a"].hit == PrefixHit(60 * BLOCK, 60 * BLOCK)
    assert index.match_all(CHAIN, 59 * BLOCK)["a"].hit.num_tokens == 20 * BLOCK


def test_what_an_engine_has_cannot_be_sent():
    index = DigestIndex(make_layout(FULL, STATE))
    holds(index, "a", 60, states=(60,), medium=Medium.ENGINE)
    holds(index, "a", 20, states=(20,))
    found = index.match_all(CHAIN, TOKENS)["a"]
    assert (found.hit.num_tokens, found.movable_tokens) == (60 * BLOCK, 20 * BLOCK)


def test_a_node_that_is_dropped_or_speaks_anew_has_nothing_of_before():
    index = DigestIndex(make_layout(FULL))
    holds(index, "a", 60)
    holds(index, "b", 60)
    index.drop("a")
    index.apply("b", DigestCleared())
    assert index.match_all(CHAIN, TOKENS) == {"b": NOTHING}
    while index.tidy():
        pass
    assert len(index) == 0


def test_foreign_groups_are_refused():
    with pytest.raises(ValueError, match="reports group 3"):
        DigestIndex(make_layout(FULL)).apply("a", DigestPart(3, Medium.MEMORY, (b"name",)))


LAYOUTS = (make_layout(FULL), make_layout(FULL, STATE), make_layout(FULL, WINDOW), make_layout(WINDOW, STATE))


@given(
    layout=st.sampled_from(LAYOUTS),
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 24 * BLOCK)), max_size=12),
    pages=st.integers(24, 96),
)
def test_digests_say_what_names_say(layout: ModelLayout, prompts: list[tuple[int, int]], pages: int):
    """Of a real cache that evicts: no hit is longer than names allow, but by blocks that have none, and few are lost."""
    cache, exact, index, digest = PrefixCache(layout, pages), PrefixIndex(layout), DigestIndex(layout), CacheDigest()
    for now, (branch, length) in enumerate(prompts):
        shared = list(range(8 * BLOCK))
        tokens = [*shared, *(1000 * (branch + 1) + at for at in range(length))]
        try:
            prefill(cache, tokens, now=float(now))
        except OutOfPages:
            continue
        for event in cache.take_events():
            exact.apply("a", event)
            match event:
                case BlocksStored(group, hashes, medium):
                    digest.stored(group, hashes, medium, is_sampled=group in layout.full_groups)
                case BlocksRemoved(group, hashes, medium):
                    digest.removed(group, hashes, medium, is_sampled=group in layout.full_groups)
                case CacheCleared(medium):
                    digest.clear(medium)
        told(index, "a", digest)
        for asked_branch in range(3):
            asked = [*shared, *(1000 * (asked_branch + 1) + at for at in range(24 * BLOCK))]
            hashes = hashes_of(asked)
            by_names = exact.match_all(hashes, len(asked))["a"].hit if "a" in exact.nodes() else None
            by_digest = index.match_all(hashes, len(asked)).get("a", NOTHING).hit
            if by_names is None:
                continue
            named = [0, *(at + 1 for at in named_at(hashes, len(hashes))), len(hashes)]
            if layout.state_groups or layout.window_groups:
                assert by_digest.num_tokens == by_names.num_tokens
            else:
                blocks = by_names.num_tokens // BLOCK
                assert by_digest.num_tokens // BLOCK == max(at for at in named[:-1] if at <= blocks)


def test_wrong_hits_are_rarer_than_one_in_a_hundred():
    """By prompts that a node with 2 million blocks has nothing of."""
    rng = random.Random(0)
    index = DigestIndex(make_layout(FULL))
    names = tuple(rng.randbytes(4) for _ in range(2_000_000 // 8))
    index.apply("a", DigestPart(0, Medium.MEMORY, names))
    wrong = 0
    for _ in range(2000):
        hashes = [rng.randbytes(32) for _ in range(64)]
        wrong += index.match_all(hashes, 64 * BLOCK)["a"].hit.num_tokens > 0
    assert wrong / 2000 <= 0.01

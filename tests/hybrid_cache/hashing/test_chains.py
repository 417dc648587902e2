"""Hashes looked up are the hashes that would have been computed."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_cache.hashing.block_hash import Inset, block_hashes, tokens_digest
from hybrid_cache.hashing.chains import CHUNK_BLOCKS, Chain, ChainCache
from prompts.fair_cache import FairCache
from prompts.tokens.segments import TokenArray
from tests.properties import examples

BLOCK_SIZE = 2
CHUNK = CHUNK_BLOCKS * BLOCK_SIZE


def prompt(num_tokens: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens).astype(np.uint32)


def computed(tokens: TokenArray, salt: bytes, block_size: int = BLOCK_SIZE, insets: Sequence[Inset] = ()) -> Chain:
    return Chain(block_hashes(tokens[:-1], block_size, salt, insets=insets), tokens_digest(tokens, salt, insets))


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 5 * CHUNK), st.integers(0, 5 * CHUNK), st.integers(0, 2), st.sampled_from([b"a", b"b"])
        ),
        max_size=12,
    )
)
def test_prompts_that_share_beginnings_have_the_hashes_of_their_own_tokens(
    prompts: list[tuple[int, int, int, bytes]],
) -> None:
    cache = ChainCache(FairCache(60_000))
    for num_tokens, shared, seed, salt in prompts:
        tokens = np.concatenate([prompt(num_tokens)[:shared], prompt(num_tokens, seed)[shared:]])
        assert cache.chain(tokens, BLOCK_SIZE, salt) == computed(tokens, salt)


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 4 * CHUNK),
            st.dictionaries(
                st.one_of(st.integers(0, 4 * CHUNK), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1])),
                st.sampled_from(["cat", "dog"]),
                max_size=3,
            ),
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_prompts_of_equal_tokens_have_the_hashes_of_their_own_insets(
    prompts: list[tuple[int, dict[int, str]]], collides: bool
) -> None:
    cache = ChainCache(FairCache(60_000), fast_hash=(lambda data: 0) if collides else hash)
    for num_tokens, named in prompts:
        insets = [Inset(start, named[start]) for start in sorted(named)]
        tokens = prompt(4 * CHUNK)[:num_tokens]
        assert cache.chain(tokens, BLOCK_SIZE, b"", insets=insets) == computed(tokens, b"", insets=insets)


def test_only_what_is_new_is_hashed() -> None:
    cache = ChainCache(FairCache())
    cache.chain(prompt(4 * CHUNK), BLOCK_SIZE, b"")
    assert cache.hits == 0
    cache.chain(np.concatenate([prompt(4 * CHUNK)[: 3 * CHUNK + 1], prompt(CHUNK, seed=1)]), BLOCK_SIZE, b"")
    assert cache.hits == 3


def test_prompts_whose_fast_hashes_collide_have_the_hashes_of_their_own_tokens() -> None:
    cache = ChainCache(FairCache(), fast_hash=lambda data: 0)
    for seed in (1, 2, 1):
        tokens = prompt(3 * CHUNK, seed)
        assert cache.chain(tokens, BLOCK_SIZE, b"") == computed(tokens, b"")
    assert cache.hits == 0
    assert cache.chain(tokens, BLOCK_SIZE, b"") == computed(tokens, b"")
    assert cache.hits == 2


def test_salts_and_block_sizes_share_nothing() -> None:
    cache = ChainCache(FairCache())
    for block_size, salt in ((BLOCK_SIZE, b"a"), (BLOCK_SIZE, b"b"), (1, b"a")):
        tokens = prompt(4 * CHUNK)
        assert cache.chain(tokens, block_size, salt) == computed(tokens, salt, block_size)
    assert cache.hits == 0


def test_it_keeps_to_its_bound() -> None:
    cache = ChainCache(FairCache(3 * 5800))
    for seed in range(10):
        cache.chain(prompt(2 * CHUNK + 1, seed), BLOCK_SIZE, b"")
    cache.chain(prompt(2 * CHUNK + 1, 9), BLOCK_SIZE, b"")
    cache.chain(prompt(2 * CHUNK + 1, 0), BLOCK_SIZE, b"")
    assert cache.hits == 2

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.hashing.block_hash import HASH_BYTES, Inset, block_hashes, have_repeats, split_hashes, tokens_digest

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_chain_is_the_documented_one():
    tokens = np.array([1, 2, 3, 4, 5], dtype="<u4")
    root = hashlib.sha256(b"prfaas.blocks" + b"salt").digest()
    first = hashlib.sha256(root + tokens[:2].tobytes()).digest()
    second = hashlib.sha256(first + tokens[2:4].tobytes()).digest()
    assert block_hashes(tokens, 2, b"salt") == [first, second]


def test_digest_is_fixed_across_processes():
    assert tokens_digest([1, 2, 3], b"").hex() == (
        hashlib.sha256(hashlib.sha256(b"prfaas.tokens").digest() + b"\1\0\0\0\2\0\0\0\3\0\0\0").hexdigest()
    )


@given(TOKENS, st.integers(1, 5), st.integers(0, 10))
def test_parent_continues_the_chain(tokens, block_size, cut):
    whole = block_hashes(tokens, block_size, b"s")
    cut = min(cut, len(whole))
    if cut:
        assert block_hashes(tokens[cut * block_size :], block_size, b"s", whole[cut - 1]) == whole[cut:]
    assert len(whole) == len(tokens) // block_size


NAMES = st.sampled_from(["a", "b"])
INSETS = st.dictionaries(st.integers(0, 39), NAMES, max_size=4).map(
    lambda at: [Inset(start, at[start]) for start in sorted(at)]
)


def test_an_inset_is_in_the_name_of_the_block_in_which_it_begins():
    tokens = np.array([1, 2, 3, 4], dtype="<u4")
    root = hashlib.sha256(b"prfaas.blocks").digest()
    first = hashlib.sha256(root + tokens[:2].tobytes()).digest()
    mark = (1).to_bytes(8, "little") + hashlib.sha256(b"cat").digest()
    assert block_hashes(tokens, 2, b"", insets=[Inset(3, "cat")]) == [
        first,
        hashlib.sha256(first + tokens[2:].tobytes() + mark).digest(),
    ]
    plain = tokens_digest(tokens, b"")
    mark = (3).to_bytes(8, "little") + hashlib.sha256(b"cat").digest()
    assert tokens_digest(tokens, b"", [Inset(3, "cat")]) == hashlib.sha256(b"prfaas.insets" + plain + mark).digest()


@given(st.lists(st.integers(0, 1), max_size=40), INSETS, INSETS, st.integers(1, 5))
def test_equal_names_mean_equal_tokens_and_the_same_insets_at_the_same_places(tokens, left, right, size):
    names = [block_hashes(tokens, size, b"", insets=insets) for insets in (left, right)]
    for number, (one, other) in enumerate(zip(*names, strict=True)):
        stop = (number + 1) * size
        before = [[inset for inset in insets if inset.start < stop] for insets in (left, right)]
        assert (one == other) == (before[0] == before[1])
    assert (tokens_digest(tokens, b"", left) == tokens_digest(tokens, b"", right)) == (left == right)


@given(TOKENS, INSETS, st.integers(1, 5), st.integers(0, 10))
def test_parent_continues_the_chain_of_a_prompt_with_insets(tokens, insets, size, cut):
    whole = block_hashes(tokens, size, b"s", insets=insets)
    cut = min(cut, len(whole))
    if cut:
        rest = [Inset(start - cut * size, name) for start, name in insets if start >= cut * size]
        assert block_hashes(tokens[cut * size :], size, b"s", whole[cut - 1], rest) == whole[cut:]


@given(TOKENS, TOKENS)
def test_equal_hashes_mean_equal_prefixes(left, right):
    for i, (a, b) in enumerate(zip(block_hashes(left, 2, b""), block_hashes(right, 2, b""), strict=False)):
        assert (a == b) == (left[: 2 * i + 2] == right[: 2 * i + 2])


def test_salts_share_nothing():
    tokens = list(range(64))
    assert not set(block_hashes(tokens, 4, b"a")) & set(block_hashes(tokens, 4, b"b"))
    assert tokens_digest(tokens, b"a") != tokens_digest(tokens, b"b")


def test_digest_tells_lengths_apart():
    assert tokens_digest([0], b"") != tokens_digest([0, 0], b"")
    assert tokens_digest([], b"") != tokens_digest([0], b"")


def test_int_kinds_hash_alike():
    tokens = [7, 0, 99, 2**31]
    expected = block_hashes(tokens, 2, b"")
    for dtype in ("<u4", ">u4", "<i8", ">u8"):
        assert block_hashes(np.array(tokens, dtype=dtype), 2, b"") == expected


@pytest.mark.parametrize("tokens", [[-1, 2], [2**32, 1], [1.5, 2.0], [[1, 2], [3, 4]]])
def test_no_tokens(tokens):
    with pytest.raises(ValueError, match="tokens must"):
        block_hashes(tokens, 2, b"")


@pytest.mark.parametrize("end", [b"", bytes(HASH_BYTES), b"a" + bytes(HASH_BYTES - 1)])
def test_split_hashes(end):
    hashes = [*block_hashes(list(range(12)), 4, b""), *([end] if end else [])]
    joined = b"".join(hashes)
    assert split_hashes(joined) == split_hashes(memoryview(joined)) == hashes
    assert not split_hashes(b"")
    with pytest.raises(ValueError, match="33 bytes"):
        split_hashes(bytes(33))


@given(st.lists(st.binary(min_size=1, max_size=1), max_size=6), st.booleans())
def test_hashes_that_appear_twice_are_found_however_alike_others_are(ends, at_end):
    hashes = [bytes(HASH_BYTES - 1) + end if at_end else end * HASH_BYTES for end in ends]
    assert have_repeats(b"".join(hashes)) == (len(set(hashes)) < len(hashes))

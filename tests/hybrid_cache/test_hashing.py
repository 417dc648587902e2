import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_cache.hashing import block_hashes, split_hashes, tokens_digest

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


def test_split_hashes():
    hashes = block_hashes(list(range(12)), 4, b"")
    assert split_hashes(b"".join(hashes)) == hashes
    with pytest.raises(ValueError, match="33 bytes"):
        split_hashes(bytes(33))

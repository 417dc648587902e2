"""Ids that are decoded in pieces are those of the whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompts.errors import BadPrompt
from prompts.tokens.ids import flat_ids, may_be_ids


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1), st.sampled_from(["%s", "[%s]", " [ %s ]\n"]), st.booleans())
def test_ids_in_pieces_are_those_of_the_list(numbers: list[int], around: str, spaced: bool) -> None:
    separators = None if spaced else (",", ":")
    raw = (around % json.dumps(numbers, separators=separators)).encode()
    found = flat_ids(raw, piece_bytes=7)
    assert found is not None
    assert found.tolist() == numbers


@pytest.mark.parametrize(
    "raw",
    [b"[]", b"[[]]", b"[1.5]", b"[-1]", b'["a"]', b"[1,[2]]", b"[[1],[2]]", b"[[[1]]]", b'"1,2"', b"[true]", b"null"],
)
def test_what_is_no_list_of_ids_is_read_otherwise(raw: bytes) -> None:
    assert flat_ids(raw) is None


@pytest.mark.parametrize(
    "raw", [b"[4294967296]", b"[1,18446744073709551616]", b"[1,,2]", b"[1,]", b"[,1]", b"[1 2]", b"[01]"]
)
def test_what_is_no_id_is_refused(raw: bytes) -> None:
    for piece_bytes in (1, 1000):
        with pytest.raises(BadPrompt) as refusal:
            flat_ids(raw, piece_bytes=piece_bytes)
        assert refusal.value.param == "prompt"


def test_a_body_of_ids_is_known_by_its_bytes() -> None:
    assert may_be_ids(b'{"prompt": [1, 2, 3]}', 13)
    assert not may_be_ids(b'{"prompt": [1, 2, 3]}', 12)

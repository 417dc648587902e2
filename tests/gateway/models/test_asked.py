"""Which model a body names."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.models.asked import model_at_begin, model_in

NAMES = st.text(max_size=40)


@given(NAMES, st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=4), st.booleans())
def test_the_first_field_says_what_a_whole_reading_says(name: str, more: dict[str, str], is_ascii: bool) -> None:
    body = json.dumps({"model": name} | {key: value for key, value in more.items() if key != "model"}).encode()
    if not is_ascii:
        body = body.decode().encode("utf-8")
    assert model_in(body) == name
    assert model_at_begin(body) in (name, None)


@pytest.mark.parametrize(
    ("body", "at_begin", "whole"),
    [
        (b'{"model": "a", "prompt": "b"}', "a", "a"),
        (b' \n{ "model":"moon/a-1"}', "moon/a-1", "moon/a-1"),
        (b'{"prompt": "\\"model\\": \\"b\\"", "model": "a"}', None, "a"),
        (b'{"a": {"model": "b"}, "model": "a"}', None, "a"),
        (b'{"model": "\\u0061"}', None, "a"),
        (b'{"model": null}', None, None),
        (b'{"model": 1}', None, None),
        (b'{"prompt": "a"}', None, None),
        (b'{"model": "\xff"}', None, None),
        (b"[1]", None, None),
        (b"", None, None),
    ],
)
def test_a_model_is_read_where_it_stands(body: bytes, at_begin: str | None, whole: str | None) -> None:
    assert (model_at_begin(body), model_in(body)) == (at_begin, whole)

"""Shapes: what an engine is asked to do, and nothing of what is said."""

import json
from typing import Any

import pytest

from gateway.api.openai import Endpoint, parse
from gateway.request.fingerprint import RequestShape, shape_of

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def shape(**fields: Any) -> RequestShape:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
    return shape_of(parse(Endpoint.CHAT, json.dumps(body).encode()), 100)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, set()),
        ({"user": "u", "metadata": {"a": "b"}}, set()),
        ({"seed": 1, "n": 1, "temperature": 0.5}, {"seed", "n", "temperature"}),
        ({"temperature": 0}, {"temperature", "temperature=0"}),
        ({"response_format": {"type": "json_object"}}, {"response_format", "response_format=json_object"}),
        ({"tools": [TOOL], "tool_choice": "auto"}, {"tools", "tool_choice"}),
        ({"guided_regex": "a+"}, {"guided_regex"}),
        ({"a b": 1, "ß": 2}, {"…"}),
        ({"invented": 1, "guided_json": {}}, {"guided_json", "…"}),
    ],
)
def test_the_options_of_a_shape(fields: dict[str, Any], options: set[str]) -> None:
    assert shape(**fields) == RequestShape(Endpoint.CHAT, frozenset(options), 7)


def test_what_is_said_makes_no_difference() -> None:
    assert shape(seed=1, temperature=0.3) == shape(seed=2, temperature=0.9)
    assert str(shape(seed=1)) == "/v1/chat/completions, seed, up to 127 tokens"

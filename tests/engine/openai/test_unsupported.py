"""What the engine says beforehand is what it refuses."""

import json
from typing import Any

import pytest

from engine.errors import RequestError
from engine.openai.api import ChatRequest, CompletionRequest, check_supported, parse_request
from engine.openai.unsupported import not_done_json

FIELDS: dict[str, list[Any]] = json.loads(not_done_json())
OF_CHATS = ("documents",)
OF_TEXTS = ("echo", "suffix")
ASKS: dict[str, Any] = {
    "tools": [{}],
    "response_format": {"type": "json_object"},
    "documents": ["x"],
    "echo": True,
    "min_p": 0.5,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "repetition_penalty": 2.0,
}


def refusal(name: str, value: Any) -> str | None:
    kind: Any = CompletionRequest if name in OF_TEXTS else ChatRequest
    prompt = {"prompt": "x"} if name in OF_TEXTS else {"messages": [{"role": "user", "content": "x"}]}
    try:
        check_supported(parse_request(json.dumps({"model": "m", **prompt, name: value}).encode(), kind))
    except RequestError as error:
        return error.code
    return None


@pytest.mark.parametrize("name", FIELDS)
def test_what_is_said_not_to_be_done_is_refused_and_what_asks_for_nothing_is_not(name: str) -> None:
    assert refusal(name, ASKS.get(name, "x")) == "unsupported_parameter"
    # What is of another type altogether is another mistake.
    assert "unsupported_parameter" not in [refusal(name, value) for value in FIELDS[name] if value not in ({}, [])]

"""What is a style, and what is known of it."""

import json
from typing import Any

import pytest

from gateway.api.openai import Endpoint, parse
from gateway.prompt.tokenizer_trust import ALONE_S, ENGINE_S, Reading, Styles, style_of

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


def style(endpoint: Endpoint = Endpoint.CHAT, **fields: Any) -> bytes:
    return style_of(parse(endpoint, json.dumps({"model": "m"} | fields).encode()))


def test_contents_are_no_part_of_it() -> None:
    long = {"role": "user", "content": "something else entirely, at length"}
    assert style(messages=[USER]) == style(messages=[long, USER])
    assert style(messages=[USER], temperature=0.5, max_tokens=3, stream=True) == style(messages=[USER])
    other = {"type": "function", "function": {"name": "g", "description": "e", "parameters": {"type": "object"}}}
    assert style(messages=[USER], tools=[TOOL]) == style(messages=[USER], tools=[other, TOOL])
    assert style(messages=[USER], truncate_prompt_tokens=5) == style(messages=[USER], truncate_prompt_tokens=500)
    assert style(Endpoint.COMPLETIONS, prompt="a") == style(Endpoint.COMPLETIONS, prompt="b")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "developer", "content": "hi"}]},
        {"messages": [{"content": "hi", "role": "user"}]},
        {"messages": [USER | {"name": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]}]},
        {"messages": [USER | {"tool_calls": [CALL]}]},
        {"messages": [USER | {"tool_calls": [CALL | {"index": 0}]}]},
        {"messages": [USER | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]}]},
        {"messages": [USER], "tools": [TOOL]},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [USER], "tools": [{"function": {"name": "f"}, "type": "function"}]},
        {"messages": [USER], "reasoning_effort": "low"},
        {"messages": [USER], "reasoning_effort": "high"},
        {"messages": [USER], "add_generation_prompt": False},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": [USER], "documents": [{"text": "x"}]},
        {"messages": [USER], "truncate_prompt_tokens": 5},
        {"messages": [USER], "of_tomorrow": {}},
    ],
    ids=str,
)
def test_what_may_be_read_in_another_way_is_another_style(fields: dict[str, Any]) -> None:
    assert style(**fields) != style(messages=[USER])


@pytest.mark.parametrize("messages", [5, "x", None, [5], [[]], [{"role": {}, "tool_calls": 3, "content": [1, None]}]])
def test_nonsense_has_a_style(messages: Any) -> None:
    assert style(messages=messages) == style(messages=messages)


def test_what_is_learned_of_a_style() -> None:
    styles = Styles(limit=2)
    assert (len(styles), styles.reading(b"a", 0.0)) == (0, Reading.OWN)
    styles.differs(b"a", Reading.OWN, 0.0)
    assert styles.reading(b"a", ENGINE_S - 1) is Reading.ENGINE
    assert (styles.reading(b"a", ENGINE_S), len(styles)) == (Reading.OWN, 0)
    styles.differs(b"a", Reading.ENGINE, 0.0)
    assert styles.reading(b"a", ALONE_S - 1) is Reading.ALONE
    assert styles.reading(b"a", ALONE_S) is Reading.ENGINE
    assert styles.reading(b"a", ALONE_S + ENGINE_S) is Reading.OWN


def test_the_style_that_was_not_met_for_longest_is_forgotten() -> None:
    styles = Styles(limit=2)
    styles.not_read(b"a", 0.0)
    styles.not_read(b"b", 0.0)
    styles.reading(b"a", 1.0)
    styles.differs(b"c", Reading.OWN, 1.0)
    assert [styles.reading(each, 2.0) for each in (b"a", b"b", b"c")] == [Reading.ALONE, Reading.OWN, Reading.ENGINE]

"""Messages in the form that vLLM hands to a template. That it is vLLM's is tested beside vLLM (tests/vllm/test_chats.py)."""

from typing import Any

import pytest

from prompts.chat.form import Continued, Form, in_form, in_form_from, tools_in_form, variables
from prompts.errors import BadPrompt

TEXT, PARTS, MODERN = Form(), Form(in_parts=True), Form(knows_developer=True)
USER = {"role": "user", "content": "hi"}


def of(message: dict[str, Any], form: Form = MODERN) -> dict[str, Any]:
    return in_form([message], form)[0]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def calling(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "1", "function": function}]}


@pytest.mark.parametrize(
    ("content", "as_text", "as_parts"),
    [
        ("a", "a", parts("a")),
        (None, "", []),
        ([], "", []),
        (parts("a", "b"), "a\nb", parts("a", "b")),
        (["a", "b"], "a\nb", parts("a", "b")),
        (["", "a", ""], "a", parts("", "a", "")),
        ([{"type": "text", "text": None}, *parts("a")], "a", parts("a")),
        ([{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}], "a\nb", parts("a", "b")),
        ([{"text": "a", "type": "text", "cache_control": 1}], "a", [{"type": "text", "text": "a", "cache_control": 1}]),
        ([{"type": "tool_reference", "name": "f"}], "f", [{"type": "tool_reference", "name": "f"}]),
    ],
)
def test_content_is_what_the_template_wants(content: Any, as_text: str, as_parts: list[Any]) -> None:
    message = {"role": "user", "content": content}
    assert of(message, TEXT)["content"] == as_text
    assert of(message, PARTS)["content"] == as_parts


@pytest.mark.parametrize("named", [{"type": "text", "text": "a"}, {"type": "tool_reference", "name": "f"}])
def test_what_has_a_name_is_no_text(named: dict[str, Any]) -> None:
    assert of({"role": "user", "content": [named | {"uuid": None}]})["content"] in ("a", "f")
    for hidden in ({}, {"image_url": "http://a/b.png"}):
        with pytest.raises(BadPrompt, match="cannot have a 'uuid'"):
            of({"role": "user", "content": [named | {"uuid": "x"} | hidden]})


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a":1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("[1]", {}),
        ('{"a', {}),
        ("[" * 100_000, {}),
    ],
)
def test_arguments_are_an_object(written: Any, read: dict[str, Any]) -> None:
    call = of(calling(written))["tool_calls"][0]
    assert call["function"]["arguments"] == read
    assert (list(call), list(call["function"])) == (["id", "function", "type"], ["arguments", "name"])


def test_nothing_of_the_clients_is_changed() -> None:
    message = calling('{"a":1}')
    of(message)
    assert message == calling('{"a":1}')


@pytest.mark.parametrize(
    ("said", "thoughts"),
    [
        ({"reasoning": "a"}, "a"),
        ({"reasoning_content": "b"}, "b"),
        ({"reasoning": "a", "reasoning_content": "b"}, "a"),
        ({"reasoning": None, "reasoning_content": "b"}, "b"),
    ],
)
def test_thoughts_go_by_both_names(said: dict[str, Any], thoughts: str) -> None:
    made = of({"role": "assistant", "content": "x"} | said)
    assert made["reasoning"] == made["reasoning_content"] == thoughts


def test_only_an_assistant_thinks_and_calls() -> None:
    assert of(USER | {"reasoning": "a", "tool_calls": [1], "tool_call_id": "x"}) == USER


def test_results_of_tools_are_texts_for_every_template() -> None:
    made = of({"role": "tool", "tool_call_id": "1", "content": parts("a", "b")}, PARTS)
    assert made == {"role": "tool", "content": "a\nb", "tool_call_id": "1"}


@pytest.mark.parametrize(
    "content", ["x-anthropic-billing-header: 1\nrest", parts("x-anthropic-billing-header: 1", "rest")]
)
def test_a_billing_header_is_left_out(content: Any) -> None:
    assert of({"role": "system", "content": content}, TEXT)["content"] == "rest"


def test_a_developer_is_a_system_for_a_template_that_knows_none() -> None:
    developer = {"role": "developer", "content": "d", "tools": [1]}
    assert in_form([developer, USER], TEXT) == [{"role": "system", "content": "d"}, USER]
    assert in_form([developer, USER], MODERN) == [developer, USER]
    system = {"role": "system", "content": "s"}
    assert in_form([system, USER, developer], TEXT) == [{"role": "system", "content": "s\n\nd"}, USER]
    assert in_form([USER, system], TEXT) == [USER, system]  # of no developer's making


def test_a_conversation_goes_on_unless_its_beginning_changes() -> None:
    developer, system = {"role": "developer", "content": "d"}, {"role": "system", "content": "s"}
    assert in_form_from([USER], 3, False, TEXT) == Continued([USER], False)
    begun = in_form_from([developer, USER], 0, False, TEXT)
    assert begun == Continued([{"role": "system", "content": "d"}, USER], True)
    assert in_form_from([USER, developer], 2, False, TEXT) is None
    assert in_form_from([system], 2, True, TEXT) is None
    assert in_form_from([system], 2, False, TEXT) == Continued([system], False)
    assert in_form_from([USER, developer], 2, True, MODERN) is not None


def test_tools_have_all_fields_in_order() -> None:
    bare = {"function": {"parameters": {"b": 1, "a": 2}, "name": "f", "x": 1}, "type": "function", "cache_control": {}}
    made = tools_in_form([bare])
    assert made == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {"b": 1, "a": 2}}}
    ]
    assert (list(made[0]), list(made[0]["function"])) == (["type", "function"], ["name", "description", "parameters"])
    strict = {"function": {"name": "f", "strict": False}, "defer_loading": True}
    assert tools_in_form([strict]) == [
        {
            "type": "function",
            "function": {"name": "f", "description": None, "parameters": None, "strict": False, "defer_loading": True},
            "defer_loading": True,
        }
    ]
    assert tools_in_form(["odd", None]) == ["odd", None]
    assert tools_in_form(None) is None


@pytest.mark.parametrize(
    ("said", "effort", "expected"),
    [
        (None, None, {}),
        ({"a": None, "b": "auto", "c": False}, None, {"c": False}),
        (None, "low", {"reasoning_effort": "low", "enable_thinking": True}),
        (None, "none", {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"enable_thinking": False, "reasoning_effort": "high"},
            "low",
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
        ({"enable_thinking": None}, "low", {"reasoning_effort": "low"}),
    ],
)
def test_effort_is_a_variable_and_so_is_thinking(
    said: dict[str, Any] | None, effort: str | None, expected: dict[str, Any]
) -> None:
    assert variables(said, effort) == expected


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [None]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": [], "text": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": {}, "text": "x"}]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_what_is_wrong_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadPrompt) as refused:
        of(message)
    assert refused.value.param == param

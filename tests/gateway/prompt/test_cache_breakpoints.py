"""Marks become lengths in tokens, or a refusal that names the field."""

import json
from datetime import datetime
from typing import Any

import pytest

from gateway.api.cache_control import NO_CACHING, Breakpoint, Caching
from gateway.api.openai import Endpoint, parse
from gateway.errors import BadRequest
from gateway.prompt.cache_breakpoints import unmarked
from gateway.prompt.prompt import Hashing, PromptMemory, read_call
from prompts.chat.template import ChatTemplate
from prompts.tokens.tokenizer import TextTokenizer
from tests.gateway.worlds import model_of
from tests.prompts.builders import bpe, text_tokenizer

HASHING = Hashing(16, b"salt")
FIVE: dict[str, Any] = {"mode": "explicit", "ttl": "5m"}
LONG = "Answer in few words, whatever you are asked. " * 4
TOKENS = len(text_tokenizer().encode(LONG))


def caching_of(body: dict[str, Any], endpoint: Endpoint = Endpoint.CHAT) -> tuple[Caching, int, dict[str, Any]]:
    """What is to be kept, of how many tokens, and the call without it."""
    said = json.dumps({"model": "scripted", **body}).encode()
    call, prompt = read_call(endpoint, said, model_of(HASHING), PromptMemory(text_tokenizer()))
    return prompt.caching, prompt.num_tokens, {name: json.loads(bytes(raw)) for name, raw in call.fields.items()}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [*messages], **fields}


def text(said: str, mark: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": said} | ({"prompt_cache_breakpoint": mark} if mark else {})


def test_a_prompt_without_marks_is_left_alone() -> None:
    body = json.dumps(chat({"role": "user", "content": "hi"}, model="scripted")).encode()
    call = parse(Endpoint.CHAT, body)
    assert unmarked(call)[0] is call
    assert caching_of(chat({"role": "user", "content": "hi"}))[0] == NO_CACHING


def test_a_marked_message_is_kept_to_its_end_and_engines_hear_nothing_of_it() -> None:
    user = {"role": "user", "content": "And now?"}
    caching, total, fields = caching_of(chat({"role": "system", "content": [text(LONG, FIVE)]}, user))
    (found,) = caching.breakpoints
    assert found.field == "messages[0].content[0].prompt_cache_breakpoint"
    assert (found.ttl, found.tokens) == ("5m", found.asked_tokens)
    assert TOKENS <= found.tokens < total
    assert fields["messages"] == [{"role": "system", "content": [text(LONG)]}, user]
    assert caching.hints(16) == {"branch_tokens": [found.tokens // 16 * 16]}
    # Whatever follows, the prefix is the same.
    again, _, _ = caching_of(
        chat({"role": "system", "content": [text(LONG, FIVE)]}, user | {"content": "What else? " * 9})
    )
    assert again == caching


def test_a_mark_inside_a_message_ends_where_the_whole_prompt_goes_on_otherwise() -> None:
    parts = [text(LONG, {"mode": "explicit"}), text("And this.")]
    (found,) = caching_of(chat({"role": "user", "content": parts}))[0].breakpoints
    assert found.ttl == "30m"
    assert TOKENS <= found.tokens < found.asked_tokens  # the end of the turn comes later


def test_implicit_marks_the_last_message_and_explicit_says_what_is_of_no_use() -> None:
    message = {"role": "user", "content": LONG}
    (found,) = caching_of(chat(message, prompt_cache_options={"ttl": "1h"}))[0].breakpoints
    assert (found.field, found.ttl) == ("prompt_cache_options", "1h")
    caching, _, fields = caching_of(chat(message, prompt_cache_options={"mode": "explicit"}, prompt_cache_key="k"))
    assert (caching.breakpoints, caching.hints(16)["useful_tokens"]) == ((), 0)
    assert caching.category not in ("", "k")
    assert "prompt_cache_options" not in fields
    (whole,) = caching_of({"prompt": LONG, "prompt_cache_options": {}}, Endpoint.COMPLETIONS)[0].breakpoints
    assert whole == Breakpoint("prompt_cache_options", "30m", TOKENS, TOKENS)


CONTROL = {"type": "ephemeral"}


def test_a_chat_may_say_it_as_anthropic_does() -> None:
    """Clients of many providers (LiteLLM) write `cache_control` into chats, as do those that know Anthropic's."""
    user = {"role": "user", "content": "And now?"}
    hour = {"cache_control": CONTROL | {"ttl": "1h"}}
    parts = [text("Be brief. ") | {"cache_control": CONTROL}, text(LONG) | hour]
    caching, total, fields = caching_of(chat({"role": "system", "content": parts}, user))
    within, after = caching.breakpoints
    assert [(each.field, each.ttl) for each in caching.breakpoints] == [
        ("messages[0].content[0].cache_control", "5m"),
        ("messages[0].content[1].cache_control", "1h"),
    ]
    assert 0 < within.tokens < TOKENS <= after.tokens < total
    # Engines hear nothing of it, and the same prompt without it is the same.
    assert fields["messages"] == [{"role": "system", "content": [text("Be brief. "), text(LONG)]}, user]
    said = [text("Be brief. ", FIVE), text(LONG, {"mode": "explicit", "ttl": "1h"})]
    same = caching_of(chat({"role": "system", "content": said}, user))[0].breakpoints
    assert [(each.ttl, each.tokens) for each in same] == [("5m", within.tokens), ("1h", after.tokens)]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (chat({"role": "system", "content": LONG, "cache_control": CONTROL}), "messages[0].cache_control"),
        (chat({"role": "user", "content": LONG}, cache_control=CONTROL), "cache_control"),
        (
            chat({"role": "user", "content": LONG, "cache_control": None, "tool_calls": None}, cache_control=CONTROL),
            "cache_control",
        ),
    ],
)
def test_a_whole_message_may_be_marked_so(body: dict[str, Any], field: str) -> None:
    caching, total, fields = caching_of(body)
    (found,) = caching.breakpoints
    assert (found.field, found.ttl, TOKENS <= found.tokens <= total) == (field, "5m", True)
    assert "cache_control" not in json.dumps(fields)


def test_a_call_may_be_marked_so() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": LONG, "tool_calls": [call | {"cache_control": CONTROL}]}
    caching, total, fields = caching_of(chat({"role": "user", "content": "Hi"}, called))
    (found,) = caching.breakpoints
    assert (found.field, TOKENS <= found.tokens <= total) == ("messages[1].tool_calls[0].cache_control", True)
    assert fields["messages"][1]["tool_calls"] == [call]


def test_a_text_may_be_marked_so() -> None:
    caching, total, fields = caching_of({"prompt": LONG, "cache_control": CONTROL}, Endpoint.COMPLETIONS)
    assert caching.breakpoints == (Breakpoint("cache_control", "5m", total, total),)
    assert "cache_control" not in fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_control": {"type": "for_ever"}}, "cache_control.type"),
        ({"cache_control": CONTROL | {"ttl": "2h"}}, "cache_control.ttl"),
        (
            {"messages": [{"role": "user", "content": [text("a") | {"cache_control": True}]}]},
            "messages[0].content[0].cache_control",
        ),
        ({"messages": [{"role": "user", "content": "a", "cache_control": CONTROL}] * 5}, "cache_control"),
    ],
)
def test_anthropics_mistakes_are_named_in_chats_too(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        caching_of(chat({"role": "user", "content": "hi"}) | fields)
    assert refused.value.param == param


def test_the_last_four_count() -> None:
    messages = [{"role": "user", "content": [text(f"{LONG}{number}", FIVE)]} for number in range(6)]
    found = caching_of(chat(*messages))[0].breakpoints
    assert [each.field.split(".")[0] for each in found] == [f"messages[{number}]" for number in range(2, 6)]
    assert sorted(each.tokens for each in found) == [each.tokens for each in found]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"ttl": "2h"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"mode": "all"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_key": "k" * 600}, "prompt_cache_key"),
        (
            {"messages": [{"role": "user", "content": [text("a", {"mode": "explicit", "ttl": "12h"})]}]},
            "messages[0].content[0].prompt_cache_breakpoint.ttl",
        ),
        (
            {"messages": [{"role": "user", "content": [text("a", {"mode": "implicit"})]}]},
            "messages[0].content[0].prompt_cache_breakpoint.mode",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        caching_of(chat({"role": "user", "content": "hi"}) | fields)
    assert refused.value.param == param


def message(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 9, "messages": [{"role": "user", "content": "And now?"}], **fields}


def test_anthropics_marks_are_the_same() -> None:
    control = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": "Be brief. "}, {"type": "text", "text": LONG, "cache_control": control}]
    caching, _, fields = caching_of(message(system=system), Endpoint.MESSAGES)
    (found,) = caching.breakpoints
    assert (found.field, found.ttl) == ("system[1].cache_control", "1h")
    assert found.tokens == found.asked_tokens > TOKENS
    assert fields["messages"][0] == {"role": "system", "content": "Be brief. " + LONG}
    system[0]["cache_control"] = {"type": "ephemeral"}
    within, after = caching_of(message(system=system), Endpoint.MESSAGES)[0].breakpoints
    assert (within.ttl, after) == ("5m", found)
    assert 0 < within.tokens < TOKENS
    (last,) = caching_of(message(cache_control={"type": "ephemeral"}), Endpoint.MESSAGES)[0].breakpoints
    assert last.field == "cache_control"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "2h"}}]}, "system"),
        ({"cache_control": {"type": "for_ever"}}, "cache_control.type"),
        (
            {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 5},
            "cache_control",
        ),
    ],
)
def test_anthropics_mistakes_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        caching_of(message(**fields), Endpoint.MESSAGES)
    assert (refused.value.param or "").startswith(param)


def caching_with(template: str, body: dict[str, Any]) -> Caching:
    tokenizer = TextTokenizer(bpe(), ChatTemplate(template, {}, datetime.now))
    said = json.dumps({"model": "scripted", **body}).encode()
    return read_call(Endpoint.CHAT, said, model_of(HASHING), PromptMemory(tokenizer))[1].caching


COUNTS = "{{ messages | length }}: {% for message in messages %}{{ message.content }}\n{% endfor %}"
TOOLS_LAST = "{% for message in messages %}{{ message.content }}\n{% endfor %}{{ tools | tojson }}"
TOOLS_FIRST = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}{{ m.content }}\n{% endfor %}"
)


def test_what_a_template_tells_otherwise_when_more_follows_is_refused() -> None:
    messages = [{"role": "system", "content": [text(LONG, FIVE)]}, {"role": "user", "content": "Now?"}]
    with pytest.raises(BadRequest) as refused:
        caching_with(COUNTS, chat(*messages))
    assert (refused.value.param, refused.value.code) == (
        "messages[0].content[0].prompt_cache_breakpoint",
        "cannot_be_cached",
    )


def test_marked_tools_are_kept_where_a_template_puts_them_first() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "news")]
    tools[0]["prompt_cache_breakpoint"] = FIVE
    body = chat({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}, tools=tools)
    (found,) = caching_with(TOOLS_FIRST, body).breakpoints
    assert 0 < found.tokens <= found.asked_tokens
    with pytest.raises(BadRequest) as refused:
        caching_with(TOOLS_LAST, body)
    assert refused.value.param == "tools[0].prompt_cache_breakpoint"
    del tools[0]["prompt_cache_breakpoint"]
    for bearer, field in ((tools[0], "tools[0]"), (tools[0]["function"], "tools[0].function")):
        bearer["cache_control"] = CONTROL
        (same,) = caching_with(TOOLS_FIRST, body).breakpoints
        assert (same.field, same.ttl, same.tokens) == (f"{field}.cache_control", "5m", found.tokens)
        del bearer["cache_control"]


def test_responses_marks_are_the_same() -> None:
    parts = [{"type": "input_text", "text": LONG, "prompt_cache_breakpoint": {"mode": "explicit"}}]
    asked = {"input": [{"role": "developer", "content": parts}, {"role": "user", "content": "And now?"}]}
    caching, _, fields = caching_of(
        {**asked, "prompt_cache_options": {"mode": "explicit", "ttl": "1h"}}, Endpoint.RESPONSES
    )
    (found,) = caching.breakpoints
    assert (found.field, found.ttl) == ("input[0].content[0].prompt_cache_breakpoint", "1h")
    assert found.tokens == found.asked_tokens > TOKENS
    assert fields["messages"][0] == {"role": "system", "content": LONG}
    parts[0]["prompt_cache_breakpoint"] = {"mode": "explicit", "ttl": "2h"}
    with pytest.raises(BadRequest) as refused:
        caching_of(asked, Endpoint.RESPONSES)
    assert refused.value.param == "input[0].content[0].prompt_cache_breakpoint.ttl"

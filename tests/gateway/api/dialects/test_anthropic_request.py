"""Anthropic's Messages: what becomes of a body, and what is told of a chat's answer."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.dialects.anthropic_request import to_chat, to_counted
from gateway.api.dialects.anthropic_response import MessagesTranslator, error_body
from gateway.api.openai import Endpoint
from gateway.errors import ApiError, BadRequest, Overloaded
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import on_loop, until, world

ASKED = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
CALLED = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": [1, 2]}}


def chat(**fields: Any) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(to_chat(json.dumps(ASKED | fields).encode()))
    return said


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = chat(messages=list(given), **fields)["messages"]
    return said


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The data of each event; its name is its type."""
    found = []
    for event in raw.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def chunk(*deltas: dict[str, Any], finish: str | None = None, stop: Any = None) -> bytes:
    choices = [{"index": 0, "delta": delta} for delta in deltas]
    if finish:
        choices.append({"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": stop})
    return b"".join(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" for choice in choices)


def usage(prompt: int = 10, completion: int = 3, cached: int = 4) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}


USAGE = b"data: " + json.dumps({"choices": [], "usage": usage()}).encode() + b"\n\ndata: [DONE]\n\n"


def test_a_message_is_a_chat() -> None:
    assert chat() == {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    said = chat(
        system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        stop_sequences=["x"], temperature=0, top_k=3, top_p=0.5, stream=True, metadata={"user_id": "u"}, min_p=0.1,
        service_tier="auto",
    )  # fmt: skip
    assert said["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: said[name] for name in ("stop", "temperature", "top_k", "top_p", "stream", "user", "min_p")} == {
        "stop": ["x"], "temperature": 0, "top_k": 3, "top_p": 0.5, "stream": True, "user": "u", "min_p": 0.1,
    }  # fmt: skip
    assert said["stream_options"] == {"include_usage": True}
    assert "service_tier" not in said


def test_tools_and_their_results_are_functions_and_messages() -> None:
    said = chat(tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    function = {"name": "look", "parameters": {"type": "object"}, "description": "Looks."}
    assert said["tools"] == [{"type": "function", "function": function}]
    assert (said["tool_choice"], said["parallel_tool_calls"]) == ("required", False)
    named = chat(tools=[TOOL], tool_choice={"type": "tool", "name": "look"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    thoughts = {"type": "thinking", "thinking": "hm", "signature": "s"}
    found = messages(
        {"role": "assistant", "content": [thoughts, {"type": "text", "text": "So"}, CALLED]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "5"}]},
        {"role": "user", "content": [{"type": "text", "text": "and"},
                                     {"type": "tool_result", "tool_use_id": "c2",
                                      "content": [{"type": "text", "text": "6"}], "is_error": True}]},
    )  # fmt: skip
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": [1, 2]}'}}
    assert found == [
        {"role": "assistant", "content": "So", "reasoning": "hm", "reasoning_content": "hm", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "tool", "tool_call_id": "c2", "content": "6"},
        {"role": "user", "content": "and"},
    ]


def test_whether_it_thinks_is_for_the_template_and_an_output_format_for_the_engine() -> None:
    assert chat(thinking={"type": "disabled"})["chat_template_kwargs"] == {"enable_thinking": False}
    assert chat(thinking={"type": "enabled", "budget_tokens": 2048})["chat_template_kwargs"] == {
        "enable_thinking": True
    }
    assert "chat_template_kwargs" not in chat(thinking={"type": "adaptive"})
    schema = {"name": "output", "schema": {"type": "object"}}
    output = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert chat(output_config=output)["response_format"] == {"type": "json_schema", "json_schema": schema}


def test_images_are_handed_on_as_chats_have_them() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    (message,) = messages(
        {"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "source": source}]}
    )
    assert message["content"][1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def test_a_line_of_a_clients_books_is_no_part_of_the_prompt() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"},
        {"type": "text", "text": "You are."},
    ]
    assert chat(system=system)["messages"][0]["content"] == "You are."
    line = "x-anthropic-billing-header: cc_version=1"
    assert chat(system=f"{line}\nYou are.\nBe brief.")["messages"][0]["content"] == "You are.\nBe brief."
    block = {"type": "text", "text": f"{line}\nYou are."}
    assert chat(system=[block])["messages"][0]["content"] == "You are."
    assert [each["role"] for each in chat(system=line)["messages"]] == ["user"]


BEGUN = {"role": "assistant", "content": [{"type": "text", "text": "The answer"}]}
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("begun", [BEGUN, {"role": "assistant", "content": "The answer"}])
def test_an_answer_that_has_begun_goes_on(begun: dict[str, Any]) -> None:
    said = chat(messages=[*ASKED["messages"], begun])
    assert said["messages"][-1] == {"role": "assistant", "content": "The answer"}
    assert {name: said[name] for name in CONTINUED} == CONTINUED
    assert not chat(messages=[*ASKED["messages"], begun, {"role": "user", "content": "?"}]).keys() & CONTINUED.keys()
    otherwise = chat(messages=[*ASKED["messages"], begun], continue_final_message=False)
    assert (otherwise["continue_final_message"], "add_generation_prompt" in otherwise) == (False, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "assistant", "content": [CALLED]}]},
        {"messages": [BEGUN], "thinking": {"type": "enabled", "budget_tokens": 2048}},
    ],
)
def test_what_cannot_go_on_is_refused_and_counted_all_the_same(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    assert (refused.value.param, refused.value.code) == ("messages[0]", "unsupported")
    body = json.dumps({"model": "scripted"} | fields).encode()
    assert not json.loads(to_counted(body)).keys() & CONTINUED.keys()


@on_memory_loop
async def test_an_answer_goes_on_with_the_tokens_of_its_beginning() -> None:
    async with pipeline() as w:
        for content, more in (("hi", []), ("hi", [BEGUN])):
            asked = ASKED | {"messages": [{"role": "user", "content": content}, *more]}
            async with w.http.post("/v1/messages/count_tokens", json=asked) as response:
                counted = (await response.json())["input_tokens"]
            async with w.http.post("/v1/messages", json=asked) as response:
                assert response.status == 200
            fields: dict[str, Any] = CONTINUED if more else {}
            chats = {"messages": json.loads(to_chat(json.dumps(asked).encode()))["messages"]} | fields
            async with w.http.post("/tokenize", json=chats) as response:
                assert (await response.json())["count"] == counted
            assert (await w.records())[-1]["total"] == counted


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "pdf"}]}]}, "messages[0].content[0].type", "invalid_value"),
        ({"messages": [{"role": "user", "content": [CALLED]}]}, "messages[0].content[0].type", "invalid_value"),
        ({"messages": [{"role": "assistant", "content": [CALLED | {"input": 5}]}]},
         "messages[0].content[0].input", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": None}, "max_tokens", "invalid_value"),
        ({"stop_sequences": ["x"] * 257}, "stop_sequences", "invalid_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"tools": [{"name": "w", "type": "web_search_20250305"}]}, "tools[0].type", "unsupported"),
        ({"tools": [{"name": "w"}]}, "tools[0].input_schema", "missing_required_parameter"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "invalid_value"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "unsupported"),
    ],
)  # fmt: skip
def test_mistakes_are_named_as_the_client_named_them(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        chat(**fields)
    assert (refusal.value.param, refusal.value.code) == (param, code)


BLOCKS = st.lists(st.builds(lambda text: {"type": "text", "text": text}, st.text()), max_size=3)
TURNS = st.lists(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]),
              st.text() | BLOCKS), min_size=1, max_size=5)  # fmt: skip


@given(TURNS, TURNS)
def test_a_conversation_that_goes_on_begins_with_the_bytes_it_had(first: Any, more: Any) -> None:
    before = json.dumps(messages(*first, system="s"))
    after = json.dumps(messages(*first, *more, system="s"))
    assert after.startswith(before.removesuffix("]"))


# Answers


def telling() -> MessagesTranslator:
    return MessagesTranslator("7", "scripted", 10)


def whole(message: dict[str, Any], finish: str = "stop", stop: Any = None) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": stop}
    told: dict[str, Any] = json.loads(
        telling().whole(200, json.dumps({"choices": [choice], "usage": usage()}).encode())
    )
    return told


def test_a_whole_answer_is_a_message() -> None:
    function = {"name": "look", "arguments": '{"at": 1}'}
    told = whole({"reasoning": "hm", "content": "So", "tool_calls": [{"id": "c1", "function": function}]}, "tool_calls")
    assert told == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "So"},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 3,
        },
    }


def test_what_was_written_to_a_cache_is_told_by_time() -> None:
    told = {
        "field": "system[0].cache_control",
        "ttl": "1h",
        "tokens": 9,
        "kept": 6,
        "context": "ctx_1",
        "reason": "partial",
    }
    details = {
        "cached_tokens": 1,
        "cache_write_tokens": 5,
        "cache_writes_by_ttl": {"5m": 0, "1h": 5},
        "breakpoints": [told],
    }
    usage = {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": details}
    choices = [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]
    said = json.loads(telling().whole(200, json.dumps({"choices": choices, "usage": usage}).encode()))["usage"]
    assert (said["input_tokens"], said["cache_creation_input_tokens"], said["cache_read_input_tokens"]) == (4, 5, 1)
    assert said["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 5}
    assert said["cache_breakpoints"] == [told]


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", 2, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", None, "max_tokens", None),
        ("content_filter", None, "refusal", None),
    ],
)
def test_why_an_answer_ended(finish: str, stop: Any, reason: str, sequence: str | None) -> None:
    told = whole({"content": "x"}, finish, stop)
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)


STREAM = (
    chunk(
        {"role": "assistant", "content": ""}, {"reasoning": "h"}, {"reasoning": "m"}, {"content": "S"}, {"content": "o"}
    )
    + chunk({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "look", "arguments": ""}}]})
    + chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"at":'}}]})
    + chunk({"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]})
    + chunk(
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "look", "arguments": "{}"}}]}, finish="tool_calls"
    )
    + USAGE
)


def test_a_stream_is_a_message_in_the_order_that_anthropic_has() -> None:
    told = events_of(telling().events(STREAM))
    assert [event["type"].removeprefix("content_block_") for event in told] == [
        "message_start", "start", "delta", "delta", "stop", "start", "delta", "delta", "stop",
        "start", "delta", "delta", "stop", "start", "delta", "stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert told[0]["message"]["usage"]["input_tokens"] == 10
    said = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in said) == "hm"
    assert "".join(delta.get("text", "") for delta in said) == "So"
    assert [delta["partial_json"] for delta in said if "partial_json" in delta] == ['{"at":', " 1}", "{}"]
    assert [event["index"] for event in told if "index" in event] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 3
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-2]["usage"]["cache_read_input_tokens"] == 4


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_wherever_a_stream_is_cut_the_same_is_told(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    each = telling()
    told = b"".join(each.events(STREAM[start:end]) for start, end in itertools.pairwise(places))
    assert told + each.end() == telling().events(STREAM)
    assert each.output_tokens == 3


def test_a_stream_that_ends_early_says_so() -> None:
    each = telling()
    each.events(chunk({"content": "S"}))
    (failed,) = events_of(each.failure(ApiError(502, "gone", type="server_error")))
    assert failed["error"]["type"] == "api_error"
    assert each.end() == b""
    engine = telling()
    said = b'data: {"error": {"message": "overrun", "type": "server_error", "code": "x"}}\n\ndata: [DONE]\n\n'
    assert [event["type"] for event in events_of(engine.events(chunk({"content": "S"}) + said) + engine.end())] == [
        "message_start", "content_block_start", "content_block_delta", "error",
    ]  # fmt: skip
    quiet = telling()
    quiet.events(chunk({"content": "S"}, finish="length"))
    assert [event["type"] for event in events_of(quiet.end())] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_what_makes_no_sense_is_an_error() -> None:
    with pytest.raises(ApiError, match="cannot be read"):
        telling().events(b"data: {\n\n")
    with pytest.raises(ApiError, match="cannot be read"):
        telling().whole(200, b"<html>")


def test_errors_have_anthropics_shape() -> None:
    assert json.loads(error_body(Overloaded("Too many."))) == {
        "type": "error",
        "error": {
            "type": "rate_limit_error",
            "message": "Too many.",
            "param": None,
            "code": "rate_limit_exceeded",
        },
    }


# Through a gateway


@on_memory_loop
async def test_messages_go_the_way_of_chats() -> None:
    async with pipeline() as w:
        long = ASKED | {"messages": [{"role": "user", "content": "the quick brown fox " * 60}]}
        async with w.http.post(Endpoint.MESSAGES, json=long) as response:
            told = await response.json()
            assert response.status == 200, told
            assert [block["text"] for block in told["content"]] == ["one two three"]
            assert response.headers["x-prfaas-route"].startswith("remote")
            assert response.headers["request-id"]
        async with w.http.post(Endpoint.MESSAGES, json=long | {"stream": True}) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            said = events_of(await response.read())
        assert "".join(event["delta"].get("text", "") for event in said if "delta" in event) == "one two three"
        async with w.http.post(Endpoint.CHAT, json=long) as response:
            assert response.status == 200
        assert [record["endpoint"] for record in await w.records()] == [Endpoint.MESSAGES] * 2 + [Endpoint.CHAT]
        records = await w.records()
        assert len({record["total"] for record in records}) == 1  # the same prompt in each dialect
        assert records[1]["output_tokens"] == records[0]["output_tokens"] == 3
        bodies = [body for node in w.nodes.nodes for body in node.bodies if body["max_tokens"] == 9]
        assert all(body["messages"] == long["messages"] for body in bodies)
        async with w.http.post(
            Endpoint.COUNT_TOKENS, json={name: long[name] for name in ("model", "messages")}
        ) as counted:
            assert await counted.json() == {"input_tokens": records[0]["total"]}
        await w.settled()


@on_loop
async def test_long_messages_are_read_as_short_ones_are() -> None:
    async with world() as w:
        for node in w.nodes.nodes:
            node.max_model_len = 1 << 20
        turns = [{"role": "user", "content": [{"type": "text", "text": f"{n}"}]} for n in range(9_000)]
        async with w.http.post(Endpoint.COUNT_TOKENS, json=ASKED | {"messages": turns}) as response:
            assert (await response.json())["input_tokens"] > 9_000
        async with w.http.post(Endpoint.MESSAGES, json=ASKED | {"messages": turns}) as response:
            error = await response.json()
        assert (response.status, error["error"]["code"]) == (400, "context_length_exceeded")


@on_memory_loop
async def test_errors_of_the_gateway_and_of_engines_are_told_in_the_dialect() -> None:
    async with pipeline(max_in_flight=4) as w:
        async with w.http.post(Endpoint.MESSAGES, json=ASKED | {"model": "other"}) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (404, "not_found_error")
        for node in w.nodes.decode:
            node.script.decode = ["422 too_odd"]
        async with w.http.post(Endpoint.MESSAGES, json=ASKED) as response:
            told = await response.json()
        assert (response.status, told["type"], told["error"]["code"]) == (422, "error", "too_odd")
        for node in w.nodes.decode:
            node.script.decode = ["die_after_first"]
        async with w.http.post(Endpoint.MESSAGES, json=ASKED | {"stream": True}) as response:
            assert events_of(await response.read())[-1]["type"] == "error"
        await until(lambda: not w.admission.in_flight)

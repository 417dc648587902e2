"""OpenAI's Responses: what becomes of a body, and what is told of a chat's answer."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.dialects.responses_request import to_chat
from gateway.api.dialects.responses_response import ResponsesTranslator
from gateway.api.openai import Endpoint
from gateway.errors import ApiError, BadRequest
from tests.gateway.api.dialects.test_anthropic_request import STREAM, chunk, events_of, usage
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import on_loop, world

ASKED = {"model": "scripted", "input": "hi"}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}', "id": "fc_1"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "5"}
THOUGHTS = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def chat(**fields: Any) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(to_chat(json.dumps(ASKED | fields).encode())[0])
    return said


def messages(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = chat(input=list(items), **fields)["messages"]
    return said


def test_a_response_is_a_chat() -> None:
    assert chat() == {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    said = chat(instructions="Be brief.", max_output_tokens=7, temperature=0, stream=True, seed=3, top_logprobs=2)
    assert said == {
        "model": "scripted",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 7,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 3,
    }


def test_items_are_messages_and_an_assistants_items_are_one() -> None:
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "So", "annotations": []}],
    }
    function = {"name": "look", "arguments": '{"at": 1}'}
    called = {"id": "c1", "type": "function", "function": function}
    thought = {"reasoning": "hm", "reasoning_content": "hm"}
    assert messages(
        {"role": "developer", "content": "Be."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        THOUGHTS, said, CALL, CALL | {"call_id": "c2"}, OUTPUT, OUTPUT | {"call_id": "c2"}, said, said,
    ) == [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "So", **thought, "tool_calls": [called, called | {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "tool", "tool_call_id": "c2", "content": "5"},
        {"role": "assistant", "content": "So"},
        {"role": "assistant", "content": "So"},
    ]  # fmt: skip


def test_images_tools_and_formats_are_said_as_chats_say_them() -> None:
    image = {"type": "input_image", "image_url": "data:x", "detail": "low"}
    (message,) = messages({"role": "user", "content": [{"type": "input_text", "text": "?"}, image]})
    assert message["content"][1] == {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}
    said = chat(tools=[TOOL], tool_choice={"type": "function", "name": "look"}, parallel_tool_calls=False)
    function = {"name": "look", "parameters": {"type": "object"}, "strict": True}
    assert said["tools"] == [{"type": "function", "function": function}]
    assert said["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert said["parallel_tool_calls"] is False
    shape = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    assert chat(text={"format": shape})["response_format"] == wanted


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported"),
        ({"store": True}, "store", "unsupported"),
        ({"conversation": {"id": "c"}}, "conversation", "unsupported"),
        ({"background": True}, "background", "unsupported"),
        ({"truncation": "auto"}, "truncation", "unsupported"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": 5}, "input", "invalid_value"),
        ({"input": [5]}, "input[0]", "invalid_value"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "unsupported"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "missing_required_parameter"),
        ({"metadata": {"a": 1}}, "metadata[...]", "invalid_value"),
    ],
)
def test_mistakes_are_named_as_the_client_named_them(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        chat(**fields)
    assert (refusal.value.param, refusal.value.code) == (param, code)


TEXTS = st.text(max_size=5)
TURN = st.one_of(
    st.builds(lambda text: [{"role": "user", "content": text}], TEXTS),
    st.builds(
        lambda text, calls: [
            {"role": "assistant", "content": text},
            *[CALL | {"call_id": str(n)} for n in range(calls)],
            *[OUTPUT | {"call_id": str(n)} for n in range(calls)],
            {"role": "user", "content": "on"},
        ],
        TEXTS,
        st.integers(0, 2),
    ),
)


@given(st.lists(TURN, min_size=1, max_size=4), st.lists(TURN, max_size=3))
def test_a_conversation_that_goes_on_begins_with_the_bytes_it_had(first: Any, more: Any) -> None:
    before = json.dumps(messages(*itertools.chain(*first), instructions="s"))
    after = json.dumps(messages(*itertools.chain(*first), *itertools.chain(*more), instructions="s"))
    assert after.startswith(before.removesuffix("]"))


# Answers


def telling(**echo: Any) -> ResponsesTranslator:
    return ResponsesTranslator("7", "scripted", json.dumps(echo).encode(), 1000)


def test_a_whole_answer_is_a_response() -> None:
    function = {"name": "look", "arguments": '{"at": 1}'}
    logprob = {"token": "So", "logprob": -1.0, "bytes": [], "top_logprobs": []}
    message = {"reasoning": "hm", "content": "So", "tool_calls": [{"id": "c1", "function": function}]}
    choice = {"message": message, "finish_reason": "tool_calls", "logprobs": {"content": [logprob]}}
    body = json.dumps({"choices": [choice], "usage": usage()}).encode()
    told = json.loads(telling(temperature=0.5, tools=[TOOL], instructions=None).whole(200, body))
    assert [item["type"] for item in told["output"]] == ["reasoning", "message", "function_call"]
    assert told["output"][1]["content"][0] == {
        "type": "output_text", "text": "So", "annotations": [], "logprobs": [logprob],
    }  # fmt: skip
    assert {name: told["output"][2][name] for name in ("call_id", "name", "arguments")} == {
        "call_id": "c1", "name": "look", "arguments": '{"at": 1}',
    }  # fmt: skip
    assert told["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }
    repeated = (told["status"], told["temperature"], told["tools"], told["store"], told["created_at"])
    assert repeated == ("completed", 0.5, [TOOL], False, 1000)


def test_an_answer_that_was_cut_short_is_incomplete() -> None:
    choice = {"message": {"content": "S"}, "finish_reason": "length"}
    told = json.loads(telling().whole(200, json.dumps({"choices": [choice], "usage": usage()}).encode()))
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert told["output"][0]["status"] == "incomplete"
    *_, done, last = events_of(telling().events(chunk({"content": "S"}, finish="length") + b"data: [DONE]\n\n"))
    assert (last["type"], last["response"]["output"]) == ("response.incomplete", [done["item"]])
    assert done["item"]["status"] == "incomplete"


def test_a_stream_is_a_response_in_the_order_that_openai_has() -> None:
    told = events_of(telling().events(STREAM))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    last = told[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call", "function_call"]
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    assert last["output"][2]["arguments"] == '{"at": 1}'


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_wherever_a_stream_is_cut_the_same_is_told(cuts: list[int]) -> None:
    each = telling()
    places = [0, *sorted(cuts), len(STREAM)]
    told = b"".join(each.events(STREAM[start:end]) for start, end in itertools.pairwise(places))
    assert told + each.end() == telling().events(STREAM)
    assert each.output_tokens == 3


def test_a_stream_that_ends_early_has_failed() -> None:
    each = telling()
    each.events(chunk({"content": "S"}))
    failed, error = events_of(each.failure(ApiError(502, "gone", code="stream_broken")))
    assert (failed["response"]["status"], failed["response"]["output"][0]["content"][0]["text"]) == ("failed", "S")
    assert (error["type"], error["code"], error["message"]) == ("error", "stream_broken", "gone")
    assert each.end() == b""


# Through a gateway


@on_memory_loop
async def test_responses_go_the_way_of_chats() -> None:
    async with pipeline() as w:
        text = "the quick brown fox " * 60
        async with w.http.post(Endpoint.RESPONSES, json={"model": "scripted", "input": text}) as response:
            told = await response.json()
            assert response.status == 200, told
            assert told["output"][0]["content"][0]["text"] == "one two three"
            assert response.headers["x-prfaas-route"].startswith("remote")
        asked = {"model": "scripted", "input": [{"role": "user", "content": text}], "stream": True}
        async with w.http.post(Endpoint.RESPONSES, json=asked) as response:
            said = events_of(await response.read())
        assert said[-1]["type"] == "response.completed"
        assert said[-1]["response"]["output"][0]["content"][0]["text"] == "one two three"
        chat = {"model": "scripted", "messages": [{"role": "user", "content": text}]}
        async with w.http.post(Endpoint.CHAT, json=chat) as response:
            assert response.status == 200
        records = await w.records()
        assert len({record["total"] for record in records}) == 1  # the same prompt in each dialect
        assert [record["output_tokens"] for record in records[:2]] == [3, 3]
        async with w.http.post(Endpoint.RESPONSES, json=ASKED | {"previous_response_id": "resp_1"}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"], error["code"]) == (400, "previous_response_id", "unsupported")
        await w.settled()


@on_loop
async def test_long_responses_are_read_as_short_ones_are() -> None:
    async with world() as w:
        items = [{"role": "user", "content": [{"type": "input_text", "text": f"{n}"}]} for n in range(9_000)]
        async with w.http.post(Endpoint.RESPONSES, json=ASKED | {"input": items}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (400, "context_length_exceeded")

"""What engines say that is out of order, late or broken, in both dialects."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.dialects.anthropic_response import MessagesTranslator
from gateway.api.dialects.chat import Cutter
from gateway.api.dialects.responses_response import ResponsesTranslator
from gateway.errors import ApiError

Told = list[dict[str, Any]]
TELLINGS = {
    "messages": lambda: MessagesTranslator("1", "m", 5),
    "responses": lambda: ResponsesTranslator("1", "m", b"{}", 0),
}
each_dialect = pytest.mark.parametrize("dialect", TELLINGS)


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).encode()


def part(index: int | None, call_id: str | None = None, name: str | None = None, arguments: str | None = None) -> bytes:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    call = {"function": function} | ({} if index is None else {"index": index}) | ({"id": call_id} if call_id else {})
    return chunk({"tool_calls": [call]})


def stream(*chunks: bytes, finish: str | None = "tool_calls") -> bytes:
    return b"".join([*chunks, chunk({}, finish), b"data: [DONE]\n\n"])


def told_by(dialect: str, data: bytes) -> Told:
    telling = TELLINGS[dialect]()
    told = telling.events(data)
    return events_of(told + telling.end())


def events_of(data: bytes) -> Told:
    return [json.loads(event.split(b"\ndata: ")[1]) for event in data.split(b"\n\n") if event]


def said(events: Told) -> list[tuple[str | None, str]]:
    """The parts as a client puts them together, each checked to be told in one piece: (name of a call, text)."""
    parts: list[list[Any]] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start" | "response.output_item.added":
                assert not is_open
                is_open = True
                block = event.get("content_block") or event["item"]
                parts.append([block.get("name"), ""])
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(parts) - 1
                parts[-1][1] += event["delta"].get("partial_json") or event["delta"].get("text")
            case "response.output_text.delta" | "response.function_call_arguments.delta":
                assert is_open
                assert event["output_index"] == len(parts) - 1
                parts[-1][1] += event["delta"]
            case "content_block_stop" | "response.output_item.done":
                assert is_open
                is_open = False
    assert not is_open
    return [tuple(each) for each in parts]


TWO = [("f", '{"x":1}'), ("g", '{"y":2}')]


@each_dialect
@pytest.mark.parametrize(
    "chunks",
    [
        [part(0, "a", "f", '{"x":1}'), part(1, "b", "g", '{"y":2}')],
        [part(0, "a", "f"), part(1, "b", "g"), part(0, arguments='{"x":1}'), part(1, arguments='{"y":2}')],
        [part(0, "a", "f", '{"x"'), part(1, "b", "g", '{"y":'), part(1, arguments="2}"), part(0, arguments=":1}")],
        [part(0, "a", "f", '{"x":1}'), part(0, "b", "g", '{"y":2}')],
        [part(None, "a", "f", '{"x":1}'), part(None, "b", "g", '{"y":2}')],
        [
            part(0, "a"),
            part(0, name="f"),
            part(1, "b"),
            part(0, arguments='{"x":1}'),
            part(1, name="g", arguments='{"y":2}'),
        ],
        [part(0, "a", "f", '{"x":1}'), part(1, "b", "g", '{"y":2}'), part(0, arguments=" \n")],
    ],
)
def test_calls_are_told_one_after_the_other(dialect: str, chunks: list[bytes]) -> None:
    assert said(told_by(dialect, stream(*chunks))) == TWO


@given(st.permutations([0] * 8 + [1] * 8 + [2] * 6), st.sampled_from(sorted(TELLINGS)))
def test_however_calls_are_mixed_each_one_is_whole(order: list[int], dialect: str) -> None:
    calls = ['{"x":1}', '{"y":2}', "{3: 4"]  # the last one is no JSON
    pieces = [iter([("n", each), *[("a", char) for char in each]]) for each in calls]
    chunks, begun = [], []
    for index in order:
        kind, value = next(pieces[index])
        if kind == "n":
            begun.append(index)
        chunks.append(part(index, f"c{index}", f"f{index}") if kind == "n" else part(index, arguments=value))
    assert said(told_by(dialect, stream(*chunks))) == [(f"f{index}", calls[index]) for index in begun]


@each_dialect
def test_a_call_is_told_while_it_comes_and_text_behind_it_waits(dialect: str) -> None:
    telling = TELLINGS[dialect]()
    first = events_of(telling.events(part(0, "a", "f", '{"x"')))
    assert any("delta" in event for event in first)
    assert events_of(telling.events(chunk({"content": "so"}))) == []
    told = first + events_of(telling.events(part(0, arguments=":1}")) + telling.events(stream()))
    assert said(told) == [("f", '{"x":1}'), (None, "so")]


@each_dialect
@pytest.mark.parametrize(
    ("chunks", "what"),
    [
        ([part(0, "a", "f", "{}"), part(1, "b", "g", "{}"), part(0, arguments="{}")], "cannot be read"),
        ([part(0, "a", arguments="{}")], "cannot be read"),
    ],
)
def test_a_call_that_goes_on_after_its_end_or_has_no_name_is_an_error(
    dialect: str, chunks: list[bytes], what: str
) -> None:
    with pytest.raises(ApiError, match=what):
        told_by(dialect, stream(*chunks))


@each_dialect
@pytest.mark.parametrize("finish", ["abort", "error", "none of these", None])
def test_an_answer_that_its_engine_gave_up_is_no_end(dialect: str, finish: str | None) -> None:
    telling = TELLINGS[dialect]()
    told = events_of(telling.events(stream(chunk({"content": "half an ans"}), finish=finish)))
    assert {event["type"] for event in told}.isdisjoint({"message_stop", "response.completed", "response.incomplete"})
    with pytest.raises(ApiError, match="The engine did not") as caught:
        telling.end()
    assert (caught.value.status, caught.value.code) == (502, "answer_not_whole")
    assert events_of(telling.failure(caught.value))[-1]["type"] == "error"
    assert telling.end() == b""
    choice = {"message": {"content": "half an ans"}, "finish_reason": finish}
    with pytest.raises(ApiError, match="The engine did not"):
        TELLINGS[dialect]().whole(200, json.dumps({"choices": [choice]}).encode())


@each_dialect
def test_an_empty_stream_is_no_answer(dialect: str) -> None:
    with pytest.raises(ApiError, match="did not say how its answer ended"):
        told_by(dialect, b": nothing but comments\n\n")


@each_dialect
def test_an_answer_that_repeats_itself_was_cut(dialect: str) -> None:
    told = told_by(dialect, stream(chunk({"content": "la la"}), finish="repetition"))
    why = [event["delta"]["stop_reason"] for event in told if event["type"] == "message_delta"]
    why += [
        event["response"]["incomplete_details"]["reason"] for event in told if event["type"] == "response.incomplete"
    ]
    assert why in (["max_tokens"], ["max_output_tokens"])


@each_dialect
def test_events_before_one_that_makes_no_sense_are_told(dialect: str) -> None:
    telling = TELLINGS[dialect]()
    assert b"hello" in telling.events(chunk({"content": "hello"}) + b"data: {\n\n")
    with pytest.raises(ApiError, match="cannot be read"):
        telling.events(stream())


def whole_input(arguments: str) -> Any:
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    choice = {"message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
    return json.loads(MessagesTranslator("1", "m", 5).whole(200, json.dumps({"choices": [choice]}).encode()))[
        "content"
    ][0]["input"]


@pytest.mark.parametrize("arguments", ['{"path": "/a', "[1]", '"x"', "null", "{} {}", "call me"])
def test_arguments_that_are_no_object_are_not_lost(arguments: str) -> None:
    assert whole_input(arguments) == {"INVALID_JSON": arguments}


def test_no_arguments_are_none() -> None:
    assert (whole_input(""), whole_input("{}"), whole_input(' {"a": 1} ')) == ({}, {}, {"a": 1})


@each_dialect
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@given(data=st.data())
def test_every_spelling_of_events_is_read(dialect: str, end: bytes, data: st.DataObject) -> None:
    body = stream(chunk({"content": "hello"}), finish="stop").removesuffix(b"data: [DONE]\n\n")
    spelled = (
        b": a comment\n\nevent: message\nid: 1\n" + body.replace(b"data: ", b"data:") + b"retry: 3\n\ndata:[DONE]\n\n"
    )
    wire = spelled.replace(b"\n", end)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6))), len(wire)]
    telling = TELLINGS[dialect]()
    told = b"".join(telling.events(wire[start:stop]) for start, stop in itertools.pairwise(cuts))
    assert said(events_of(told + telling.end())) == [(None, "hello")]


def test_lines_of_data_are_joined() -> None:
    assert Cutter().feed(b"data: {\ndata:  1\ndata\ndata:}\n\n") == [b"{\n 1\n}"]

"""Bad input: one line per mistake, each with the status, the field and the code that its answer names."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.dialects import anthropic_request as messages
from gateway.api.dialects import responses_request as responses
from gateway.api.openai import Endpoint, parse, request_id_or
from gateway.auth.keyring import digest_of
from gateway.config.tenants import TenantConfig
from gateway.errors import BadRequest
from gateway.prompt.cache_breakpoints import unmarked
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import on_loop, world

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "scripted", "prompt": "hi"}

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}


def bad(fields: dict[str, Any], param: str | None, code: str | None = "invalid_value", status: int = 400) -> Any:
    return pytest.param(fields, param, code, status, id=json.dumps(fields)[:60])


BAD_CHAT = [
    bad({"model": "gpt-9"}, "model", "model_not_found", 404),
    bad({"model": 5}, "model"),
    bad({"model": None}, "model"),
    bad({"messages": []}, "messages"),
    bad({"messages": "hi"}, "messages"),
    bad({"messages": [5]}, "messages[0]"),
    bad({"messages": [{"content": "hi"}]}, "messages[0].role"),
    bad({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    bad({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    bad({"max_tokens": -1}, "max_tokens"),
    bad({"max_tokens": 0}, "max_tokens"),
    bad({"max_tokens": 1.5}, "max_tokens"),
    bad({"max_tokens": "7"}, "max_tokens"),
    bad({"max_completion_tokens": -4}, "max_completion_tokens"),
    bad({"max_tokens": 99_999}, "messages", "context_length_exceeded"),
    bad({"temperature": 3}, "temperature"),
    bad({"temperature": "hot"}, "temperature"),
    bad({"top_p": 0}, "top_p"),
    bad({"top_p": 1.1}, "top_p"),
    bad({"top_k": -2}, "top_k"),
    bad({"n": 0}, "n"),
    bad({"seed": "x"}, "seed"),
    bad({"stop": 5}, "stop"),
    bad({"stop": [5]}, "stop[0]"),
    bad({"stop": ["x"] * 257}, "stop"),
    bad({"stop": ["x" * 1025]}, "stop[0]"),
    bad({"n": 129}, "n"),
    bad({"response_format": "json"}, "response_format"),
    bad({"response_format": {"type": "yaml"}}, "response_format.type"),
    bad({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    bad(
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "missing_required_parameter",
    ),
    bad({"tools": [], "tool_choice": "required"}, "tool_choice"),
    bad({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    bad({"seed": 2**63}, "seed"),
    bad({"tools": [5]}, "tools[0]"),
    bad({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    bad({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    bad({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    bad({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
    bad({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice.function.name"),
    bad({"tool_choice": "required"}, "tool_choice"),
    bad({"stream_options": {"include_usage": True}}, "stream_options"),
    bad({"top_logprobs": 2}, "top_logprobs"),
    bad({"stream": "yes"}, "stream"),
    bad({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    bad({"presence_penalty": -3}, "presence_penalty"),
    bad({"frequency_penalty": 2.1}, "frequency_penalty"),
    bad({"logprobs": 5}, "logprobs"),
    bad({"top_logprobs": 21}, "top_logprobs"),
    bad({"logit_bias": [1]}, "logit_bias"),
    bad({"tools": {"a": 1}}, "tools"),
    bad({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    bad({"kv_transfer_params": {"transfer_id": "t"}}, "kv_transfer_params", "unsupported"),
    bad({"chat_template": "x"}, "chat_template", "unsupported"),
]
BAD_TEXT = [
    bad({"prompt": 5}, "prompt"),
    bad({"prompt": []}, "prompt"),
    bad({"prompt": ""}, "prompt"),
    bad({"prompt": ["a", 5]}, "prompt"),
    bad({"prompt": ["a"] * 129}, "prompt"),
    bad({"prompt": ["a"] * 65, "n": 2}, "n"),
    bad({"prompt": ["a", ""]}, "prompt"),
    bad({"prompt": [1, -2]}, "prompt"),
    bad({"prompt": [1, 2**40]}, "prompt"),
    bad({"prompt": [1, 99_999]}, "prompt"),
    bad({"prompt": [1, 1.5]}, "prompt[1]"),
    bad({"prompt": {"text": "a"}}, "prompt"),
    bad({"prompt": [1] * 4096}, "prompt", "context_length_exceeded"),
    bad({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    bad({"prompt": "a", "logprobs": True}, "logprobs"),
    bad({"prompt": "a", "best_of": 0}, "best_of"),
    bad({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    bad({"prompt": "a", "best_of": 2}, "best_of", "unsupported"),
]
BAD_BODIES = [
    pytest.param(b"", "invalid_json", id="empty"),
    pytest.param(b"{", "invalid_json", id="cut off"),
    pytest.param(b'{"model": "scripted", "prompt": "a" "b"}', "invalid_json", id="malformed"),
    pytest.param(b'{"model": "scripted", "prompt": "\xff"}', "invalid_json", id="not utf-8"),
    pytest.param(b'{"model": "scripted", "prompt": "\\ud800"}', "invalid_json", id="lone surrogate"),
    pytest.param(b'{"model": "scripted", "prompt": "a", "x": ' + b"[" * 100_000, "invalid_json", id="deep"),
    pytest.param(b"[1]", None, id="a list"),
    pytest.param(b'"hi"', None, id="a string"),
    pytest.param(b'{"model": "scripted"}', "missing_required_parameter", id="no prompt"),
    pytest.param(b'{"prompt": "a"}', "missing_required_parameter", id="no model"),
]


@on_memory_loop
async def test_every_mistake_is_named_and_nothing_else_happens() -> None:
    async with pipeline() as w:
        for path, base, cases in ((Endpoint.CHAT, CHAT, BAD_CHAT), (Endpoint.COMPLETIONS, TEXT, BAD_TEXT)):
            for fields, param, code, status in (case.values for case in cases):
                async with w.http.post(path, json=base | fields) as response:
                    error = (await response.json())["error"]
                    assert set(error) == {"message", "type", "param", "code"}
                    found = (response.status, error["param"], error["code"], error["type"])
                    assert found == (status, param, code, "invalid_request_error"), (fields, error)
        for case in BAD_BODIES:
            body, code = case.values
            headers = {"Content-Type": "application/json"}
            async with w.http.post(Endpoint.COMPLETIONS, data=body, headers=headers) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (400, code), (case.id, error)
        assert [node.bodies for node in w.nodes.nodes] == [[]] * 4
        assert all(not node.open_reservations and not node.aborts for node in w.nodes.nodes)


@on_memory_loop
async def test_what_is_wrong_with_a_request_as_such_is_json_too() -> None:
    async with pipeline(max_body_bytes=10_000) as w:
        answers = {
            413: w.http.post(Endpoint.CHAT, json=CHAT | {"user": "x" * 20_000}),
            415: w.http.post(Endpoint.CHAT, data="hi", headers={"Content-Type": "text/plain"}),
            404: w.http.get("/v2/nothing"),
            405: w.http.get(Endpoint.CHAT),
        }
        for status, answer in answers.items():
            async with answer as response:
                assert response.status == status
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
                assert response.headers["x-request-id"]
        async with w.http.get(Endpoint.CHAT) as response:
            assert response.headers["Allow"] == "POST"
        async with w.http.get("/v1/models/nothing") as response:
            assert (await response.json())["error"]["code"] == "model_not_found"


@on_loop
async def test_a_ten_megabyte_body_is_over_the_default_limit() -> None:
    async with world() as w:
        body = json.dumps(CHAT | {"user": "x" * 10 * 1024 * 1024}).encode()
        headers = {"Content-Type": "application/json"}
        async with w.http.post(Endpoint.CHAT, data=io.BytesIO(body), headers=headers) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "request_too_large"


@on_memory_loop
async def test_models_health_and_records_answer() -> None:
    async with pipeline() as w:
        async with w.http.get("/v1/models") as response:
            (model,) = (await response.json())["data"]
            assert (model["id"], model["object"], model["max_model_len"]) == ("scripted", "model", 4096)
        for path in ("/health", "/healthz", "/livez", "/readyz", "/liveness", "/readiness"):
            async with w.http.get(path) as response:
                assert (response.status, (await response.json())["status"]) == (200, "ok")
        await w.complete("a")
        await w.complete("b")
        await w.idle()
        async with w.http.get("/prfaas/requests?since=1") as response:
            assert [json.loads(line)["seq"] for line in (await response.text()).splitlines()] == [2]
        async with w.http.get("/prfaas/requests?since=x") as response:
            assert response.status == 400
        async with w.http.get("/metrics") as response:
            text = await response.text()
        assert 'prfaas_requests_total{reason="single_token",route="local",status="200"} 2.0' in text
        assert 'prfaas_nodes{cluster="west",role="decode",state="ready"} 2.0' in text


def test_fields_that_are_not_touched_stay_byte_for_byte() -> None:
    body = b'{"model":"m", "prompt" : "\\u00e9 \\/", "odd": [1.50, {"a" : 1e2}], "stream": true}'
    call = parse(Endpoint.COMPLETIONS, body)
    sent = call.body({"max_tokens": 1}, drop={"stream"})
    assert sent == b'{"model":"m","prompt":"\\u00e9 \\/","odd":[1.50, {"a" : 1e2}],"max_tokens":1}'


def test_the_last_of_a_repeated_field_counts_for_everybody() -> None:
    call = parse(Endpoint.COMPLETIONS, b'{"model":"a","prompt":"x","model":"b"}')
    assert call.options.model == "b"
    assert json.loads(call.body({}))["model"] == "b"


def test_the_message_names_type_and_field() -> None:
    with pytest.raises(BadRequest) as failure:
        parse(Endpoint.COMPLETIONS, b'{"model":"a","prompt":"x","max_tokens":"7"}')
    assert str(failure.value) == "Invalid value for 'max_tokens': Expected `int | null`, got `str`."


@pytest.mark.parametrize(
    ("endpoint", "fields", "unshared"),
    [
        (Endpoint.COMPLETIONS, {"logprobs": 1}, False),
        (Endpoint.COMPLETIONS, {"echo": True}, False),
        (Endpoint.COMPLETIONS, {"echo": True, "logprobs": 0}, True),
        (Endpoint.COMPLETIONS, {"prompt_logprobs": 0}, True),
        (Endpoint.COMPLETIONS, {"cache_salt": "mine"}, False),
        (Endpoint.CHAT, {"echo": True, "logprobs": True}, False),
        (Endpoint.CHAT, {"echo": True, "logprobs": True, "top_logprobs": 0}, True),
        (Endpoint.CHAT, {"prompt_logprobs": -1}, True),
    ],
)
def test_some_prompts_are_computed_whole_whatever_is_cached(
    endpoint: Endpoint, fields: dict[str, object], unshared: bool
) -> None:
    body = json.dumps({"model": "m", endpoint.prompt_field: [], **fields})
    assert parse(endpoint, body.encode()).options.is_unshared is unshared


def test_a_request_id_is_taken_over_only_if_harmless() -> None:
    assert request_id_or("abc-1", "mine") == "abc-1"
    assert request_id_or("a b", "mine") == request_id_or("x" * 200, "mine") == request_id_or(None, "mine") == "mine"


@on_memory_loop
@pytest.mark.parametrize("fields", [CHAT, CHAT | {"model": "gpt-9"}], ids=["good", "bad"])
async def test_a_path_spelled_otherwise_gets_the_same_answer_through_the_application(fields: dict[str, Any]) -> None:
    async with pipeline() as w:
        answers = []
        for path in (Endpoint.CHAT, f"{Endpoint.CHAT}?spelled=otherwise"):
            async with w.http.post(path, json=fields, headers={"x-request-id": "mine"}) as response:
                assert response.headers["x-request-id"] == "mine"
                answers.append((response.status, set(response.headers), json.loads(await response.read()).keys()))
        assert answers[0] == answers[1]


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_no_tools_at_all_are_no_tools(choice: dict[str, Any]) -> None:
    call = parse(Endpoint.CHAT, json.dumps(CHAT | {"tools": []} | choice).encode())
    assert not call.fields.keys() & {"tools", "tool_choice"}
    assert (
        "tool_choice"
        in parse(Endpoint.CHAT, json.dumps(CHAT | {"tools": [], "tool_choice": "required"}).encode()).fields
    )


MARK = {"mode": "explicit", "end": 3, "said": "SPOOFED"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [], "prompt_cache_breakpoint": MARK}


@pytest.mark.parametrize(
    "message",
    [
        CALLING,
        {"role": "user", "prompt_cache_breakpoint": MARK},
        {"role": "user", "content": "a", "prompt_cache_breakpoint": MARK},
    ],
)
def test_what_translations_say_of_marks_no_client_says(message: dict[str, Any]) -> None:
    asked = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}, message]}).encode()
    _, marks = unmarked(parse(Endpoint.CHAT, asked))
    assert [(mark.field, mark.end) for mark in marks.marks] == [("messages[1].prompt_cache_breakpoint", None)]


def test_a_list_of_marks_is_no_mark() -> None:
    message = {"role": "user", "content": "hi", "prompt_cache_breakpoint": [{"mode": "explicit"}]}
    with pytest.raises(BadRequest) as refused:
        unmarked(parse(Endpoint.CHAT, json.dumps({"model": "m", "messages": [message]}).encode()))
    assert refused.value.param == "messages[0].prompt_cache_breakpoint"


@pytest.mark.parametrize(
    ("translate", "fields", "param"),
    [
        (messages.to_chat, {"max_tokens": 3, "messages": USER, "stop_sequences": ["a"], "stop": "b"}, "stop"),
        (messages.to_chat, {"max_tokens": 3, "messages": USER, "stream": True, "stream_options": {}}, "stream_options"),
        (responses.to_chat, {"input": "hi", "messages": USER}, "messages"),
        (responses.to_chat, {"input": "hi", "stream": True, "stream_options": {"include_usage": False}}, None),
    ],
)
def test_a_chats_field_does_not_say_otherwise_what_a_dialects_says(
    translate: Callable[[bytes], Any], fields: dict[str, Any], param: str | None
) -> None:
    body = json.dumps({"model": "m"} | fields).encode()
    if param is None:
        translate(body)
        return
    with pytest.raises(BadRequest) as refused:
        translate(body)
    assert (refused.value.param, refused.value.code) == (param, "unsupported")


@on_memory_loop
async def test_more_answers_than_may_ever_be_at_once_are_a_mistake() -> None:
    tenants = {"few": TenantConfig(keys=(digest_of("sk-few"),), concurrent_requests=2)}
    async with pipeline(tenants=tenants) as w:
        key = {"Authorization": "Bearer sk-few"}
        for fields, param in (({"n": 3}, "n"), ({"prompt": ["a", "b", "c"]}, "prompt")):
            response = await w.complete(**({"prompt": "a"} | fields), headers=key)
            assert (response.status, (await response.json())["error"]["param"]) == (400, param)
        assert (await w.complete("a", n=2, headers=key)).status == 200
    async with pipeline(max_in_flight=2) as w:
        assert (await w.complete("a", n=3)).status == 400

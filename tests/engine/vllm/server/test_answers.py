"""Streams of vLLM's that go on: what the middleware asks for and passes on. vLLM is a script here, not in tests/vllm."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest

from engine.vllm.internals import RECOMPUTED
from engine.vllm.server.answers import App, Message, Receive, ResumeMiddleware, Send, named_tokens, why_not
from engine.vllm.server.continuation import going_on
from gateway.api.usage import recompute_reason

WORDS = ["", " caf", "é ", "", "au", " lait"]  # half a character has no text yet


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def sse(answer: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(answer, separators=(",", ":")).encode() + b"\n\n"


def chunk(number: int, *, named: bool) -> bytes:
    ids = {"token_ids": [number] if named else None}
    head = {"prompt_token_ids": [5, 6, 7] if named and not number else None}
    return sse({"id": "x", "choices": [{"index": 0, "text": WORDS[number], "logprobs": None, **head, **ids}]})


class Vllm:
    """An API server that spells every answer from its first word on; `fails_after` so many of them it says so."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.asked: dict[str, Any] = {}
        self.length = b""
        self.fails_after = fails_after

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        message = await receive()
        self.asked = json.loads(message["body"])
        self.length = dict(scope["headers"])[b"content-length"]
        assert len(message["body"]) == int(self.length)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for number in range(len(WORDS)):
            if number == self.fails_after:
                await send({"type": "http.response.body", "body": sse({"error": {"message": "!"}}), "more_body": True})
                break
            event = chunk(number, named=bool(self.asked.get("return_token_ids")))
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def asked(app: Any, body: bytes, path: str = "/v1/completions") -> tuple[dict[bytes, bytes], list[bytes]]:
    """Headers and events of what `app` answers; the body comes in two parts."""
    parts: list[Message] = [
        {"type": "http.request", "body": body[:9], "more_body": True},
        {"type": "http.request", "body": body[9:], "more_body": False},
    ]
    told: list[Message] = []

    async def receive() -> Message:
        return parts.pop(0)

    async def send(message: Message) -> None:
        told.append(message)

    scope = {"type": "http", "path": path, "headers": [(b"content-length", str(len(body)).encode())]}
    await app(scope, receive, send)
    return dict(told[0]["headers"]), [message["body"] for message in told[1:] if message["body"]]


def body(params: dict[str, Any] | None, **fields: Any) -> bytes:
    asks = {"prompt": [5, 6, 7], "stream": True, **fields}
    return json.dumps(asks if params is None else asks | {"kv_transfer_params": params}).encode()


def answers(app: App) -> ResumeMiddleware:
    """Before an `app` that needs no vLLM to be prepared."""
    return ResumeMiddleware(app, prepare=lambda: None)


@pytest.fixture
def vllm() -> Vllm:
    return Vllm()


@on_loop
async def test_a_stream_that_is_to_be_resumable_names_its_tokens_and_not_its_prompts(vllm: Vllm) -> None:
    headers, events = await asked(answers(vllm), body({"resumable": True}))
    assert sum(named_tokens(event) for event in events) == len(WORDS)
    assert not any(b'"prompt_token_ids":[' in event for event in events)
    assert [json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]] == WORDS
    assert headers == {b"content-type": b"text/event-stream"}


@on_loop
async def test_a_client_that_asks_for_token_ids_gets_those_of_its_prompt_too(vllm: Vllm) -> None:
    _, events = await asked(answers(vllm), body({"resumable": True}, return_token_ids=True))
    assert b'"prompt_token_ids":[5,6,7]' in events[0]


@pytest.mark.parametrize("given", range(1, len(WORDS)))
@on_loop
async def test_what_has_been_answered_is_not_said_again(vllm: Vllm, given: int) -> None:
    _, whole = await asked(answers(vllm), body({"resumable": True}))
    headers, rest = await asked(answers(vllm), body({"resumable": True, "answered": list(range(given))}))
    assert headers[b"x-prfaas-answered"] == str(given).encode()
    assert rest == whole[given:]


@on_loop
async def test_an_error_is_said_however_little_was_spelled_again(vllm: Vllm) -> None:
    vllm.fails_after = 1
    _, events = await asked(answers(vllm), body({"resumable": True, "answered": [0, 1, 2]}))
    assert events[0].startswith(b'data: {"error"')


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"stream": False}, "not_streamed"),
        ({"presence_penalty": 0.5}, "penalties"),
        ({"logprobs": 0}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"n": 2}, "several_answers"),
        ({"use_beam_search": True}, "several_answers"),
        ({"vllm_xargs": {"a": 1}}, "custom_sampling"),
        ({"presence_penalty": 0.0, "logprobs": None, "echo": False, "n": 1, "frequency_penalty": 0}, ""),
        ({"repetition_penalty": 1.2, "seed": 7, "stop": ["x"], "min_tokens": 3}, ""),
    ],
)
@on_loop
async def test_what_vllm_cannot_go_on_with_is_not_named_and_the_head_says_why(
    vllm: Vllm, fields: dict[str, Any], why: str
) -> None:
    headers, events = await asked(answers(vllm), body({"resumable": True}, **fields))
    assert headers.get(b"x-prfaas-not-resumable", b"").decode() == why
    assert bool(sum(map(named_tokens, events))) == (not why)


@pytest.mark.parametrize(
    "sent",
    [
        body(None),
        body({"salt": "ab"}),
        body({"do_remote_decode": True, "resumable": True, "answered": [1]}),
        body({"answered": "x"}),
        b'{"kv_transfer_params": {}, ',
    ],
    ids=["no gateway's", "not wanted", "a prefill leg", "wrong type", "no JSON"],
)
@on_loop
async def test_whatever_else_is_asked_passes_as_it_is(sent: bytes) -> None:
    got: list[bytes] = []

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        got.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    assert (await asked(answers(app), sent)) == ({}, [b"{}"])
    assert got == [sent]


class Spelling:
    """As vLLM's detokenizer: a word for each token, the last of them held back while a stop string may begin there."""

    def __init__(self, stop: str = "") -> None:
        self.output_token_ids: list[int] = []
        self._stop = stop
        self._told = 0
        self._text = ""

    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    def update(self, tokens: list[int], stop_terminated: bool) -> str | None:
        for token in tokens:
            self.output_token_ids.append(token)
            self._text += WORDS[token]
            if self._stop and (at := self._text.find(self._stop)) >= 0:
                self._text = self._text[:at]
                return self._stop
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        end = len(self._text) if finished else max(self._told, len(self._text) - max(0, len(self._stop) - 1))
        told, self._told = self._text[self._told : end], end
        return told


def output(tokens: Sequence[int], finish: str | None = None) -> Any:
    choice = SimpleNamespace(token_ids=list(tokens), text="", finish_reason=finish, stop_reason=None)
    return SimpleNamespace(
        outputs=[choice], finished=finish is not None, prompt_token_ids=[5, 6, 7, 0, 1], num_cached_tokens=4
    )


async def rest_of(outputs: list[Any], closed: list[bool]) -> AsyncGenerator[Any, None]:
    try:
        for each in outputs:
            yield each
    finally:
        closed.append(True)


@pytest.mark.parametrize("given", range(1, len(WORDS)))
@pytest.mark.parametrize("stop", ["", "u la"])
@on_loop
async def test_a_whole_answer_is_spelled_with_one_state_across_the_seam(given: int, stop: str) -> None:
    alone = Spelling(stop)
    expected, ended = [], False
    for token in range(len(WORDS)):
        ended = alone.update([token], False) is not None or token == len(WORDS) - 1
        expected.append((token, alone.get_next_output_text(ended, True)))
        if ended:
            break
    closed: list[bool] = []
    last = len(WORDS) - 1
    rest = [output([token], "length" if token == last else None) for token in range(given, len(WORDS))]
    told = [each async for each in going_on(rest_of(rest, closed), [5, 6, 7], range(given), Spelling(stop))]
    assert [(each.outputs[0].token_ids[0], each.outputs[0].text) for each in told] == expected
    assert {len(each.prompt_token_ids) for each in told} == {3}
    assert {each.num_cached_tokens for each in told} == {3}
    assert [each.finished for each in told] == [False] * (len(told) - 1) + [True]
    assert told[-1].outputs[0].finish_reason == ("stop" if stop else "length")
    assert closed == [True]


def test_every_reason_is_of_a_field_or_its_value() -> None:
    assert why_not({}) == "not_streamed"


class Recomputing:
    """An API server whose engine could not use what landed."""

    def __init__(self, events: Sequence[bytes]) -> None:
        self._events = events

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number, event in enumerate(self._events):
            if number == len(self._events) - 3 and (told := RECOMPUTED.get()) is not None:
                told.append("timeout")
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.mark.parametrize("resumable", [False, True])
@on_loop
async def test_a_landing_that_could_not_be_used_is_told_in_the_last_chunks(vllm: Vllm, resumable: bool) -> None:
    text = sse({"choices": [{"text": '"usage":{', "finish_reason": None}]})
    last = sse({"choices": [{"text": "", "finish_reason": "stop"}]})
    usage = sse({"choices": [], "usage": {"prompt_tokens": 3}})
    app = answers(Recomputing([text, text, last, usage, b"data: [DONE]\n\n"]))
    params = {"do_remote_prefill": True, "resumable": resumable}
    _, said = await asked(app, body(params))
    assert said[:2] == [text, text]
    told = [json.loads(event.removeprefix(b"data: ")) for event in said[2:4]]
    assert [each["kv_transfer_params"] for each in told] == 2 * [{"recomputed": True, "reason": "timeout"}]
    assert [recompute_reason(event) for event in said[1:5]] == [None, "timeout", "timeout", None]
    assert RECOMPUTED.get() is None


@on_loop
async def test_what_is_no_landing_is_not_looked_at(vllm: Vllm) -> None:
    last = sse({"choices": [{"text": "", "finish_reason": "stop"}]})
    _, said = await asked(answers(Recomputing([last, b"", b""])), body({"salt": "00"}))
    assert said[0] == last

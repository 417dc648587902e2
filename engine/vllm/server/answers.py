"""Makes streams resumable by another server: an ASGI middleware of vLLM's API server.

`kv_transfer_params` say what is wanted, as they do to the embedded engine (`engine.openai.api`):

    resumable    the stream's chunks name their tokens (vLLM's `return_token_ids`), without a copy of the prompt's
    answered     tokens that the client has had from another server: vLLM computes prompt and answer so far, spells the answer
                 again from its first token on, with the state that the other server had (half a character, the beginning of a
                 stop string, a parser's), and nothing of that leaves here

And a stream whose landing could not be used says so in its last chunks, as the embedded engine's do; vLLM says it in whole
answers alone.

How vLLM is had to go on is in `engine.vllm.internals`. What it could not go on with is not named, and the answer's head says why.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

import msgspec
from msgspec import Raw

from engine.openai.api import ANSWERED_HEADER, NOT_RESUMABLE_HEADER
from engine.vllm.internals import RECOMPUTED, prepare_front_end

PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
IDS: Final = b',"token_ids":['  # cannot stand inside a JSON string: its quotes would be escaped there
PROMPT_IDS: Final = b'"prompt_token_ids":['
ERROR: Final = b'data: {"error"'
LAST: Final = (b'"finish_reason":"', b'"usage":{')  # what the last chunks have
END: Final = b"}\n\n"
# Fields that keep vLLM from going on, by why. What it counts over the tokens of an answer, it counts over its own alone; log
# probabilities, and an echo of the prompt, are told with offsets that begin anew.
NOT_DONE: Final[Mapping[str, str]] = {
    "presence_penalty": "penalties",
    "frequency_penalty": "penalties",
    "bad_words": "penalties",
    "repetition_detection": "penalties",
    "thinking_token_budget": "penalties",
    "logprobs": "logprobs",
    "prompt_logprobs": "logprobs",
    "echo": "echo",
    "logits_processors": "custom_sampling",
    "vllm_xargs": "custom_sampling",
    "use_beam_search": "several_answers",
}
ASKED_BY_ZERO: Final = frozenset({"logprobs", "prompt_logprobs"})  # each token's own

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_NOTHING: Final = frozenset({b"null", b"false", b"[]", b"{}", b'""'})
_ZERO: Final = frozenset({b"0", b"0.0", b"-0.0"})
_ONE: Final = frozenset({b"1", b"null"})
_PROMPT_IDS: Final = re.compile(rb'"prompt_token_ids":\[[^\]]*\]')
_FIELDS: Final = msgspec.json.Decoder(dict[str, Raw])
_NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ResumeParams(msgspec.Struct, frozen=True):
    """The part of `kv_transfer_params` that is about streams that go on."""

    resumable: bool = False
    answered: list[int] = []
    do_remote_decode: bool = False
    do_remote_prefill: bool = False


_ASKED: Final = msgspec.json.Decoder(ResumeParams | None)


def why_not(fields: Mapping[str, Raw]) -> str:
    """The reason why vLLM could not continue this answer; "": it can."""
    if bytes(fields.get("stream", b"")) != b"true":
        return "not_streamed"
    if any(bytes(fields.get(name, b"1")) not in _ONE for name in ("n", "best_of")):
        return "several_answers"
    said = (why for name, why in NOT_DONE.items() if _says(fields, name))
    return next(said, "")


def _says(fields: Mapping[str, Raw], name: str) -> bool:
    value = bytes(fields.get(name, b"null"))
    return value not in _NOTHING and (name in ASKED_BY_ZERO or value not in _ZERO)


class ResumeMiddleware:
    """The middleware. It reads the bodies of generations that come by a gateway, and the streams that answer them."""

    def __init__(self, app: App, *, prepare: Callable[[], None] = prepare_front_end) -> None:
        self._app = app
        prepare()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        if body is None:
            return  # the gateway has left
        body, outgoing = _read(body, send)
        length = (b"content-length", str(len(body)).encode())
        headers = [length, *(header for header in scope["headers"] if header[0] != b"content-length")]
        if outgoing is None:
            await self._app({**scope, "headers": headers}, _again(body, receive), send)
            return
        was = RECOMPUTED.set(outgoing.recomputed)
        try:
            await self._app({**scope, "headers": headers}, _again(body, receive), outgoing.send)
        finally:
            RECOMPUTED.reset(was)


class OutgoingAnswer:
    """An answer on its way to a gateway."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], replayed: int, *, has_prompt_ids: bool) -> None:
        self._send = send
        self._headers = headers
        self._replayed = replayed  # tokens that are still to be spelled again
        self._has_prompt_ids = has_prompt_ids  # still to come, and not asked for
        self.recomputed: list[str] = []  # why, once vLLM has said it
        self._is_stream = False

    async def send(self, message: Message) -> None:
        """Passes on what is for the gateway of what vLLM says."""
        if message["type"] == "http.response.start":
            self._is_stream = message["status"] == 200
            if self._is_stream:
                message = {**message, "headers": [*message["headers"], *self._headers]}
        elif self._is_stream and (body := message.get("body")):
            if self._replayed > 0 and not body.startswith(ERROR):
                self._replayed -= named_tokens(body)
                await asyncio.sleep(0)  # a long answer must not hold up those of others
                return
            if self._has_prompt_ids and PROMPT_IDS in body:
                self._has_prompt_ids = False
                body = _PROMPT_IDS.sub(b'"prompt_token_ids":null', body)
                message = {**message, "body": body}
            if self.recomputed and body.endswith(END) and any(each in body for each in LAST):
                said = msgspec.json.encode({"recomputed": True, "reason": self.recomputed[0]})
                message = {**message, "body": b'%b,"kv_transfer_params":%b%b' % (body[: -len(END)], said, END)}
        await self._send(message)


def named_tokens(event: bytes) -> int:
    """How many tokens an event of one choice names."""
    at = event.find(IDS) + len(IDS)
    if at < len(IDS):
        return 0
    ids = event[at : event.index(b"]", at)]
    return ids.count(b",") + 1 if ids else 0


def _read(body: bytes, send: Send) -> tuple[bytes, OutgoingAnswer | None]:
    """The body as vLLM is to have it, and what its answer has to pass; None: any answer will do as it is."""
    if b'"kv_transfer_params"' not in body:
        return body, None
    try:
        fields = _FIELDS.decode(body)
        asked = _ASKED.decode(fields.get("kv_transfer_params", Raw(b"null"))) or ResumeParams()
    except _NOT_JSON:
        return body, None  # vLLM says what is wrong with it
    goes_on = asked.resumable or bool(asked.answered)
    if asked.do_remote_decode or not (goes_on or asked.do_remote_prefill):
        return body, None
    if not goes_on:
        return body, OutgoingAnswer(send, [], 0, has_prompt_ids=False)
    why = why_not(fields)
    if why:
        return body, OutgoingAnswer(send, [(NOT_RESUMABLE_HEADER.encode(), why.encode())], 0, has_prompt_ids=False)
    is_wanted = _says(fields, "return_token_ids")
    headers = [(ANSWERED_HEADER.encode(), str(len(asked.answered)).encode())] if asked.answered else []
    outgoing = OutgoingAnswer(send, headers, len(asked.answered), has_prompt_ids=not is_wanted)
    return msgspec.json.encode({**fields, "return_token_ids": True}), outgoing


async def _whole(receive: Receive) -> bytes | None:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """Receives `body`, then whatever `receive` does."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def received() -> Message:
        return left.pop() if left else await receive()

    return received

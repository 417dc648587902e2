"""The OpenAI request surface: bytes in, typed values out; every mistake becomes an answer that names its field.

A body is scanned once, into its top-level fields as raw JSON. The small ones become `Options`; the large ones
(messages, prompt) are decoded in a worker thread, where they are needed as text. What goes to an engine is put together
from the client's own raw fields, so nothing the client wrote is lost or re-formatted.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw

from gateway.api.bodies import Body, body_of
from gateway.api.validation import (
    LEAST_SEED,
    MAX_ANSWERS,
    MOST_SEED,
    ResponseFormat,
    Stop,
    Stops,
    ToolChoice,
    check_best_of,
    check_continued,
    check_format,
    check_stream,
    check_top_logprobs,
)
from gateway.errors import BadRequest

MAX_REQUEST_ID_CHARS: Final = 128
MAX_FIELDS: Final = 256  # of a body; the APIs of this family know about a hundred
MAX_OPTION_BYTES: Final = 512 * 1024  # of a field in `Options`: those are decoded on the event loop


class Endpoint(StrEnum):
    """What is read as a prompt; the value is the path. Engines know the first two, the others are said as chats."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    RESPONSES = "/v1/responses"

    @property
    def prompt_field(self) -> str:
        return "messages" if self is Endpoint.CHAT else "prompt"


Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The fields whose type and range the gateway answers for. An engine may know more: unknown fields pass through."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    seed: Annotated[int, Meta(ge=LEAST_SEED, le=MOST_SEED)] | None = None
    stop: Stop | Stops | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    echo: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    def check(self) -> None:
        """Raises BadRequest for fields that do not go together."""
        if self.stream_options is not None:
            check_stream(self.stream)
        if self.response_format is not None:
            check_format(self.response_format)

    @property
    def output_tokens(self) -> int | None:
        """How many tokens the client asked for at most, if it said."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def is_unshared(self) -> bool:
        """Whether KVCache computed elsewhere is of no use: each prompt token's log probability is asked for."""
        return self.prompt_logprobs is not None or bool(self.echo and self.echoes_logprobs)

    @property
    def echoes_logprobs(self) -> bool:
        """Whether an echo of the prompt comes with log probabilities."""
        return False


class ChatOptions(Options, frozen=True, kw_only=True):
    """`/v1/chat/completions`, and what the chat template of this family of servers may be told."""

    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None

    @property
    def adds_special_tokens(self) -> bool:
        return bool(self.add_special_tokens)

    def check(self) -> None:
        Options.check(self)
        if self.top_logprobs is not None:
            check_top_logprobs(self.logprobs)
        if self.continue_final_message:
            check_continued(self.add_generation_prompt)

    @property
    def output_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def echoes_logprobs(self) -> bool:
        return self.top_logprobs is not None


class CompletionOptions(Options, frozen=True, kw_only=True):
    """`/v1/completions`."""

    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] | None = None
    add_special_tokens: bool | None = None

    @property
    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens is not False

    def check(self) -> None:
        Options.check(self)
        if self.best_of is not None:
            check_best_of(self.best_of, self.n or 1)

    @property
    def echoes_logprobs(self) -> bool:
        return self.logprobs is not None


OPTIONS: Final[dict[Endpoint, type[ChatOptions] | type[CompletionOptions]]] = {
    Endpoint.CHAT: ChatOptions,
    Endpoint.COMPLETIONS: CompletionOptions,
}
# Ours to set: a client that could name a transfer could read another client's prompt from its KVCache.
RESERVED: Final = ("kv_transfer_params", "chat_template")

NO_TOOLS: Final = (b"[]", b"[ ]")

# msgspec maps neither text that is no UTF-8 nor nesting without end to an error of its own.
NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_FIELDS: Final = msgspec.json.Decoder(dict[str, Raw])
_OPTIONS: Final = {endpoint: msgspec.json.Decoder(options) for endpoint, options in OPTIONS.items()}
_KNOWN: Final = {endpoint: frozenset(options.__struct_fields__) for endpoint, options in OPTIONS.items()}
_AT: Final = re.compile(r" - at `\$\.?(.*)`$")
_MISSING: Final = re.compile(r"missing required field `(\w+)`")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]+")


@dataclass(frozen=True, slots=True)
class Call:
    """One parsed API call, as engines are asked it; `dialect` is where the client asked it, if that was elsewhere.

    `echo` is what an answer in that dialect repeats of the request, as JSON.
    """

    endpoint: Endpoint
    options: ChatOptions | CompletionOptions
    fields: dict[str, Raw]
    dialect: Endpoint | None = None
    echo: bytes = b""

    @property
    def stream(self) -> bool:
        return bool(self.options.stream)

    @property
    def num_bytes(self) -> int:
        """Of its fields, as the client wrote them."""
        return sum(map(len, self.fields.values()))

    def body(self, values: dict[str, Any], drop: Collection[str] = ()) -> bytes:
        """The client's body with `values` set and the fields of `drop` left out; everything else byte for byte."""
        return bytes(self.written(values, drop))

    def written(self, values: dict[str, Any], drop: Collection[str] = ()) -> Body:
        """`body` in pieces: long fields are lent, and shared by all that are written of this call."""
        kept = {name: raw for name, raw in self.fields.items() if name not in drop}
        return body_of({**kept, **values})


def parse(endpoint: Endpoint, body: bytes) -> Call:
    """The call that `body` makes. Raises BadRequest."""
    try:
        fields = _FIELDS.decode(body)
        check_text(body)
    except msgspec.ValidationError as error:
        raise BadRequest("The body must be a JSON object.") from error
    except NOT_JSON as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error
    check_fields(endpoint, fields)
    return call_of(endpoint, fields)


def check_text(body: bytes) -> None:
    """Raises UnicodeDecodeError for invalid UTF-8, also in fields that only the engine reads."""
    if not body.isascii():
        body.decode()


def check_fields(endpoint: Endpoint, fields: dict[str, Raw]) -> None:
    """Raises BadRequest for fields that are no client's to set, for too many of them, and for a prompt that is missing."""
    if len(fields) > MAX_FIELDS:
        raise BadRequest(f"The body has {len(fields)} fields, more than {MAX_FIELDS}.", code="too_many_fields")
    for name in RESERVED:
        if name in fields:
            raise BadRequest(f"'{name}' cannot be set by a client of this gateway.", param=name, code="unsupported")
    if endpoint.prompt_field not in fields:
        raise _missing(endpoint.prompt_field)


def call_of(endpoint: Endpoint, fields: dict[str, Raw]) -> Call:
    """The call whose top-level fields are `fields`. Raises BadRequest."""
    if bytes(fields.get("tools", b"")) in NO_TOOLS:
        fields = _without_tools(fields)
    options_of = _KNOWN[endpoint]
    known = {name: raw for name, raw in fields.items() if name in options_of}
    for name, raw in known.items():
        if len(raw) > MAX_OPTION_BYTES:
            raise BadRequest(f"Invalid value for '{name}': it is too long.", param=name, code="invalid_value")
    try:
        options = _OPTIONS[endpoint].decode(msgspec.json.encode(known))
    except msgspec.ValidationError as error:
        raise bad_field(error) from error
    except NOT_JSON as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error
    options.check()
    return Call(endpoint=endpoint, options=options, fields=fields)


def _without_tools(fields: dict[str, Raw]) -> dict[str, Raw]:
    """A call that lists no tools, as one that does not speak of them: frameworks list what they have."""
    is_moot = bytes(fields.get("tool_choice", b"")) in (b'"auto"', b'"none"')
    left_out = ("tools", "tool_choice") if is_moot else ("tools",)
    return {name: raw for name, raw in fields.items() if name not in left_out}


def field_of(fields: Mapping[str, Raw], name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    """One field of a body, decoded alone; None where it is missing. Raises BadRequest."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise bad_field(error, name) from error
    except NOT_JSON as error:
        raise BadRequest(
            f"The body is not valid JSON: in '{name}': {error}", param=name, code="invalid_json"
        ) from error


def bad_field(error: msgspec.ValidationError, within: str = "") -> BadRequest:
    """The answer to a field of the wrong type or range; `within` is the field that was decoded alone."""
    text = str(error)
    path = at[1] if (at := _AT.search(text)) else ""
    param = within + (path if path.startswith("[") or not within or not path else f".{path}")
    if missing := _MISSING.search(text):
        return _missing(f"{param}.{missing[1]}" if param else missing[1])
    return BadRequest(f"Invalid value for '{param}': {_AT.sub('', text)}.", param=param, code="invalid_value")


def _missing(param: str) -> BadRequest:
    return BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def request_id_or(header: str | None, fallback: str) -> str:
    """The client's `x-request-id`, if it is short and of harmless characters."""
    if header and len(header) <= MAX_REQUEST_ID_CHARS and _REQUEST_ID.fullmatch(header):
        return header
    return fallback

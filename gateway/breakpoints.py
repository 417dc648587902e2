"""Which prefixes of its prompt a request wants kept: marks of its blocks become lengths in tokens.

    OpenAI       `prompt_cache_breakpoint` of a content part, `prompt_cache_options` {mode, ttl}, `prompt_cache_key`
    Anthropic    `cache_control` of a block, of a tool, of all: `gateway.dialects.messages` says it as OpenAI does

A mark ends a prefix: the prompt up to and including the marked part. How long that is shows when the conversation up to there is
rendered by itself: as far as its tokens are those of the whole prompt, they can be kept. A template that tells the marked part
otherwise when more follows it leaves nothing to keep; then the request is refused, by the name of the field.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta, Raw

from gateway.caching import DEFAULT_TTL, KEY, MARK, MAX_KEY_CHARS, MAX_MARKS, OPTIONS, Breakpoint, Ttl
from gateway.errors import BadRequest
from gateway.openai import NOT_JSON, Call, Endpoint, bad_field
from prompts.errors import BadPrompt
from prompts.reading import Chat
from prompts.segments import TokenArray

CATEGORY_BYTES: Final = 8


class _Mark(msgspec.Struct, frozen=True):
    mode: Literal["explicit"]
    ttl: Ttl | None = None
    said: str | None = None  # ours: the field by which the client knows it
    end: Annotated[int, Meta(ge=1)] | None = None  # and characters of a text that were blocks of its own


class _Options(msgspec.Struct, frozen=True):
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Ttl = DEFAULT_TTL


class Mark(msgspec.Struct, frozen=True):
    """The end of a prefix: `end` parts (of a text: characters) of message `message` and all before it, or `tools` tools.

    `field` is what it is called in an error.
    """

    field: str
    ttl: str
    message: int = 0
    end: int | None = None  # None: all of it
    tools: int = 0


class Marks(msgspec.Struct, frozen=True):
    """What a call says of caching; `is_explicit`: nothing but what is marked is worth keeping."""

    marks: tuple[Mark, ...] = ()
    category: str = ""
    is_explicit: bool = False


NO_MARKS: Final = Marks()

_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, Any]])
_TOOLS: Final = msgspec.json.Decoder(list[dict[str, Any]])
_OPTIONS: Final = msgspec.json.Decoder(_Options | None)
_KEY: Final = msgspec.json.Decoder(str | None)
_SAID: Final = f'"{MARK}"'.encode()
_CALLS_FOR_MARKS: Final = (_SAID, b'"cache_control"', f'"{OPTIONS}"'.encode())


def is_marked(body: bytes) -> bool:
    """Whether a body may say where prefixes of its prompt end."""
    return any(said in body for said in _CALLS_FOR_MARKS)


def unmarked(call: Call) -> tuple[Call, Marks]:
    """The call without what it says of caching, which engines need not know, and that. Raises BadRequest."""
    fields = call.fields
    if not (OPTIONS in fields or KEY in fields or any(_SAID in bytes(fields.get(name, b"")) for name in _WITH_MARKS)):
        return call, NO_MARKS
    options = _decoded(_OPTIONS, fields, OPTIONS)
    key = _decoded(_KEY, fields, KEY) or ""
    if len(key) > MAX_KEY_CHARS:
        raise _invalid(KEY, f"it has more than {MAX_KEY_CHARS} characters")
    kept = {name: raw for name, raw in fields.items() if name != OPTIONS}
    ttl = options.ttl if options is not None else DEFAULT_TTL
    marks: list[Mark] = []
    if _SAID in bytes(fields.get("tools", b"")):
        tools = _decoded(_TOOLS, fields, "tools")
        for number, tool in enumerate(tools):
            if (said := tool.pop(MARK, None)) is not None:
                marks.append(_mark(said, f"tools[{number}]", ttl, tools=number + 1))
        kept["tools"] = Raw(msgspec.json.encode(tools))
    implicit = options is not None and options.mode == "implicit"
    if call.endpoint is Endpoint.CHAT and (implicit or _SAID in bytes(fields.get("messages", b""))):
        messages = _decoded(_MESSAGES, fields, "messages")
        for number, message in enumerate(messages):
            marks += _in_message(message, number, ttl)
        if implicit and messages:
            marks.append(Mark(OPTIONS, ttl, len(messages) - 1))
        kept["messages"] = Raw(msgspec.json.encode(messages))
    elif implicit:
        marks.append(Mark(OPTIONS, ttl))
    # OpenAI writes the last four; Anthropic's dialect has refused more before.
    return replace(call, fields=kept), Marks(
        tuple(marks[-MAX_MARKS:]),
        blake2b(key.encode("utf-8", "surrogatepass"), digest_size=CATEGORY_BYTES).hexdigest() if key else "",
        options is not None and options.mode == "explicit",
    )


def _in_message(message: dict[str, Any], number: int, ttl: str) -> list[Mark]:
    """The marks in a message, which are taken out of it."""
    where = f"messages[{number}]"
    found = [_mark(said, where, ttl, message=number) for said in _listed(message.pop(MARK, None))]
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    for index, part in enumerate(parts):
        if isinstance(part, dict) and (said := part.pop(MARK, None)) is not None:
            # After the last part it is the end of the message that is marked, with what the template puts there.
            end = index + 1 if index + 1 < len(parts) else None
            found.append(_mark(said, f"{where}.content[{index}]", ttl, message=number, end=end))
    return found


def _listed(said: Any) -> list[Any]:
    if said is None:
        return []
    return said if isinstance(said, list) else [said]


def _mark(said: Any, where: str, ttl: str, message: int = 0, end: int | None = None, tools: int = 0) -> Mark:
    field = f"{where}.{MARK}"
    try:
        mark = msgspec.convert(said, _Mark)
    except msgspec.ValidationError as error:
        raise bad_field(error, field) from error
    return Mark(mark.said or field, mark.ttl or ttl, message, mark.end or end, tools)


def breakpoints(
    marks: Sequence[Mark], chat: Chat, tokens: TokenArray, read: Callable[[Chat], TokenArray]
) -> tuple[Breakpoint, ...]:
    """Where the marked prefixes of `chat`, which is read as `tokens`, end. Raises BadRequest for those that cannot be kept."""
    return tuple(_place(mark, chat, tokens, read) for mark in marks)


def _place(mark: Mark, chat: Chat, tokens: TokenArray, read: Callable[[Chat], TokenArray]) -> Breakpoint:
    def rendered(part: Chat) -> TokenArray:
        try:
            return read(part)
        except BadPrompt as error:
            what = f"the model's template renders no conversation that ends there ({error.message})"
            raise _unsupported(mark.field, what) from error

    whole = rendered(_up_to(mark, chat))
    length = _common(whole, tokens)
    if length < len(whole) and length <= _common(rendered(_before(mark, chat)), tokens):
        what = "the model's template tells that part otherwise, or elsewhere, when more follows it"
        raise _unsupported(mark.field, what)
    return Breakpoint(mark.field, mark.ttl, length, len(whole))


def _up_to(mark: Mark, chat: Chat) -> Chat:
    if mark.tools:
        return _opening(chat, mark.tools)
    message = chat.messages[mark.message]
    if mark.end is not None:
        message = {**message, "content": message["content"][: mark.end]}
    return _short(chat, [*chat.messages[: mark.message], message])


def _before(mark: Mark, chat: Chat) -> Chat:
    """The conversation up to the marked part, but without all that is marked of its message."""
    if mark.tools:
        return _opening(chat, mark.tools - 1)
    return _short(chat, [*chat.messages[: mark.message], {**chat.messages[mark.message], "content": ""}])


def _opening(chat: Chat, tools: int) -> Chat:
    first = msgspec.structs.replace(chat, tools=(chat.tools or [])[:tools] or None)
    return _short(first, [{**chat.messages[0], "content": ""}])


def _short(chat: Chat, messages: list[dict[str, Any]]) -> Chat:
    return msgspec.structs.replace(chat, messages=messages, add_generation_prompt=False, continue_final_message=None)


def _common(first: TokenArray, second: TokenArray) -> int:
    """How many tokens two begin with alike."""
    size = min(len(first), len(second))
    differing = np.flatnonzero(np.asarray(first[:size]) != np.asarray(second[:size]))
    return int(differing[0]) if len(differing) else size


_WITH_MARKS: Final = ("messages", "tools")


def _decoded(decoder: msgspec.json.Decoder[Any], fields: dict[str, Raw], name: str) -> Any:
    if name not in fields:
        return None
    try:
        return cast(Any, decoder.decode(fields[name]))
    except msgspec.ValidationError as error:
        raise bad_field(error, name) from error
    except NOT_JSON as error:
        raise BadRequest(
            f"The body is not valid JSON: in '{name}': {error}", param=name, code="invalid_json"
        ) from error


def _invalid(param: str, what: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {what}.", param=param, code="invalid_value")


def _unsupported(param: str, what: str) -> BadRequest:
    return BadRequest(f"'{param}' cannot be honoured: {what}.", param=param, code="cannot_be_cached")

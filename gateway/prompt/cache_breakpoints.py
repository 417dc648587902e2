"""Which prefixes of its prompt a request wants kept: marks of its blocks become lengths in tokens.

    OpenAI       `prompt_cache_breakpoint` of a content part, `prompt_cache_options` {mode, ttl}, `prompt_cache_key`
    Anthropic    `cache_control` of a block, of a tool, of all: `gateway.api.dialects.anthropic_request` says it as OpenAI does;
                 in a chat, as clients of both write it: of a part, a message, a tool, a call, of all

A mark ends a prefix: the prompt up to and including the marked part. How long that is shows when the conversation up to there is
rendered by itself: as far as its tokens are those of the whole prompt, they can be kept. A template that tells the marked part
otherwise when more follows it leaves nothing to keep; then the request is refused, by the name of the field.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Raw

from gateway.api.cache_control import (
    CONTROL,
    DEFAULT_TTL,
    KEY,
    MARK,
    MAX_KEY_CHARS,
    MAX_MARKS,
    OPTIONS,
    Breakpoint,
    CacheControl,
    Ttl,
)
from gateway.api.dialects.cache_marks import check_number
from gateway.api.openai import Call, Endpoint, bad_field, field_of
from gateway.errors import BadRequest
from prompts.errors import BadPrompt
from prompts.reading import Chat
from prompts.tokens.segments import TokenArray

CATEGORY_BYTES: Final = 8

T = TypeVar("T")


class _Mark(msgspec.Struct, frozen=True):
    """As a client of chats says it."""

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class _Translated(msgspec.Struct, frozen=True):
    """As `gateway.api.dialects.cache_marks` says it; of clients' bodies these fields are never read."""

    mode: Literal["explicit"]
    ttl: Ttl | None = None
    said: str | None = None  # the field by which the client knows it
    end: Annotated[int, Meta(ge=1)] | None = None  # characters of a text that were blocks of its own


class _Options(msgspec.Struct, frozen=True):
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Ttl = DEFAULT_TTL


class PrefixMark(msgspec.Struct, frozen=True):
    """The end of a prefix: `end` parts (of a text: characters) of message `message` and all before it, or `tools` tools.

    `field` is what it is called in an error.
    """

    field: str
    ttl: str
    message: int = 0
    end: int | None = None  # None: all of it
    tools: int = 0


class PrefixMarks(msgspec.Struct, frozen=True):
    """What a call says of caching; `is_explicit`: nothing but what is marked is worth keeping."""

    marks: tuple[PrefixMark, ...] = ()
    category: str = ""
    is_explicit: bool = False


NO_MARKS: Final = PrefixMarks()
_Taken = Callable[[Any, str, PrefixMark], Iterator[PrefixMark]]

_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, Any]])
_TOOLS: Final = msgspec.json.Decoder(list[dict[str, Any]])
_OPTIONS: Final = msgspec.json.Decoder(_Options | None)
_KEY: Final = msgspec.json.Decoder(str | None)
_CONTROL: Final = msgspec.json.Decoder(CacheControl | None)
_SAID: Final = (f'"{MARK}"'.encode(), f'"{CONTROL}"'.encode())
_CALLS_FOR_MARKS: Final = (*_SAID, f'"{OPTIONS}"'.encode())


def is_marked(body: bytes) -> bool:
    """Whether a body may say where prefixes of its prompt end."""
    return any(said in body for said in _CALLS_FOR_MARKS)


def unmarked(call: Call, *, may_be_marked: bool = True) -> tuple[Call, PrefixMarks]:
    """The call without what it says of caching, which engines need not know, and that. Raises BadRequest.

    `may_be_marked` is `is_marked` of its body, which is not looked through again if that is known.
    """
    fields = call.fields
    is_borne = may_be_marked and any(_bears(call, name) for name in _WITH_MARKS)
    if not (is_borne or any(name in fields for name in (OPTIONS, KEY, CONTROL))):
        return call, NO_MARKS
    options = field_of(fields, OPTIONS, _OPTIONS)
    key = field_of(fields, KEY, _KEY) or ""
    if len(key) > MAX_KEY_CHARS:
        raise _invalid(KEY, f"it has more than {MAX_KEY_CHARS} characters")
    kept = {name: raw for name, raw in fields.items() if name not in (OPTIONS, CONTROL)}
    control = field_of(fields, CONTROL, _CONTROL)
    ttl = options.ttl if options is not None else DEFAULT_TTL
    taken = _taken if call.dialect is None else _taken_of_dialect
    marks: list[PrefixMark] = []
    if _bears(call, "tools"):
        tools = field_of(fields, "tools", _TOOLS)
        for number, tool in enumerate(tools):
            end = PrefixMark("", ttl, tools=number + 1)
            for where, bearer in ((f"tools[{number}]", tool), (f"tools[{number}].function", tool.get("function"))):
                marks += taken(bearer, where, end)
        kept["tools"] = Raw(msgspec.json.encode(tools))
    implicit = options is not None and options.mode == "implicit"
    last = 0
    if call.endpoint is Endpoint.CHAT and (implicit or control is not None or _bears(call, "messages")):
        messages = field_of(fields, "messages", _MESSAGES)
        for number, message in enumerate(messages):
            marks += _in_message(message, number, ttl, taken)
        kept["messages"] = Raw(msgspec.json.encode(messages))
        last = len(messages) - 1
    if implicit and last >= 0:
        marks.append(PrefixMark(OPTIONS, ttl, last))
    if control is not None and last >= 0:
        marks.append(PrefixMark(CONTROL, control.ttl, last))
    check_number(sum(mark.field.endswith(CONTROL) for mark in marks))
    # OpenAI writes the last four.
    return replace(call, fields=kept), PrefixMarks(
        tuple(marks[-MAX_MARKS:]),
        blake2b(key.encode("utf-8", "surrogatepass"), digest_size=CATEGORY_BYTES).hexdigest() if key else "",
        options is not None and options.mode == "explicit",
    )


def _in_message(message: dict[str, Any], number: int, ttl: str, taken: _Taken) -> list[PrefixMark]:
    """The marks in a message, which are taken out of it."""
    where, whole = f"messages[{number}]", PrefixMark("", ttl, message=number)
    found = [*taken(message, where, whole)]
    for index, called in enumerate(_list(message.get("tool_calls"))):
        found += taken(called, f"{where}.tool_calls[{index}]", whole)  # a part of its message's end
    parts = _list(message.get("content"))
    for index, part in enumerate(parts):
        # After the last part it is the end of the message that is marked, with what the template puts there.
        end = msgspec.structs.replace(whole, end=index + 1) if index + 1 < len(parts) else whole
        found += taken(part, f"{where}.content[{index}]", end)
    return found


def _taken(bearer: Any, where: str, end: PrefixMark) -> Iterator[PrefixMark]:
    """The marks of `bearer`, which it loses; they are where `end` is. Raises BadRequest."""
    if not isinstance(bearer, dict):
        return
    if (said := bearer.pop(MARK, None)) is not None:
        mark = _converted(said, _Mark, f"{where}.{MARK}")
        yield msgspec.structs.replace(end, field=f"{where}.{MARK}", ttl=mark.ttl or end.ttl)
    if (said := bearer.pop(CONTROL, None)) is not None:
        control = _converted(said, CacheControl, f"{where}.{CONTROL}")
        yield msgspec.structs.replace(end, field=f"{where}.{CONTROL}", ttl=control.ttl)


def _taken_of_dialect(bearer: Any, where: str, end: PrefixMark) -> Iterator[PrefixMark]:
    """As `_taken`, of what a dialect has become: such marks may be several, and say themselves where they are."""
    said = bearer.pop(MARK, ()) if isinstance(bearer, dict) else ()
    for each in said if isinstance(said, list | tuple) else [said]:
        mark = msgspec.convert(each, _Translated)
        yield msgspec.structs.replace(
            end, field=mark.said or f"{where}.{MARK}", ttl=mark.ttl or end.ttl, end=mark.end or end.end
        )


def _converted(said: Any, kind: type[T], field: str) -> T:
    try:
        return msgspec.convert(said, kind)
    except msgspec.ValidationError as error:
        raise bad_field(error, field) from error


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _bears(call: Call, name: str) -> bool:
    """Whether something in this field of `call` may be marked."""
    data = bytes(call.fields.get(name, b""))
    return any(said in data for said in _SAID)


def breakpoints(
    marks: Sequence[PrefixMark], chat: Chat, tokens: TokenArray, read: Callable[[Chat], TokenArray]
) -> tuple[Breakpoint, ...]:
    """Where the marked prefixes of `chat`, which is read as `tokens`, end. Raises BadRequest for those that cannot be kept."""
    return tuple(_place(mark, chat, tokens, read) for mark in marks)


def _place(mark: PrefixMark, chat: Chat, tokens: TokenArray, read: Callable[[Chat], TokenArray]) -> Breakpoint:
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


def _up_to(mark: PrefixMark, chat: Chat) -> Chat:
    if mark.tools:
        return _opening(chat, mark.tools)
    message = chat.messages[mark.message]
    if mark.end is not None:
        message = {**message, "content": message["content"][: mark.end]}
    return _short(chat, [*chat.messages[: mark.message], message])


def _before(mark: PrefixMark, chat: Chat) -> Chat:
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


def _invalid(param: str, what: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {what}.", param=param, code="invalid_value")


def _unsupported(param: str, what: str) -> BadRequest:
    return BadRequest(f"'{param}' cannot be honoured: {what}.", param=param, code="cannot_be_cached")

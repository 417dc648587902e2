"""Styles of requests that engines are known to read as other tokens than the gateway does.

A style is what matters to reading and is no content: roles, the keys of messages, parts, calls and tools, which parameters are
said. A leg that was refused for its tokens teaches the gateway that style: the next request of it is read by an engine itself
(`gateway.pipeline.engine_render`); where that did not help either, or cannot be asked for, its decode node computes it alone.

    own ──mismatch──► engine ──mismatch, or none can be asked──► alone
     ▲                 │  ▲                                        │
     └──after ENGINE_S─┘  └─────────────after ALONE_S──────────────┘
"""

from collections import OrderedDict
from dataclasses import replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.api.openai import NOT_JSON, Call

MAX_STYLES: Final = 256
ENGINE_S: Final = 3600.0  # then the gateway's own reading is tried again: the contents may have made the difference
ALONE_S: Final = 600.0  # then an engine is asked again: it may be another one by now
MAX_VALUE_BYTES: Final = 32  # of a parameter that counts with its value
# They are no matter of reading. What else is a list or an object counts with its keys.
SAMPLING: Final = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "user", "seed"}
    | {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop"}
    | {"logit_bias", "logprobs", "top_logprobs", "metadata", "store", "service_tier", "cache_salt", "ignore_eos"}
)  # fmt: skip
_MEDIA: Final = Raw(b'"media"')  # in the place of messages
_LIST: Final = msgspec.json.Decoder(list[Raw])
_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])


class Reading(StrEnum):
    """Whose reading of a prompt is believed."""

    OWN = "own"  # the gateway's: it is the engines', as far as is known
    ENGINE = "engine"  # an engine's, which is asked for it
    ALONE = "alone"  # shared with no one: the engine that answers computes what it reads


def style_of(call: Call) -> bytes:
    """A name for the style of `call`."""
    said = sorted(f"{name}={_value(name, raw)}" for name, raw in call.fields.items() if name not in SAMPLING)
    return blake2b("\n".join([call.endpoint, *said]).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def style_with_media(call: Call) -> bytes:
    """As `style_of`, of a chat with media: its messages, which may be megabytes, do not count. Engines that see otherwise do so
    whatever they are shown.
    """
    rest = {name: raw for name, raw in call.fields.items() if name != "messages"}
    return style_of(replace(call, fields=rest | {"messages": _MEDIA}))


class Styles:
    """What is known of styles; the oldest is forgotten."""

    def __init__(self, limit: int = MAX_STYLES) -> None:
        self._limit = limit
        self._known: OrderedDict[bytes, tuple[Reading, float]] = OrderedDict()  # whose reading, and until when

    def __len__(self) -> int:
        return len(self._known)

    def reading(self, style: bytes, now: float) -> Reading:
        """Whose reading of that style is to be believed."""
        if style not in self._known:
            return Reading.OWN
        reading, until = self._known[style]
        if now < until:
            self._known.move_to_end(style)
            return reading
        if reading is Reading.ALONE:
            self._keep(style, Reading.ENGINE, now + ENGINE_S)
            return Reading.ENGINE
        del self._known[style]
        return Reading.OWN

    def differs(self, style: bytes, read: Reading, now: float) -> None:
        """Engines came to other tokens for a request of that style than the reading that was believed."""
        if read is Reading.OWN:
            self._keep(style, Reading.ENGINE, now + ENGINE_S)
        else:
            self.not_read(style, now)

    def not_read(self, style: bytes, now: float) -> None:
        """No engine reads it for the gateway."""
        self._keep(style, Reading.ALONE, now + ALONE_S)

    def _keep(self, style: bytes, reading: Reading, until: float) -> None:
        self._known[style] = reading, until
        self._known.move_to_end(style)
        while len(self._known) > self._limit:
            self._known.popitem(last=False)


def _value(name: str, raw: Raw) -> str:
    match name:
        case "messages":
            return _kinds(raw, _message)
        case "tools":
            return _kinds(raw, _tool)
        case "documents" | "prompt":
            return _kinds(raw, _keys)
        case "truncate_prompt_tokens":
            return ""
    if _first(raw) not in (b"{", b"["):
        return _short(raw)
    fields = _object(raw)
    return ",".join(f"{key}:{_short(fields[key])}" for key in sorted(fields))


def _kinds(raw: Raw, kind: Any) -> str:
    """Of the elements of a list every kind, once."""
    if _first(raw) != b"[":
        return _sort(raw)
    try:
        elements = _LIST.decode(raw)
    except NOT_JSON:
        return "?"
    return ";".join(sorted({kind(element) for element in elements}))


def _message(raw: Raw) -> str:
    fields = _object(raw)
    content = fields.get("content", Raw(b"null"))
    parts = _kinds(content, _part) if _first(content) == b"[" else _sort(content)
    calls = _kinds(fields["tool_calls"], _call) if "tool_calls" in fields else ""
    return f"{_short(fields.get('role', Raw(b'?')))}({','.join(fields)})[{parts}][{calls}]"


def _part(raw: Raw) -> str:
    fields = _object(raw)
    return f"{_short(fields.get('type', Raw(b'?')))}({','.join(fields)})"


def _call(raw: Raw) -> str:
    fields = _object(raw)
    function = _object(fields.get("function", Raw(b"{}")))
    return f"({','.join(fields)})({','.join(function)}){_sort(function.get('arguments', Raw(b'?')))}"


def _tool(raw: Raw) -> str:
    fields = _object(raw)
    return f"({','.join(fields)})({','.join(_object(fields.get('function', Raw(b'{}'))))})"


def _keys(raw: Raw) -> str:
    return ",".join(_object(raw)) if _first(raw) == b"{" else _sort(raw)


def _object(raw: Raw) -> dict[str, Raw]:
    try:
        return _OBJECT.decode(raw)
    except NOT_JSON:
        return {}


def _short(raw: Raw) -> str:
    """A value that is no content: a short one."""
    value = bytes(memoryview(raw)[: MAX_VALUE_BYTES + 1])
    return value.decode(errors="replace") if len(value) <= MAX_VALUE_BYTES and value[:1] not in b"{[" else _sort(raw)


def _sort(raw: Raw) -> str:
    """The kind of a value: its first letter, but that all numbers are one."""
    first = _first(raw)
    return "0" if first in b"-0123456789" else first.decode(errors="replace")


def _first(raw: Raw) -> bytes:
    return bytes(memoryview(raw)[:1])

"""Resumes a stream: knows which tokens its client has had, so that another engine can go on from there.

Engines that can go on name each chunk's tokens where they are asked to (`kv_transfer_params.resumable`); the names are taken out
on the way, and kept, a few bytes per token. The next engine reads the prompt and those tokens, and says nothing of
them again. It holds as much text back (half a character, the beginning of a stop string) as the engine before did. What is
relayed are whole events: of one that was cut the client has seen nothing, and its tokens are asked for again.

    engine A   event event event ev│      the client has had three events, three tokens
    engine B             (replayed)│event event [DONE]
"""

import re
from typing import Any, Final

import msgspec

from gateway.api.openai import NOT_JSON, Call
from gateway.api.sse import DATA, DONE, ERROR, EVENT_END
from gateway.errors import LegFailed

IDS: Final = b',"token_ids":['  # cannot stand inside a JSON string: its quotes would be escaped there
MAX_HELD_BYTES: Final = 1 << 20  # of an event whose end has not come
MAX_TOLD_BYTES: Final = 512  # of an error

_CREATED: Final = re.compile(rb'"created": ?\d+')
_BOOL: Final = msgspec.json.Decoder(bool | None)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_NOTHING: Final = (b"null", b"[]", b"{}", b"false", b'""')
# What makes an engine parse or constrain what it generates: that state ends with it.
STRUCTURED: Final = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag",
)  # fmt: skip


def why_not(call: Call) -> str:
    """Why the answer to `call`, which asks for one, could not be continued by another engine; "": it can."""
    options, fields = call.options, call.fields
    if not call.stream:
        return "not_streamed"  # nothing of it has been seen: it is asked for anew
    if _said(call, "best_of") and fields["best_of"] != b"1":
        return "several_answers"
    if _said(call, "tools") and fields.get("tool_choice") != b'"none"':
        return "tools"
    if options.response_format is not None and options.response_format.type != "text":
        return "structured_output"
    return "structured_output" if any(_said(call, name) for name in STRUCTURED) else ""


def names_tokens(call: Call) -> bool:
    """Whether the client has asked for its answer's tokens itself, and is to see them."""
    raw = call.fields.get("return_token_ids")
    try:
        return raw is not None and bool(_BOOL.decode(raw))
    except NOT_JSON:
        return True


def _said(call: Call, name: str) -> bool:
    raw = call.fields.get(name)
    return raw is not None and bytes(raw) not in _NOTHING


class StreamResume:
    """What has been relayed of one stream: at most `max_bytes` of its tokens' names. `is_asked`: the client wants them, too."""

    __slots__ = ("_created", "_error", "_held", "_ids", "_is_asked", "_last", "_max_bytes", "is_too_long", "num_tokens")

    def __init__(self, max_bytes: int, *, is_asked: bool = False) -> None:
        self._max_bytes = max_bytes
        self._is_asked = is_asked
        self._ids = bytearray()  # as engines write them, in decimal
        self._held = b""  # the beginning of an event whose end has not come
        self._last = b""  # the events that were last relayed
        self._error = ""  # the event that followed them
        self._created = b""  # the date of the answer, once another engine dates it
        self.num_tokens = 0  # named so far, kept or not
        self.is_too_long = False

    @property
    def knows_tokens(self) -> bool:
        """Whether the engine has named any."""
        return bool(self._ids)

    @property
    def tokens(self) -> list[int]:
        """Those that the client has had."""
        return [int(token) for token in bytes(self._ids).split(b",") if token]

    @property
    def is_whole(self) -> bool:
        """Whether the stream has come to its end."""
        return self._last.endswith(DONE) and not self._held

    def take(self, chunk: bytes) -> bytes:
        """What the client is to get of the engine's next bytes: whole events. Raises LegFailed if one of them is an error."""
        if self._held:
            chunk, self._held = self._held + chunk, b""
        if not chunk.endswith(EVENT_END):
            end = chunk.rfind(EVENT_END) + len(EVENT_END)
            if end < len(EVENT_END):
                end = 0
            if len(chunk) - end > MAX_HELD_BYTES:
                raise LegFailed("event_too_long", f"an event of more than {MAX_HELD_BYTES} bytes")
            chunk, self._held = chunk[:end], chunk[end:]
            if not chunk:
                return b""
        if ERROR in chunk and (self._ids or IDS in chunk):
            at = chunk.index(ERROR)
            chunk, self._error = chunk[:at], chunk[at : at + MAX_TOLD_BYTES].decode(errors="replace")
            if not chunk:
                self.check()
        self._last = chunk
        if (at := chunk.find(IDS)) >= 0:
            chunk = self._without_ids(chunk, at)
        return _CREATED.sub(self._created, chunk) if self._created else chunk

    def check(self) -> None:
        """Raises LegFailed if what follows is an error of the engine's: that is for another one to mend, not for the client."""
        if self._error:
            raise LegFailed("stream_error", self._error)

    def _without_ids(self, chunk: bytes, at: int) -> bytes:
        ids, parts, start = self._ids, [], 0
        while at >= 0:
            end = chunk.index(b"]", at)
            named = chunk[at + len(IDS) : end]
            self.num_tokens += named.count(b",") + bool(named)
            ids += named
            ids += b","
            parts.append(chunk[start:at])
            start = end + 1
            at = chunk.find(IDS, start)
        if len(ids) > self._max_bytes:
            self.is_too_long = True
            del ids[1:]  # there were some
        if self._is_asked:
            return chunk
        parts.append(chunk[start:])
        return b"".join(parts)

    def reopen(self) -> None:
        """Another engine goes on: what the last one had begun to say is forgotten, the answer keeps its date."""
        self._held, self._error = b"", ""
        found = _CREATED.search(self._last)
        self._created = self._created or (found[0] if found else b"")

    def ending(self, prompt_tokens: int, cached_tokens: int, wants_usage: bool) -> bytes | None:
        """What is missing of a stream whose last token has been relayed; None: tokens are missing, too."""
        said = [event for event in self._last.split(EVENT_END) if event]
        if not said or self.is_whole:
            return b"" if self.is_whole else None
        try:
            last = _OBJECT.decode(said[-1].removeprefix(DATA))
            choices = last["choices"]
            if choices and choices[0].get("finish_reason") is None:
                return None
        except (*NOT_JSON, KeyError, AttributeError, IndexError, TypeError):
            return None
        if not choices or not wants_usage:  # its usage was the last but one
            return DONE
        answered = len(self.tokens)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answered,
            "total_tokens": prompt_tokens + answered,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        head = {name: last[name] for name in ("id", "object", "created", "model") if name in last}
        return DATA + msgspec.json.encode(head | {"choices": [], "usage": usage}) + EVENT_END + DONE

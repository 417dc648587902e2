"""`usage.prompt_tokens_details.cached_tokens`, set to what the prefill reused.

The decode node writes the answer, but only the prefill node knows how much of the prompt it found cached. It says so
when it is done, which is after the decode node was asked. So the one JSON object that holds `usage` is rewritten on its
way to the client; every other byte passes as it came. A decode node that computed the prompt itself is right already:
it says `recomputed`, and keeps its number.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from gateway.api.openai import NOT_JSON
from gateway.api.sse import DATA

MARK: Final = b'"prompt_tokens"'  # cannot stand inside a JSON string: its quotes would be escaped there
RECOMPUTED: Final = b'"recomputed"'
EVENT_END: Final = b"\n\n"
MAX_HELD_BYTES: Final = 1 << 20

_COMPLETION_TOKENS: Final = re.compile(rb'"completion_tokens":\s*(\d+)')
_REASON: Final = re.compile(rb'"recomputed":\s*true,\s*"reason":\s*"([\w.-]{1,64})"')


class _Told(msgspec.Struct):
    usage: dict[str, Any] | None = None


_USAGE: Final = msgspec.json.Decoder(_Told)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

Details = Callable[[int], Awaitable[Mapping[str, Any]]]  # of a prompt with so many cached tokens
CachedTokens = Callable[[], Awaitable[int | None]]


async def with_details(body: bytes, cached_tokens: int | None, details: Details) -> bytes:
    """As `with_cached_tokens`, and what `details` adds to that."""
    try:
        usage = _USAGE.decode(body).usage
    except NOT_JSON:
        return body
    told = usage.get("prompt_tokens_details") if usage else None
    known = (told.get("cached_tokens") or 0) if isinstance(told, dict) else 0
    if cached_tokens is None or RECOMPUTED in body:
        cached_tokens = known
    return with_cached_tokens(body, cached_tokens, await details(cached_tokens))


def with_cached_tokens(body: bytes, cached_tokens: int | None, details: Mapping[str, Any] | None = None) -> bytes:
    """The JSON object `body` with the number in its usage (None: as it is) and without what is not the client's.

    With `details`, these are told beside it, and the number is right in any case.
    """
    try:
        fields = _FIELDS.decode(body)
    except NOT_JSON:
        return body  # no object of ours to change
    recomputed = bool(_object(fields.pop("kv_transfer_params", None)).get("recomputed"))
    if cached_tokens is not None and (details or not recomputed) and (usage := _object(fields.get("usage"))):
        told = usage.get("prompt_tokens_details")
        usage["prompt_tokens_details"] = (told if isinstance(told, dict) else {}) | {
            "cached_tokens": cached_tokens,
            **(details or {}),
        }
        fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
    return msgspec.json.encode(fields)


def _object(raw: msgspec.Raw | None) -> dict[str, Any]:
    """The fields of an object that an engine tells; none of what is no object."""
    try:
        value = msgspec.json.decode(raw or b"null")
    except NOT_JSON:
        return {}
    return value if isinstance(value, dict) else {}


def completion_tokens(body: bytes | None) -> int | None:
    """What the usage of an answer counts, the last of a stream's; None without one."""
    found = _COMPLETION_TOKENS.findall(body or b"")
    return int(found[-1]) if found else None


def recompute_reason(answer: bytes) -> str | None:
    """Why the decode node computed the prompt itself, if this part of its answer says that it did."""
    if RECOMPUTED not in answer:
        return None
    found = _REASON.search(answer)
    return found[1].decode(errors="replace") if found else "unknown"


class UsagePatch:
    """An SSE stream whose usage event tells the right number. An event is held back only until it is complete."""

    def __init__(
        self, read: Callable[[], Awaitable[bytes]], cached_tokens: CachedTokens, details: Details | None = None
    ) -> None:
        self._details = details
        self._read = read
        self._cached_tokens = cached_tokens
        self._held = b""  # the beginning of an event whose end has not come

    async def read(self) -> bytes:
        """The next bytes for the client, b"" at the end."""
        while chunk := await self._read():
            held = self._held + chunk if self._held else chunk
            end = held.rfind(EVENT_END) + len(EVENT_END)
            if end < len(EVENT_END) and len(held) <= MAX_HELD_BYTES:
                self._held = held
                continue
            ready, self._held = (held, b"") if end < len(EVENT_END) else (held[:end], held[end:])
            return await self._patched(ready) if MARK in ready else ready
        rest, self._held = self._held, b""
        return rest

    async def _patched(self, events: bytes) -> bytes:
        cached_tokens = await self._cached_tokens()
        return EVENT_END.join([await self._patched_event(event, cached_tokens) for event in events.split(EVENT_END)])

    async def _patched_event(self, event: bytes, cached_tokens: int | None) -> bytes:
        if MARK not in event or not event.startswith(DATA):
            return event
        told = event.removeprefix(DATA)
        if self._details is not None:
            return DATA + await with_details(told, cached_tokens, self._details)
        return DATA + with_cached_tokens(told, cached_tokens)

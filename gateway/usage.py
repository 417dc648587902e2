"""`usage.prompt_tokens_details.cached_tokens`, set to what the prefill reused.

The decode node writes the answer, but only the prefill node knows how much of the prompt it found cached, and says so
when it is done, which is after the decode node was asked. So the one JSON object that holds `usage` is rewritten on its
way to the client; every other byte passes as it came. A decode node that computed the prompt itself is right already:
it says `recomputed`, and keeps its number.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from gateway.openai import NOT_JSON

MARK: Final = b'"prompt_tokens"'  # cannot stand inside a JSON string: its quotes would be escaped there
RECOMPUTED: Final = b'"recomputed"'
EVENT_END: Final = b"\n\n"
DATA: Final = b"data: "
MAX_HELD_BYTES: Final = 1 << 20

_COMPLETION_TOKENS: Final = re.compile(rb'"completion_tokens":\s*(\d+)')
_REASON: Final = re.compile(rb'"recomputed":\s*true,\s*"reason":\s*"([\w.-]{1,64})"')
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

CachedTokens = Callable[[], Awaitable[int | None]]


def with_cached_tokens(body: bytes, cached_tokens: int | None) -> bytes:
    """The JSON object `body` with the number in its usage (None: as it is) and without what is not the client's."""
    try:
        fields = _FIELDS.decode(body)
    except NOT_JSON:
        return body  # no object of ours to change
    params = fields.pop("kv_transfer_params", None)
    recomputed = params is not None and bool((msgspec.json.decode(params) or {}).get("recomputed"))
    if cached_tokens is not None and not recomputed and "usage" in fields:
        usage: dict[str, Any] | None = msgspec.json.decode(fields["usage"])
        if usage:
            usage["prompt_tokens_details"] = (usage.get("prompt_tokens_details") or {}) | {
                "cached_tokens": cached_tokens
            }
            fields["usage"] = msgspec.Raw(msgspec.json.encode(usage))
    return msgspec.json.encode(fields)


def completion_tokens(body: bytes | None) -> int | None:
    """What the usage of a whole answer counts, None where there is none."""
    found = _COMPLETION_TOKENS.search(body or b"")
    return int(found[1]) if found else None


def recompute_reason(answer: bytes) -> str | None:
    """Why the decode node computed the prompt itself, if this part of its answer says that it did."""
    if RECOMPUTED not in answer:
        return None
    found = _REASON.search(answer)
    return found[1].decode(errors="replace") if found else "unknown"


class UsagePatch:
    """An SSE stream whose usage event tells the right number. An event is held back only until it is complete."""

    def __init__(self, read: Callable[[], Awaitable[bytes]], cached_tokens: CachedTokens) -> None:
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
            return _patched_events(ready, await self._cached_tokens()) if MARK in ready else ready
        rest, self._held = self._held, b""
        return rest


def _patched_events(events: bytes, cached_tokens: int | None) -> bytes:
    return EVENT_END.join(_patched_event(event, cached_tokens) for event in events.split(EVENT_END))


def _patched_event(event: bytes, cached_tokens: int | None) -> bytes:
    if MARK not in event or not event.startswith(DATA):
        return event
    return DATA + with_cached_tokens(event.removeprefix(DATA), cached_tokens)

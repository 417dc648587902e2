"""What an engine answers, as its client is to read it.

The engine that decodes writes the usage, but only the one that prefilled knows how much of the prompt it found cached. An engine
that computed the prompt after all is right already: it says `recomputed`. That word is for us, and leaves here. Every byte of
other events passes as it came.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import msgspec
from msgspec import Raw

from node.picked.bodies import NOT_JSON, RESERVED

USAGE: Final = b'"prompt_tokens"'  # cannot stand inside a JSON string: its quotes would be escaped there
OURS: Final = b'"kv_transfer_params"'
RECOMPUTED: Final = b'"recomputed"'
EVENT_END: Final = b"\n\n"
DATA: Final = b"data: "
STREAM: Final = "text/event-stream"
MAX_HELD_BYTES: Final = 16 << 20  # of an answer that comes as a whole, or of one event; longer ones pass as they are

CachedTokens = Callable[[], Awaitable[int | None]]
_FIELDS: Final = msgspec.json.Decoder(dict[str, Raw])
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any] | None)


async def no_prefill() -> int | None:
    """The engine's own number is right."""
    return None


async def as_clients_read(
    chunks: AsyncIterator[bytes], cached_tokens: CachedTokens, *, is_stream: bool
) -> AsyncIterator[bytes]:
    """The answer in chunks. `cached_tokens` is asked where it counts: by then the prefill is over."""
    held, is_too_long = bytearray(), False
    async for chunk in chunks:
        held += chunk
        is_too_long = is_too_long or len(held) > MAX_HELD_BYTES
        ready = len(held) if is_too_long else held.rfind(EVENT_END) + len(EVENT_END) if is_stream else 0
        if is_too_long or ready >= len(EVENT_END):
            part = bytes(held[:ready])
            del held[:ready]
            yield part if is_too_long else await _events(part, cached_tokens)
    if held:
        yield bytes(held) if is_stream or is_too_long else await _object(bytes(held), cached_tokens)


def patched(told: bytes, cached_tokens: int | None) -> bytes:
    """A JSON object with that number in its usage (None: as it is), and without what is not the client's."""
    try:
        fields = _FIELDS.decode(told)
        ours, usage = bytes(fields.pop(RESERVED, b"")), _OBJECT.decode(fields.get("usage", b"null"))
        if cached_tokens is not None and usage and RECOMPUTED not in ours:
            details = usage.get("prompt_tokens_details")
            known = details if isinstance(details, dict) else {}
            usage["prompt_tokens_details"] = known | {"cached_tokens": cached_tokens}
            fields["usage"] = Raw(msgspec.json.encode(usage))
    except NOT_JSON:  # no object of ours to change
        return told
    return msgspec.json.encode(fields)


async def _events(events: bytes, cached_tokens: CachedTokens) -> bytes:
    if USAGE not in events and OURS not in events:
        return events
    found = [await _event(event, cached_tokens) for event in events.split(EVENT_END)]
    return EVENT_END.join(found)


async def _event(event: bytes, cached_tokens: CachedTokens) -> bytes:
    if not event.startswith(DATA):
        return event
    return DATA + await _object(event.removeprefix(DATA), cached_tokens)


async def _object(told: bytes, cached_tokens: CachedTokens) -> bytes:
    if USAGE not in told and OURS not in told:
        return told
    return patched(told, await cached_tokens() if USAGE in told else None)

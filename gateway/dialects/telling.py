"""How one answer is told to a client that speaks another dialect than engines do."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from gateway.dialects.chat import EngineError
from gateway.errors import ApiError

STATUS_OF_KIND: Final = {"invalid_request_error": 400, "rate_limit_error": 429}


class Telling(Protocol):
    """One answer, whole or as a stream. `output_tokens` is what its usage counted, once that has come."""

    output_tokens: int | None
    headers: Mapping[str, str]

    @property
    def has_ended(self) -> bool:
        """Whether the event that ends the stream has been told."""

    def whole(self, status: int, body: bytes) -> bytes:
        """The dialect's answer for a whole chat answer. Raises ApiError for one that makes no sense."""

    def events(self, data: bytes) -> bytes:
        """The dialect's events for some bytes of a stream of chat events. Raises ApiError."""

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream that cannot go on."""

    def end(self) -> bytes:
        """What is left to be said when the stream has ended."""


def named_event(value: dict[str, Any]) -> bytes:
    """An event of server-sent events whose name is the type of its data."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), msgspec.json.encode(value))


def stream_error(error: EngineError) -> ApiError:
    """What an engine says in its stream."""
    kind = error.type or "server_error"
    code = None if error.code is None else str(error.code)
    message = error.message or "The engine failed."
    return ApiError(STATUS_OF_KIND.get(kind, 502), message, type=kind, param=error.param, code=code)

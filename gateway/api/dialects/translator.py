"""How one answer is told to a client that speaks another dialect than engines do."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec

from gateway.api.dialects.chat import AnswerParts, ChatAnswer, ChatChoice, ChatError, ChatEvents, ChatUsage
from gateway.errors import ApiError

STATUS_OF_KIND: Final = {"invalid_request_error": 400, "rate_limit_error": 429}


class ResponseTranslator(Protocol):
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


class StreamTranslator(ABC):
    """The state of one answer, and how the engine's events become a dialect's."""

    def __init__(self, answer_id: str) -> None:
        self.output_tokens: int | None = None
        self._events = ChatEvents()
        self._parts = AnswerParts(answer_id)
        self._choice = ChatChoice()
        self._usage: ChatUsage | None = None
        self._has_begun = self._has_ended = False
        self._wrong: ApiError | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the event that ends the stream has been told."""
        return self._has_ended

    def events(self, data: bytes) -> bytes:
        """The dialect's events for some bytes of a stream. Raises ApiError."""
        told: list[dict[str, Any]] = []
        try:
            self._check()
            for answer in self._events.feed(data):
                if self._has_ended:
                    break
                if answer is None:
                    told += self._ending()
                elif answer.error is not None:
                    return self._joined(told) + self.failure(stream_error(answer.error))
                else:
                    told += self._changes(answer)
        except ApiError as error:
            self._wrong = error
            if not told:
                raise
        return self._joined(told)

    def end(self) -> bytes:
        """The end of a stream whose engine did not say so. Raises ApiError where that is no end."""
        self._check()
        return b"" if self._has_ended else self._joined(self._ending())

    def _check(self) -> None:
        """Raises what was wrong behind events that were told first."""
        if self._wrong is not None and not self._has_ended:
            raise self._wrong

    def _joined(self, events: Iterable[dict[str, Any]]) -> bytes:
        return b"".join(map(named_event, events))

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream that cannot go on."""

    @abstractmethod
    def _changes(self, answer: ChatAnswer) -> Iterator[dict[str, Any]]:
        """The events for one event of the engine's. Raises ApiError."""

    @abstractmethod
    def _ending(self) -> Iterator[dict[str, Any]]:
        """The events after the engine's last one. Raises ApiError."""


def named_event(value: dict[str, Any]) -> bytes:
    """An event of server-sent events whose name is the type of its data."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), msgspec.json.encode(value))


def stream_error(error: ChatError) -> ApiError:
    """What an engine says in its stream."""
    kind = error.type or "server_error"
    code = None if error.code is None else str(error.code)
    message = error.message or "The engine failed."
    return ApiError(STATUS_OF_KIND.get(kind, 502), message, type=kind, param=error.param, code=code)

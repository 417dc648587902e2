"""A chat answer, whole or as events, as the parts that other dialects make of it: thoughts, text, calls of tools.

Parts come one after the other: the next one begins when the last one has ended. Engines that mix deltas of several calls would
begin a call again; none of them does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

from gateway.errors import ApiError
from gateway.openai import NOT_JSON

EVENT_END: Final = b"\n\n"
DATA: Final = b"data: "
DONE: Final = b"[DONE]"
MAX_EVENT_BYTES: Final = 4 << 20  # a token's event with all its log probabilities is a thousandth of it


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True):
    """A part of `tool_calls`, or all of one."""

    index: int | None = None
    id: str | None = None
    function: _Function = _Function()


class Delta(msgspec.Struct, frozen=True):
    """What a message says, or a part of it. vLLM calls thoughts `reasoning`, others `reasoning_content`."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[CallDelta] | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[Any] | None = None


class Choice(msgspec.Struct, frozen=True):
    """One of `choices`; a chunk has `delta`, a whole answer `message`."""

    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # vLLM's: the stop string that was met
    logprobs: _Logprobs | None = None

    @property
    def tokens(self) -> list[Any] | None:
        """The log probabilities of its tokens, where they were asked for."""
        return None if self.logprobs is None else self.logprobs.content


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    cache_writes_by_ttl: dict[str, int] = {}
    breakpoints: list[dict[str, Any]] | None = None


class _CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """`usage` of a chat."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0

    @property
    def written_tokens(self) -> int:
        """Tokens that were put into a cache for later, where somebody counts them."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cache_write_tokens) or 0

    @property
    def reasoning_tokens(self) -> int:
        return (self.completion_tokens_details and self.completion_tokens_details.reasoning_tokens) or 0


class EngineError(msgspec.Struct, frozen=True):
    """`error` of an answer or an event."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class Answer(msgspec.Struct, frozen=True):
    """A chat answer, or one event of it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: EngineError | None = None


_ANSWER: Final = msgspec.json.Decoder(Answer)


def answer_of(body: bytes) -> Answer:
    """A whole answer, or the data of an event. Raises ApiError for what an engine should not say."""
    try:
        return _ANSWER.decode(body)
    except (msgspec.ValidationError, *NOT_JSON) as error:
        raise ApiError(502, "The engine's answer makes no sense.", type="server_error", code="bad_answer") from error


def error_of(status: int, body: bytes) -> ApiError:
    """What an engine that answers with `status` says."""
    try:
        said = _ANSWER.decode(body).error or EngineError()
    except (msgspec.ValidationError, *NOT_JSON):
        said = EngineError()
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ApiError(
        status,
        said.message or "The engine refused the request.",
        type=kind,
        param=said.param,
        code=None if said.code is None else str(said.code),
    )


class Cutter:
    """Cuts a stream of bytes into the data of its events."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are whole now. Raises ApiError."""
        *events, self._held = (self._held + data).split(EVENT_END)
        if len(self._held) > MAX_EVENT_BYTES:
            raise ApiError(502, "The engine's answer makes no sense.", type="server_error", code="bad_answer")
        return [event.removeprefix(DATA) for event in events if event.startswith(DATA)]


class Events:
    """The events of a chat. None stands for the last one, `[DONE]`."""

    def __init__(self) -> None:
        self._cutter = Cutter()

    def feed(self, data: bytes) -> Iterator[Answer | None]:
        """The events that are whole now. Raises ApiError."""
        for each in self._cutter.feed(data):
            yield None if each == DONE else answer_of(each)


class Kind(StrEnum):
    """What a part is."""

    THOUGHTS = "thoughts"
    TEXT = "text"
    REFUSAL = "refusal"
    CALL = "call"


class Step(StrEnum):
    """What happens to a part."""

    BEGIN = "begin"
    GROW = "grow"
    END = "end"


@dataclass(slots=True)
class Part:
    """A part of an answer, its number among them, and what there is of it."""

    kind: Kind
    number: int
    call_id: str = ""
    name: str = ""
    said: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What has been said, or a call's arguments as JSON."""
        return "".join(self.said)


@dataclass(frozen=True, slots=True)
class Change:
    """One step of a part; `text` is by what it grows."""

    step: Step
    part: Part
    text: str = ""
    logprobs: tuple[Any, ...] = ()


class Parts:
    """The parts of one answer, as its deltas come."""

    def __init__(self, unnamed: str) -> None:
        self.all: list[Part] = []
        self._unnamed = unnamed  # what calls without an id are named after
        self._open: Part | None = None
        self._call: int | None = None  # the index of the call that is open

    def feed(self, delta: Delta, logprobs: list[Any] | None = None) -> Iterator[Change]:
        """What `delta` changes."""
        if thoughts := delta.reasoning or delta.reasoning_content:
            yield from self._grow(Kind.THOUGHTS, thoughts)
        if delta.content:
            yield from self._grow(Kind.TEXT, delta.content, logprobs or ())
        if delta.refusal:
            yield from self._grow(Kind.REFUSAL, delta.refusal)
        for number, call in enumerate(delta.tool_calls or ()):
            yield from self._grow_call(number if call.index is None else call.index, call)

    def end(self) -> Iterator[Change]:
        """Nothing follows."""
        if self._open is not None:
            part, self._open, self._call = self._open, None, None
            yield Change(Step.END, part)

    def _grow(self, kind: Kind, text: str, logprobs: list[Any] | tuple[Any, ...] = ()) -> Iterator[Change]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(Part(kind, len(self.all)))
        part = self._open
        assert part is not None
        part.said.append(text)
        part.logprobs += logprobs
        yield Change(Step.GROW, part, text, tuple(logprobs))

    def _grow_call(self, index: int, call: CallDelta) -> Iterator[Change]:
        if self._open is None or self._open.kind is not Kind.CALL or self._call != index:
            number = len(self.all)
            call_id = call.id or f"call_{self._unnamed}_{number}"
            yield from self._begin(Part(Kind.CALL, number, call_id, call.function.name or ""))
            self._call = index
        part = self._open
        assert part is not None
        if text := call.function.arguments:
            part.said.append(text)
            yield Change(Step.GROW, part, text)

    def _begin(self, part: Part) -> Iterator[Change]:
        yield from self.end()
        self._open = part
        self.all.append(part)
        yield Change(Step.BEGIN, part)

"""A chat answer, whole or as events, as the parts that other dialects make of it: thoughts, text, calls of tools.

Parts are told one after the other: the next one begins when the last one has ended. An engine may mix the deltas of several
calls; then the first one is told as it comes, and what follows it waits until its arguments are whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

from gateway.api.openai import NOT_JSON
from gateway.errors import ApiError

EVENT_END: Final = b"\n\n"
DATA: Final = b"data:"
DONE: Final = b"[DONE]"
WHOLE: Final = frozenset({"stop", "tool_calls", "function_call"})  # finish reasons of answers that are whole
CUT_SHORT: Final = frozenset({"length", "content_filter", "repetition"})  # of those that are told as cut short
MAX_EVENT_BYTES: Final = 4 << 20  # a token's event with all its log probabilities is a thousandth of it


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True):
    """A part of `tool_calls`, or all of one."""

    index: int | None = None
    id: str | None = None
    function: _Function = _Function()


class ChatDelta(msgspec.Struct, frozen=True):
    """What a message says, or a part of it. vLLM calls thoughts `reasoning`, others `reasoning_content`."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[CallDelta] | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[Any] | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One of `choices`; a chunk has `delta`, a whole answer `message`."""

    delta: ChatDelta | None = None
    message: ChatDelta | None = None
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


class ChatUsage(msgspec.Struct, frozen=True):
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
        """Tokens that were put into a cache for later, if they are counted."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cache_write_tokens) or 0

    @property
    def reasoning_tokens(self) -> int:
        return (self.completion_tokens_details and self.completion_tokens_details.reasoning_tokens) or 0


class ChatError(msgspec.Struct, frozen=True):
    """`error` of an answer or an event."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class ChatAnswer(msgspec.Struct, frozen=True):
    """A chat answer, or one event of it."""

    choices: list[ChatChoice] = []
    usage: ChatUsage | None = None
    error: ChatError | None = None


_ANSWER: Final = msgspec.json.Decoder(ChatAnswer)


def answer_of(body: bytes) -> ChatAnswer:
    """A whole answer, or the data of an event. Raises ApiError for what an engine should not say."""
    try:
        return _ANSWER.decode(body)
    except (msgspec.ValidationError, *NOT_JSON) as error:
        raise nonsense() from error


def nonsense() -> ApiError:
    """What an engine says that it should not."""
    return ApiError(502, "The engine's answer cannot be read.", type="server_error", code="bad_answer")


def error_of(status: int, body: bytes) -> ApiError:
    """What an engine that answers with `status` says."""
    try:
        said = _ANSWER.decode(body).error or ChatError()
    except (msgspec.ValidationError, *NOT_JSON):
        said = ChatError()
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ApiError(
        status,
        said.message or "The engine refused the request.",
        type=kind,
        param=said.param,
        code=None if said.code is None else str(said.code),
    )


def check_ended(reason: str | None) -> None:
    """Raises ApiError for an answer that nothing says is whole, or where it was cut: an engine gave it up, say."""
    if reason in WHOLE or reason in CUT_SHORT:
        return
    said = (
        "did not say how its answer ended" if reason is None else f"did not end its answer: finish_reason is {reason!r}"
    )
    raise ApiError(502, f"The engine {said}.", type="server_error", code="answer_not_whole")


class Cutter:
    """Cuts a stream of bytes into the data of its events (WHATWG HTML §9.2.6)."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are whole now. Raises ApiError."""
        held = self._held + data
        if b"\r" in held:
            # A CR at the end may be the first half of a CRLF.
            held, half = (held[:-1], b"\r") if held.endswith(b"\r") else (held, b"")
            held = held.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + half
        *events, self._held = held.split(EVENT_END)
        if len(self._held) > MAX_EVENT_BYTES:
            raise nonsense()
        return [said for event in events if (said := _data_of(event)) is not None]


def _data_of(event: bytes) -> bytes | None:
    """The lines of data that `event` has, joined; None: it has none, like a comment."""
    lines = [line.removeprefix(DATA).removeprefix(b" ") for line in event.split(b"\n") if line.startswith(DATA)]
    return b"\n".join(lines) if lines else None


class ChatEvents:
    """The events of a chat. None stands for the last one, `[DONE]`."""

    def __init__(self) -> None:
        self._cutter = Cutter()

    def feed(self, data: bytes) -> Iterator[ChatAnswer | None]:
        """The events that are whole now. Raises ApiError."""
        for each in self._cutter.feed(data):
            yield None if each == DONE else answer_of(each)


class PartKind(StrEnum):
    """What a part is."""

    THOUGHTS = "thoughts"
    TEXT = "text"
    REFUSAL = "refusal"
    CALL = "call"


class PartStep(StrEnum):
    """What happens to a part."""

    BEGIN = "begin"
    GROW = "grow"
    END = "end"


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer, its number among them, and what there is of it."""

    kind: PartKind
    number: int
    call_id: str = ""
    name: str = ""
    said: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What has been said, or a call's arguments as JSON."""
        return "".join(self.said)

    @property
    def arguments(self) -> dict[str, Any] | None:
        """A call's arguments; None for what is no object of JSON, or not all of one."""
        if self.said and not self.said[-1].rstrip().endswith("}"):
            return None
        try:
            value = msgspec.json.decode(self.text)
        except NOT_JSON:
            return None
        return value if isinstance(value, dict) else None

    @property
    def is_named(self) -> bool:
        """Whether it can begin: a call does so with its name."""
        return self.kind is not PartKind.CALL or self.name != ""

    @property
    def is_over(self) -> bool:
        """Whether nothing is missing once something else has begun."""
        return self.kind is not PartKind.CALL or self.arguments is not None


@dataclass(frozen=True, slots=True)
class PartChange:
    """One step of a part; `text` is by what it grows."""

    step: PartStep
    part: AnswerPart
    text: str = ""
    logprobs: tuple[Any, ...] = ()


class AnswerParts:
    """The parts of one answer, as its deltas come.

    all   | ended ... | open | waiting ... |
    """

    def __init__(self, unnamed: str) -> None:
        self.all: list[AnswerPart] = []
        self._unnamed = unnamed  # what calls without an id are named after
        self._begun = 0  # how many of them have begun; the last one of these is open
        self._calls: dict[int, AnswerPart] = {}  # the call that an index stands for now

    def feed(self, delta: ChatDelta, logprobs: list[Any] | None = None) -> Iterator[PartChange]:
        """What `delta` changes. Raises ApiError for more of a call that was whole."""
        if thoughts := delta.reasoning or delta.reasoning_content:
            yield from self._grow(PartKind.THOUGHTS, thoughts)
        if delta.content:
            yield from self._grow(PartKind.TEXT, delta.content, logprobs or ())
        if delta.refusal:
            yield from self._grow(PartKind.REFUSAL, delta.refusal)
        for number, call in enumerate(delta.tool_calls or ()):
            yield from self._grow_call(number if call.index is None else call.index, call)

    def end(self) -> Iterator[PartChange]:
        """Nothing follows: what waited is told. Raises ApiError for a call without a name."""
        while self._begun < len(self.all):
            if not self.all[self._begun].is_named:
                raise nonsense()
            yield from self._begin_next()
        if self.all:
            yield PartChange(PartStep.END, self.all[-1])

    def _grow(self, kind: PartKind, text: str, logprobs: Sequence[Any] = ()) -> Iterator[PartChange]:
        if not self.all or self.all[-1].kind is not kind:
            self.all.append(AnswerPart(kind, len(self.all)))
        yield from self._add(self.all[-1], text, logprobs)

    def _grow_call(self, index: int, call: CallDelta) -> Iterator[PartChange]:
        part = self._calls.get(index)
        if part is None or (call.id and part.call_id not in ("", call.id, self._made_id(part))):
            part = self._calls[index] = AnswerPart(PartKind.CALL, len(self.all))
            self.all.append(part)
        part.call_id = part.call_id or call.id or ""
        part.name = part.name or call.function.name or ""
        yield from self._add(part, call.function.arguments or "")

    def _add(self, part: AnswerPart, text: str, logprobs: Sequence[Any] = ()) -> Iterator[PartChange]:
        if part.number < self._begun - 1:
            if text.strip():
                raise nonsense()
            return
        if text:
            part.said.append(text)
            part.logprobs += logprobs
            if part.number == self._begun - 1:
                yield PartChange(PartStep.GROW, part, text, tuple(logprobs))
        while self._begun < len(self.all) and self.all[self._begun].is_named:
            if self._begun and not self.all[self._begun - 1].is_over:
                return
            yield from self._begin_next()

    def _begin_next(self) -> Iterator[PartChange]:
        if self._begun:
            yield PartChange(PartStep.END, self.all[self._begun - 1])
        part = self.all[self._begun]
        self._begun += 1
        if part.kind is PartKind.CALL:
            part.call_id = part.call_id or self._made_id(part)
        yield PartChange(PartStep.BEGIN, part)
        if part.said:
            yield PartChange(PartStep.GROW, part, part.text, tuple(part.logprobs))

    def _made_id(self, part: AnswerPart) -> str:
        return f"call_{self._unnamed}_{part.number}"

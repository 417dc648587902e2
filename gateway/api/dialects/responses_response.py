"""A chat's answer, as OpenAI's Responses tell it: items, each with its parts, numbered events around them.

response.created response.in_progress
    (output_item.added (content_part.added text.delta* text.done content_part.done)? … output_item.done)*
response.completed, or response.incomplete, response.failed, error
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from gateway.api.dialects.chat import (
    AnswerPart,
    ChatAnswer,
    ChatDelta,
    ChatUsage,
    PartChange,
    PartKind,
    PartStep,
    answer_of,
    check_ended,
    error_of,
)
from gateway.api.dialects.translator import StreamTranslator, named_event
from gateway.errors import ApiError

# Status of a response, and why it is incomplete, by the chat's finish reason.
INCOMPLETE: Final = {
    "length": "max_output_tokens", "repetition": "max_output_tokens", "content_filter": "content_filter",
}  # fmt: skip
DEFAULTS: Final[dict[str, Any]] = {
    "background": False, "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "reasoning": {"effort": None, "summary": None},
    "service_tier": "default", "store": False, "temperature": 1.0, "text": {"format": {"type": "text"}},
    "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": None,
}  # fmt: skip
_ECHO: Final = msgspec.json.Decoder(dict[str, Any])
_DELTAS: Final = {
    PartKind.TEXT: "response.output_text.delta",
    PartKind.REFUSAL: "response.refusal.delta",
    PartKind.THOUGHTS: "response.reasoning_text.delta",
    PartKind.CALL: "response.function_call_arguments.delta",
}


class ResponsesTranslator(StreamTranslator):
    """One answer, as a response. `echo` is what it repeats of its request, as JSON; `created_s` a date."""

    def __init__(self, response_id: str, model: str, echo: bytes, created_s: int) -> None:
        super().__init__(response_id)
        self.headers: Mapping[str, str] = {}
        self._id = response_id
        self._model = model
        self._said = {name: value for name, value in _ECHO.decode(echo or b"{}").items() if value is not None}
        self._created_s = created_s
        self._sequence = 0

    def whole(self, status: int, body: bytes) -> bytes:
        """The response; the error of an engine is in OpenAI's shape already. Raises ApiError."""
        if status != 200:
            return error_of(status, body).body()
        answer = answer_of(body)
        for choice in answer.choices[:1]:
            self._choice = choice
            for _ in itertools.chain(self._parts.feed(choice.message or ChatDelta(), choice.tokens), self._parts.end()):
                pass
        check_ended(self._choice.finish_reason)
        self._count(answer.usage)
        return msgspec.json.encode(self._ended_response())

    def failure(self, error: ApiError) -> bytes:
        """`error`, on which clients raise, and the response as it has failed."""
        self._has_ended = True
        said = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        failed = {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        response = self._response() | failed | {"output": [_item(part, self._id, True) for part in self._parts.all]}
        return self._joined([{"type": "response.failed", "response": response}, said])

    def _changes(self, answer: ChatAnswer) -> Iterator[dict[str, Any]]:
        yield from self._beginning()
        for choice in answer.choices[:1]:
            self.output_tokens = (self.output_tokens or 0) + 1  # until usage says it
            for change in self._parts.feed(choice.delta or ChatDelta(), choice.tokens):
                yield from self._change(change)
            if choice.finish_reason is not None:
                self._choice = choice
        self._count(answer.usage)

    def _beginning(self) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "response.created", "response": self._response()}
            yield {"type": "response.in_progress", "response": self._response()}

    def _ending(self) -> Iterator[dict[str, Any]]:
        yield from self._beginning()
        for change in self._parts.end():
            yield from self._change(change)
        check_ended(self._choice.finish_reason)
        self._has_ended = True
        response = self._ended_response()
        yield {"type": f"response.{response['status']}", "response": response}

    def _change(self, change: PartChange) -> Iterator[dict[str, Any]]:
        part = change.part
        item, at = _item(part, self._id, change.step is PartStep.END), {"output_index": part.number}
        within = at | {"item_id": item["id"]} | ({} if part.kind is PartKind.CALL else {"content_index": 0})
        match change.step:
            case PartStep.BEGIN:
                whole: dict[str, Any] = {} if part.kind is PartKind.CALL else {"content": []}
                yield {"type": "response.output_item.added", **at, "item": item | whole | {"status": "in_progress"}}
                if part.kind is not PartKind.CALL:
                    yield {"type": "response.content_part.added", **within, "part": item["content"][0]}
            case PartStep.GROW:
                logprobs = {"logprobs": list(change.logprobs)} if part.kind is PartKind.TEXT else {}
                yield {"type": _DELTAS[part.kind], **within, "delta": change.text, **logprobs}
            case PartStep.END:
                yield _done(part, within)
                if part.kind is not PartKind.CALL:
                    yield {"type": "response.content_part.done", **within, "part": item["content"][0]}
                yield {"type": "response.output_item.done", **at, "item": item | {"status": self._status(part)}}

    def _status(self, part: AnswerPart) -> str:
        was_cut = self._choice.finish_reason in INCOMPLETE and (part is self._parts.all[-1] or not part.is_over)
        return "incomplete" if was_cut else "completed"

    def _count(self, usage: ChatUsage | None) -> None:
        if usage is not None:
            self._usage, self.output_tokens = usage, usage.completion_tokens

    def _response(self) -> dict[str, Any]:
        head = {"id": f"resp_{self._id}", "object": "response", "created_at": self._created_s, "model": self._model}
        state: dict[str, Any] = {
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return head | state | DEFAULTS | self._said

    def _ended_response(self) -> dict[str, Any]:
        why = INCOMPLETE.get(self._choice.finish_reason or "")
        output = [_item(part, self._id, True) | {"status": self._status(part)} for part in self._parts.all]
        ended = {"status": "incomplete", "incomplete_details": {"reason": why}} if why else {"status": "completed"}
        usage = None if self._usage is None else _usage(self._usage)
        return self._response() | ended | {"output": output, "usage": usage}

    def _joined(self, events: Iterable[dict[str, Any]]) -> bytes:
        told = b""
        for event in events:
            told += named_event(event | {"sequence_number": self._sequence})
            self._sequence += 1
        return told


def _item(part: AnswerPart, answer_id: str, is_whole: bool) -> dict[str, Any]:
    """The output item that `part` is, or is to become."""
    text = part.text if is_whole else ""
    unique = f"{answer_id}_{part.number}"
    match part.kind:
        case PartKind.CALL:
            call = {"call_id": part.call_id, "name": part.name, "arguments": text}
            return {"type": "function_call", "id": f"fc_{unique}", **call, "status": "completed"}
        case PartKind.THOUGHTS:
            content: dict[str, Any] = {"type": "reasoning_text", "text": text}
            return {
                "type": "reasoning",
                "id": f"rs_{unique}",
                "summary": [],
                "content": [content],
                "status": "completed",
            }
        case PartKind.REFUSAL:
            content = {"type": "refusal", "refusal": text}
        case PartKind.TEXT:
            logprobs = part.logprobs if is_whole else []
            content = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "message", "id": f"msg_{unique}", "role": "assistant", "content": [content], "status": "completed"}


def _done(part: AnswerPart, within: dict[str, Any]) -> dict[str, Any]:
    kind = _DELTAS[part.kind].removesuffix("delta") + "done"
    match part.kind:
        case PartKind.CALL:
            return {"type": kind, **within, "name": part.name, "arguments": part.text}
        case PartKind.REFUSAL:
            return {"type": kind, **within, "refusal": part.text}
        case PartKind.TEXT:
            return {"type": kind, **within, "text": part.text, "logprobs": part.logprobs}
        case _:
            return {"type": kind, **within, "text": part.text}


def _usage(usage: ChatUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.written_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

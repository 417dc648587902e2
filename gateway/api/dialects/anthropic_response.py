"""A chat's answer, as Anthropic's Messages tell it.

message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop
"""

import itertools
from collections.abc import Iterator, Mapping
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

STOP_REASONS: Final = {
    "length": "max_tokens", "repetition": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use",
    "content_filter": "refusal",
}  # fmt: skip
INVALID_JSON: Final = "INVALID_JSON"  # in it Anthropic's documentation has clients wrap arguments that are no object
ERROR_TYPES: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


class MessagesTranslator(StreamTranslator):
    """One answer, as a message. `num_tokens` are the prompt's: a stream says them before anything else."""

    def __init__(self, message_id: str, model: str, num_tokens: int) -> None:
        super().__init__(message_id)
        self.headers: Mapping[str, str] = {"request-id": message_id}
        self._id = f"msg_{message_id}"
        self._model = model
        self._num_tokens = num_tokens

    def whole(self, status: int, body: bytes) -> bytes:
        """The message, or the error of an engine, in Anthropic's shape. Raises ApiError."""
        if status != 200:
            return error_body(error_of(status, body))
        answer = answer_of(body)
        for choice in answer.choices[:1]:
            self._choice = choice
            for _ in itertools.chain(self._parts.feed(choice.message or ChatDelta()), self._parts.end()):
                pass
        check_ended(self._choice.finish_reason)
        self._count(answer.usage)
        return msgspec.json.encode(
            self._message([_whole_block(part) for part in self._parts.all], self._usage) | self._stopped()
        )

    def failure(self, error: ApiError) -> bytes:
        """`event: error`."""
        self._has_ended = True
        return named_event(_error(error))

    def _changes(self, answer: ChatAnswer) -> Iterator[dict[str, Any]]:
        yield from self._beginning()
        for choice in answer.choices[:1]:
            self.output_tokens = (self.output_tokens or 0) + 1  # until usage says it
            for change in self._parts.feed(choice.delta or ChatDelta()):
                yield _block_event(change)
            if choice.finish_reason is not None:
                self._choice = choice
        self._count(answer.usage)

    def _beginning(self) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            message = self._message([], ChatUsage(prompt_tokens=self._num_tokens))
            yield {"type": "message_start", "message": message | {"stop_reason": None, "stop_sequence": None}}

    def _ending(self) -> Iterator[dict[str, Any]]:
        yield from self._beginning()
        for change in self._parts.end():
            yield _block_event(change)
        check_ended(self._choice.finish_reason)
        self._has_ended = True
        yield {"type": "message_delta", "delta": self._stopped(), "usage": _usage(self._usage, self._num_tokens)}
        yield {"type": "message_stop"}

    def _message(self, content: list[dict[str, Any]], usage: ChatUsage | None) -> dict[str, Any]:
        message = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}
        return message | {"usage": _usage(usage, self._num_tokens)}

    def _count(self, usage: ChatUsage | None) -> None:
        if usage is not None:
            self._usage, self.output_tokens = usage, usage.completion_tokens

    def _stopped(self) -> dict[str, Any]:
        reason, stop = self._choice.finish_reason, self._choice.stop_reason
        if reason == "stop" and any(part.kind is PartKind.CALL for part in self._parts.all):
            reason = "tool_calls"  # vLLM's, for a call that the client asked for by name
        if reason == "stop" and isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": STOP_REASONS.get(reason or "stop", "end_turn"), "stop_sequence": None}


def _whole_block(part: AnswerPart) -> dict[str, Any]:
    match part.kind:
        case PartKind.THOUGHTS:
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case PartKind.CALL:
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _input(part)}
        case _:
            return {"type": "text", "text": part.text}


def _input(part: AnswerPart) -> dict[str, Any]:
    """A call's arguments; as they are where a model has written what is no object, or was cut short."""
    if not part.text.strip():
        return {}
    arguments = part.arguments
    return {INVALID_JSON: part.text} if arguments is None else arguments


_BEGINNINGS: Final[dict[PartKind, dict[str, Any]]] = {
    PartKind.THOUGHTS: {"type": "thinking", "thinking": "", "signature": ""},
    PartKind.TEXT: {"type": "text", "text": ""},
    PartKind.REFUSAL: {"type": "text", "text": ""},
}
_DELTAS: Final = {
    PartKind.THOUGHTS: ("thinking_delta", "thinking"),
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.REFUSAL: ("text_delta", "text"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}


def _block_event(change: PartChange) -> dict[str, Any]:
    part = change.part
    match change.step:
        case PartStep.BEGIN:
            called = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
            block = _BEGINNINGS.get(part.kind, called)
            return {"type": "content_block_start", "index": part.number, "content_block": block}
        case PartStep.GROW:
            kind, name = _DELTAS[part.kind]
            return {"type": "content_block_delta", "index": part.number, "delta": {"type": kind, name: change.text}}
        case PartStep.END:
            return {"type": "content_block_stop", "index": part.number}


def _usage(usage: ChatUsage | None, num_tokens: int) -> dict[str, Any]:
    """Anthropic counts input tokens without those that were read from a cache or written to one."""
    counted = usage or ChatUsage(prompt_tokens=num_tokens)
    others = counted.cached_tokens + counted.written_tokens
    details = counted.prompt_tokens_details
    writes: dict[str, Any] = {}
    if details is not None and details.breakpoints is not None:
        writes["cache_creation"] = {
            f"ephemeral_{ttl}_input_tokens": tokens for ttl, tokens in details.cache_writes_by_ttl.items()
        }
        writes["cache_breakpoints"] = details.breakpoints
    return writes | {
        "input_tokens": max(0, counted.prompt_tokens - others),
        "cache_creation_input_tokens": counted.written_tokens,
        "cache_read_input_tokens": counted.cached_tokens,
        "output_tokens": counted.completion_tokens,
    }


def _error(error: ApiError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    said = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": said}


def error_body(error: ApiError) -> bytes:
    """An error in Anthropic's shape; `param` and `code` are OpenAI's, beside it."""
    return msgspec.json.encode(_error(error))

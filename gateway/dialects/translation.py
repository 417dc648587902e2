"""Which dialect a path speaks: how its bodies become calls, how answers and errors are told."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from gateway.dialects import messages, messages_answer
from gateway.dialects.messages_answer import MessagesTelling
from gateway.dialects.telling import Telling
from gateway.errors import ApiError
from gateway.openai import Call, Endpoint, parse

_TO_CHAT: Final[dict[str, Callable[[bytes], bytes]]] = {
    Endpoint.MESSAGES: messages.to_chat,
    Endpoint.COUNT_TOKENS: messages.to_counted,
}
_ERRORS: Final[dict[str, Callable[[ApiError], bytes]]] = {
    Endpoint.MESSAGES: messages_answer.error_body,
    Endpoint.COUNT_TOKENS: messages_answer.error_body,
}


def call_in(endpoint: Endpoint, body: bytes) -> Call:
    """The call that `body` makes at `endpoint`, in the dialect that engines speak. Raises BadRequest."""
    translate = _TO_CHAT.get(endpoint)
    if translate is None:
        return parse(endpoint, body)
    return replace(parse(Endpoint.CHAT, translate(body)), dialect=endpoint)


def telling_of(call: Call, answer_id: str, num_tokens: int) -> Telling | None:
    """How an answer to `call` is told; None: as engines say it."""
    if call.dialect is Endpoint.MESSAGES:
        return MessagesTelling(answer_id, call.options.model, num_tokens)
    return None


def error_told(path: str, error: ApiError) -> bytes:
    """The body that tells `error` to who asked at `path`."""
    tell = _ERRORS.get(path)
    return error.body() if tell is None else tell(error)

"""Which dialect a path speaks: how its bodies become calls, how answers and errors are told."""

from dataclasses import replace

from gateway.api.dialects import anthropic_request as messages
from gateway.api.dialects import anthropic_response as messages_answer
from gateway.api.dialects import responses_request as responses
from gateway.api.dialects.anthropic_response import MessagesTranslator
from gateway.api.dialects.responses_response import ResponsesTranslator
from gateway.api.dialects.translator import ResponseTranslator
from gateway.api.openai import Call, Endpoint, parse
from gateway.errors import ApiError


def call_in(endpoint: Endpoint, body: bytes) -> Call:
    """The call that `body` makes at `endpoint`, in the dialect that engines speak. Raises BadRequest."""
    echo = b""
    match endpoint:
        case Endpoint.CHAT | Endpoint.COMPLETIONS:
            return parse(endpoint, body)
        case Endpoint.MESSAGES:
            chat = messages.to_chat(body)
        case Endpoint.COUNT_TOKENS:
            chat = messages.to_counted(body)
        case Endpoint.RESPONSES:
            chat, echo = responses.to_chat(body)
    return replace(parse(Endpoint.CHAT, chat), dialect=endpoint, echo=echo)


def telling_of(call: Call, answer_id: str, num_tokens: int, unix_s: int) -> ResponseTranslator | None:
    """How an answer to `call` is told; None: as engines say it. `answer_id` is unique, `unix_s` the date."""
    match call.dialect:
        case Endpoint.MESSAGES:
            return MessagesTranslator(answer_id, call.options.model, num_tokens)
        case Endpoint.RESPONSES:
            return ResponsesTranslator(answer_id, call.options.model, call.echo, unix_s)
        case _:
            return None


def error_told(path: str, error: ApiError) -> bytes:
    """The body that tells `error` to who asked at `path`."""
    if path == Endpoint.MESSAGES or path.startswith(f"{Endpoint.MESSAGES}/"):
        return messages_answer.error_body(error)
    return error.body()

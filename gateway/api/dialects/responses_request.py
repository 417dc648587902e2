"""OpenAI's Responses (`POST /v1/responses`), as a chat. Nothing is kept: a conversation comes whole, in `input`.

    instructions               a system message, before all others        text.format         response_format
    input: messages            messages; developer → system               max_output_tokens   max_completion_tokens
    input: function_call(s)    `tool_calls` of the assistant's message    reasoning items     its `reasoning`
    function_call_output       messages of role "tool"                    tools, tool_choice  functions

What would need a memory, or a runner of tools, is refused. Fields that are not of Responses go to the engine as they are.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw

from gateway.api.cache_control import MARK, Ttl
from gateway.api.dialects.cache_marks import check_not_twice, content_of, marked
from gateway.api.openai import NOT_JSON, Tokens, bad_field
from gateway.api.validation import MAX_TOOLS, Name
from gateway.errors import BadRequest

SYSTEM: Final = frozenset({"system", "developer"})  # many templates know no developer
LOGPROBS: Final = "message.output_text.logprobs"


class CacheBreakpoint(msgspec.Struct, frozen=True):
    """The prompt up to and including what bears this is kept for a time; that of `prompt_cache_options` if it says none."""

    mode: Literal["explicit"]
    ttl: Ttl | None = None


class Content(msgspec.Struct, frozen=True):
    """A part of a message, or of the output of a function."""

    type: Literal["input_text", "output_text", "text", "refusal", "input_image", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    image_url: str | None = None
    detail: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class MessageItem(msgspec.Struct, frozen=True, tag="message"):
    """A message; `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Content]


class FunctionCall(msgspec.Struct, frozen=True, tag="function_call"):
    """A call of an earlier turn."""

    call_id: str
    name: Name
    arguments: str


class FunctionCallOutput(msgspec.Struct, frozen=True, tag="function_call_output"):
    """What it came to."""

    call_id: str
    output: str | list[Content]


class ReasoningItem(msgspec.Struct, frozen=True, tag="reasoning"):
    """Thoughts of an earlier turn; encrypted ones cannot be read here."""

    summary: list[Content] = []
    content: list[Content] | None = None


Item = MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem


class FunctionTool(msgspec.Struct, frozen=True):
    """One of `tools`."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    """`tool_choice`, where it is one function."""

    type: Literal["function"]
    name: Name


class Format(msgspec.Struct, frozen=True):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    """`text`."""

    format: Format | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/responses`."""

    model: str
    input: str | list[Raw]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None


# What an answer repeats of its request.
ECHOED: Final = (
    "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "reasoning",
    "safety_identifier", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "user",
)  # fmt: skip
MAX_ECHO_BYTES: Final = 1 << 20

_REQUEST: Final = msgspec.json.Decoder(ResponsesRequest)
_FIELDS: Final = msgspec.json.Decoder(dict[str, Raw])
_ITEM: Final = msgspec.json.Decoder(Item)
_KEYS: Final = msgspec.json.Decoder(dict[str, Raw])
_KNOWN: Final = frozenset(ResponsesRequest.__struct_fields__)


def to_chat(body: bytes) -> tuple[bytes, bytes]:
    """The chat that a body of `/v1/responses` asks for, and what its answer repeats, as JSON. Raises BadRequest."""
    try:
        fields, asked = _FIELDS.decode(body), _REQUEST.decode(body)
    except msgspec.ValidationError as error:
        raise bad_field(error) from error
    except NOT_JSON as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error
    _check(asked)
    rest = {name: raw for name, raw in fields.items() if name not in _KNOWN}
    echo = msgspec.json.encode({name: fields[name] for name in ECHOED if name in fields})
    if len(echo) > MAX_ECHO_BYTES:
        raise _invalid("tools", f"the fields that the answer repeats are longer than {MAX_ECHO_BYTES} bytes")
    chat = _chat_fields(asked)
    check_not_twice(chat.keys() & rest.keys())
    return msgspec.json.encode(chat | rest), echo


def _check(asked: ResponsesRequest) -> None:
    """Raises BadRequest for what is not done here."""
    needs_memory = "this gateway keeps no responses: send the whole conversation as 'input', with 'store': false"
    for name, value in (
        ("previous_response_id", asked.previous_response_id), ("conversation", asked.conversation),
        ("store", asked.store), ("background", asked.background), ("prompt", asked.prompt),
    ):  # fmt: skip
        if value:
            raise _unsupported(name, needs_memory)
    if asked.truncation == "auto":
        raise _unsupported("truncation", "a prompt is never truncated")
    for index, tool in enumerate(asked.tools or ()):
        if tool.type != "function":
            raise _unsupported(
                f"tools[{index}].type",
                f"'{tool.type}' would run on the server; only functions are supported",
            )
        if not tool.name:
            raise _missing(f"tools[{index}].name")
    if asked.tool_choice not in (None, "none", "auto") and not asked.tools:
        raise _invalid("tool_choice", "it is only allowed with 'tools'")


def _chat_fields(asked: ResponsesRequest) -> dict[str, Any]:
    chat: dict[str, Any] = {"model": asked.model, "messages": _messages(asked)}
    if asked.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if asked.max_output_tokens is not None:
        chat["max_completion_tokens"] = asked.max_output_tokens
    for name in ("temperature", "top_p"):
        if (value := getattr(asked, name)) is not None:
            chat[name] = value
    if asked.top_logprobs is not None or LOGPROBS in (asked.include or ()):
        chat |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    if asked.tools:
        chat["tools"] = [_tool(tool) for tool in asked.tools]
        chat |= _tool_choice(asked)
    if asked.text is not None and asked.text.format is not None and asked.text.format.type != "text":
        chat["response_format"] = _format(asked.text.format)
    return chat


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    for name in ("description", "parameters", "strict"):
        if (value := getattr(tool, name)) is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _tool_choice(asked: ResponsesRequest) -> dict[str, Any]:
    choice = asked.tool_choice
    said: dict[str, Any] = (
        {} if asked.parallel_tool_calls is None else {"parallel_tool_calls": asked.parallel_tool_calls}
    )
    if isinstance(choice, NamedFunction):
        return said | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return said if choice is None else said | {"tool_choice": choice}


def _format(given: Format) -> dict[str, Any]:
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.name is None:
        raise _missing("text.format.name")
    schema: dict[str, Any] = {"name": given.name, "schema": given.schema or {}}
    if given.description is not None:
        schema["description"] = given.description
    if given.strict is not None:
        schema["strict"] = given.strict
    return {"type": "json_schema", "json_schema": schema}


# Messages


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    turn: dict[str, Any] | None = None  # the assistant's, as long as its items come
    for index, raw in enumerate(asked.input):
        item = _item(raw, f"input[{index}]")
        match item:
            case FunctionCallOutput():
                turn = None
                content = _said(item.output, f"input[{index}].output")
                messages.append({"role": "tool", "tool_call_id": item.call_id, **content})
            case MessageItem() if item.role != "assistant":
                turn = None
                role = "system" if item.role in SYSTEM else "user"
                messages.append({"role": role, **_said(item.content, f"input[{index}].content")})
            case _:
                if turn is None or _is_next_turn(turn, item):
                    turn = {"role": "assistant", "content": ""}
                    messages.append(turn)
                _add(turn, item, f"input[{index}].content")
    if not messages:
        raise _invalid("input", "at least one item is needed")
    return messages


def _item(raw: Raw, where: str) -> Item:
    try:
        keys = _KEYS.decode(raw)
        if "type" not in keys:
            raw = Raw(msgspec.json.encode({**keys, "type": "message"}))
        elif bytes(keys["type"]) == b'"item_reference"':
            raise _unsupported(where, "this gateway does not store responses")
        item: Item = _ITEM.decode(raw)
        return item
    except msgspec.ValidationError as error:
        raise bad_field(error, where) from error
    except NOT_JSON as error:
        raise BadRequest(f"The body is not valid JSON: in '{where}': {error}", code="invalid_json") from error


def _is_next_turn(turn: dict[str, Any], item: Item) -> bool:
    """Whether the assistant has begun anew: it thinks or speaks after it has spoken or called."""
    if isinstance(item, FunctionCall):
        return False
    has_ended = bool(turn["content"]) or "tool_calls" in turn
    return has_ended or (isinstance(item, ReasoningItem) and "reasoning" in turn)


def _add(turn: dict[str, Any], item: Item, where: str) -> None:
    match item:
        case MessageItem():
            turn |= _said(item.content, where)
        case FunctionCall():
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        case ReasoningItem():
            if thoughts := "".join(part.text for part in item.content or item.summary):
                turn |= dict.fromkeys(("reasoning", "reasoning_content"), thoughts)


def _said(content: str | list[Content], where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"content": content}
    return content_of([_part(part, f"{where}[{index}]") for index, part in enumerate(content)])


def _part(part: Content, where: str) -> dict[str, Any]:
    mark, said = part.prompt_cache_breakpoint, {}
    if mark is not None:
        said = marked(mark.ttl, f"{where}.{MARK}")
    if part.type != "input_image":
        return {"type": "text", "text": part.text or part.refusal} | said
    image = {"url": part.image_url or ""} | ({"detail": part.detail} if part.detail else {})
    return {"type": "image_url", "image_url": image} | said


def _invalid(param: str, what: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {what}.", param=param, code="invalid_value")


def _missing(param: str) -> BadRequest:
    return BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def _unsupported(param: str, what: str) -> BadRequest:
    return BadRequest(f"'{param}' is not supported: {what}.", param=param, code="unsupported")

"""Anthropic's Messages (`POST /v1/messages`), as a chat.

    system, messages[].text        system, user, assistant messages        tool_use        tool_calls
    thinking (earlier turns)       `reasoning` of the assistant's message  tool_result     messages of role "tool"
    tools, tool_choice             functions; any → required               stop_sequences  stop
    thinking.type                  chat_template_kwargs.enable_thinking     metadata.user_id  user

    cache_control                  prompt_cache_breakpoint            a last message of the      continue_final_message
                                                                  assistant's

Fields that are not Anthropic's go to the engine as they are. Each message becomes the same bytes whatever follows it, so a
conversation that goes on begins with the prompt it had.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from gateway.api.cache_control import CacheControl
from gateway.api.dialects.cache_marks import also_marked, check_not_twice, check_number, content_of, marked
from gateway.api.openai import NOT_JSON, Tokens, bad_field
from gateway.api.validation import MAX_TOOLS, Name, Stops
from gateway.errors import BadRequest

# A line that Claude Code puts before its system prompt, another one for every request: nothing after it could be cached.
BILLING: Final = "x-anthropic-billing-header"


class _Source(msgspec.Struct, frozen=True):
    type: Literal["base64", "url"]
    media_type: str = "image/jpeg"
    data: str = ""
    url: str = ""


class Text(msgspec.Struct, frozen=True, tag="text"):
    """A text block."""

    text: str
    cache_control: CacheControl | None = None


class SystemText(msgspec.Struct, frozen=True):
    """A block of `system`, which can be nothing else."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class Image(msgspec.Struct, frozen=True, tag="image"):
    """An image block."""

    source: _Source
    cache_control: CacheControl | None = None


class Thinking(msgspec.Struct, frozen=True, tag="thinking"):
    """Thoughts of an earlier turn."""

    thinking: str


class RedactedThinking(msgspec.Struct, frozen=True, tag="redacted_thinking"):
    """Thoughts that cannot be read here."""


class ToolUse(msgspec.Struct, frozen=True, tag="tool_use"):
    """A call of an earlier turn."""

    id: str
    name: Name
    input: Raw
    cache_control: CacheControl | None = None


class ToolResult(msgspec.Struct, frozen=True, tag="tool_result"):
    """What a call came to."""

    tool_use_id: str
    content: str | list[Text | Image] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Text | Image | Thinking | RedactedThinking | ToolUse | ToolResult


class Message(msgspec.Struct, frozen=True):
    """One of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, frozen=True):
    """One of `tools`."""

    name: Name
    input_schema: dict[str, Any] | UnsetType = UNSET
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True):
    """`thinking`. A budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class _Metadata(msgspec.Struct, frozen=True):
    user_id: str | None = None


class _Format(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(msgspec.Struct, frozen=True):
    format: _Format | None = None
    effort: str | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/messages`."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Tokens
    system: str | list[SystemText] | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    metadata: _Metadata | None = None
    output_config: _OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


# Anthropic's own, for which there is nothing to be done here.
UNHEARD: Final = frozenset({"service_tier", "inference_geo", "betas", "context_management"})
REFUSED: Final = ("container", "mcp_servers", "fallbacks")  # they ask for work that is not done here

# A last message of the assistant's is the beginning of the answer, as vLLM's chats are asked for that.
CONTINUED: Final = {"continue_final_message": True, "add_generation_prompt": False}

_REQUEST: Final = msgspec.json.Decoder(MessagesRequest)
_FIELDS: Final = msgspec.json.Decoder(dict[str, Raw])
_KNOWN: Final = frozenset(MessagesRequest.__struct_fields__)


def to_chat(body: bytes) -> bytes:
    """The chat that a body of `/v1/messages` asks for. Raises BadRequest, which names the field by Anthropic's name."""
    return _to_chat(body)


def to_counted(body: bytes) -> bytes:
    """The same of a body of `/v1/messages/count_tokens`, which says nothing of an answer."""
    return _to_chat(body, is_counted=True)


def _to_chat(body: bytes, *, is_counted: bool = False) -> bytes:
    try:
        fields = _FIELDS.decode(body) | ({"max_tokens": Raw(b"1")} if is_counted else {})
        asked = _REQUEST.decode(msgspec.json.encode(fields) if is_counted else body)
    except msgspec.ValidationError as error:
        raise bad_field(error) from error
    except NOT_JSON as error:
        raise BadRequest(f"The body is not valid JSON: {error}", code="invalid_json") from error
    for name in REFUSED:
        if name in fields and bytes(fields[name]) not in (b"null", b"[]"):
            raise _unsupported(name)
    _check_marks(asked)
    rest = {name: raw for name, raw in fields.items() if name not in _KNOWN and name not in UNHEARD}
    chat = _chat_fields(asked)
    if asked.messages[-1].role == "assistant" and not rest.keys() & set(CONTINUED):
        if (why := _why_not_continued(asked)) is None:
            chat |= CONTINUED
        elif not is_counted:
            raise why
    check_not_twice(chat.keys() & rest.keys())
    return msgspec.json.encode(chat | rest)


def _why_not_continued(asked: MessagesRequest) -> BadRequest | None:
    """Why the answer cannot go on where the last message, the assistant's, ends."""
    last = f"messages[{len(asked.messages) - 1}]"
    content = asked.messages[-1].content
    if not isinstance(content, str) and any(isinstance(block, ToolUse) for block in content):
        return _unsupported(last, "an answer cannot go on after a call of a tool; its result has to follow")
    if asked.thinking is not None and asked.thinking.type == "enabled":
        return _unsupported(last, "an answer that goes on from there begins with no thoughts; disable 'thinking'")
    return None


def _chat_fields(asked: MessagesRequest) -> dict[str, Any]:
    chat: dict[str, Any] = {"model": asked.model, "messages": _messages(asked), "max_tokens": asked.max_tokens}
    if asked.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if asked.stop_sequences:
        chat["stop"] = asked.stop_sequences
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(asked, name)) is not None:
            chat[name] = value
    if asked.metadata is not None and asked.metadata.user_id is not None:
        chat["user"] = asked.metadata.user_id
    if asked.tools:
        chat["tools"] = [
            _tool(tool, f"tools[{index}]") | _marked(tool.cache_control, f"tools[{index}].cache_control")
            for index, tool in enumerate(asked.tools)
        ]
    if asked.tool_choice is not None:
        chat |= _tool_choice(asked.tool_choice, bool(asked.tools))
    if asked.output_config is not None and asked.output_config.format is not None:
        schema = {"name": "output", "schema": asked.output_config.format.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if kwargs := _template_kwargs(asked):
        chat["chat_template_kwargs"] = kwargs
    return chat


def _template_kwargs(asked: MessagesRequest) -> dict[str, Any]:
    thinks = {"enabled": True, "disabled": False}.get(asked.thinking.type) if asked.thinking else None
    return ({} if thinks is None else {"enable_thinking": thinks}) | (asked.chat_template_kwargs or {})


def _messages(asked: MessagesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if system := _system(asked.system):
        messages.append({"role": "system", **system})
    for index, message in enumerate(asked.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        else:
            messages += _from_blocks(message.role, message.content, f"messages[{index}].content")
    if asked.cache_control is not None:  # at the end of the last block
        also_marked(messages[-1], _marked(asked.cache_control, "cache_control"))
    return messages


def _system(system: str | list[SystemText] | None) -> dict[str, Any]:
    if isinstance(system, str):
        return {"content": text} if (text := _unbilled(system)) else {}
    texts = [(index, block, _unbilled(block.text)) for index, block in enumerate(system or ())]
    content = content_of(
        [
            {"type": "text", "text": text} | _marked(block.cache_control, f"system[{index}].cache_control")
            for index, block, text in texts
            if text or not block.text
        ]
    )
    return content if content["content"] else {}


def _unbilled(text: str) -> str:
    """The text without a first line that is `BILLING`'s."""
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _marked(control: CacheControl | None, field: str) -> dict[str, Any]:
    """What a chat says for a `cache_control`; an error calls it `field`."""
    return {} if control is None else marked(control.ttl, field)


def _check_marks(asked: MessagesRequest) -> None:
    """Raises BadRequest for more marks than Anthropic allows."""
    system = asked.system if isinstance(asked.system, list) else []
    blocks = [block for message in asked.messages if isinstance(message.content, list) for block in message.content]
    bearers: list[Any] = [asked, *(asked.tools or ()), *system, *blocks]
    marks = sum(getattr(bearer, "cache_control", None) is not None for bearer in bearers)
    check_number(marks)


def _from_blocks(role: str, blocks: list[Block], where: str) -> list[dict[str, Any]]:
    """The chat messages of one message: results of tools are messages of their own, and come first."""
    results: list[dict[str, Any]] = []
    content: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    whole: dict[str, Any] = {}  # the mark of a call, which is a part of its message's end
    for index, block in enumerate(blocks):
        mark = _marked(getattr(block, "cache_control", None), f"{where}[{index}].cache_control")
        match block:
            case Text():
                content.append({"type": "text", "text": block.text} | mark)
            case Image() if role == "user":
                content.append(_image(block) | mark)
            case Thinking() if role == "assistant":
                thoughts.append(block.thinking)
            case RedactedThinking() if role == "assistant":
                pass
            case ToolUse() if role == "assistant":
                calls.append(_call(block, f"{where}[{index}].input"))
                whole |= mark
            case ToolResult() if role == "user":
                results.append(_result(block) | mark)
            case _:
                tag = type(block).__struct_config__.tag
                raise _invalid(f"{where}[{index}].type", f"'{tag}' is not allowed in a message of role '{role}'")
    if not (content or calls or thoughts) and results:
        return results
    message: dict[str, Any] = {"role": role} | content_of(content)
    also_marked(message, whole)
    if thoughts:
        message |= dict.fromkeys(
            ("reasoning", "reasoning_content"), "".join(thoughts)
        )  # as vLLM hands them to templates
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _plain(content: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if all(part["type"] == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _image(block: Image) -> dict[str, Any]:
    source = block.source
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _call(block: ToolUse, where: str) -> dict[str, Any]:
    arguments = bytes(block.input)
    if not arguments.startswith(b"{"):
        raise _invalid(where, "expected an object")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments.decode()}}


def _result(block: ToolResult) -> dict[str, Any]:
    content: str | list[dict[str, Any]]
    if isinstance(block.content, list):
        content = _plain(
            [{"type": "text", "text": each.text} if isinstance(each, Text) else _image(each) for each in block.content]
        )
    else:
        content = block.content or ""
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise _unsupported(
            f"{where}.type", f"'{tool.type}' would run on Anthropic's servers, which this gateway does not call"
        )
    if isinstance(tool.input_schema, UnsetType):
        raise BadRequest(
            f"Missing required parameter: '{where}.input_schema'.",
            param=f"{where}.input_schema",
            code="missing_required_parameter",
        )
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice, has_tools: bool) -> dict[str, Any]:
    if choice.type == "tool" and not choice.name:
        raise _invalid("tool_choice.name", "it must name a tool")
    if not has_tools:
        if choice.type in ("auto", "none"):
            return {}
        raise _invalid("tool_choice", "it is only allowed with 'tools'")
    named = {"type": "function", "function": {"name": choice.name}}
    chosen = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    parallel = (
        {}
        if choice.disable_parallel_tool_use is None
        else {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    )
    return {"tool_choice": chosen, **parallel}


def _invalid(param: str, what: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {what}.", param=param, code="invalid_value")


def _unsupported(param: str, what: str = "this gateway runs nothing of its own") -> BadRequest:
    return BadRequest(f"'{param}' is not supported: {what}.", param=param, code="unsupported")

"""The form in which a template is handed a conversation, by vLLM's rules: `parse_chat_messages` and what surrounds it (0.32).

Clients write the same chat in many ways: arguments of a tool's call as a text, a tool without a description, keys in
any order, a role that the template does not know. vLLM puts all that into one form before the template sees it. A
prompt whose KVCache vLLM is to use must have been read from the same form, to the byte. So these are not rules of
taste:

    messages   role, content, then what the role has: tool_calls, reasoning (twice), tool_call_id; name, task, tools
    content    parts, or one text of all parts with a line's end between them: as the template wants it (content_format.py)
    arguments  an object, whatever was written; {} where it was none
    tools      type and function: name, description (null, too), parameters (null, too), strict and defer_loading if given
    developer  is `system` for a template that does not name it, and then all of those are one, the first
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from prompts.errors import BadPrompt

Message = dict[str, Any]
# What a part of each type calls its text.
TEXTS: Final = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip
MAY_BE_MISSING: Final = ("text", "refusal")  # left out where they are null, of a list of parts, too
# Keys of parts that vLLM knows; any other one is kept with a text.
KNOWN_KEYS: Final = frozenset(
    {"audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio"}
    | {"name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url"}
)
# Another one for each request: Claude Code's; nothing behind it could be cached.
BILLING_HEADER: Final = "x-anthropic-billing-header"
PLAIN: Final = ("role", "content")
UNSET: Final = (None, "auto")  # values of variables that say nothing


class Form(msgspec.Struct, frozen=True):
    """A template's form: content in parts or as a text, and whether it knows the role `developer`."""

    in_parts: bool = False
    knows_developer: bool = False


def in_form(messages: Sequence[Message], form: Form) -> list[Message]:
    """A whole conversation as the template is handed it. Raises BadPrompt."""
    if not messages:
        raise invalid("messages", "at least one message is needed")
    made = [_in_form(message, form.in_parts, f"messages[{index}]") for index, message in enumerate(messages)]
    if not form.knows_developer and any(message["role"] == "developer" for message in made):
        return _with_one_system(made)
    return made


class Continued(msgspec.Struct, frozen=True):
    """Messages of a conversation from some number on; `by_developer`: its first one is a developer's, kept as a system's."""

    messages: list[Message]
    by_developer: bool


def in_form_from(messages: Sequence[Message], start: int, by_developer: bool, form: Form) -> Continued | None:
    """The messages from number `start` on as the template is handed them; None: with them, earlier ones change as well.

    Raises BadPrompt.
    """
    made = [_in_form(message, form.in_parts, f"messages[{start + index}]") for index, message in enumerate(messages)]
    if form.knows_developer:
        return Continued(made, False)
    later = made if start else made[1:]
    by_developer = by_developer or (start == 0 and made[0]["role"] == "developer")
    if any(message["role"] == "developer" or (by_developer and message["role"] == "system") for message in later):
        return None
    if start == 0 and by_developer:
        made[0] = _as_system(made[0])
    return Continued(made, by_developer)


def tools_in_form(tools: Sequence[Any] | None) -> list[Any] | None:
    """The tools as the template is handed them; what is no tool stays as it is, for engines to refuse."""
    return None if tools is None else [_tool(each) for each in tools]


def variables(said: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Variables of the template: those that a client says, and what `reasoning_effort` stands for."""
    kept = {name: value for name, value in (said or {}).items() if not _is_unset(value)}
    if effort is not None and effort != "auto":
        kept["reasoning_effort"] = effort
        if "enable_thinking" not in (said or {}):
            kept["enable_thinking"] = effort != "none"
    return kept


def invalid(param: str, what: str) -> BadPrompt:
    """The error of a field."""
    return BadPrompt(f"Invalid value for '{param}': {what}.", param=param, code="invalid_value")


def _is_unset(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == "auto")


def _in_form(message: Message, in_parts: bool, where: str) -> Message:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise invalid(f"{where}.role", "expected a string")
    is_text = isinstance(content, str)
    if is_text and not in_parts and tuple(message) == PLAIN and role not in ("system", "developer"):
        return message
    parts: list[Any] = [content] if is_text else content if isinstance(content, list) else []
    if content is not None and not is_text and not isinstance(content, list):
        raise invalid(f"{where}.content", "expected a string or a list of parts")
    if role == "system":
        parts = list(_without_billing(parts))
    found = (_part(part, in_parts, f"{where}.content[{index}]") for index, part in enumerate(parts))
    pieces = [piece for piece in found if piece]  # of a text, empty parts leave no line
    made: Message = {"role": role, "content": pieces if in_parts else "\n".join(pieces)}
    more = _MORE.get(role)
    if more is not None:
        more(message, made, where)
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            made[name] = message[name]
    if role == "developer":
        tools = message.get("tools")
        made["tools"] = [_ordered_tool(each) for each in tools] if isinstance(tools, list) else tools
    return made


def _part(part: Any, in_parts: bool, where: str) -> Any:
    """The part in form; None: there is nothing in it."""
    if isinstance(part, str):
        return {"type": "text", "text": part} if in_parts else part
    if isinstance(part, dict) and part.get("uuid") is not None:  # vLLM looks for an image in it then, whatever its type
        raise invalid(where, "a text part cannot have a 'uuid'")
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": "tool_reference", "name": part["name"]} if in_parts else part["name"]
    if not isinstance(kind, str) or kind not in TEXTS:
        raise invalid(where, "this model takes text parts only")
    text = part.get(TEXTS[kind])
    if text is None and (kind in MAY_BE_MISSING or not in_parts):
        return None
    if not isinstance(text, str | None):
        raise invalid(where, "this model takes text parts only")
    if not in_parts:
        return text
    return {"type": "text", "text": text} | {key: value for key, value in part.items() if key not in KNOWN_KEYS}


def _without_billing(parts: Sequence[Any]) -> Iterator[Any]:
    for part in parts:
        is_part = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_part else part
        if not (isinstance(text, str) and text.startswith(BILLING_HEADER)):
            yield part
        elif rest := text.partition("\n")[2]:
            yield {**part, "text": rest} if is_part else rest


def _of_assistant(message: Message, made: Message, where: str) -> None:
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    thoughts = message.get("reasoning")
    if thoughts is None:
        thoughts = message.get("reasoning_content")
    if thoughts is not None:
        made["reasoning"] = made["reasoning_content"] = thoughts


def _of_tool(message: Message, made: Message, where: str) -> None:
    if "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    content = made["content"]
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        made["content"] = _joined(content, where)


_MORE: Final[dict[str, Callable[[Message, Message, str], None]]] = {"assistant": _of_assistant, "tool": _of_tool}


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise invalid(where, "expected a call of a function")
    made = _ordered(call, ("id", "function", "type"))
    made["function"] = _ordered(function, ("arguments", "name"))
    made["function"]["arguments"] = _arguments(function.get("arguments"))
    return made


def _arguments(written: Any) -> dict[str, Any]:
    if isinstance(written, str) and written:
        try:
            written = json.loads(written)  # by the standard library: it reads what vLLM reads
        except (ValueError, RecursionError):
            return {}
    return written if isinstance(written, dict) else {}


def _tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    defers = tool.get("defer_loading")
    made = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        made["strict"] = function["strict"]
    inner = function.get("defer_loading")
    if inner is not None or defers is not None:
        made["defer_loading"] = defers if inner is None else inner
    whole = {"type": tool.get("type", "function"), "function": made}
    return whole if defers is None else whole | {"defer_loading": defers}


def _ordered_tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    made = _ordered(tool, ("function", "type"))
    if isinstance(made.get("function"), dict):
        made["function"] = _ordered(made["function"], ("name", "description", "parameters", "strict"))
    return made


def _ordered(value: dict[str, Any], first: Sequence[str]) -> dict[str, Any]:
    """`value` with the keys `first` first, in that order."""
    return {name: value[name] for name in first if name in value} | value


def _as_system(message: Message) -> Message:
    return {name: value for name, value in (message | {"role": "system"}).items() if name != "tools"}


def _with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Developers' messages become systems'; where these are several or not the first, they become one."""
    made = [_as_system(each) if each["role"] == "developer" else each for each in messages]
    at = [index for index, each in enumerate(made) if each["role"] == "system"]
    if at == [0]:
        return made
    texts = [_text_of(made[index]["content"]) for index in at]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(each for each in made if each["role"] != "system")]


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else _joined([part for part in content if "text" in part], "messages")


def _joined(parts: Sequence[dict[str, Any]], where: str) -> str:
    texts = [part["text"] for part in parts]
    if None in texts:  # which vLLM fails at
        raise invalid(f"{where}.content", "a text is null")
    return "\n".join(texts)

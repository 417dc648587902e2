"""From the prompt of a request to its tokens, as gateway and engine both read it: what one refuses, so does the other."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from prompts.errors import BadPrompt
from prompts.segments import TokenArray, token_array
from prompts.template import Message
from prompts.tokenizer import TextTokenizer

# What templates are rendered with, and what `apply_chat_template` of transformers and vLLM takes: fields of the request
# say it or nobody does. (vLLM answers an error where both do; to let either win would be for one of two ends to be wrong.)
RESERVED_KWARGS: Final = frozenset(
    {"messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "tokenizer", "model_config", "request"}
)


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat request says of its prompt, under the names of its fields; None is not said."""

    messages: Sequence[Message]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def check_kwargs(chat: Chat) -> None:
    """Raises BadPrompt for a variable of the template that is not the client's to set."""
    for name in sorted(RESERVED_KWARGS.intersection(chat.chat_template_kwargs or ())):
        param = f"chat_template_kwargs.{name}"
        raise BadPrompt(f"'{param}' cannot be set; is there a field of the request?", param=param, code="unsupported")


def chat_tokens(chat: Chat, tokenizer: TextTokenizer, tenant: bytes = b"") -> TokenArray:
    """The tokens of a rendered chat, which spells its special tokens out itself. Raises BadPrompt."""
    check_kwargs(chat)
    text = tokenizer.render(
        plain_messages(chat.messages),
        tools=chat.tools,
        documents=chat.documents,
        add_generation_prompt=chat.add_generation_prompt is not False and not chat.continue_final_message,
        continue_final_message=bool(chat.continue_final_message),
        kwargs=chat.chat_template_kwargs,
    )
    return tokenizer.encode(text) if chat.add_special_tokens else tokenizer.encode_rendered(text, tenant)


def completion_tokens(
    prompt: Any, tokenizer: TextTokenizer, *, add_special_tokens: bool | None = None, tenant: bytes = b""
) -> TokenArray:
    """The tokens of one plain prompt, a text or token ids. Raises BadPrompt."""
    # A list of one prompt is that prompt; more would be several answers.
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokenizer.encode_rendered(prompt, tenant) if add_special_tokens is False else tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not {int}.issuperset(map(type, prompt)):
        raise _invalid("prompt", "expected one string or one list of token ids")
    try:
        return token_array(prompt)
    except OverflowError as error:
        raise _invalid("prompt", "token ids must be in [0, 2**32)") from error


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages checked as far as every template relies on it, each content one string. Raises BadPrompt."""
    if not messages:
        raise _invalid("messages", "at least one message is needed")
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, where: str) -> Message:
    """`message` with its text parts put together, as vLLM does it: the template sees one string."""
    if not isinstance(message.get("role"), str):
        raise _invalid(f"{where}.role", "expected a string")
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:
        return {**message, "content": ""}
    if not isinstance(content, list):
        raise _invalid(f"{where}.content", "expected a string or a list of parts")
    return {**message, "content": "".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))}


def _text(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise _invalid(where, "this model takes text parts only")


def _invalid(param: str, what: str) -> BadPrompt:
    return BadPrompt(f"Invalid value for '{param}': {what}.", param=param, code="invalid_value")

"""Reads a request's prompt into tokens. Gateway and engine share it, so both refuse the same prompts."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from prompts.chat.form import Message, in_form, invalid, tools_in_form, variables
from prompts.errors import BadPrompt
from prompts.tokens.segments import TokenArray, token_array
from prompts.tokens.tokenizer import TextTokenizer

# What templates are rendered with, and what `apply_chat_template` of transformers and vLLM takes: fields of the request
# say it or it is not said. (vLLM answers an error where both do; to let either win would be for one of two ends to be wrong.)
RESERVED_KWARGS: Final = frozenset(
    {"messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs", "tokenizer", "model_config", "request"}
)


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a chat request that its prompt depends on, under their names; None: not given."""

    messages: Sequence[Message]
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def rendering(self) -> dict[str, Any]:
        """The variables for a template, beside messages, and whether the last message is left open."""
        return {
            "tools": tools_in_form(self.tools),
            "documents": self.documents,
            "add_generation_prompt": self.add_generation_prompt is not False,
            "kwargs": variables(self.chat_template_kwargs, self.reasoning_effort),
        }


def check_kwargs(chat: Chat) -> None:
    """Raises BadPrompt for a variable of the template that is not the client's to set."""
    for name in sorted(RESERVED_KWARGS.intersection(chat.chat_template_kwargs or ())):
        param = f"chat_template_kwargs.{name}"
        raise BadPrompt(f"'{param}' cannot be set here; use a field of the request", param=param, code="unsupported")


def chat_tokens(chat: Chat, tokenizer: TextTokenizer, tenant: bytes = b"") -> TokenArray:
    """The tokens of a rendered chat, which spells its special tokens out itself. Raises BadPrompt."""
    check_kwargs(chat)
    text = tokenizer.render(in_form(chat.messages, tokenizer.form(bool(chat.tools))), **_whole(chat))
    return tokenizer.encode(text) if chat.add_special_tokens else tokenizer.encode_rendered(text, tenant)


def _whole(chat: Chat) -> dict[str, Any]:
    if not chat.continue_final_message:
        return chat.rendering
    return chat.rendering | {"add_generation_prompt": False, "continue_final_message": True}


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
        raise invalid("prompt", "expected one string or one list of token ids")
    try:
        return token_array(prompt)
    except OverflowError as error:
        raise invalid("prompt", "token ids must be in [0, 2**32)") from error


def truncated(tokens: TokenArray, most: int, side: str | None, added: tuple[int, int] = (0, 0)) -> TokenArray:
    """At most `most` of `tokens`: as vLLM cuts prompts, the last ones unless `side` is "right".

    Where no `side` is said, the special tokens stay that the tokenizer has `added` before and after the text.
    """
    if len(tokens) <= most:
        return tokens
    if side == "right":
        return tokens[:most]
    before, after = (0, 0) if side else added
    kept = max(0, most - before - after)
    text = tokens[before : len(tokens) - after]
    cut = np.concatenate([tokens[:before], text[len(text) - kept :], tokens[len(tokens) - after :]])
    return cut[len(cut) - min(len(cut), most) :]

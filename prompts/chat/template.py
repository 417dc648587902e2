"""Chat messages to text, as `tokenizer.apply_chat_template` of transformers renders them.

The tokens the gateway hashes must be the tokens the engine computes, so the environment is the same: an immutable
sandbox, trim_blocks, lstrip_blocks, loop controls, an unescaped `tojson`, `raise_exception`, `strftime_now`, and `{%
generation %}` as a transparent block. The model's owner wrote the template. The client wrote the messages, which are
only data to it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prompts.chat.appending import NEW, START, ConversationParts, NotAppending, in_parts, split
from prompts.chat.content_format import wants_parts
from prompts.chat.form import Form, Message
from prompts.errors import TemplateError

CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
# A template is a program that runs on a client's data: any error means that the two do not fit.
TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError
)  # fmt: skip


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> NoReturn:
    """The function with which a template refuses a conversation."""
    raise jinja2.TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled chat template with the special tokens it may name (`bos_token`, …); `form` is what it wants messages to be."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Callable[[], datetime]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        self.form, self._variables = _read(environment, source)
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        self._compiled = _with_plain_globals(environment.from_string(source))
        self._in_parts: jinja2.Template | None = None
        self.not_appending = ""
        try:
            self._in_parts = _with_plain_globals(in_parts(environment, source))
        except NotAppending as reason:
            self.not_appending = str(reason)
        except TEMPLATE_ERRORS:
            self.not_appending = "unknown_form"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: list[Any] | None = None,
        documents: list[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises TemplateError when the template refuses."""
        if continue_final_message:
            messages = _marked(messages)
        given = {"messages": messages, "tools": tools, "documents": documents}
        text = self._render(self._compiled, given | {"add_generation_prompt": add_generation_prompt}, kwargs)
        return _cut_at_mark(text) if continue_final_message else text

    def render_from(
        self,
        start: int,
        first: Message,
        new: Sequence[Message],
        *,
        tools: list[Any] | None,
        documents: list[Any] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any] | None,
    ) -> ConversationParts | None:
        """The prompt text in parts, of its messages only `new`, those from number `start` on; `first` is the first of all.

        None where the parts cannot be told apart. Only for a template that is appending. Raises TemplateError.
        """
        assert self._in_parts is not None, self.not_appending
        given = {"messages": [first], NEW: new, START: start, "tools": tools, "documents": documents}
        return split(self._render(self._in_parts, given | {"add_generation_prompt": add_generation_prompt}, kwargs))

    def _render(self, template: jinja2.Template, given: Mapping[str, Any], kwargs: Mapping[str, Any] | None) -> str:
        try:
            said = {name: value for name, value in (kwargs or {}).items() if name in self._variables}
            text = template.render({**self.special_tokens, **said, **given})
            if not text.isascii():
                text.encode()  # half a surrogate pair is no text
        except TEMPLATE_ERRORS as error:
            raise TemplateError(str(error) or type(error).__name__) from error
        return text


def _read(environment: jinja2.Environment, source: str) -> tuple[Form, frozenset[str]]:
    """The form of messages that `source` wants, and the variables that a client can set: those that it names."""
    knows_developer = '"developer"' in source or "'developer'" in source  # vLLM's rule, to the letter
    try:
        tree = environment.parse(source)
        names = frozenset(meta.find_undeclared_variables(tree))
    except jinja2.TemplateError:
        return Form(knows_developer=knows_developer), frozenset()
    return Form(wants_parts(tree), knows_developer), names


def _with_plain_globals(template: jinja2.Template) -> jinja2.Template:
    """`template` with its globals in one dict. Jinja copies them for each rendering; out of its own chain of maps that took more
    than all the rest of a short chat's."""
    template.globals = dict(template.globals)
    return template


def _marked(messages: Sequence[Message]) -> list[Message]:
    marked = deepcopy(list(messages))
    content = marked[-1].get("content")
    if isinstance(content, str):
        marked[-1]["content"] = content + CONTINUE_TAG
        return marked
    for part in reversed(content or []):
        if "text" in part:
            part["text"] += CONTINUE_TAG
            return marked
    raise TemplateError("continue_final_message needs a final message with text")


def _cut_at_mark(text: str) -> str:
    """Everything before the mark; a template that trims its messages has trimmed the mark's space as well."""
    at = text.rfind(CONTINUE_TAG.strip())
    if at < 0:
        raise TemplateError("the template does not render the final message, so it cannot be continued")
    return text[:at] if text.startswith(CONTINUE_TAG, at) else text[:at].rstrip()

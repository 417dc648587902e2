"""Tokens of a model directory, without transformers: `tokenizer.json` and the chat template, both read once.

The gateway must come to the same token ids from the same files, so nothing here depends on anything but them.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from engine.errors import RequestError, TokenizerError


class TextTokenizer:
    """Text and chats to token ids and back."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        config: dict[str, Any],
        chat_template: str | None = None,
        more_eos: Sequence[int] = (),
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._config = config
        self._more_eos = tuple(more_eos)
        self.chat_template = chat_template

    @classmethod
    def load(cls, directory: Path) -> "TextTokenizer":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises TokenizerError."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{directory} has no tokenizer.json")
        try:
            tokenizer = FastTokenizer.from_file(str(path))
            config = _read_json(directory / "tokenizer_config.json")
            generation = _read_json(directory / "generation_config.json")
        except Exception as exc:  # the tokenizers library raises bare Exception
            raise TokenizerError(f"{path} cannot be read: {exc}") from exc
        return cls(tokenizer, config, _read_template(directory, config), _token_ids(generation.get("eos_token_id")))

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends an answer: the tokenizer's EOS and those that the generation config adds (end of turn, say)."""
        token = _special(self._config, "eos_token")
        own = self._tokenizer.token_to_id(token) if token else None
        return tuple({*(() if own is None else (own,)), *self._more_eos})

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt; the tokenizer's own rules say whether a BOS comes first."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Tokens of a rendered chat; special tokens are the template's business. Raises RequestError."""
        return list(self._tokenizer.encode(self.render_chat(messages, **options), add_special_tokens=False).ids)

    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        if self._template is None:
            raise RequestError("this model has no chat template: use /v1/completions", param="messages")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: token for name in names if (token := _special(self._config, name))}
        # Defined as None, as transformers does: templates ask `tools is not none`.
        absent = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return str(self._template.render(messages=list(messages), **{**absent, **special, **options}))
        except (TemplateError, TypeError, ValueError, KeyError) as exc:
            raise RequestError(f"the chat template refuses these messages: {exc}", param="messages") from exc

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def token_text(self, token: int) -> str:
        """One token on its own, special tokens spelled out; what logprobs name."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    @cached_property
    def _template(self) -> Any:
        if self.chat_template is None:
            return None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            return environment.from_string(self.chat_template)
        except TemplateError as exc:
            raise TokenizerError(f"the chat template cannot be compiled: {exc}") from exc


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones; "default" is the one for plain chats
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int)]


def _special(config: dict[str, Any], name: str) -> str | None:
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)

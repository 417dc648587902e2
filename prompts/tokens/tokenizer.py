"""A model directory's tokenizer and chat template. Slow for long texts: for threads and processes, not the event loop."""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec
import numpy as np
from tokenizers import Tokenizer
from xxhash import xxh3_64_intdigest

from prompts.chat.appending import ConversationParts
from prompts.chat.form import Form, Message
from prompts.chat.template import ChatTemplate
from prompts.errors import BadPrompt, TokenizerUnreadable
from prompts.fair_cache import DEFAULT_BYTES, FairCache
from prompts.tokens.byte_tokens import bytes_spelled
from prompts.tokens.encoder import EncoderVerdict, TextEncoder
from prompts.tokens.segments import TokenArray, cuts

REPLACEMENT: Final = "\ufffd"
MIN_CACHED_CHARS: Final = 64  # a shorter segment costs less to tokenise than to remember
SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Blueprint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a tokenizer is made of, so that another process can build an equal one. "" means no template.

    `known` is what its fast encoder has shown; None: it is not used.
    """

    tokenizer: str
    special_tokens: dict[str, str]
    template: str = ""
    tool_template: str = ""
    eos_token_ids: tuple[int, ...] = ()
    known: EncoderVerdict | None = None
    cache_bytes: int = DEFAULT_BYTES


class _Seen(NamedTuple):
    """A segment, and its tokens."""

    text: bytes
    tokens: TokenArray


class TextTokenizer:
    """A model directory's tokenizer and chat template, without transformers. Thread-safe.

    Texts seen before are not tokenised again: their tokens are in `cache`, each tenant's own. `encoder` tokenises the others,
    faster once it has been told to (`encoder.hasten`).
    `eos_token_ids` are what ends an answer: the tokenizer's EOS and those that the generation config adds (end of turn, say).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        tool_template: ChatTemplate | None = None,
        eos_token_ids: Sequence[int] = (),
        cache: FairCache | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.encoder = TextEncoder(tokenizer)
        self._template = template
        self._tool_template = tool_template or template
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.cache = FairCache() if cache is None else cache
        self.max_token_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._cuts = cuts(tokenizer)
        self._pieces: dict[int, bytes | None] = {}  # by token, as they are asked for

    @classmethod
    def load(cls, directory: Path, cache: FairCache | None = None) -> Self:
        """Reads tokenizer.json, both configs beside it and chat_template.jinja. Raises TokenizerUnreadable."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerUnreadable(f"{directory} has no tokenizer.json")
        try:
            return cls._read(directory, Tokenizer.from_file(str(path)), cache)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise TokenizerUnreadable(f"the tokenizer in {directory} cannot be read: {error}") from error

    @classmethod
    def _read(cls, directory: Path, tokenizer: Tokenizer, cache: FairCache | None) -> Self:
        config = _read_json(directory / "tokenizer_config.json")
        special = special_tokens({**_read_json(directory / "special_tokens_map.json"), **config})
        templates = {
            name: ChatTemplate(source, special, datetime.now) for name, source in _templates(directory, config).items()
        }
        eos = tokenizer.token_to_id(special.get("eos_token", ""))
        more_eos = _token_ids(_read_json(directory / "generation_config.json").get("eos_token_id"))
        return cls(
            tokenizer,
            templates.get("default"),
            tool_template=templates.get("tool_use"),
            eos_token_ids=[*(() if eos is None else (eos,)), *more_eos],
            cache=cache,
        )

    def blueprint(self) -> Blueprint:
        """The blueprint from which `build` makes an equal one."""
        template, tool_template = self._template, self._tool_template
        return Blueprint(
            tokenizer=self._tokenizer.to_str(),
            special_tokens=template.special_tokens if template else {},
            template=template.source if template else "",
            tool_template=tool_template.source if tool_template else "",
            eos_token_ids=self.eos_token_ids,
            known=self.encoder.verdict if self.encoder.is_fast else None,
            cache_bytes=self.cache.max_bytes,
        )

    @classmethod
    def build(cls, blueprint: Blueprint) -> Self:
        """The tokenizer that `blueprint` was taken from."""
        sources = (blueprint.template, blueprint.tool_template)
        template, tool_template = (
            ChatTemplate(source, blueprint.special_tokens, datetime.now) if source else None for source in sources
        )
        made = cls(
            Tokenizer.from_str(blueprint.tokenizer),
            template,
            tool_template=tool_template,
            eos_token_ids=blueprint.eos_token_ids,
            cache=FairCache(blueprint.cache_bytes),
        )
        if blueprint.known is not None:
            made.encoder.follow(blueprint.known)
        return made

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def added(self) -> tuple[int, int]:
        """How many special tokens `encode` puts before a text, and behind it."""
        text, whole = (self._tokenizer.encode("a", add_special_tokens=each).ids for each in (False, True))
        count = len(whole) - len(text)
        before = next((at for at in range(count + 1) if whole[at : at + len(text)] == text), count)
        return before, count - before

    @property
    def is_incremental(self) -> bool:
        """Whether text seen before is not tokenised again."""
        return self._cuts is not None

    def encode(self, text: str) -> TokenArray:
        """Tokens of a plain prompt; the tokenizer's own rules say whether a BOS comes first."""
        return self._encode_whole(text, add_special_tokens=True)

    def encode_rendered(self, text: str, tenant: bytes = b"") -> TokenArray:
        """Tokens of a rendered chat, which spells its special tokens out itself."""
        if self._cuts is None:
            return self._encode_whole(text, add_special_tokens=False)
        return self._encode_segments(self._cuts.pieces(text), tenant)

    def lasting_cut(self, text: str) -> int:
        """The last place at which `text` may be cut whatever follows it; 0: none."""
        return self._cuts.last_for_good(text) if self._cuts is not None else 0

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, **options: Any) -> str:
        """The prompt text of a chat. Raises BadPrompt."""
        return self._template_for(bool(tools)).render(messages, tools=tools, **options)

    def render_from(
        self, start: int, first: Message, new: Sequence[Message], tools: list[Any] | None = None, **options: Any
    ) -> ConversationParts | None:
        """The same in parts, of messages only the text of `new`, from number `start` on. Raises BadPrompt."""
        return self._template_for(bool(tools)).render_from(start, first, new, tools=tools, **options)

    def form(self, has_tools: bool) -> Form:
        """The form that the template wants for messages. Raises BadPrompt without a template."""
        return self._template_for(has_tools).form

    def not_appending(self, has_tools: bool) -> str:
        """The reason why a longer conversation's text may differ from its beginning on; "": it does not."""
        template = self._tool_template if has_tools else self._template
        return "missing" if template is None else template.not_appending

    def _template_for(self, has_tools: bool) -> ChatTemplate:
        template = self._tool_template if has_tools else self._template
        if template is None:
            raise BadPrompt("This model has no chat template; use /v1/completions.", param="messages")
        return template

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer: special tokens are left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of any tokens, special ones spelled out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def token_text(self, token: int) -> str:
        """The text that one token adds, as logprobs name it. A tokenizer may drop the space before the first word of
        all."""
        alone = self.spell([token])
        return alone if REPLACEMENT in alone else self.spell([token, token])[len(alone) :]

    def token_bytes(self, token: int) -> bytes:
        """The same in UTF-8; those of its own where it is a piece of a character."""
        raw = self.bytes_of_pieces(token)
        return self.token_text(token).encode() if raw is None else raw

    def bytes_of_pieces(self, token: int) -> bytes | None:
        """The bytes of a token that holds a piece of a character; None: its text is whole."""
        if token not in self._pieces:
            self._pieces[token] = self._bytes_of_pieces(token)
        return self._pieces[token]

    def _bytes_of_pieces(self, token: int) -> bytes | None:
        text, spelled = self.spell([token]), self._tokenizer.id_to_token(token)
        raw = None if REPLACEMENT not in text or spelled is None else bytes_spelled(spelled)
        return raw if raw is not None and raw.decode("utf-8", "replace") == text else None

    def _encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenArray:
        return self.encoder.encode(text, add_special_tokens=add_special_tokens)

    def _encode_segments(self, segments: Sequence[str], tenant: bytes) -> TokenArray:
        parts: list[TokenArray] = []
        short = ""  # what lies between segments worth remembering is tokenised together
        # One call after the other: a batch of several wakes a pool of threads, which wait for more by spinning.
        for segment in segments:
            if len(segment) < MIN_CACHED_CHARS:
                short += segment
                continue
            if short:
                parts.append(self._encode_whole(short, add_special_tokens=False))
                short = ""
            parts.append(self._encode_segment(segment, tenant))
        if short or not parts:
            parts.append(self._encode_whole(short, add_special_tokens=False))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _encode_segment(self, segment: str, tenant: bytes) -> TokenArray:
        data = segment.encode()
        # Texts of equal hashes can be made by anybody: the hash says where to look, the text is compared.
        key = (self.encoder.generation, xxh3_64_intdigest(data))
        found: _Seen | None = self.cache.get(tenant, key)
        if found is None or found.text != data:
            found = _Seen(data, self._encode_whole(segment, add_special_tokens=False))
            self.cache.put(tenant, key, found, len(data) + found.tokens.nbytes)
        return found.tokens


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that a template may name (`bos_token`, …), from tokenizer_config.json."""
    extra = config.get("extra_special_tokens")
    named = {name: config.get(name) for name in SPECIAL_NAMES} | (extra if isinstance(extra, dict) else {})
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if isinstance(template, str) else {}


def _read_json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return value if isinstance(value, dict) else {}


def _token_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int)]

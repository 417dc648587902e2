"""From a parsed call to the tokens, block hashes and digest of its prompt. For worker threads, not the event loop.

A conversation grows turn by turn, so most of its text has been tokenised before. Text is cut after every special token
of the vocabulary: the tokenizer itself splits there before anything else, so the segments' tokens put together are the
tokens of the whole, and each segment is looked up by its text. Whether a tokenizer keeps that promise is read from its
own file and tried once on a probe; one that does not is always asked for the whole text.

    <|im_start|> | system\\nYou are …<|im_end|> | \\n<|im_start|> | user\\n…<|im_end|> | …        cut at each |
"""

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from xxhash import xxh3_128_digest

from gateway.errors import BadRequest, ConfigError
from gateway.openai import Call, ChatOptions, Endpoint, bad_field
from gateway.template import ChatTemplate, Message, TemplateError
from hybrid_cache.hashing import block_hashes, tokens_digest

TokenArray = NDArray[np.uint32]

MAX_CACHED_TOKENS: Final = 8_000_000  # of segments; 4 bytes each
MIN_CACHED_CHARS: Final = 64  # a shorter segment costs less to tokenise than to remember
SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Steps of a tokenizer that treat a text the same wherever it stands. (Metaspace and a prepending normaliser do not.)
POSITION_FREE: Final = frozenset(
    {
        "ByteLevel",
        "Split",
        "Digits",
        "Whitespace",
        "WhitespaceSplit",
        "Punctuation",
        "UnicodeScripts",
        "BertPreTokenizer",
    }
    | {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
)

_PROMPT: Final = msgspec.json.Decoder(str | list[int | str | list[int]])
_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, Any]])
_LIST: Final = msgspec.json.Decoder(list[Any] | None)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any] | None)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the clusters know it. `hashes` are those of the full blocks of its first N-1 tokens."""

    tokens: TokenArray
    hashes: list[bytes]
    digest: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def transfer_tokens(self) -> int:
        """Tokens whose KVCache a prefill node computes: all but the last one."""
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Hashing:
    """How the served model's blocks are named: tokens per block, and the salt of tenant and model."""

    block_size: int
    salt: bytes


class SegmentCache:
    """Tokens of text segments seen before, least recently used first out. Shared by worker threads."""

    def __init__(self, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self.max_tokens = max_tokens
        self.held_tokens = 0
        self.misses = 0
        self._segments: OrderedDict[bytes, TokenArray] = OrderedDict()
        self._lock = Lock()

    def get(self, key: bytes) -> TokenArray | None:
        with self._lock:
            found = self._segments.get(key)
            if found is None:
                self.misses += 1
                return None
            self._segments.move_to_end(key)
            return found

    def put(self, key: bytes, tokens: TokenArray) -> None:
        if len(tokens) > self.max_tokens:
            return
        with self._lock:
            if key in self._segments:
                return
            self._segments[key] = tokens
            self.held_tokens += len(tokens)
            while self.held_tokens > self.max_tokens:
                _, evicted = self._segments.popitem(last=False)
                self.held_tokens -= len(evicted)


class TextTokenizer:
    """A model directory's tokenizer and chat template, without transformers. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        tool_template: ChatTemplate | None = None,
        cache: SegmentCache | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._tool_template = tool_template or template
        self.cache = cache or SegmentCache()
        self.max_token_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._cut = cut_pattern(tokenizer)
        if self._cut is not None and not self._cuts_are_exact():
            self._cut = None

    @classmethod
    def load(cls, directory: Path) -> "TextTokenizer":
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ConfigError."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"tokenizer_dir={str(directory)!r}: has no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
            config = _read_json(directory / "tokenizer_config.json")
            special = special_tokens({**_read_json(directory / "special_tokens_map.json"), **config})
            templates = {
                name: ChatTemplate(source, special, datetime.now)
                for name, source in _templates(directory, config).items()
            }
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ConfigError(f"tokenizer_dir={str(directory)!r}: cannot be read: {error}") from error
        return cls(tokenizer, templates.get("default"), tool_template=templates.get("tool_use"))

    @property
    def is_incremental(self) -> bool:
        """Whether text seen before is not tokenised again."""
        return self._cut is not None

    def encode(self, text: str) -> TokenArray:
        """Tokens of a plain prompt; the tokenizer's own rules say whether a BOS comes first."""
        return _ids(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_rendered(self, text: str) -> TokenArray:
        """Tokens of a rendered chat, which spells its special tokens out itself."""
        if self._cut is None:
            return self._encode_whole(text)
        return self._encode_segments(cut_after(self._cut, text))

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None, **options: Any) -> str:
        """The prompt text of a chat. Raises BadRequest."""
        template = self._tool_template if tools else self._template
        if template is None:
            raise BadRequest("This model has no chat template; use /v1/completions.", param="messages")
        try:
            return template.render(messages, tools=tools, **options)
        except TemplateError as error:
            raise BadRequest(f"The chat template refuses these messages: {error}", param="messages") from error

    def _encode_whole(self, text: str) -> TokenArray:
        return _ids(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_segments(self, segments: Sequence[str]) -> TokenArray:
        keys = [xxh3_128_digest(s.encode()) if len(s) >= MIN_CACHED_CHARS else None for s in segments]
        parts = [self.cache.get(key) if key else None for key in keys]
        new = [index for index, part in enumerate(parts) if part is None]
        encoded = self._tokenizer.encode_batch_fast([segments[index] for index in new], add_special_tokens=False)
        for index, encoding in zip(new, encoded, strict=True):
            parts[index] = tokens = _ids(encoding.ids)
            if key := keys[index]:
                self.cache.put(key, tokens)
        return np.concatenate([part for part in parts if part is not None]) if parts else _ids([])

    def _cuts_are_exact(self) -> bool:
        assert self._cut is not None
        special = [t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special]
        texts = (" lead", "Trail ", "\n\n x", "don't 123", "é漢字", "", "  ")
        probe = "".join(f"{text}{token}" for token in special[:32] for text in texts)
        segments = cut_after(self._cut, probe)
        encoded = self._tokenizer.encode_batch_fast(segments, add_special_tokens=False)
        return [i for part in encoded for i in part.ids] == self._tokenizer.encode(probe, add_special_tokens=False).ids


class PromptReader:
    """Calls to prompts, on a few threads of its own."""

    def __init__(self, tokenizer: TextTokenizer, threads: int = 2) -> None:
        self.tokenizer = tokenizer
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenise")

    def read(self, call: Call, hashing: Hashing) -> Prompt:
        """The prompt of `call`. Slow for long prompts: call it in `executor`. Raises BadRequest."""
        tokens = self._chat_tokens(call) if call.endpoint is Endpoint.CHAT else self._completion_tokens(call)
        if not len(tokens):
            raise _invalid(call.endpoint.prompt_field, "the prompt is empty")
        return Prompt(
            tokens=tokens,
            hashes=block_hashes(tokens[:-1], hashing.block_size, hashing.salt),
            digest=tokens_digest(tokens, hashing.salt),
        )

    def close(self) -> None:
        self.executor.shutdown(wait=True, cancel_futures=True)

    def _chat_tokens(self, call: Call) -> TokenArray:
        options = cast(ChatOptions, call.options)
        messages = parse_messages(call)
        text = self.tokenizer.render(
            messages,
            tools=_field(call, "tools", _LIST),
            documents=_field(call, "documents", _LIST),
            add_generation_prompt=options.add_generation_prompt is not False and not options.continue_final_message,
            continue_final_message=bool(options.continue_final_message),
            kwargs=_field(call, "chat_template_kwargs", _OBJECT),
        )
        return self.tokenizer.encode(text) if options.add_special_tokens else self.tokenizer.encode_rendered(text)

    def _completion_tokens(self, call: Call) -> TokenArray:
        prompt = _field(call, "prompt", _PROMPT)
        # A list of one prompt is that prompt; more would be several answers.
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if not isinstance(prompt, str):
            return self._token_ids(prompt)
        if call.options.add_special_tokens is False:
            return self.tokenizer.encode_rendered(prompt)
        return self.tokenizer.encode(prompt)

    def _token_ids(self, prompt: Any) -> TokenArray:
        try:
            tokens = _ids(prompt)
        except (TypeError, OverflowError) as error:
            raise _invalid("prompt", "expected one string or one list of token ids") from error
        if len(tokens) and int(tokens.max()) > (largest := self.tokenizer.max_token_id):
            raise _invalid("prompt", f"token ids must be in [0, {largest}]")
        return tokens


def parse_messages(call: Call) -> list[Message]:
    """The messages of a chat, checked as far as every template relies on it. Raises BadRequest."""
    messages: list[Message] = _field(call, "messages", _MESSAGES)
    if not messages:
        raise _invalid("messages", "at least one message is needed")
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, where: str) -> Message:
    """`message` with its content as one string: the engine puts text parts together, so the template sees that."""
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


def _invalid(param: str, what: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {what}.", param=param, code="invalid_value")


def _field(call: Call, name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    raw = call.fields.get(name)
    if raw is None:
        return None
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise bad_field(error, name) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(
            f"The body is not valid JSON: in '{name}': {error}", param=name, code="invalid_json"
        ) from error


def cut_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches the special tokens after which a text may be cut, or None when no cut is known to be safe.

    Not safe: a step that treats the start of a text differently, or an added token that takes in what stands around it.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    special = [token for token in added if token.special]
    if not special or any(token.rstrip or token.lstrip or token.single_word for token in added):
        return None
    if any(not token.special and not token.normalized for token in added):
        return None
    description = json.loads(tokenizer.to_str())
    if not all(_position_free(description.get(step)) for step in ("normalizer", "pre_tokenizer")):
        return None
    # Longest first: the tokenizer, too, takes the longest token that starts at the leftmost place.
    contents = sorted((token.content for token in special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, contents)))


def _position_free(step: dict[str, Any] | None) -> bool:
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(map(_position_free, step.get("pretokenizers") or step.get("normalizers") or []))
    return step["type"] in POSITION_FREE and not step.get("add_prefix_space")


def cut_after(pattern: re.Pattern[str], text: str) -> list[str]:
    """`text` in pieces, each but the last ending with a match."""
    ends = [match.end() for match in pattern.finditer(text)]
    starts = [0, *ends]
    return [text[start:end] for start, end in zip(starts, [*ends, len(text)], strict=True) if start < end]


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """What a template may name (`bos_token`, …), out of tokenizer_config.json."""
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


def _ids(ids: Sequence[int]) -> TokenArray:
    # array() reads a list of ints three times as fast as numpy does.
    return np.frombuffer(array("I", ids), dtype=np.uint32)

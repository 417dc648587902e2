"""What a picker reads of a request: the tenant, what is promised, and the names of its prompt's blocks.

A prompt is not tokenized. Its JSON is cut into blocks of bytes, and a block's name says all that comes before it as well: two
prompts with the same beginning share names, as long as a client writes it the same way twice. Agents do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import xxhash

from gateway.picker.exchange import RequestHead
from gateway.picker.headers import FAIRNESS, OBJECTIVE, SLO_TTFT_MS, first_of

BLOCK_BYTES: Final = 512
BYTES_PER_TOKEN: Final = 4  # of English in JSON, nearly; it only weighs prompts against each other
BLOCK_TOKENS: Final = BLOCK_BYTES // BYTES_PER_TOKEN
MAX_BLOCKS: Final = 32_768  # of one prompt that have names: 4M tokens
MAX_NAME_CHARS: Final = 128
MAX_MODEL_BYTES: Final = 1024
NOTHING: Final = msgspec.Raw(b"")


class UnreadableBody(ValueError):
    """Says why."""


class _Body(msgspec.Struct, frozen=True, gc=False):
    """Whatever the fields hold: what is wrong with them, the server says."""

    model: msgspec.Raw = NOTHING
    messages: msgspec.Raw = NOTHING
    prompt: msgspec.Raw = NOTHING
    input: msgspec.Raw = NOTHING
    system: msgspec.Raw = NOTHING
    instructions: msgspec.Raw = NOTHING
    tools: msgspec.Raw = NOTHING
    cache_salt: msgspec.Raw = NOTHING
    max_tokens: msgspec.Raw = NOTHING
    max_completion_tokens: msgspec.Raw = NOTHING


_DECODER: Final = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompt:
    """`blocks` are names, the first block first; what is left over at the end has none."""

    num_tokens: int = 0
    blocks: tuple[int, ...] = ()
    answer_tokens: int = 0


NO_PROMPT: Final = AskedPrompt()


@dataclass(frozen=True, slots=True, kw_only=True)
class PickRequest:
    """A request that wants a server. `ttft_s` is what it was promised; 0: nothing."""

    prompt: AskedPrompt
    model: str = ""  # "": the body does not say
    tenant: str = ""
    objective: str = ""
    ttft_s: float = 0.0
    subset: frozenset[str] | None = None


def read_request(head: RequestHead, body: bytes | None) -> PickRequest:
    """Raises UnreadableBody for a body that is no JSON."""
    headers = head.headers
    found = _decoded(body) if body and _is_json(headers) else None
    return PickRequest(
        prompt=_prompt_of(found) if found is not None else NO_PROMPT,
        model=_text(found.model) if found is not None else "",
        tenant=first_of(headers, FAIRNESS)[:MAX_NAME_CHARS],
        objective=first_of(headers, OBJECTIVE)[:MAX_NAME_CHARS],
        ttft_s=_milliseconds(first_of(headers, SLO_TTFT_MS)),
        subset=frozenset(head.subset) if head.subset is not None else None,
    )


def read_prompt(body: bytes) -> AskedPrompt:
    """The prompt of a chat, a completion, a response or a message. Raises UnreadableBody."""
    return _prompt_of(_decoded(body))


def _decoded(body: bytes) -> _Body:
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableBody(f"the body is no JSON object: {error}") from error


def _prompt_of(found: _Body) -> AskedPrompt:
    text = found.messages or found.prompt or found.input
    before = [found.model, found.cache_salt, found.tools, found.system, found.instructions]
    num_bytes = sum(map(len, map(bytes, before[2:]))) + len(bytes(text))
    return AskedPrompt(
        num_tokens=-(-num_bytes // BYTES_PER_TOKEN),
        blocks=block_names(bytes(text), seed=xxhash.xxh3_64_intdigest(b"\0".join(map(bytes, before)))),
        answer_tokens=_number(found.max_completion_tokens or found.max_tokens),
    )


def block_names(text: bytes, seed: int = 0) -> tuple[int, ...]:
    """The names of a text's whole blocks. Equal ones stand for equal texts up to there."""
    view, name, names = memoryview(text), seed, []
    for end in range(BLOCK_BYTES, min(len(text), MAX_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        name = xxhash.xxh3_64_intdigest(view[end - BLOCK_BYTES : end], seed=name)
        names.append(name)
    return tuple(names)


def _is_json(headers: Mapping[str, str]) -> bool:
    """One that does not say what it is, is read as JSON."""
    kind, coding = headers.get("content-type", "").lower(), headers.get("content-encoding", "").lower()
    return (not kind or "json" in kind) and coding in ("", "identity")


def _milliseconds(text: str) -> float:
    """In seconds; 0 for what is no number."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value / 1000 if 0 < value < 1e9 else 0.0


def _text(raw: msgspec.Raw) -> str:
    """ "" for what is no string, and for one that no server is called."""
    try:
        value = msgspec.json.decode(raw) if len(bytes(raw)) <= MAX_MODEL_BYTES else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return value if isinstance(value, str) else ""


def _number(raw: msgspec.Raw) -> int:
    text = bytes(raw)
    return int(text) if text.isdigit() and len(text) < 10 else 0

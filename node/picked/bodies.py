"""Bodies of picked requests: what a client asks for, whether another node may prefill it, and what the engine is asked.

Pure functions of bytes. A client's fields pass through as they are; what the engine is told besides is ours to say.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw

from node.errors import BadPickedRequest

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
# A client that could name a transfer could read another client's prompt from its KVCache.
RESERVED: Final = "kv_transfer_params"
CACHE_SALT: Final = "cache_salt"
NOTHING: Final = (b"null", b"false")
ONE: Final = (*NOTHING, b"1")
# Fields that a leg serves only in part: the values that ask for no more than that, and why no leg is run for others.
APART: Final = (
    ("n", ONE, "several_answers"),
    ("best_of", ONE, "several_answers"),
    ("use_beam_search", NOTHING, "several_answers"),
    ("truncate_prompt_tokens", NOTHING, "truncated"),
    ("prompt_logprobs", NOTHING, "prompt_logprobs"),
    ("echo", NOTHING, "prompt_logprobs"),
)
NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

TokenIds = list[Annotated[int, Meta(ge=0, le=2**32 - 1)]]


class _TextPart(msgspec.Struct):
    """By its type: engines look at that first, and one without it may be a picture that has a text, too."""

    type: Literal["text"]
    text: str


class _TextMessage(msgspec.Struct):
    content: str | list[str | _TextPart] | None = None


_FIELDS: Final = msgspec.json.Decoder(dict[str, Raw])
_TEXTS: Final = msgspec.json.Decoder(list[_TextMessage])
_IDS: Final = msgspec.json.Decoder(TokenIds)
_STRING: Final = msgspec.json.Decoder(str | None)


@dataclass(frozen=True, slots=True)
class PickedBody:
    """A client's body, by its fields. `model` and `cache_salt` are "" where it says nothing of them."""

    path: str
    fields: dict[str, Raw]
    model: str
    cache_salt: str

    def said(self, name: str) -> bytes:
        """A field as JSON; `null` where it is not there."""
        return bytes(self.fields.get(name, b"null"))

    def let_go(self) -> None:
        """Its engine has it all: an answer may take hours, and a body be long."""
        self.fields.clear()


def read_body(path: str, data: bytes) -> PickedBody:
    """Raises BadPickedRequest for what no engine may be asked."""
    try:
        fields = _FIELDS.decode(data)
    except NOT_JSON as exc:
        raise BadPickedRequest(f"the body is no JSON object: {exc}", code="invalid_json") from exc
    if RESERVED in fields:
        raise BadPickedRequest(
            f"{RESERVED}: it is not for clients to set", code="unsupported_parameter", param=RESERVED
        )
    return PickedBody(path, fields, _text(fields, "model"), _text(fields, CACHE_SALT))


def reason_against_leg(body: PickedBody, served_model: str) -> str:
    """Why no other node may prefill it, as a label; "": one may."""
    for name, plain, reason in APART:
        if body.said(name) not in plain:
            return reason
    if body.model != served_model:  # an adapter's KVCache is not the model's
        return "other_model"
    if body.path == CHAT:
        return "" if _is_text(body.said("messages")) else "media"
    is_one = body.said("prompt").startswith(b'"') or token_ids(body) is not None
    return "" if is_one else "several_prompts"


def least_tokens(body: PickedBody) -> int:
    """How many tokens a prompt has at least, if it is given as tokens, without making numbers of them; 0 for any other."""
    said = body.said("prompt")
    return said.count(b",") + 1 if body.path == COMPLETIONS and said.startswith(b"[") else 0


def token_ids(body: PickedBody) -> list[int] | None:
    """The tokens of a prompt that is given as tokens; None for any other."""
    said = body.said("prompt")
    if body.path != COMPLETIONS or not said.startswith(b"["):
        return None
    try:
        return _IDS.decode(said)
    except NOT_JSON:
        return None


def with_params(body: PickedBody, params: dict[str, Any], namespace: str) -> bytes:
    """The body as the engine is asked it; `namespace` is that of its blocks, "" for everybody's."""
    said: dict[str, Any] = {**body.fields, RESERVED: params}
    if namespace:
        said[CACHE_SALT] = namespace
    return msgspec.json.encode(said)


def _is_text(messages: bytes) -> bool:
    """Whether a chat is of texts alone."""
    try:
        _TEXTS.decode(messages)
    except NOT_JSON:
        return False
    return True


def _text(fields: dict[str, Raw], name: str) -> str:
    try:
        return _STRING.decode(fields.get(name, b"null")) or ""
    except NOT_JSON as exc:
        raise BadPickedRequest(f"{name}: it must be a string", code="invalid_value", param=name) from exc

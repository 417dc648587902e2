"""Images, sounds and videos in messages: engines read them, the gateway passes them on and knows how much text is around them.

KVCache of such a prompt is not that of its tokens alone. So its blocks get names of their own, and it is computed where it is
decoded; what its media come to in tokens only the engine knows, and here it is guessed.
"""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.errors import BadRequest
from gateway.openai import NOT_JSON, Call

# Types of parts that vLLM's `MM_PARSER_MAP` (0.32) knows beside texts, and keys that parts without a type have instead.
KINDS: Final = frozenset(
    {"image_url", "input_image", "image_embeds", "image_pil", "audio_url", "input_audio", "audio_embeds"}
    | {"video_url", "video_embeds"}
)
TOKENS_EACH: Final = 1024  # guessed: an image of a megapixel has 1,369 in Qwen2.5-VL, 576 a picture in LLaVA 1.5
NAMED: Final = "uuid"  # by which engines find what was sent with it before, whoever has sent it

_MARKS: Final = tuple(f'"{kind}"'.encode() for kind in sorted(KINDS))
_MESSAGES: Final = msgspec.json.Decoder(list[Any])


class Apart(msgspec.Struct, frozen=True):
    """A call's texts, and how many media were among them; `digest` is of all they say."""

    texts: Call
    number: int
    digest: bytes


def may_have_media(raw: Raw) -> bool:
    """Whether messages may have media in them, as JSON; texts may say the same words."""
    data = bytes(raw)
    return any(mark in data for mark in _MARKS)


def apart(call: Call, *, may_be_named: bool) -> Apart | None:
    """The texts of a chat without its media; None: there are none. Raises BadRequest for those by a name, unless they may be."""
    try:
        messages = _MESSAGES.decode(call.fields["messages"])
    except NOT_JSON:  # whoever reads it says what is wrong
        return None
    named = sha256()
    number = 0
    texts = []
    for index, message in enumerate(messages):
        parts = message.get("content") if isinstance(message, dict) else None
        if not isinstance(parts, list):
            texts.append(message)
            continue
        media = [(at, part) for at, part in enumerate(parts) if _is_medium(part)]
        for at, part in media:
            if NAMED in part and not may_be_named:
                where = f"messages[{index}].content[{at}].{NAMED}"
                raise BadRequest(
                    f"'{where}' cannot be set here: engines would find by it what others have sent.",
                    param=where,
                    code="unsupported",
                )
            named.update(msgspec.json.encode((index, at, part)))
        number += len(media)
        kept = [part for part in parts if not _is_medium(part)]
        texts.append({**message, "content": kept} if media else message)
    if not number:
        return None
    fields = call.fields | {"messages": Raw(msgspec.json.encode(texts))}
    return Apart(replace(call, fields=fields), number, named.digest())


def _is_medium(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in KINDS if isinstance(kind, str) else kind is None and not KINDS.isdisjoint(part)

"""Images, sounds and videos in messages: engines read them, the gateway passes them on and knows how much text is around them.

KVCache of such a prompt is not that of its tokens alone, and what its media come to in tokens only an engine knows. One is asked
where that may be worth it (`gateway.pipeline.engine_render`): then its blocks are named by tokens and media, and it goes
wherever any prompt may. Of others the length is guessed, their blocks have names of their own, and they are computed where they
are decoded.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any, Final

import msgspec
from msgspec import Raw

from gateway.api.openai import NOT_JSON, Call
from gateway.errors import BadRequest
from gateway.prompt.media_addresses import check_addresses

# Types of parts that vLLM's `MM_PARSER_MAP` (0.32) knows beside texts, and keys that parts without a type have instead.
KINDS: Final = frozenset(
    {"image_url", "input_image", "image_embeds", "image_pil", "audio_url", "input_audio", "audio_embeds"}
    | {"video_url", "video_embeds"}
)
TOKENS_EACH: Final = 1024  # guessed: an image of a megapixel has 1,369 in Qwen2.5-VL, 576 a picture in LLaVA 1.5
# Kinds whose KVCache may be computed elsewhere: those that are in the request. The answering engine looks an address up;
# three engines that did might see three images.
SEEN: Final = frozenset({"image_url", "input_image"})
ADDRESS: Final = "image_url"  # the key of what is looked at, of both
INLINE: Final = "data:"
NAMED: Final = "uuid"  # by which engines find what any client sent with it before

_MARKS: Final = tuple(f'"{kind}"'.encode() for kind in sorted(KINDS))
_MESSAGES: Final = msgspec.json.Decoder(list[Any])


class MediaGuess(msgspec.Struct, frozen=True):
    """What is known of a prompt whose media no engine has read: the tokens of its texts, the number of media, and why none is
    asked for them; "": one may be.
    """

    text_tokens: int
    number: int
    unread: str = ""


class Apart(msgspec.Struct, frozen=True):
    """A call's texts, and how many media were among them; `digest` is of all they say, `unread` as in a MediaGuess."""

    texts: Call
    number: int
    digest: bytes
    unread: str = ""


def may_have_media(raw: Raw) -> bool:
    """Whether messages may have media in them, as JSON; texts may say the same words."""
    data = bytes(raw)
    return any(mark in data for mark in _MARKS)


def apart(call: Call, *, may_be_named: bool, domains: Collection[str] = ()) -> Apart | None:
    """The texts of a chat without its media; None: no media.

    Raises BadRequest for those by a name, unless they may be, and for those at an address of another domain.
    """
    try:
        messages = _MESSAGES.decode(call.fields["messages"])
    except NOT_JSON:  # its reader says what is wrong
        return None
    named = sha256()
    number = 0
    unread = ""
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
                    f"'{where}' cannot be set here: it would let a request use media that other clients sent.",
                    param=where,
                    code="unsupported",
                )
            check_addresses(part, KINDS, domains, f"messages[{index}].content[{at}]")
            named.update(msgspec.json.encode((index, at, part)))
            unread = unread or _unread(part)
        number += len(media)
        kept = [part for part in parts if not _is_medium(part)]
        texts.append({**message, "content": kept} if media else message)
    if not number:
        return None
    fields = call.fields | {"messages": Raw(msgspec.json.encode(texts))}
    return Apart(replace(call, fields=fields), number, named.digest(), unread)


def _unread(part: Mapping[str, Any]) -> str:
    if NAMED in part:
        return "named"
    # As vLLM looks for it: the first thing of a part without a type, and under this key, whatever type a part has.
    kind = part.get("type") or (ADDRESS if ADDRESS in part else "")
    if kind not in SEEN:
        return "kind"
    said = part.get(ADDRESS)
    url = said.get("url") if isinstance(said, Mapping) else said
    return "" if isinstance(url, str) and url.startswith(INLINE) else "address"


def _is_medium(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    kind = part.get("type")
    return kind in KINDS if isinstance(kind, str) else kind is None and not KINDS.isdisjoint(part)

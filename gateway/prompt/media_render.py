"""What an engine says of a prompt with media, and whether to ask: its tokens, where its media stand, and what they are.

vLLM's `/render` has to see each image for that, and its decode node does so again for the answer. So no engine is asked where
no other node could compute the prompt, nor for prompts that are short whatever their images come to.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.api.openai import NOT_JSON
from gateway.prompt.media import TOKENS_EACH, MediaGuess
from hybrid_cache.hashing.block_hash import MEDIUM, Inset
from prompts.tokens.segments import TokenArray, token_array

MAX_MEDIA: Final = 256  # of a prompt that is read
MAX_ANSWER_BYTES: Final = 16 << 20  # a million tokens are 7 MB
AT_ONCE: Final = 8  # of a gateway's questions: an engine's front end has few threads for images
TIMEOUT_S: Final = 20.0  # then computing it whole is soon as good
KNOWN: Final = 64  # prompts
EXPLORED: Final = 16  # of so many short ones one is asked for all the same, as images may have become larger
KINDS: Final = frozenset({"image"})  # vLLM's word


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


_RENDERED: Final = msgspec.json.Decoder(_Rendered)


@dataclass(frozen=True, slots=True)
class RenderedMedia:
    """A prompt's tokens, and the media among them, in order; `failure` is why they are not known well enough."""

    tokens: TokenArray
    insets: tuple[Inset, ...] = ()
    failure: str = ""


def seen_in(answer: bytes, number: int) -> RenderedMedia:
    """What an engine has seen of a prompt with so many media."""
    nothing = token_array([])
    try:
        told = _RENDERED.decode(answer)
        tokens = token_array(told.token_ids)
    except (*NOT_JSON, ValueError, OverflowError):
        return RenderedMedia(nothing, failure="bad_answer")
    if told.features is None or told.features.mm_hashes.keys() != told.features.mm_placeholders.keys():
        return RenderedMedia(nothing, failure="bad_answer")
    if not KINDS.issuperset(told.features.mm_hashes):
        return RenderedMedia(nothing, failure="kind")
    names = [name for kind in KINDS for name in told.features.mm_hashes.get(kind, ())]
    places = [place for kind in KINDS for place in told.features.mm_placeholders.get(kind, ())]
    if len(names) != len(places) or len(names) != number or not _in_order(places, len(tokens)):
        return RenderedMedia(nothing, failure="bad_answer")
    if not all(name.startswith(MEDIUM) for name in names):
        return RenderedMedia(nothing, failure="unnamed")
    if places[-1].offset + places[-1].length == len(tokens):  # the last token is the decode node's to compute
        return RenderedMedia(nothing, failure="at_end")
    return RenderedMedia(tokens, tuple(Inset(place.offset, name) for place, name in zip(places, names, strict=True)))


def _in_order(places: list[_Range], num_tokens: int) -> bool:
    stop = 0
    for place in places:
        if place.offset < stop or place.length <= 0:
            return False
        stop = place.offset + place.length
    return bool(places) and stop <= num_tokens


class Worth:
    """Whether an engine is asked what the media of a prompt come to, by what they came to before."""

    def __init__(self) -> None:
        self._tokens_each: deque[float] = deque(maxlen=KNOWN)
        self._short = 0

    def learn(self, guess: MediaGuess, num_tokens: int) -> None:
        """A prompt of that guess has `num_tokens`."""
        self._tokens_each.append((num_tokens - guess.text_tokens) / guess.number)

    def asks(self, guess: MediaGuess, threshold_tokens: float) -> bool:
        """Whether it may be one of more than `threshold_tokens`; now and then, and as long as nothing is known, any may be."""
        if not self._tokens_each:
            return True
        most = guess.text_tokens + guess.number * max(TOKENS_EACH, *self._tokens_each)
        if most > threshold_tokens:
            return True
        self._short += 1
        return self._short % EXPLORED == 0

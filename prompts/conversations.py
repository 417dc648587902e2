"""Growing chats: of a conversation read before, only the new messages are decoded, rendered and tokenised.

The cache keeps the JSON of a conversation's messages, byte for byte, and the tokens of their text. The tokens end at
the last place where the text may be cut, whatever follows (prompts.tokens.segments). A body whose messages begin with
these bytes continues it:

    messages  [{…},{…},{…}      ,{…},{…}]
    text      BEFORE · … <eot>  …             · AFTER        BEFORE and AFTER are rendered each time (prompts.chat.appending)
    tokens    known ─────────┤  new ─────────────────┤

Every result equals that of reading the whole. Some are compared with it; a template whose result differs is not trusted
again.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_128

from prompts.chat.appending import ConversationParts
from prompts.chat.form import Message, in_form, in_form_from
from prompts.errors import BadPrompt, TakesLonger
from prompts.reading import Chat, check_kwargs
from prompts.tokens.segments import TokenArray
from prompts.tokens.tokenizer import TextTokenizer

STRIDE_BYTES: Final = 16 * 1024
MAX_ALIKE: Final = 4  # conversations kept that begin alike for as many strides
CHECKED_FIRST: Final = 4  # readings compared with the whole, then one of so many:
CHECKED_EVERY: Final = 256
BLANKS: Final = b" \t\r\n"
_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, Any]])
NOT_JSON: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)


class _Known(NamedTuple):
    """A conversation as it was read last."""

    json: bytes  # of its messages, without the closing bracket
    num_messages: int
    first: Message
    before: str
    tokens: TokenArray  # of the text up to the cut
    tail: str  # text of messages behind the cut
    after: str
    rest: TokenArray  # of tail and after
    by_developer: bool = False  # the first message was a developer's


class ConversationRead(NamedTuple):
    """Tokens of a chat, None where the whole is to be read; and why, or how: a word for a metric."""

    tokens: TokenArray | None
    how: str


class Conversations:
    """Reads chats for one tokenizer, whose cache also keeps the conversations. Shared by threads.

    Messages of less than `stride_bytes` are read as a whole: that is as fast.
    """

    def __init__(self, tokenizer: TextTokenizer, stride_bytes: int = STRIDE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._stride_bytes = stride_bytes
        self._readings: Counter[bool] = Counter()  # by whether the template is that for tools
        self._disbelieved: set[bool] = set()

    def tokens(
        self,
        messages: bytes,
        fields: Mapping[str, bytes],
        chat: Chat,
        tenant: bytes = b"",
        most_new: int | None = None,
    ) -> ConversationRead:
        """The tokens of `chat`, whose messages are given as JSON, other fields both ways. `chat.messages` are not looked at.

        Raises TakesLonger where this would be more than going on by `most_new` bytes.
        """
        has_tools = bool(chat.tools)
        if len(messages) < self._stride_bytes:
            return ConversationRead(None, "short")
        if chat.continue_final_message or chat.add_special_tokens:
            return ConversationRead(None, "unusual")
        if not self._tokenizer.is_incremental:
            return ConversationRead(None, "tokenizer_cannot_be_cut")
        if has_tools in self._disbelieved:
            return ConversationRead(None, "template_differs")
        if reason := self._tokenizer.not_appending(has_tools):
            return ConversationRead(None, f"template_{reason}")
        try:
            return self._read(messages, _said(fields), chat, tenant, most_new)
        except (BadPrompt, *NOT_JSON):
            return ConversationRead(None, "refused")  # by the reader of the whole, with the right words

    def _read(self, messages: bytes, said: bytes, chat: Chat, tenant: bytes, most_new: int | None) -> ConversationRead:
        check_kwargs(chat)
        end = _end(messages)
        said += b"%d" % self._tokenizer.encoder.generation
        places = [(said, *place) for place in _places(messages[:end], self._stride_bytes)]
        known, place = self._known(places, messages, tenant)
        if most_new is not None and (known is None or self._is_more(messages, known, most_new, bool(chat.tools))):
            raise TakesLonger
        said_new = _continuation(messages, known) if known is not None else None
        if known is None or said_new is None:
            if most_new is not None:
                raise TakesLonger
            said_new, how = _MESSAGES.decode(messages), "new"
            known = _NOTHING
            if not said_new:
                return ConversationRead(None, "refused")
        else:
            how = "continued"
        form = self._tokenizer.form(bool(chat.tools))
        continued = in_form_from(said_new, known.num_messages, known.by_developer, form)
        if continued is None:
            return ConversationRead(None, "developer")
        new = continued.messages
        if not known.num_messages:
            known = known._replace(first=new[0], by_developer=continued.by_developer)
        parts = self._render(known, new, chat)
        if parts is None or (known.num_messages and parts.before != known.before):
            return ConversationRead(None, "unlike_before")
        is_same = how == "continued" and not new and parts.after == known.after
        if not is_same and most_new is not None and len(known.tail) > most_new:
            raise TakesLonger
        count = known.num_messages + len(new)
        learned = known if is_same else self._learned(known, messages[:end], count, parts, tenant)
        tokens = np.concatenate([learned.tokens, learned.rest])
        if how == "continued" and not self._is_believed(tokens, messages, chat, may_check=most_new is None):
            return ConversationRead(None, "template_differs")
        if places and not is_same:
            self._keep(learned, places[-1], known, place, tenant)
        return ConversationRead(tokens, how)

    def _render(self, known: _Known, new: Sequence[Message], chat: Chat) -> ConversationParts | None:
        return self._tokenizer.render_from(
            known.num_messages,
            known.first,
            new,
            **chat.rendering,
        )

    def _learned(
        self, known: _Known, json: bytes, num_messages: int, parts: ConversationParts, tenant: bytes
    ) -> _Known:
        """`known`, gone on with by `parts`."""
        text = (known.tail if known.num_messages else parts.before) + parts.messages
        cut = self._tokenizer.lasting_cut(text)
        lasting = self._tokenizer.encode_rendered(text[:cut], tenant) if cut else _NONE
        rest = self._tokenizer.encode_rendered(text[cut:] + parts.after, tenant)
        tokens = np.concatenate([known.tokens, lasting])
        return known._replace(
            json=json,
            num_messages=num_messages,
            before=parts.before,
            tokens=tokens,
            tail=text[cut:],
            after=parts.after,
            rest=rest,
        )

    def _is_more(self, messages: bytes, known: _Known, most_new: int, has_tools: bool) -> bool:
        new_bytes = _end(messages) - len(known.json)
        is_more = new_bytes and new_bytes + len(known.tail) > most_new
        return bool(is_more) or _is_checked(self._readings[has_tools] + 1)

    def _is_believed(self, tokens: TokenArray, messages: bytes, chat: Chat, *, may_check: bool) -> bool:
        has_tools = bool(chat.tools)
        number = self._readings[has_tools] + 1
        if _is_checked(number) and not may_check:
            raise TakesLonger
        self._readings[has_tools] = number
        if not _is_checked(number):
            return True
        text = self._tokenizer.render(
            in_form(_MESSAGES.decode(messages), self._tokenizer.form(has_tools)),
            **chat.rendering,
        )
        if np.array_equal(tokens, self._tokenizer.encode_rendered(text)):
            return True
        self._disbelieved.add(has_tools)
        return False

    def _known(
        self, places: Sequence[tuple[bytes, int, bytes]], messages: bytes, tenant: bytes
    ) -> tuple[_Known | None, tuple[bytes, int, bytes] | None]:
        """The longest conversation kept that `messages` begin with, and where it is kept."""
        for place in reversed(places):
            alike: tuple[_Known, ...] = self._tokenizer.cache.get(tenant, place) or ()
            for known in sorted(alike, key=lambda each: -len(each.json)):
                if messages.startswith(known.json):
                    return known, place
        return None, None

    def _keep(
        self,
        learned: _Known,
        place: tuple[bytes, int, bytes],
        before: _Known,
        place_before: tuple[bytes, int, bytes] | None,
        tenant: bytes,
    ) -> None:
        """Replaces a conversation by its continuation."""
        if place_before is not None:
            self._put(place_before, [each for each in self._alike(place_before, tenant) if each is not before], tenant)
        others = [each for each in self._alike(place, tenant) if each.json != learned.json]
        self._put(place, [*others, learned][-MAX_ALIKE:], tenant)

    def _alike(self, place: tuple[bytes, int, bytes], tenant: bytes) -> tuple[_Known, ...]:
        return self._tokenizer.cache.get(tenant, place) or ()

    def _put(self, place: tuple[bytes, int, bytes], alike: Sequence[_Known], tenant: bytes) -> None:
        if alike:
            self._tokenizer.cache.put(tenant, place, tuple(alike), sum(map(_size, alike)))
        else:
            self._tokenizer.cache.drop(tenant, place)


_NONE: Final[TokenArray] = np.empty(0, np.uint32)
_NOTHING: Final = _Known(b"", 0, {}, "", _NONE, "", "", _NONE)


def _is_checked(number: int) -> bool:
    return number <= CHECKED_FIRST or number % CHECKED_EVERY == 0


def _said(fields: Mapping[str, bytes]) -> bytes:
    """A digest of everything else that the text depends on."""
    digest = blake2b(digest_size=16)
    for name in sorted(fields):
        digest.update(b"%b %d " % (name.encode(), len(fields[name])) + fields[name])
    return digest.digest()


def _places(messages: bytes, stride_bytes: int) -> list[tuple[int, bytes]]:
    """Where conversations are kept that begin as `messages` do: by strides, and a digest of these."""
    view, digest = memoryview(messages), xxh3_128()
    places = []
    for strides in range(1, len(messages) // stride_bytes + 1):
        digest.update(view[(strides - 1) * stride_bytes : strides * stride_bytes])
        places.append((strides, digest.digest()))
    return places


def _end(messages: bytes) -> int:
    """Where the closing bracket is, and blanks before it."""
    return len(messages.rstrip(BLANKS)[:-1].rstrip(BLANKS))


def _continuation(messages: bytes, known: _Known) -> list[Message] | None:
    """The messages behind those known; None if there is something else."""
    rest = messages[len(known.json) :].lstrip(BLANKS)
    if rest.startswith(b"]"):
        return []
    if not rest.startswith(b","):
        return None
    return _MESSAGES.decode(b"[" + rest[1:]) or None


def _size(known: _Known) -> int:
    first = sum(len(str(value)) for value in known.first.values())
    texts = len(known.before) + len(known.tail) + len(known.after) + first
    return len(known.json) + known.tokens.nbytes + known.rest.nbytes + 4 * texts

"""Tokens to text while they come: never half a character, never a piece of a stop string."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from prompts.tokens.tokenizer import TextTokenizer

_UTF8: Final = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Text of a growing token list, in pieces.

    Tokens that are pieces of characters are joined byte by byte. The text of every other token may depend on the one before it
    (a space, say), so two texts are compared: that of the token before, and that of both.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = _UTF8("replace")
        self._has_pieces = False
        self._before: tuple[int, ...] = ()  # the last token that was neither special nor a piece of a character

    def push(self, token: int) -> str:
        """The text that has become certain."""
        raw = self._tokenizer.bytes_of_pieces(token)
        if raw is not None:
            self._has_pieces = True
            return self._bytes.decode(raw)
        decode = self._tokenizer.decode
        # Behind pieces alone the token is its own neighbour: it is not the first, and a piece would change its text.
        before = self._before or ((token,) if self._has_pieces else ())
        text = decode((*before, token))[len(decode(before)) :]
        # Only a special token has no text even behind itself: it ends no character, and is no neighbour.
        if not text and not decode((token, token)):
            return ""
        self._before = (token,)
        return self.flush() + text

    def flush(self) -> str:
        """U+FFFD for a character that did not become whole."""
        return self._bytes.decode(b"", True)


class TextPiece(NamedTuple):
    text: str
    stopped: bool


class _Beginning:
    """The first `length` characters that some stop strings have in common; longer ones are made when text comes to them."""

    __slots__ = ("_longer", "_stops", "goes_on", "is_whole", "length")

    def __init__(self, length: int, stops: Sequence[str]) -> None:
        """`stops` are sorted and all different, so that the first one is the only one that may end here."""
        self.length = length
        self.is_whole = len(stops[0]) == length
        self.goes_on = len(stops) > 1 or not self.is_whole
        self._stops = stops
        self._longer: dict[str, _Beginning] | None = None

    def then(self, char: str) -> "_Beginning | None":
        """The next state after `char`, if some stop string continues with it."""
        if self._longer is None:
            groups: dict[str, list[str]] = {}
            for stop in self._stops:
                if len(stop) > self.length:
                    groups.setdefault(stop[self.length], []).append(stop)
            self._longer = {first: _Beginning(self.length + 1, stops) for first, stops in groups.items()}
        return self._longer.get(char)


class StopStrings:
    """Passes text on until one of the stop strings is complete, which is not part of the output.

    Each place of the held text at which a stop string may have begun is followed by itself. So a character costs as much as
    there are such places, however many stop strings there are.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        kept = sorted({stop for stop in stops if stop})
        self._nothing = _Beginning(0, kept) if kept else None
        self._held = ""
        self._begun: list[_Beginning] = []  # the longest one first: that is what is held

    def push(self, text: str, *, may_stop: bool = True) -> TextPiece:
        """`may_stop=False`: a stop string that is complete within `text` does not count; one that begins there may."""
        if self._nothing is None:
            return TextPiece(text, False)
        self._held += text
        rest = len(text)
        for char in text:
            rest -= 1
            begun, longest = [], 0
            for beginning in (*self._begun, self._nothing):
                longer = beginning.then(char)
                if longer is None:
                    continue
                if longer.is_whole and may_stop:
                    longest = max(longest, longer.length)
                if longer.goes_on:
                    begun.append(longer)
            self._begun = begun
            if longest:
                piece, self._held = self._held[: len(self._held) - rest - longest], ""
                return TextPiece(piece, True)
        certain = len(self._held) - (self._begun[0].length if self._begun else 0)
        piece, self._held = self._held[:certain], self._held[certain:]
        return TextPiece(piece, False)

    def flush(self) -> str:
        rest, self._held, self._begun = self._held, "", []
        return rest


class OutputText:
    """The text of one request's output."""

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopStrings(stops)

    def push(self, token: int, *, may_stop: bool = True) -> TextPiece:
        """`may_stop=False`: one of the first `min_tokens` tokens. A stop string counts if it ends after them, as in vLLM."""
        return self._stops.push(self._decoder.push(token), may_stop=may_stop)

    def flush(self, *, may_stop: bool = True) -> TextPiece:
        """The rest, after the last token. A stop string that only now is complete still counts."""
        piece = self._stops.push(self._decoder.flush(), may_stop=may_stop)
        return piece if piece.stopped else TextPiece(piece.text + self._stops.flush(), False)

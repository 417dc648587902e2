"""Tokens to text while they come: never half a character, never a piece of a stop string."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from prompts.tokenizer import TextTokenizer

REPLACEMENT: Final = "\ufffd"
MAX_PENDING_TOKENS: Final = 4  # a UTF-8 character has at most four bytes; after that, bytes are simply invalid


class IncrementalDecoder:
    """Text of a growing token list, in pieces.

    A token's text may depend on its neighbours, so two texts are compared: that of a settled window and that of the
    same window with the pending tokens (the method of Hugging Face's text-generation-inference).

        tokens   | ... emitted ... | window start .. read | pending |
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._window = 0
        self._read = 0

    def push(self, token: int) -> str:
        """The text that has become certain."""
        self._tokens.append(token)
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._tokens) - self._read < MAX_PENDING_TOKENS:
            return ""
        return self._settle(text)

    def flush(self) -> str:
        """Whatever is left, complete or not."""
        return self._settle(self._pending_text())

    def _pending_text(self) -> str:
        settled = self._tokenizer.decode(self._tokens[self._window : self._read])
        return self._tokenizer.decode(self._tokens[self._window :])[len(settled) :]

    def _settle(self, text: str) -> str:
        self._window, self._read = self._read, len(self._tokens)
        return text


class Piece(NamedTuple):
    text: str
    stopped: bool


class StopStrings:
    """Passes text on until one of the stop strings appears, which is not part of the output."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> Piece:
        self._held += text
        found = [position for stop in self._stops if (position := self._held.find(stop)) >= 0]
        if found:
            piece, self._held = self._held[: min(found)], ""
            return Piece(piece, True)
        keep = self._possible_beginning()
        piece, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return Piece(piece, False)

    def flush(self) -> str:
        rest, self._held = self._held, ""
        return rest

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class OutputText:
    """The text of one request's output."""

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopStrings(stops)

    def push(self, token: int, *, may_stop: bool = True) -> Piece:
        """`may_stop=False`: text of the first `min_tokens` tokens, in which stop strings do not count."""
        text = self._decoder.push(token)
        return self._stops.push(text) if may_stop else Piece(text, False)

    def flush(self) -> Piece:
        """The rest, after the last token. A stop string that only now is complete still counts."""
        piece = self._stops.push(self._decoder.flush())
        return piece if piece.stopped else Piece(piece.text + self._stops.flush(), False)

"""Decides which texts fastokens may encode, so that its memory stays within a bound.

fastokens remembers the words that it has met, a bounded number of them, however long they are (0.3.5): 5 to 10 bytes
for each of their characters. Words as languages have them come to some 100 MB at most. Long ones are counted here, each
once; when `most_chars` of them have been met, a text with another one is not for fastokens. Forgetting would mean to
build another twin of a large vocabulary and to free this one. Both hold the interpreter's lock: 0.2 to 2 s.

A word is what a tokenizer looks up as one. Regular expressions of today's vocabularies end it where letters, digits, blanks and
all else meet, give or take a character; some tokenizers split at blanks alone, and some never.

    text ──► runs ──► 64 characters and more ──► met before? ──► room for the others? ──► fastokens, or not
"""

import re
import unicodedata
from enum import Enum
from functools import cache
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

LONG_CHARS: Final = 64  # of a word: fewer, and their bounded number is bound enough
MOST_CHARS: Final = 8 << 20  # of long words: 80 MB
NUMPY_CHARS: Final = 4096  # from so many on numpy is the faster one: 0.26 ms for 420 KB
PLANE: Final = 1 << 16  # characters with a class of their own; those beyond are letters
OTHER, LETTER, DIGIT, BLANK = range(4)
RUNS: Final = tuple(each * (LONG_CHARS + 6) for each in ("a", "1", ".", "a", " ", "漢", "。", "é", "-", "1", "\n", "x"))


_LONG: Final = re.compile(rf"\S{{{LONG_CHARS}}}|\s{{{LONG_CHARS}}}")
_ASCII_BLANKS: Final = np.array([chr(each).isspace() for each in range(256)])


class Splits(Enum):
    """Where a tokenizer surely ends a word."""

    CLASSES = "where letters, digits, blanks and all else meet"
    BLANKS = "at blanks"
    NEVER = "never"


def splits_of(tokenizer: Tokenizer) -> Splits:
    """Where `tokenizer` surely ends a word, tried on a text."""
    if max(_words(tokenizer, "".join(RUNS))) <= len(RUNS[0]) + 2:
        return Splits.CLASSES
    return Splits.BLANKS if len(_words(tokenizer, "a a")) > 1 else Splits.NEVER


class LongWords:
    """Long words that have been met, by their hashes. Thread-safe."""

    def __init__(self, splits: Splits, most_chars: int = MOST_CHARS) -> None:
        self._splits = splits
        _class_table()  # takes some milliseconds: now, not when the first text comes
        self._left_chars = most_chars
        self._met: set[int] = set()
        self._lock = Lock()

    def have_room(self, text: str) -> bool:
        """Whether `text` has no long words but those met before and such as there is room for; those have been met now."""
        if not self._may_have_any(text):
            return True
        words = {hash(word): len(word) for word in self._long_words(text)}
        with self._lock:
            new = words.keys() - self._met
            num_chars = sum(words[each] for each in new)
            if num_chars > self._left_chars:
                return False
            self._left_chars -= num_chars
            self._met |= new
        return True

    def _may_have_any(self, text: str) -> bool:
        if len(text) < LONG_CHARS:
            return False
        if self._splits is Splits.NEVER or not text.isascii():  # of blanks beyond ASCII there are many
            return True
        if len(text) < NUMPY_CHARS:
            return _LONG.search(text) is not None
        blank = _ASCII_BLANKS[np.frombuffer(text.encode(), np.uint8)]
        return _longest(blank) >= LONG_CHARS

    def _long_words(self, text: str) -> list[str]:
        if self._splits is Splits.NEVER:
            return [text]
        classes = _classes(text)
        if self._splits is Splits.BLANKS:
            classes = (classes == BLANK).view(np.uint8)
        starts = _run_starts(classes)
        ends = np.append(starts[1:], len(text))
        long = ends - starts >= LONG_CHARS
        return [text[start:end] for start, end in zip(starts[long].tolist(), ends[long].tolist(), strict=True)]


def _run_starts(classes: NDArray[Any]) -> NDArray[np.intp]:
    return np.flatnonzero(np.concatenate([[True], classes[1:] != classes[:-1]]))


def _longest(classes: NDArray[Any]) -> int:
    return int(np.diff(_run_starts(classes), append=len(classes)).max())


def _words(tokenizer: Tokenizer, text: str) -> list[int]:
    """The lengths of what a tokenizer splits `text` into."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [len(text)]
    return [end - start for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _classes(text: str) -> NDArray[np.uint8]:
    characters = np.frombuffer(text.encode("utf-32-le", "replace"), np.dtype("<u4"))
    found: NDArray[np.uint8] = _class_table()[np.minimum(characters, PLANE - 1)]
    return found


@cache
def _class_table() -> NDArray[np.uint8]:
    return np.array([_class_of(chr(each)) for each in range(PLANE - 1)] + [LETTER], np.uint8)


def _class_of(character: str) -> int:
    if character.isspace():
        return BLANK
    match unicodedata.category(character)[0]:
        case "L" | "M":  # marks belong to letters for some, and to nothing for others
            return LETTER
        case "N":
            return DIGIT
        case _:
            return OTHER

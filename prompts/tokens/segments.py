"""Cuts text where its tokens may be cut, so that known segments are not tokenised again.

A conversation grows turn by turn, so most of its text has been seen. Text is cut after every added token, as the tokenizer
itself finds them: it splits there, too, so the segments' tokens put together are the tokens of the whole, and each segment is
looked up by its text. It looks for them at two stages: for some in the text as it is, for those called `normalized` in what
lies between, once that is normalised; so these are cuts only where nothing is. Whether a tokenizer keeps all that is read from
its own file and tried once on a probe; one that does not is always asked for the whole text.

    <|im_start|> | system\\nYou are …<|im_end|> | \\n<|im_start|> | user\\n…<|im_end|> | …        cut at each |
"""

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

TokenArray = NDArray[np.uint32]

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


class Cuts:
    """Where the texts of a tokenizer may be cut: behind its added tokens, given by stages."""

    def __init__(self, stages: Sequence[Sequence[str]]) -> None:
        self._first, *others = [_Stage(contents) for contents in stages if contents]
        self._second = others[0] if others else None
        contents = [content for stage in stages for content in stage]
        self._longest = max(map(len, contents))
        self._by_first_letter = _by_first_letter(contents)

    def ends(self, text: str) -> list[int]:
        """All places at which `text` may be cut."""
        if self._second is None:
            return [end for _, end in self._first.spans(text, 0, len(text))]
        ends, after = list[int](), 0
        for start, end in self._first.spans(text, 0, len(text)):
            ends += [each for _, each in self._second.spans(text, after, start)]
            ends.append(end)
            after = end
        return ends + [each for _, each in self._second.spans(text, after, len(text))]

    def pieces(self, text: str) -> list[str]:
        """`text` in pieces, each but the last ending with an added token."""
        ends = self.ends(text)
        starts = [0, *ends]
        return [text[start:end] for start, end in zip(starts, [*ends, len(text)], strict=True) if start < end]

    def last_for_good(self, text: str) -> int:
        """The last place at which `text` may be cut whatever follows it; 0: none."""
        sure = self._unfinished(text)
        return max((end for end in self.ends(text) if end <= sure), default=0)

    def _unfinished(self, text: str) -> int:
        """Where the first added token would begin that more text might complete."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            begun = text[start:]
            if any(
                len(each) > len(begun) and each.startswith(begun) for each in self._by_first_letter.get(begun[0], ())
            ):
                return start
        return len(text)


class _Stage:
    """Added tokens that are looked for together: from left to right, the longest at each place.

    A pattern for each letter that they begin with: a search for one letter is ten times as fast as one for several.
    """

    def __init__(self, contents: Sequence[str]) -> None:
        self._patterns = [re.compile(_longest_of(each)) for each in _by_first_letter(contents).values()]

    def spans(self, text: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where tokens lie between `start` and `stop`."""
        if len(self._patterns) == 1:
            yield from (match.span() for match in self._patterns[0].finditer(text, start, stop))
            return
        found = {pattern: pattern.search(text, start, stop) for pattern in self._patterns}
        while next_ones := [match for match in found.values() if match is not None]:
            span = min(match.span() for match in next_ones)
            yield span
            for pattern, match in found.items():
                if match is not None and match.start() < span[1]:
                    found[pattern] = pattern.search(text, span[1], stop)


def _by_first_letter(contents: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for content in contents:
        found.setdefault(content[0], []).append(content)
    return found


def cuts(tokenizer: Tokenizer) -> Cuts | None:
    """Where texts may be cut, or None when no cut is known to be safe.

    Three things are not safe: a step that treats the start of a text differently; an added token that takes in its
    surroundings; special tokens that are looked for in a changed text.
    """
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    if not any(token.special for token in added):
        return None
    if any(token.rstrip or token.lstrip or token.single_word for token in added):
        return None
    description = json.loads(tokenizer.to_str())
    if not all(_position_free(description.get(step)) for step in ("normalizer", "pre_tokenizer")):
        return None
    stages = [[token.content for token in added if token.normalized is normalized] for normalized in (False, True)]
    if not _changes_nothing(description.get("normalizer")):
        if any(token.special and token.normalized for token in added):
            return None
        stages = stages[:1]
    found = Cuts(stages)
    return found if _are_exact(tokenizer, found, [content for stage in stages for content in stage]) else None


def _longest_of(contents: Sequence[str]) -> str:
    """Matches the longest of `contents` at a place, as the tokenizer does. A tree: a thousand tokens are told apart at once."""
    tree: dict[str, list[str]] = {}
    for content in contents:
        tree.setdefault(content[:1], []).append(content[1:])
    ends_here = tree.pop("", None) is not None
    branches = []
    for first, rest in tree.items():
        shared = commonprefix(rest)  # noqa: RUF071 of characters, indeed
        branches.append(re.escape(first + shared) + _longest_of([each[len(shared) :] for each in rest]))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if ends_here else ''}"


def _are_exact(tokenizer: Tokenizer, found: Cuts, contents: Sequence[str]) -> bool:
    """Whether a probe that is cut has the tokens of the whole."""
    texts = (" lead", "Trail ", "\n\n x", "don't 123", "é漢字", "", "  ")
    probe = "".join(f"{text}{token}" for token in (*contents[:32], *contents[-32:]) for text in texts)
    encoded = tokenizer.encode_batch_fast(found.pieces(probe), add_special_tokens=False)
    return [i for part in encoded for i in part.ids] == tokenizer.encode(probe, add_special_tokens=False).ids


def _changes_nothing(step: dict[str, Any] | None) -> bool:
    return step is None or (step["type"] == "Sequence" and all(map(_changes_nothing, step.get("normalizers") or [])))


def _position_free(step: dict[str, Any] | None) -> bool:
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(map(_position_free, step.get("pretokenizers") or step.get("normalizers") or []))
    return step["type"] in POSITION_FREE and not step.get("add_prefix_space")


def token_array(ids: Sequence[int]) -> TokenArray:
    """Token ids as an array. Raises TypeError or OverflowError for what are no ids."""
    # array() reads a list of ints three times as fast as numpy does.
    return np.frombuffer(array("I", ids), dtype=np.uint32)

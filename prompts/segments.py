"""Text cut where its tokens may be: what was tokenised before is not tokenised again.

A conversation grows turn by turn, so most of its text has been seen. Text is cut after every added token that the tokenizer
itself looks for first, before it normalises anything (all special ones, and others such as <tool_call>): it splits there,
too, so the segments' tokens put together are the tokens of the whole, and each segment is looked up by its text. Whether a
tokenizer keeps that promise is read from its own file and tried once on a probe; one that does not is always asked for the
whole text.

    <|im_start|> | system\\nYou are …<|im_end|> | \\n<|im_start|> | user\\n…<|im_end|> | …        cut at each |
"""

import json
import re
from array import array
from collections.abc import Sequence
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


def cut_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches the added tokens after which a text may be cut, or None when no cut is known to be safe.

    Not safe: a step that treats the start of a text differently, an added token that takes in what stands around it, or
    special tokens that are looked for at two stages.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    cuts = [token for token in added if token.special or not token.normalized]
    if not any(token.special for token in added) or len({token.normalized for token in cuts}) > 1:
        return None
    if any(token.rstrip or token.lstrip or token.single_word for token in added):
        return None
    description = json.loads(tokenizer.to_str())
    if not all(_position_free(description.get(step)) for step in ("normalizer", "pre_tokenizer")):
        return None
    return re.compile(_longest_of([token.content for token in cuts]))


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


def cuts_are_exact(tokenizer: Tokenizer, pattern: re.Pattern[str]) -> bool:
    """Whether a probe that is cut by `pattern` has the tokens of the whole."""
    added = tokenizer.get_added_tokens_decoder().values()
    special = [token.content for token in added if pattern.fullmatch(token.content)]
    texts = (" lead", "Trail ", "\n\n x", "don't 123", "é漢字", "", "  ")
    probe = "".join(f"{text}{token}" for token in special[:32] for text in texts)
    segments = cut_after(pattern, probe)
    encoded = tokenizer.encode_batch_fast(segments, add_special_tokens=False)
    return [i for part in encoded for i in part.ids] == tokenizer.encode(probe, add_special_tokens=False).ids


def _position_free(step: dict[str, Any] | None) -> bool:
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(map(_position_free, step.get("pretokenizers") or step.get("normalizers") or []))
    return step["type"] in POSITION_FREE and not step.get("add_prefix_space")


def cut_after(pattern: re.Pattern[str], text: str) -> list[str]:
    """`text` in pieces, each but the last ending with a match."""
    ends = [match.end() for match in pattern.finditer(text)]
    starts = [0, *ends]
    return [text[start:end] for start, end in zip(starts, [*ends, len(text)], strict=True) if start < end]


def token_array(ids: Sequence[int]) -> TokenArray:
    """Token ids as an array. Raises TypeError or OverflowError for what are none."""
    # array() reads a list of ints three times as fast as numpy does.
    return np.frombuffer(array("I", ids), dtype=np.uint32)

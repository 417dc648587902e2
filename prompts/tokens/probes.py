"""Texts that reveal differences between two programs that read the same tokenizer.json.

Every tokenizer gets three kinds of texts. First, texts that are known to go wrong: runs of blanks, digits, marks and
emoji; ends of words; added tokens whole, cut off, in other letters and beside each other. Second, text made of its own
vocabulary. Third, texts one after the other that begin alike: a program that remembers earlier text might continue
wrongly there.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from tokenizers import AddedToken, Tokenizer

MAX_ADDED: Final = 64
VOCABULARY_TEXTS: Final = 4
VOCABULARY_TOKENS: Final = 3000  # of the vocabulary in each of these texts
MIXED_TEXTS: Final = 64
SHARED_CHARS: Final = 5000  # what fastokens remembers of a text, it looks for from 4 KiB on
BLANKS: Final = (" ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b", "\u0085", "\u2028", "\x1c", "\ufeff")
PLAIN: Final = (
    *("", "x", "hello world", "Hello, World!", "a.b,c;d:e?f!g", "snake_case camelCase", "https://a.b/c?d=e&f#g"),
    *("don't I'LL 'S 'ſ we've you're I'd it's '", "0 00 000 0000 12345678901234567890 3.14 1,000 ½ ٣ ① 1e-9 0x1F"),
    *("for (int i = 0; i < n; ++i) {\n\t\treturn x[i] - 1;\n}\n\n\n", '{"a": [1, 2.5, null], "b": "\\u00e9\\n"}'),
    *("e\u0301 é \u1112\u1161\u11ab 한 ﬁ İ ß Ǆ \u0315\u0300a", "¿Qué? Ça va. Straße, naïve façade", "…—“”‘’«»"),
    *("漢字仮名交じり文。これは、試験です！", "สวัสดีครับ ก็", "مرحبا بالعالم", "नमस्ते दुनिया", "👨‍👩‍👧 🇩🇪🇫🇷 🏳️‍🌈 👍🏽 ☺️"),
    *("\x00 \x00\x00 \x7f\x80\x9f", "\U0010ffff\ufffe\uffff\U000e0001", "\ud7ff\ue000", "<b>x</b> &amp; <!-- -->"),
    *("```py\nx\n```", "A" * 70, "ab" * 70, "=" * 70),
)
RANGES: Final = (
    (0x20, 0x7F), (0x80, 0x250), (0x300, 0x370), (0x370, 0x800), (0x900, 0x1200), (0x1AB0, 0x1B00), (0x1E00, 0x2C00),
    (0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xF900, 0x10000), (0x1F300, 0x1FB00), (0x20000, 0x110000),
)  # fmt: skip


def probes(tokenizer: Tokenizer) -> Iterator[str]:
    """Some hundreds of texts, always the same: 200 to 300 KB."""
    rng = np.random.default_rng(20)
    added = _chosen(list(tokenizer.get_added_tokens_decoder().values()))
    yield from PLAIN
    yield from (f"{start}{blank * count}{end}" for blank in BLANKS for count in (1, 2, 9) for start, end in _AROUND)
    yield from map(_around_token, added)
    yield "".join(added)
    yield from (_random(rng, low, high) for low, high in RANGES)
    of_vocabulary = [_of_vocabulary(tokenizer, rng) for _ in range(VOCABULARY_TEXTS)]
    yield from of_vocabulary
    yield "\n".join(of_vocabulary * 2)  # long texts take another way
    pieces = [*PLAIN, *BLANKS, *added, *(token[: len(token) // 2] for token in added), *of_vocabulary[0].split()[:200]]
    yield from ("".join(pieces[at] for at in rng.integers(len(pieces), size=20)) for _ in range(MIXED_TEXTS))
    yield from _beginning_alike(" ".join(pieces))


_AROUND: Final = (("", ""), ("x", "y"), ("x ", ""), (".", "1"), ("", "é"))


def _chosen(tokens: Sequence[AddedToken]) -> list[str]:
    """Picks added tokens: first those that absorb their surroundings, then evenly from every kind."""
    kinds: dict[tuple[bool, ...], list[str]] = {}
    for token in tokens:
        kind = token.lstrip, token.rstrip, token.single_word, token.normalized, token.special
        kinds.setdefault(kind, []).append(token.content)
    share = max(1, MAX_ADDED // max(1, len(kinds)))
    return [each for contents in kinds.values() for each in contents[:: max(1, len(contents) // share)][:share]]


def _around_token(token: str) -> str:
    others = f"{token[:-1]} {token[1:]}{token.upper()}_{token.lower()}_"
    return f"{token} {token}{token}\n{token}a b{token}  é{others}{token}1\t{token}\n\n"


def _random(rng: np.random.Generator, low: int, high: int) -> str:
    return "".join(map(chr, rng.integers(low, high, size=200)))


def _of_vocabulary(tokenizer: Tokenizer, rng: np.random.Generator) -> str:
    size = tokenizer.get_vocab_size()
    ids = rng.integers(size, size=min(VOCABULARY_TOKENS, 2 * size)).tolist()
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _beginning_alike(text: str) -> Iterator[str]:
    """Each goes on another way where the one before was in the middle of something."""
    start = (text * (1 + SHARED_CHARS // len(text)))[:SHARED_CHARS]
    for run in (" " * 700, "\n" * 90, "7" * 90, "x" * 300, "漢" * 90):
        for end in ("x", "", run[0], "\n", "x tail"):
            yield start + run + end

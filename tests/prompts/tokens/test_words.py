"""Long words are found as tokenizers split them, and no more of them are let through than there is room for."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from engine.byte_tokenizer import byte_tokenizer
from prompts.tokens.words import LONG_CHARS, NUMPY_CHARS, LongWords, Splits, splits_of
from tests.prompts.builders import bpe
from tests.prompts.tokens.test_encoder import CL100K, O200K, QWEN, split_by

LONG = "x" * LONG_CHARS


def at_blanks() -> Tokenizer:
    tokenizer = bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def written_otherwise() -> Tokenizer:
    tokenizer = at_blanks()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "splits"),
    [
        (split_by(CL100K), Splits.CLASSES),
        (split_by(QWEN), Splits.CLASSES),
        (split_by(O200K), Splits.CLASSES),
        (at_blanks(), Splits.BLANKS),
        (written_otherwise(), Splits.NEVER),
        (byte_tokenizer(), Splits.NEVER),
    ],
)
def test_where_a_tokenizer_ends_a_word(tokenizer: Tokenizer, splits: Splits) -> None:
    assert splits_of(tokenizer) is splits


def lets_through(splits: Splits, text: str, most_chars: int) -> bool:
    return LongWords(splits, most_chars).have_room(text)


@pytest.mark.parametrize("size", [1, NUMPY_CHARS])
@pytest.mark.parametrize(
    ("text", "chars"),
    [
        ("hello there, my friend. ", 0),
        ("aGVsbG8+dGhlcmU/bXkx" * 20, 0),
        ("漢字仮名交じり文。これは、試験です！" * 9, 0),
        (LONG, LONG_CHARS),
        (f"a {LONG}1{LONG}y", 2 * LONG_CHARS + 1),
        (f"{LONG} {LONG}", LONG_CHARS),  # one word, twice
        ("=" * 80 + "\n" + "=" * 80, 80),
        (" " * 70, 70),
        ("\n \t" * 30, 90),
        ("漢" * 70, 70),
        ("\u3000 " * 40, 80),
        ("7" * 70, 70),
    ],
)
def test_the_characters_of_long_words_are_counted(size: int, text: str, chars: int) -> None:
    short = ("z" if text.isspace() else " ") + ".1a漢, "
    text = text + short * size if chars else text * size
    assert lets_through(Splits.CLASSES, text, chars)
    assert not chars or not lets_through(Splits.CLASSES, text, chars - 1)


@given(st.lists(st.text("ax1. \n漢\u3000é", max_size=200), max_size=30).map("".join))
def test_runs_are_those_of_a_plain_search(text: str) -> None:
    words = set(re.findall(r"[axé漢]{64,}|1{64,}|\.{64,}|[ \n\u3000]{64,}", text))
    chars = sum(map(len, words))
    assert lets_through(Splits.CLASSES, text, chars)
    assert not chars or not lets_through(Splits.CLASSES, text, chars - 1)


def test_a_tokenizer_that_splits_at_blanks_alone_has_longer_words() -> None:
    text = "foo.bar1" * 10
    assert lets_through(Splits.CLASSES, text, 0)
    assert not lets_through(Splits.BLANKS, f"a {text} b", len(text) - 1)
    assert lets_through(Splits.BLANKS, f"a {text} b", len(text))


def test_one_that_never_splits_has_texts_for_words() -> None:
    text = "hello there " * 10
    assert not lets_through(Splits.NEVER, text, len(text) - 1)
    assert lets_through(Splits.NEVER, text, len(text))
    assert lets_through(Splits.NEVER, text[:60], 0)


def test_words_that_were_met_take_no_more_room() -> None:
    words = LongWords(Splits.CLASSES, 2 * LONG_CHARS)
    assert words.have_room(LONG)
    assert words.have_room("y" * LONG_CHARS)
    assert not words.have_room("z" * LONG_CHARS)
    assert words.have_room(f"{LONG} {'y' * LONG_CHARS}")
    assert not words.have_room(f"{LONG} {'z' * LONG_CHARS}")

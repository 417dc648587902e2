import itertools
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.byte_tokenizer import byte_text, byte_tokenizer
from engine.runtime.detokenizer import IncrementalDecoder, OutputText, StopStrings
from prompts.tokens.byte_tokens import bytes_spelled
from prompts.tokens.tokenizer import TextTokenizer

TOKENIZER = byte_text()


def pieces(text, stops=()):
    output = OutputText(TOKENIZER, stops)
    parts = []
    for token in TOKENIZER.encode(text).tolist():
        piece = output.push(token)
        parts.append(piece.text)
        if piece.stopped:
            return parts, True
    rest = output.flush()
    return [*parts, rest.text], rest.stopped


@pytest.mark.parametrize("text", ["plain", "grüße", "日本語 and 🙂🙃", "a\u0301\u200d", "", " leading space"])
def test_pieces_add_up_and_never_hold_half_a_character(text):
    parts, stopped = pieces(text)
    assert "".join(parts) == text
    assert not stopped
    assert all("\ufffd" not in part for part in parts)


def test_streamed_text_equals_whole_text_for_any_valid_utf8():
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = "".join(chr(c) for c in rng.choice([*range(32, 127), 0xE9, 0x65E5, 0x1F642, 0x301], 40))
        assert "".join(pieces(text)[0]) == text


def test_invalid_bytes_come_out_as_replacements_and_do_not_block():
    decoder = IncrementalDecoder(TOKENIZER)
    invalid = TOKENIZER.encode("é").tolist()[:1]
    parts = [decoder.push(token) for token in invalid * 10]
    assert "".join(parts).count("\ufffd") >= 8
    assert decoder.push(TOKENIZER.encode("a").tolist()[0]).endswith("a")


def test_cut_off_character_is_flushed():
    decoder = IncrementalDecoder(TOKENIZER)
    assert decoder.push(TOKENIZER.encode("é").tolist()[0]) == ""
    assert decoder.flush() == "\ufffd"


def test_special_tokens_have_no_text():
    output = OutputText(TOKENIZER, ())
    assert output.push(2).text == ""


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two t"], "one "),
        ("aaab", ["aab"], "a"),
        ("ends here", ["here"], "ends "),
        ("日本語", ["本"], "日"),
    ],
)
def test_stop_strings_across_tokens(text, stops, expected):
    parts, stopped = pieces(text, stops)
    assert ("".join(parts), stopped) == (expected, True)


def test_what_might_become_a_stop_string_is_held_back():
    stops = StopStrings(["END"])
    assert stops.push("the E").text == "the "
    assert stops.push("N").text == ""
    assert stops.push("!").text == "EN!"
    assert stops.push("E").text == ""
    assert stops.flush() == "E"


def test_no_stop_within_the_first_tokens():
    output = OutputText(TOKENIZER, ["a"])
    first, second = TOKENIZER.encode("aa").tolist()
    assert output.push(first, may_stop=False) == ("a", False)
    assert output.push(second) == ("", True)


def tokens_of(data):
    """One token for each byte."""
    tokenizer = byte_tokenizer()
    return [tokenizer.token_to_id(spelled) for spelled in map(SPELLED.__getitem__, data)]


SPELLED = {bytes_spelled(char)[0]: char for char in pre_tokenizers.ByteLevel.alphabet()}


@pytest.mark.parametrize(
    "data",
    [
        "\ufffd😀".encode(),
        "\ufffd中".encode(),
        b"\x80" + "😀".encode(),
        b"\xf0\x9f\x98" + "😀".encode(),
        b"\xe4\xb8" + "中".encode(),
    ],
)
def test_a_stray_byte_does_not_break_the_character_behind_it(data):
    decoder = IncrementalDecoder(TOKENIZER)
    assert "".join(map(decoder.push, tokens_of(data))) == data.decode("utf-8", "replace")
    assert decoder.flush() == ""


def test_any_bytes_become_the_text_that_all_of_them_have_together():
    rng = np.random.default_rng(0)
    parts = [bytes([byte]) for byte in range(128, 256)] + ["😀".encode(), "中".encode(), b"a", "\ufffd".encode()]
    for _ in range(300):
        tokens = tokens_of(b"".join(parts[at] for at in rng.integers(0, len(parts), 12)))
        tokens.insert(int(rng.integers(0, len(tokens))), 2)  # a special token has no text, and ends no character
        decoder = IncrementalDecoder(TOKENIZER)
        assert "".join(map(decoder.push, tokens)) + decoder.flush() == TOKENIZER.decode(tokens)


def fallback_text():
    """SentencePiece's way: bytes are tokens of their own, a space is the beginning of a word."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b"]
    tokenizer = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer(tokenizer)


def test_bytes_of_a_fallback_are_joined_whatever_comes_before_them():
    fallback, ids = fallback_text(), {"▁a": 258, "b": 259}
    said = [0x80, *"😀".encode(), "b", "▁a", 0xE4, "▁a", *"中".encode(), 0x0A, "b", 0xF0]
    decoder = IncrementalDecoder(fallback)
    text = "".join(decoder.push(ids[each] if isinstance(each, str) else 1 + each) for each in said) + decoder.flush()
    assert text == "\ufffd😀b a\ufffd a中\nb\ufffd"


def test_text_of_a_fallback_is_that_of_all_tokens_together():
    """Spaces before the first word, too, and ASCII that is spelled as bytes behind a character that is."""
    fallback, rng = fallback_text(), np.random.default_rng(2)
    characters = [[1 + byte for byte in char.encode()] for char in "😀中\nr"]
    parts = [*characters, [257], [258], [259]]
    for _ in range(500):
        tokens = [token for at in rng.integers(0, len(parts), 6) for token in parts[at]]
        decoder = IncrementalDecoder(fallback)
        assert "".join(map(decoder.push, tokens)) + decoder.flush() == fallback.decode(tokens)


def test_what_a_token_adds_and_its_bytes():
    fallback = fallback_text()
    assert [fallback.token_text(token) for token in (258, 259, 1 + 0x0A, 1 + 0xF0)] == [" a", "b", "\n", "\ufffd"]
    assert [fallback.token_bytes(token) for token in (258, 1 + 0x0A, 1 + 0xF0)] == [b" a", b"\n", b"\xf0"]
    assert [TOKENIZER.token_bytes(token) for token in tokens_of("é😀".encode())] == [bytes([b]) for b in "é😀".encode()]


def first_met(text, stops, first_end):
    """Where the stop string begins that is complete first, at `first_end` or after it; the longest of those."""
    for end in range(first_end, len(text) + 1):
        met = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if met:
            return min(met)
    return None


def test_stop_strings_are_met_as_if_each_had_been_looked_for():
    rng = np.random.default_rng(1)
    for _ in range(500):
        stops = ["".join(rng.choice(list("ab"), rng.integers(1, 6))) for _ in range(rng.integers(1, 4))]
        text, border = "".join(rng.choice(list("abc"), 14)), int(rng.integers(0, 5))
        held, said, stopped = StopStrings(stops), "", False
        cuts = [0, *sorted({border, *rng.integers(0, 14, 4).tolist()} - {0}), len(text)]
        for start, end in itertools.pairwise(cuts):
            piece = held.push(text[start:end], may_stop=start >= border)
            said, stopped = said + piece.text, piece.stopped
            if stopped:
                break
        expected = first_met(text, stops, border + 1)
        assert (said + ("" if stopped else held.flush()), stopped) == (text[:expected], expected is not None)


def test_a_stop_string_that_ends_after_min_tokens_counts():
    output = OutputText(TOKENIZER, ["ab"])
    first, second = TOKENIZER.encode("ab").tolist()
    assert output.push(first, may_stop=False) == ("", False)
    assert output.push(second) == ("", True)


def test_many_long_stop_strings_are_no_work_for_others():
    """Counted, not timed: 1,023 characters are held, and 256 stop strings of 1,024 are wanted."""
    stops = StopStrings([f"b{i:03}" + "c" * 1020 for i in range(255)] + ["a" * 1023 + "z"])
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    for _ in range(1030):
        stops.push("a")
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        stops.push("a")
    finally:
        sys.setprofile(before)
    assert calls < 5_000

import numpy as np
import pytest

from engine.byte_tokenizer import byte_text
from engine.text import IncrementalDecoder, OutputText, StopStrings

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

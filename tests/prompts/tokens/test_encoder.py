"""Tokens equal those of tokenizers; an encoder that makes others is found out and not used again."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from engine.byte_tokenizer import byte_tokenizer
from prompts.fair_cache import FairCache
from prompts.tokens import encoder
from prompts.tokens.encoder import (
    CHECKED_CHARS,
    CHECKED_EVERY,
    CHECKED_FIRST,
    EncoderVerdict,
    Fast,
    NotEqual,
    TextEncoder,
    fast_twin,
    identity,
    native_twin,
    remembers_texts,
    words_of,
)
from prompts.tokens.probes import PLAIN, probes
from prompts.tokens.tokenizer import TextTokenizer
from prompts.tokens.words import Splits
from tests.prompts.builders import SPECIAL, bpe
from tests.properties import examples

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = CL100K.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED = ("<mask>", "<mask><x>", "the", "Éa")
PIECES = st.one_of(
    st.sampled_from(
        [*SPECIAL, *ADDED, "<|im_", "start|>", "<ma", "\n", "  ", " \t\r\n", "hello ", " the quick", "don't"]
    ),
    st.sampled_from(["1234567", "é漢", "e\u0301", "👨‍👩‍👧", "\x00", "\u3000", "'S", "x" * 70, " " * 90, *PLAIN]),
    st.text(max_size=12),
)
TEXTS = st.lists(PIECES, max_size=25).map("".join)


def split_by(pattern: str) -> Tokenizer:
    tokenizer = bpe()
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), by_bytes])
    return tokenizer


def normalised(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = bpe()
    tokenizer.normalizer = normalizer
    return with_added(tokenizer)


def with_added(tokenizer: Tokenizer, **flags: bool) -> Tokenizer:
    tokenizer.add_tokens([AddedToken(content, **flags) for content in ADDED])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bpe": bpe,
    "bytes": byte_tokenizer,
    "llama": lambda: split_by(CL100K),
    "qwen": lambda: normalised(normalizers.NFC()),
    "qwen's split": lambda: split_by(QWEN),
    "gpt-oss": lambda: split_by(O200K),
    "lowercase": lambda: normalised(normalizers.Lowercase()),
    "special": lambda: with_added(bpe(), special=True),
    "lstrip": lambda: with_added(bpe(), lstrip=True),
    "rstrip": lambda: with_added(bpe(), rstrip=True, special=True),
    "single_word": lambda: with_added(bpe(), single_word=True),
    "second stage": lambda: with_added(bpe(), normalized=True),
    "first stage": lambda: with_added(bpe(), normalized=False),
}


def plain(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    return ids


@pytest.fixture(scope="module")
def hastened() -> dict[str, tuple[Tokenizer, TextEncoder]]:
    pytest.importorskip("fastokens")
    made = {kind: (make(), TextEncoder(make(), later=lambda check: check())) for kind, make in KINDS.items()}
    for _, each in made.values():
        each.hasten()
    return made


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=examples(60))
@given(text=TEXTS, add_special_tokens=st.booleans())
def test_tokens_are_equal(
    hastened: dict[str, tuple[Tokenizer, TextEncoder]], kind: str, text: str, add_special_tokens: bool
) -> None:
    tokenizer, each = hastened[kind]
    assert each.is_fast
    expected = plain(tokenizer, text, add_special_tokens)
    assert each.encode(text, add_special_tokens=add_special_tokens).tolist() == expected
    assert each.is_fast


def test_texts_one_after_the_other_and_long_ones_have_equal_tokens(
    hastened: dict[str, tuple[Tokenizer, TextEncoder]],
) -> None:
    tokenizer, each = hastened["qwen's split"]
    start = "the quick brown fox, 123 and the lazy dog\n" * 200
    for run in (" ", "\n", "x"):
        for length in (1, 700, 699, 701):
            for end in ("x", "", run, "\n"):
                text = start + run * length + end
                assert each.encode(text, add_special_tokens=False).tolist() == plain(tokenizer, text)
    text = start * 40
    assert each.encode(text, add_special_tokens=False).tolist() == plain(tokenizer, text)


def test_threads_do_not_disturb_each_other(hastened: dict[str, tuple[Tokenizer, TextEncoder]]) -> None:
    tokenizer, each = hastened["llama"]
    texts = [f"{number} hello there, " * (1 + 40 * number) for number in range(24)]
    expected = [plain(tokenizer, text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: [each.encode(t, add_special_tokens=False).tolist() for t in texts], range(4)):
            assert found == expected


def test_half_a_surrogate_pair_is_refused_by_both(hastened: dict[str, tuple[Tokenizer, TextEncoder]]) -> None:
    _, each = hastened["bpe"]
    errors = []
    for encoding in (each, TextEncoder(bpe())):
        with pytest.raises((UnicodeError, TypeError)) as error:
            encoding.encode("a\ud800b", add_special_tokens=False)
        errors.append(error.type)
    assert errors[0] is errors[1]
    assert each.is_fast


@pytest.mark.parametrize("kind", ["word_level", "dropout", "metaspace", "nfkd", "unknown_characters"])
def test_what_fastokens_has_no_equal_of_stays_with_tokenizers(kind: str) -> None:
    pytest.importorskip("fastokens")
    tokenizer, reason = bpe(), "unsupported"
    match kind:
        case "word_level":
            tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        case "dropout":
            description = json.loads(tokenizer.to_str())
            description["model"]["dropout"] = 0.5
            tokenizer = Tokenizer.from_str(json.dumps(description))
        case "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        case "nfkd":
            tokenizer.normalizer = normalizers.NFKD()
        case "unknown_characters":  # are left out by one, and not by the other
            tokenizer.pre_tokenizer = pre_tokenizers.Digits()
            reason = "unequal"
    told: list[str] = []
    each = TextEncoder(tokenizer)
    each.report_to(told.append)
    each.hasten()
    assert (each.is_fast, each.why_plain, told) == (False, reason, [reason])
    if kind != "dropout":
        assert each.encode("a b", add_special_tokens=False).tolist() == plain(tokenizer, "a b")


def test_without_fastokens_tokenizers_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fastokens", None)
    each = TextEncoder(bpe())
    each.hasten()
    assert (each.is_fast, each.why_plain) == (False, "not_installed")
    with pytest.raises(NotEqual):
        fast_twin(bpe())


class Liar:
    """Answers as it should, but for texts with a certain word."""

    def __init__(self, tokenizer: Tokenizer, word: str = "dragon", error: BaseException | None = None) -> None:
        self._tokenizer = tokenizer
        self._word = word
        self._error = error

    def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        ids = plain(self._tokenizer, inputs[0], add_special_tokens)
        if self._word in inputs[0]:
            if self._error is not None:
                raise self._error
            ids = ids[1:]
        return np.array(ids, "<u4").tobytes(), b""


def with_a_liar(later: Callable[[Callable[[], None]], None], error: BaseException | None = None) -> TextEncoder:
    each = TextEncoder(bpe(), later)
    each.hasten(lambda tokenizer: Liar(tokenizer, error=error))
    return each


def test_a_text_that_differs_ends_it_for_good() -> None:
    told: list[str] = []
    each = with_a_liar(lambda check: check())
    each.report_to(told.append)
    each.encode("hello", add_special_tokens=False)
    assert (each.is_fast, each.generation, told) == (True, 0, [])
    each.encode("a dragon", add_special_tokens=False)
    assert (each.is_fast, each.generation, told) == (False, 1, ["differs"])
    assert each.encode("a dragon", add_special_tokens=False).tolist() == plain(bpe(), "a dragon")
    each.hasten()
    assert not each.is_fast


def test_what_raises_where_tokenizers_does_not_is_not_asked_again() -> None:
    class Panic(BaseException):
        """As Rust's are."""

    for error in (ValueError("no match"), Panic()):
        each = with_a_liar(lambda check: check(), error)
        assert each.encode("a dragon", add_special_tokens=False).tolist() == plain(bpe(), "a dragon")
        assert (each.is_fast, each.why_plain) == (False, "raised")


def test_a_few_of_many_texts_are_compared_one_at_a_time() -> None:
    checks: list[Callable[[], None]] = []
    each = with_a_liar(checks.append)
    for _ in range(CHECKED_FIRST):
        each.encode("x", add_special_tokens=False)
    assert len(checks) == 1  # the others would have had to wait
    checks[0]()
    compared = 0
    for _ in range(CHECKED_FIRST, 3 * CHECKED_EVERY):
        each.encode("x", add_special_tokens=False)
        for check in checks[1:]:
            check()
            compared += 1
        del checks[1:]
    assert compared == 2


def test_of_a_long_text_a_part_is_compared() -> None:
    sizes: list[int] = []

    class Measured(Liar):
        def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            sizes.append(len(inputs[0]))
            return super().encode_batch_flat(inputs, add_special_tokens)

    each = TextEncoder(bpe(), later=lambda check: check())
    each.hasten(Measured)
    each.encode("x" * 100_000, add_special_tokens=False)
    assert sizes == [100_000, CHECKED_CHARS]


def test_texts_are_compared_in_a_thread_beside() -> None:
    seen: list[str] = []
    each = with_a_liar(encoder.in_a_thread)
    each.report_to(lambda reason: seen.append(threading.current_thread().name))
    each.encode("a dragon", add_special_tokens=False)
    for thread in threading.enumerate():
        if thread.name == "check tokens":
            thread.join(60)
    assert (each.is_fast, seen) == (False, ["check tokens"])


def test_tokens_that_may_have_been_wrong_are_not_remembered() -> None:
    checks: list[Callable[[], None]] = []
    tokenizer = TextTokenizer(bpe(), cache=FairCache(1 << 20))
    tokenizer.encoder = with_a_liar(checks.append)
    text = "here be a dragon " * 10
    assert tokenizer.encode_rendered(text).tolist() != plain(bpe(), text)
    checks[0]()
    assert tokenizer.encode_rendered(text).tolist() == plain(bpe(), text)


def with_a_twin_that_remembers(most_chars: int) -> tuple[TextEncoder, list[str], list[str]]:
    """An encoder whose twin remembers long words; the texts that the twin is given, and what is counted."""
    given: list[str] = []
    counted: list[str] = []

    class Remembering(Liar):
        def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            given.append(inputs[0])
            return super().encode_batch_flat(inputs, add_special_tokens)

    each = TextEncoder(split_by(CL100K), lambda check: check(), most_chars)
    each.hasten(Remembering)
    each.report_to(counted.append)
    return each, given, counted


def test_a_twin_that_remembers_enough_long_words_is_given_no_others() -> None:
    each, given, counted = with_a_twin_that_remembers(1000)
    words = [letter * 100 for letter in "abcdefghijklmnop"]
    for word in words:
        text = f"see {word} there"
        assert each.encode(text, add_special_tokens=False).tolist() == plain(split_by(CL100K), text)
    assert {word for word in words if any(word in text for text in given)} == set(words[:10])
    assert counted == ["long_words"] * 6
    given.clear()
    for text in (f"again {words[0]}", "words as languages have them " * 4, "漢字仮名交じり文。" * 40):
        each.encode(text, add_special_tokens=False)
    assert len([text for text in given if len(text) > 1]) >= 3
    assert each.is_fast


def test_what_another_process_has_found_out_is_not_found_out_again() -> None:
    def compared_again(tokenizer: Tokenizer) -> Fast:
        pytest.fail("compared again")

    pytest.importorskip("fastokens")
    first = TextEncoder(split_by(CL100K))
    first.hasten()
    assert first.verdict is not None
    second = TextEncoder(split_by(CL100K))
    second.hasten(compared_again, known=first.verdict)
    assert (second.is_fast, second.verdict) == (True, first.verdict)
    third = TextEncoder(split_by(CL100K))
    third.hasten(compared_again, known=replace(first.verdict, why_plain="unequal"))
    assert (third.is_fast, third.why_plain) == (False, "unequal")


def test_a_verdict_on_another_tokenizer_is_void() -> None:
    pytest.importorskip("fastokens")
    each = TextEncoder(bpe())
    each.hasten(known=EncoderVerdict(of="another", why_plain="unequal"))
    assert each.is_fast
    assert each.verdict is not None
    assert each.verdict.of == identity(bpe())


def test_a_twin_that_is_not_believed_any_more_is_not_freed_at_once() -> None:
    """Freeing that of a large vocabulary holds the interpreter's lock for 0.1 s."""

    class Freed(Liar):
        def __del__(self) -> None:
            freed.append(True)

    freed: list[bool] = []
    each = TextEncoder(bpe())
    each.hasten(Freed)
    each.distrust("differs", "in this test")
    assert not each.is_fast
    assert not freed


def test_whether_texts_are_remembered_whole_shows_in_the_time_they_take() -> None:
    pytest.importorskip("fastokens")
    assert remembers_texts(native_twin(byte_tokenizer()))
    assert words_of(split_by(QWEN), native_twin(split_by(QWEN))) is Splits.CLASSES


def test_memory_of_long_words_is_bounded() -> None:
    """Without a bound this takes 10 bytes for each character: 160 MB."""
    pytest.importorskip("fastokens")
    program = (
        "import random; from engine.byte_tokenizer import byte_tokenizer; from prompts.tokens.encoder import TextEncoder\n"
        "def resident_mb(): return int(open('/proc/self/statm').read().split()[1]) * 4096 / 1e6\n"
        "each = TextEncoder(byte_tokenizer(), lambda work: work(), 2 << 20); each.hasten(); start_mb = resident_mb()\n"
        "for _ in range(250): each.encode(random.randbytes(32_000).hex(), add_special_tokens=False)\n"
        "print(resident_mb() - start_mb)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert float(said.stdout) < 80


def test_probes_are_always_the_same_and_not_too_many() -> None:
    texts = list(probes(bpe()))
    assert texts == list(probes(bpe()))
    assert 100 <= len(texts) <= 1000
    assert sum(map(len, texts)) < 400_000
    for text in texts:
        text.encode()

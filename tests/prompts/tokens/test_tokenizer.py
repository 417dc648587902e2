"""Tokens must be those of the whole text, however they were come by."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from prompts.errors import TokenizerUnreadable
from prompts.fair_cache import FairCache
from prompts.tokens.segments import cuts
from prompts.tokens.tokenizer import TextTokenizer
from tests.prompts.builders import SPECIAL, TEMPLATE, bpe, text_tokenizer
from tests.properties import examples

PIECES = st.one_of(
    st.sampled_from([*SPECIAL, "<|im_", "start|>", "\n", "  ", "hello ", " the quick", "don't", "1234", "é漢"]),
    st.text(max_size=12),
)


def whole(text: str) -> list[int]:
    ids: list[int] = bpe().encode(text, add_special_tokens=False).ids
    return ids


TOOLS = ("<tool", "<tool_call>", "<|im_start|>x", "_start|>")


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.one_of(PIECES, st.sampled_from(TOOLS)), max_size=25).map("".join))
def test_tokens_that_are_added_without_being_special_are_cut_after_too(text: str) -> None:
    tokenizer = bpe()
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in TOOLS])
    cut, expected = TextTokenizer(tokenizer), tokenizer.encode(text, add_special_tokens=False).ids
    assert cut.is_incremental
    assert cut.encode_rendered(text).tolist() == expected


AT_SECOND_STAGE = ("<tool", "start|><", "<|im_end|>x", "the", "｜A｜", "｜A｜｜B｜")


def with_two_stages() -> Tokenizer:
    """As DeepSeek's: marks are looked for after special tokens, in a text that nothing has changed."""
    tokenizer = bpe()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.add_tokens([AddedToken(content, normalized=True) for content in AT_SECOND_STAGE])
    return tokenizer


TWO_STAGES = with_two_stages()
TWO_STAGE_PIECES = st.one_of(
    PIECES, st.sampled_from([*AT_SECOND_STAGE, "<to", "ol", "｜A", "｜", "｜B｜", "th", "e", "<|im_end|>"])
)
TWO_STAGE_TEXTS = st.lists(TWO_STAGE_PIECES, max_size=25).map("".join)


@settings(deadline=None, max_examples=examples(300))
@given(TWO_STAGE_TEXTS)
def test_tokens_of_both_stages_are_cut_after(text: str) -> None:
    cut = TextTokenizer(TWO_STAGES)
    assert cut.is_incremental
    assert cut.encode_rendered(text).tolist() == TWO_STAGES.encode(text, add_special_tokens=False).ids


@settings(deadline=None, max_examples=examples(300))
@given(text=TWO_STAGE_TEXTS, more=TWO_STAGE_TEXTS)
def test_a_lasting_cut_lasts_whatever_follows(text: str, more: str) -> None:
    tokenizer = TextTokenizer(TWO_STAGES)
    cut = tokenizer.lasting_cut(text)
    parts = [tokenizer.encode_rendered(part).tolist() for part in (text[:cut], text[cut:] + more)]
    assert [*parts[0], *parts[1]] == TWO_STAGES.encode(text + more, add_special_tokens=False).ids


def test_a_cut_lasts_unless_a_longer_token_may_come() -> None:
    tokenizer = TextTokenizer(TWO_STAGES)
    assert tokenizer.lasting_cut("x<s>") == len("x<s>")
    assert tokenizer.lasting_cut("x<|im_end|>") == 0  # <|im_end|>x may come
    assert tokenizer.lasting_cut("x<|im_end|>y｜A｜") == len("x<|im_end|>")
    assert tokenizer.lasting_cut("x｜A｜y") == len("x｜A｜")


def test_what_comes_before_a_mark_of_the_second_stage_is_tokenised_once() -> None:
    tokenizer = TextTokenizer(TWO_STAGES)
    said = "the quick brown fox " * 20
    tokenizer.encode_rendered(f"<s>{said}｜A｜")
    before = tokenizer.cache.misses
    tokenizer.encode_rendered(f"<s>{said}｜A｜an answer")
    assert tokenizer.cache.misses == before


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(PIECES, max_size=25).map("".join))
def test_segments_put_together_are_the_whole_text(text: str) -> None:
    tokenizer = text_tokenizer()
    assert tokenizer.is_incremental
    assert tokenizer.encode_rendered(text).tolist() == whole(text)
    assert tokenizer.encode_rendered(text).tolist() == whole(text)  # and again, out of the cache


def test_a_conversation_seen_before_is_not_tokenised_again() -> None:
    tokenizer = text_tokenizer()
    messages = [{"role": "user", "content": f"turn {i}: " + "the quick brown fox " * 20} for i in range(8)]
    tokenizer.encode_rendered(tokenizer.render(messages[:7]))
    known, tokenizer.cache.misses = len(tokenizer.cache), 0
    text = tokenizer.render(messages)
    assert tokenizer.encode_rendered(text).tolist() == whole(text)
    assert known == 7
    assert tokenizer.cache.misses == 1


def test_the_cache_keeps_to_its_bound_and_forgets_the_least_used() -> None:
    cache = FairCache(max_bytes=2000)
    tokenizer = TextTokenizer(bpe(), cache=cache)
    for number in range(50):
        tokenizer.encode_rendered(f"{number} " + "hello there " * 8)
        assert cache.held_bytes <= 2000
    assert cache.held_bytes > 0


@pytest.mark.parametrize(
    "spoil", ["metaspace", "prefix_space", "prepend", "lstrip", "single_word", "two_stages", "no_special"]
)
def test_a_tokenizer_that_cannot_be_cut_is_asked_for_the_whole_text(spoil: str) -> None:
    tokenizer = bpe()
    match spoil:
        case "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        case "prefix_space":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        case "prepend":
            tokenizer.normalizer = normalizers.Prepend("_")
        case "lstrip":
            tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
        case "single_word":
            tokenizer.add_special_tokens([AddedToken("mask", single_word=True)])
        case "two_stages":
            tokenizer.add_special_tokens([AddedToken("start|><", normalized=True)])
            tokenizer.normalizer = normalizers.NFC()
        case "no_special":
            description = json.loads(tokenizer.to_str()) | {"added_tokens": []}
            tokenizer = type(tokenizer).from_str(json.dumps(description))
    assert cuts(tokenizer) is None
    text = "<|im_start|>user\n hello mask<|im_end|> the quick"
    assert (
        TextTokenizer(tokenizer).encode_rendered(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    )


def test_the_longer_special_token_wins_as_in_the_tokenizer() -> None:
    tokenizer = bpe()
    tokenizer.add_special_tokens(["<a>", "<a><b>"])
    found = cuts(tokenizer)
    assert found is not None
    assert found.pieces("x<a><b>y<a>z") == ["x<a><b>", "y<a>", "z"]


def test_a_directory_without_a_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnreadable, match=r"has no tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerUnreadable, match="cannot be read"):
        TextTokenizer.load(tmp_path)


def test_a_directory_is_read_with_its_template_and_special_tokens(tmp_path: Path) -> None:
    bpe().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": TEMPLATE}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = TextTokenizer.load(tmp_path)
    assert loaded.render([{"role": "user", "content": "x"}]) == text_tokenizer().render(
        [{"role": "user", "content": "x"}]
    )
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert TextTokenizer.load(tmp_path).render([{"role": "user", "content": "x"}]) == "x!"


def test_a_blueprint_makes_an_equal_tokenizer() -> None:
    original = text_tokenizer()
    copy = TextTokenizer.build(original.blueprint())
    messages = [{"role": "user", "content": "hello there, don't 123 é漢"}]
    text = original.render(messages)
    assert copy.render(messages) == text
    assert copy.encode_rendered(text).tolist() == original.encode_rendered(text).tolist() == whole(text)
    assert copy.encode("hello").tolist() == original.encode("hello").tolist()


def twin(first: bytes, second: bytes) -> str:
    """A text whose hash by XXH3 does not depend on two of its digits: beside each stands a part of XXH3's public secret."""
    head = b"user\nOur price list, valid from today. "
    body = (head + b"." * (448 - len(head))) + first + b"00\xc3" + bytes.fromhex("813a264c") + b" per unit. "
    body += b"." * (896 - len(body)) + second + b"000" + bytes.fromhex("cdb45931")
    body += b" in total. Thank you for your order, which we will ship as soon as it is paid. " * 8
    return f"{body.decode()}<|im_end|>"


def test_texts_that_were_made_to_have_equal_hashes_have_their_own_tokens() -> None:
    texts = [twin(b"1", b"9"), twin(b"9", b"1")]
    assert texts[0] != texts[1]
    assert len({xxh3_128_digest(text.encode()) for text in texts}) == 1
    assert len({xxh3_64_intdigest(text.encode()) for text in texts}) == 1
    tokenizer = text_tokenizer()
    for text in (*texts, *texts):
        assert tokenizer.encode_rendered(f"<|im_start|>{text}").tolist() == whole(f"<|im_start|>{text}")

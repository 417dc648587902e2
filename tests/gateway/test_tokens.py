"""Tokens must be those of the whole text, however they were come by."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from gateway.errors import BadRequest, ConfigError
from gateway.openai import Endpoint, parse
from gateway.tokens import Hashing, PromptReader, SegmentCache, TextTokenizer, cut_after, cut_pattern
from hybrid_cache.hashing import block_hashes, tokens_digest
from tests.gateway.worlds import SPECIAL, TEMPLATE, bpe, text_tokenizer

HASHING = Hashing(block_size=16, salt=b"salt")
PIECES = st.one_of(
    st.sampled_from([*SPECIAL, "<|im_", "start|>", "\n", "  ", "hello ", " the quick", "don't", "1234", "é漢"]),
    st.text(max_size=12),
)


def whole(text: str) -> list[int]:
    ids: list[int] = bpe().encode(text, add_special_tokens=False).ids
    return ids


@settings(deadline=None, max_examples=200)
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
    known, tokenizer.cache.misses = len(tokenizer.cache._segments), 0
    text = tokenizer.render(messages)
    assert tokenizer.encode_rendered(text).tolist() == whole(text)
    assert known == 7
    assert tokenizer.cache.misses == 1


def test_the_cache_keeps_to_its_bound_and_forgets_the_least_used() -> None:
    cache = SegmentCache(max_tokens=100)
    tokenizer = TextTokenizer(bpe(), cache=cache)
    for number in range(50):
        tokenizer.encode_rendered(f"{number} " + "hello there " * 8)
        assert cache.held_tokens <= 100
    assert cache.held_tokens > 0


@pytest.mark.parametrize("spoil", ["metaspace", "prefix_space", "prepend", "lstrip", "single_word", "no_special"])
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
        case "no_special":
            description = json.loads(tokenizer.to_str()) | {"added_tokens": []}
            tokenizer = type(tokenizer).from_str(json.dumps(description))
    assert cut_pattern(tokenizer) is None
    text = "<|im_start|>user\n hello mask<|im_end|> the quick"
    assert (
        TextTokenizer(tokenizer).encode_rendered(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    )


def test_the_longer_special_token_wins_as_in_the_tokenizer() -> None:
    tokenizer = bpe()
    tokenizer.add_special_tokens(["<a>", "<a><b>"])
    pattern = cut_pattern(tokenizer)
    assert pattern is not None
    assert cut_after(pattern, "x<a><b>y<a>z") == ["x<a><b>", "y<a>", "z"]


def prompt_of(endpoint: Endpoint, **fields: Any) -> Any:
    reader = PromptReader(text_tokenizer())
    return reader.read(parse(endpoint, json.dumps({"model": "m", **fields}).encode()), HASHING)


def test_a_prompt_is_text_or_ids_with_hashes_of_all_but_its_last_token() -> None:
    ids = whole("hello there the quick brown fox " * 9)
    text = prompt_of(Endpoint.COMPLETIONS, prompt="hello there the quick brown fox " * 9)
    listed = prompt_of(Endpoint.COMPLETIONS, prompt=ids)
    nested = prompt_of(Endpoint.COMPLETIONS, prompt=[ids])
    assert text.tokens.tolist() == listed.tokens.tolist() == nested.tokens.tolist() == ids
    assert text.hashes == listed.hashes == block_hashes(ids[:-1], 16, b"salt")
    assert text.digest == tokens_digest(ids, b"salt")
    assert (text.num_tokens, text.transfer_tokens) == (len(ids), len(ids) - 1)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_blocks_are_those_before_the_last_token(length: int) -> None:
    assert len(prompt_of(Endpoint.COMPLETIONS, prompt=[7] * length).hashes) == (length - 1) // 16


def test_text_parts_are_put_together_and_null_is_empty() -> None:
    plain = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": ""}]
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    spelled = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert (
        prompt_of(Endpoint.CHAT, messages=plain).tokens.tolist()
        == prompt_of(Endpoint.CHAT, messages=spelled).tokens.tolist()
    )


def test_the_engine_comes_to_the_same_tokens(tmp_path: Path) -> None:
    """What the gateway hashes is what the engine computes, or every transfer would be thrown away."""
    engine_tokenizer = pytest.importorskip("engine.tokenizer")
    pytest.importorskip("engine.byte_tokenizer").save_byte_tokenizer(tmp_path, 4096)
    theirs, reader = engine_tokenizer.TextTokenizer.load(tmp_path), PromptReader(TextTokenizer.load(tmp_path))
    for text in ("hi", "", "é漢\n\n </s><s> x", "the quick brown fox " * 50):
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "and?"}]
        chat = parse(Endpoint.CHAT, json.dumps({"model": "m", "messages": messages}).encode())
        assert reader.read(chat, HASHING).tokens.tolist() == theirs.encode_chat(messages)
        if text:
            plain = parse(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": text}).encode())
            assert reader.read(plain, HASHING).tokens.tolist() == theirs.encode(text)


def test_a_model_without_a_template_has_no_chat() -> None:
    reader = PromptReader(TextTokenizer(bpe()))
    call = parse(Endpoint.CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}]}')
    with pytest.raises(BadRequest, match="no chat template"):
        reader.read(call, HASHING)


def test_a_directory_without_a_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
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

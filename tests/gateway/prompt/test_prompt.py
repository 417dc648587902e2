"""From a body to the tokens that the engine computes, with hashes and digest; or a mistake that names its field."""

import json
from typing import Any

import pytest

from gateway.api.openai import Endpoint, parse
from gateway.errors import ApiError, BadRequest
from gateway.prompt.prompt import Hashing, Prompt, PromptMemory, PromptModel, prompt_tokens, read_call
from hybrid_cache.hashing.block_hash import NAMESPACE, block_hashes, namespaced, tokens_digest
from prompts.chat.template import ChatTemplate
from prompts.reading import RESERVED_KWARGS
from prompts.tokens.tokenizer import TextTokenizer
from tests.gateway import worlds
from tests.gateway.worlds import model_of
from tests.prompts.builders import bpe, fixed_clock, text_tokenizer

HASHING = Hashing(block_size=16, salt=b"salt")


def prompt_of(endpoint: Endpoint, **fields: Any) -> Prompt:
    return worlds.prompt_of(endpoint, HASHING, **fields)


def tokens_of(endpoint: Endpoint, tokenizer: TextTokenizer | None = None, **fields: Any) -> list[int]:
    call = parse(endpoint, json.dumps({"model": "m", **fields}).encode())
    ids: list[int] = prompt_tokens(call, PromptMemory(tokenizer or text_tokenizer()), b"")[0].tolist()
    return ids


def whole(text: str) -> list[int]:
    ids: list[int] = bpe().encode(text, add_special_tokens=False).ids
    return ids


def test_a_prompt_is_text_or_ids_with_hashes_of_all_but_its_last_token() -> None:
    ids = whole("hello there the quick brown fox " * 9)
    expected = Prompt(len(ids), block_hashes(ids[:-1], 16, b"salt"), tokens_digest(ids, b"salt"), salt=b"salt")
    for prompt in ("hello there the quick brown fox " * 9, ids, [ids]):
        assert tokens_of(Endpoint.COMPLETIONS, prompt=prompt) == ids
        assert prompt_of(Endpoint.COMPLETIONS, prompt=prompt) == expected
    assert expected.transfer_tokens == len(ids) - 1


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_blocks_are_those_before_the_last_token(length: int) -> None:
    assert len(prompt_of(Endpoint.COMPLETIONS, prompt=[7] * length).hashes) == (length - 1) // 16


def test_text_parts_are_put_together_and_null_is_empty() -> None:
    plain = [{"role": "user", "content": "hello \nthere"}, {"role": "assistant", "content": ""}]
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    spelled = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert tokens_of(Endpoint.CHAT, messages=plain) == tokens_of(Endpoint.CHAT, messages=spelled)


def test_a_model_without_a_template_has_no_chat() -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        tokens_of(Endpoint.CHAT, TextTokenizer(bpe()), messages=[{"role": "user", "content": "x"}])


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("name", sorted(RESERVED_KWARGS))
def test_what_the_engine_sets_itself_is_not_the_clients_to_set(name: str) -> None:
    with pytest.raises(BadRequest, match=f"'chat_template_kwargs.{name}' cannot be set") as refusal:
        prompt_of(Endpoint.CHAT, messages=MESSAGES, chat_template_kwargs={name: []})
    assert (refusal.value.status, refusal.value.param) == (400, f"chat_template_kwargs.{name}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages[7].content }}",
        "{{ x / 0 }}",
        "{{ x.y.z }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages | map(attribute='role') | sum }}",
        "{{ ('x' ~ '\\ud800') }}",
    ],
)
def test_whatever_a_template_raises_is_the_requests_mistake(template: str) -> None:
    chat = ChatTemplate(template, {}, fixed_clock)
    with pytest.raises(BadRequest):
        tokens_of(Endpoint.CHAT, TextTokenizer(bpe(), chat), messages=MESSAGES, chat_template_kwargs={"x": 1})


def test_names_and_lengths_are_checked_before_anything_is_hashed() -> None:
    body = json.dumps({"model": "m", "prompt": [7] * 90, "max_tokens": 11}).encode()
    with pytest.raises(BadRequest, match=r"maximum context length is 100 tokens\. However, you requested 101 tokens"):
        read_call(Endpoint.COMPLETIONS, body, model_of(HASHING, 100), PromptMemory(text_tokenizer()))
    with pytest.raises(ApiError, match="'gpt-9' does not exist; this gateway serves 'scripted'") as unknown:
        read_call(
            Endpoint.COMPLETIONS, b'{"model":"gpt-9","prompt":"x"}', model_of(HASHING), PromptMemory(text_tokenizer())
        )
    assert unknown.value.status == 404


@pytest.mark.parametrize(
    ("group", "cache_salt"), [("a", None), ("b", None), ("a", "mine"), ("", "mine"), ("", "a/mine"), ("a", "/mine")]
)
def test_every_namespace_has_names_of_its_own(group: str, cache_salt: str | None) -> None:
    def read(group: str, cache_salt: str | None) -> Prompt:
        fields = {} if cache_salt is None else {"cache_salt": cache_salt}
        body = json.dumps({"model": "m", "prompt": list(range(40)), **fields}).encode()
        model = model_of(Hashing(16, b"salt", group))
        return read_call(Endpoint.COMPLETIONS, body, model, PromptMemory(text_tokenizer()))[1]

    mine, everybodys = read(group, cache_salt), read("", None)
    assert mine.namespace.startswith(NAMESPACE)
    assert (everybodys.namespace, everybodys.salt) == ("", b"salt")
    assert mine.salt == namespaced(b"salt", mine.namespace) != everybodys.salt
    assert not set(mine.hashes) & set(everybodys.hashes)
    assert mine.digest != everybodys.digest


def test_no_two_namespaces_are_one() -> None:
    pairs = [("", "a/b"), ("a", "b"), ("a", "/b"), ("", "a"), ("a", ""), ("", "/a")]
    assert len({Hashing(16, b"", group).namespace(salt) for group, salt in pairs}) == len(pairs)


KEYED = Hashing(block_size=16, salt=b"new", key=b"k" * 32, earlier=Hashing(block_size=16, salt=b"old"))


def test_a_prompt_has_its_names_of_before_a_rotation_beside_the_new_ones() -> None:
    ids = [7] * 40
    prompt = worlds.prompt_of(Endpoint.COMPLETIONS, KEYED, prompt=ids)
    before = worlds.prompt_of(Endpoint.COMPLETIONS, Hashing(block_size=16, salt=b"old"), prompt=ids)
    assert prompt.hashes == block_hashes(ids[:-1], 16, b"new")
    assert prompt.by_earlier_names() == before
    assert before.earlier is None
    assert before.by_earlier_names() == before


def test_a_namespace_by_a_secret_cannot_be_told_from_its_group() -> None:
    acme, unkeyed = KEYED.of_group("acme"), Hashing(block_size=16, salt=b"old", group="acme")
    assert acme.earlier == unkeyed
    names = {each.namespace(salt) for each in (acme, unkeyed) for salt in (None, "theirs")}
    assert len(names) == 4
    assert all(name.startswith(NAMESPACE) for name in names)
    assert KEYED.namespace(None) == ""  # everybody's
    salted = worlds.prompt_of(Endpoint.COMPLETIONS, acme, prompt=[7] * 40)
    assert salted.namespace == acme.namespace(None)
    assert salted.by_earlier_names().namespace == unkeyed.namespace(None)


def test_a_prompt_goes_by_its_names_in_any_of_its_revisions():
    hashings = {"old": Hashing(16, b"old", earlier=Hashing(16, b"before")), "new": Hashing(32, b"new", "acme")}
    read = {}
    for name, other in (("old", "new"), ("new", "old")):
        model = PromptModel(
            names=("m",), max_model_len=4096, hashing=hashings[name], revision=name, others=((other, hashings[other]),)
        )
        body = json.dumps({"model": "m", "prompt": list(range(200))}).encode()
        read[name] = read_call(Endpoint.COMPLETIONS, body, model, PromptMemory(text_tokenizer()))[1]
    old = read["old"]
    assert old.revisions == ("old", "new")
    assert old.within("new") == read["new"]
    assert old.within("new").within("old") == old == old.within("old")
    assert [len(old.hashes), len(old.within("new").hashes)] == [12, 6]

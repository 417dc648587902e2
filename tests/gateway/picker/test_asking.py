"""What is read of a request, and which prompts share names of blocks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.picker.asking import BLOCK_BYTES, UnreadableBody, block_names, read_prompt, read_request
from gateway.picker.exchange import RequestHead


def chat(*contents: str, **more: object) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


@given(text=st.binary(max_size=6 * BLOCK_BYTES), cut=st.integers(0, 6 * BLOCK_BYTES), other=st.binary(max_size=2000))
def test_texts_share_names_as_far_as_they_are_equal(text: bytes, cut: int, other: bytes) -> None:
    changed = text[:cut] + other
    shared = next((at for at, (a, b) in enumerate(zip(text, changed, strict=False)) if a != b), None)
    shared = min(len(text), len(changed)) if shared is None else shared
    ours, theirs = block_names(text), block_names(changed)
    same = [a == b for a, b in zip(ours, theirs, strict=False)]
    assert same == [index < shared // BLOCK_BYTES for index in range(len(same))]


def test_a_next_turn_shares_the_names_of_the_turns_before() -> None:
    first, second = read_prompt(chat("a" * 5000)), read_prompt(chat("a" * 5000, "b" * 5000))
    assert len(first.blocks) == 9
    assert second.blocks[:9] == first.blocks


@pytest.mark.parametrize("field", ["model", "tools", "cache_salt", "system"])
def test_what_stands_before_a_prompt_changes_all_names(field: str) -> None:
    plain, other = read_prompt(chat("a" * 5000)), read_prompt(chat("a" * 5000, **{field: "x"}))
    assert not set(plain.blocks) & set(other.blocks)


@pytest.mark.parametrize("field", ["prompt", "input"])
def test_other_prompts_are_read_too(field: str) -> None:
    assert read_prompt(json.dumps({"model": "m", field: "a" * 4000}).encode()).num_tokens == 1001


def test_the_length_of_an_answer_is_read_where_it_is_one() -> None:
    assert read_prompt(chat("a", max_tokens=7)).answer_tokens == 7
    assert read_prompt(chat("a", max_tokens="many")).answer_tokens == 0


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(UnreadableBody):
        read_prompt(body)


def test_headers_say_who_asks_and_what_is_promised() -> None:
    head = RequestHead(
        headers={
            "x-gateway-inference-fairness-id": "old",
            "x-llm-d-inference-fairness-id": "acme",
            "x-llm-d-inference-objective": "batch",
            "x-llm-d-slo-ttft-ms": "250",
        },
        subset=("a:1",),
    )
    found = read_request(head, None)
    assert (found.tenant, found.objective, found.ttft_s) == ("acme", "batch", 0.25)
    assert found.subset == frozenset({"a:1"})


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", ""])
def test_a_promise_that_is_no_time_is_none(text: str) -> None:
    assert read_request(RequestHead(headers={"x-llm-d-slo-ttft-ms": text}), None).ttft_s == 0


@pytest.mark.parametrize(
    "headers", [{"content-type": "Application/JSON"}, {"content-encoding": ""}, {"content-encoding": "Identity"}]
)
def test_names_of_types_and_codings_have_no_case(headers: dict[str, str]) -> None:
    assert read_request(RequestHead(headers=headers), chat("hello")).prompt.num_tokens


@pytest.mark.parametrize("headers", [{"content-type": "multipart/form-data"}, {"content-encoding": "gzip"}])
def test_a_body_that_is_no_json_by_its_headers_is_not_read(headers: dict[str, str]) -> None:
    assert read_request(RequestHead(headers=headers), b"\x1f\x8b").prompt.num_tokens == 0

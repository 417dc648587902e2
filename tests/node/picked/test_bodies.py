"""Which bodies another node may prefill, and what engines are asked."""

import json
from typing import Any

import pytest

from node.errors import BadPickedRequest
from node.picked.bodies import CHAT, COMPLETIONS, least_tokens, read_body, reason_against_leg, token_ids, with_params


def reason(path: str, **fields: Any) -> str:
    return reason_against_leg(read_body(path, json.dumps({"model": "m"} | fields).encode()), "m")


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
IMAGE_WITH_TEXT = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}, "text": "a"}]}]
IMAGE_WITHOUT_TYPE = [{"role": "user", "content": [{"image_url": "data:", "text": "a"}]}]


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (COMPLETIONS, {"prompt": "a"}, ""),
        (COMPLETIONS, {"prompt": [1, 2]}, ""),
        (COMPLETIONS, {"prompt": ["a"]}, "several_prompts"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "several_prompts"),
        (COMPLETIONS, {"prompt": [-1]}, "several_prompts"),
        (COMPLETIONS, {}, "several_prompts"),
        (COMPLETIONS, {"prompt": "a", "n": 1, "best_of": None, "echo": False}, ""),
        (COMPLETIONS, {"prompt": "a", "n": 2}, "several_answers"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "several_answers"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "several_answers"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 5}, "truncated"),
        (COMPLETIONS, {"prompt": "a", "model": "adapter"}, "other_model"),
        (CHAT, {"messages": MESSAGES}, ""),
        (CHAT, {"messages": PARTS}, ""),
        (CHAT, {"messages": IMAGE}, "media"),
        (CHAT, {"messages": IMAGE_WITH_TEXT}, "media"),
        (CHAT, {"messages": IMAGE_WITHOUT_TYPE}, "media"),
        (CHAT, {"messages": "a"}, "media"),
        (CHAT, {}, "media"),
    ],
)
def test_a_leg_is_run_only_where_it_does_all_that_is_asked(path: str, fields: dict[str, Any], why: str) -> None:
    assert reason(path, **fields) == why


def test_tokens_of_a_prompt_that_is_given_as_tokens() -> None:
    assert token_ids(read_body(COMPLETIONS, b'{"prompt": [3, 4]}')) == [3, 4]
    assert token_ids(read_body(COMPLETIONS, b'{"prompt": "a"}')) is None
    assert token_ids(read_body(CHAT, b'{"prompt": [3, 4]}')) is None


def test_tokens_are_counted_before_numbers_are_made_of_them() -> None:
    assert least_tokens(read_body(COMPLETIONS, b'{"prompt": [3, 4, 5]}')) == 3
    assert least_tokens(read_body(COMPLETIONS, b'{"prompt": "a, b, c"}')) == 0
    assert least_tokens(read_body(CHAT, b'{"prompt": [3, 4]}')) == 0


def test_a_clients_fields_pass_and_ours_are_ours() -> None:
    body = read_body(COMPLETIONS, b'{"prompt": "a", "seed": 1.50, "cache_salt": "s", "seed": 2.50}')
    said = with_params(body, {"salt": "00"}, "prfaas-1")
    assert json.loads(said) == {
        "prompt": "a", "seed": 2.5, "cache_salt": "prfaas-1", "kv_transfer_params": {"salt": "00"},
    }  # fmt: skip
    assert b"2.50" in said


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b"\xff", b"[" * 10_000, b'{"kv_transfer_params": null}', b'{"model": 3}']
)
def test_a_body_that_no_engine_may_be_asked(text: bytes) -> None:
    with pytest.raises(BadPickedRequest):
        read_body(CHAT, text)

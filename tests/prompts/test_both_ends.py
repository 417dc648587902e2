"""What the gateway hashes is what the engine computes, or every transfer would be thrown away."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.byte_tokenizer import save_byte_tokenizer
from engine.errors import RequestError
from engine.openai import api
from gateway.api.openai import Endpoint, parse
from gateway.errors import BadRequest
from gateway.prompt import prompt as prompts
from prompts.tokens.tokenizer import TextTokenizer

TEXTS = ("hi", "é漢\n\n </s><s> x", "the quick brown fox " * 50)
USER = {"role": "user", "content": "hello"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
FUNCTION = {"name": "f", "arguments": '{"a":1}'}
CALLING = {
    "role": "assistant",
    "reasoning_content": "hm",
    "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}],
}
BEGUN = {"role": "assistant", "content": "So it "}
CHATS: list[dict[str, Any]] = [
    *({"messages": [{"role": "system", "content": text}, USER]} for text in TEXTS),
    {"messages": [PARTS, {"role": "assistant", "content": None}]},
    {"messages": [USER], "add_generation_prompt": False},
    {"messages": [USER, BEGUN], "continue_final_message": True},
    {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": False},
    {"messages": [USER], "add_generation_prompt": True, "chat_template_kwargs": {"thinking": True}},
    {"messages": [USER], "chat_template_kwargs": {"bos_token": "<pad>"}},
    {"messages": [USER], "chat_template_kwargs": {"thinking": None, "reasoning_effort": "auto"}},
    {"messages": [USER], "reasoning_effort": "none"},
    {"messages": [USER], "reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [USER, {"role": "developer", "content": "be brief"}]},
    {"messages": [CALLING, {"role": "tool", "tool_call_id": "1", "content": None}, USER]},
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [USER], "chat_template_kwargs": {"add_generation_prompt": False}}, "add_generation_prompt"),
    (
        {"messages": [USER], "add_generation_prompt": True, "chat_template_kwargs": {"add_generation_prompt": False}},
        "add_generation_prompt",
    ),
    ({"messages": [USER], "chat_template_kwargs": {"continue_final_message": True}}, "continue_final_message"),
    (
        {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": 1}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
]
PROMPTS: list[Any] = [*TEXTS, ["hi"], [5, 6, 7], [[5, 6, 7]]]
BAD_PROMPTS: list[Any] = [["a", "b"], [1, -2], [1, True], [2**32], [1, 600]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory: Path = tmp_path_factory.mktemp("model")
    save_byte_tokenizer(directory, 4096)
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.reasoning }}"
    template += "{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"
    template += "{{ thinking }}{{ enable_thinking }}{{ reasoning_effort }}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (directory / "chat_template.jinja").write_text(template)
    return TextTokenizer.load(directory)


def body_of(fields: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def of_the_gateway(endpoint: Endpoint, fields: dict[str, Any], tokenizer: TextTokenizer) -> list[int]:
    tokens: list[int] = prompts.prompt_tokens(parse(endpoint, body_of(fields)), prompts.PromptMemory(tokenizer), b"")[
        0
    ].tolist()
    return tokens


def of_the_engine(endpoint: Endpoint, fields: dict[str, Any], tokenizer: TextTokenizer) -> list[int]:
    kind = api.ChatRequest if endpoint is Endpoint.CHAT else api.CompletionRequest
    request: api.OpenAIRequest = api.parse_request(body_of(fields), kind)
    api.check_supported(request)
    return api.prompt_tokens(request, tokenizer, tokenizer.vocab_size)


def asked(chats: list[dict[str, Any]], texts: list[Any]) -> list[tuple[Endpoint, dict[str, Any]]]:
    return [*((Endpoint.CHAT, chat) for chat in chats), *((Endpoint.COMPLETIONS, {"prompt": text}) for text in texts)]


@pytest.mark.parametrize(("endpoint", "fields"), asked(CHATS, PROMPTS), ids=str)
def test_both_come_to_the_same_tokens(endpoint: Endpoint, fields: dict[str, Any], tokenizer: TextTokenizer) -> None:
    tokens = of_the_gateway(endpoint, fields, tokenizer)
    assert tokens
    assert of_the_engine(endpoint, fields, tokenizer) == tokens


@pytest.mark.parametrize(("endpoint", "fields"), asked([chat for chat, _ in BAD_CHATS], BAD_PROMPTS), ids=str)
def test_what_one_refuses_so_does_the_other(
    endpoint: Endpoint, fields: dict[str, Any], tokenizer: TextTokenizer
) -> None:
    with pytest.raises(BadRequest):
        of_the_gateway(endpoint, fields, tokenizer)
    with pytest.raises(RequestError) as refused:
        of_the_engine(endpoint, fields, tokenizer)
    assert refused.value.status == 400


@pytest.mark.parametrize(("chat", "field"), BAD_CHATS, ids=str)
def test_both_name_the_same_field_of_a_chat(chat: dict[str, Any], field: str, tokenizer: TextTokenizer) -> None:
    with pytest.raises(BadRequest) as by_gateway:
        of_the_gateway(Endpoint.CHAT, chat, tokenizer)
    with pytest.raises(RequestError) as by_engine:
        of_the_engine(Endpoint.CHAT, chat, tokenizer)
    assert by_engine.value.param == by_gateway.value.param
    assert field in str(by_engine.value.param)

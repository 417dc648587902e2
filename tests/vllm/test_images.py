"""A real vLLM whose model sees, behind our gateway: images are its own affair, texts still travel.

What one server alone would answer comes from the decode node's, asked directly under a salt of its own.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Bench
from tests.vllm.serving import posted
from tests.vllm.vision import AROUND, IMAGE_TOKENS, build_vision, picture

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.dimensions(start="images")]


@pytest.fixture(scope="module")
def bench(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = build_vision(models)
    document = {
        "model": {"path": str(model), "name": "tiny"},
        "gateway": {"port": 0, "threshold_tokens": 300},
        "node": {
            "engine": "vllm",
            "engine_args": ["--dtype", "float32", "--num-gpu-blocks-override", "512"],
            "chunk_tokens": 256,
            "max_model_len": 2048,
            "cache_bytes": 64 << 20,
        },
        "clusters": [
            {"name": "east", "kind": "prfaas", "nodes": [{"node_id": "far", "role": "prefill", "transport": "tcp"}]},
            {"name": "west", "kind": "pd", "nodes": [{"node_id": "decode0", "role": "decode"}]},
        ],
    }
    with Bench(document, model, tmp_path_factory.mktemp("images")) as running:
        yield running


def about(*images: str, numbers: range = range(120)) -> dict[str, Any]:
    """A chat about images; without any its content has the same form."""
    shown = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    text = {"type": "text", "text": " ".join(map(str, numbers))}
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": [*shown, text]}],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }


async def answered(bench: Bench, url: str, chat: dict[str, Any]) -> tuple[str, int, int]:
    """Text, prompt tokens and those of them that were cached."""
    said = await posted(bench, f"{url}/v1/chat/completions", chat)
    assert "choices" in said, said
    cached = (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"], cached


async def alone(bench: Bench, chat: dict[str, Any]) -> tuple[str, int]:
    url = bench.node("decode0").engine_url
    text, tokens, _ = await answered(bench, url, chat | {"cache_salt": uuid.uuid4().hex})
    return text, tokens


def test_images_are_answered_as_by_one_server_and_never_mistaken_for_each_other(bench: Bench) -> None:
    async def scenario() -> None:
        one, other = picture(1), picture(2)
        chats = [about(one), about(other), about(one, other), about(other, one), about()]
        expected = [await alone(bench, chat) for chat in chats]
        assert len({text for text, _ in expected}) == len(chats), "the model must see"
        assert expected[0][1] == expected[4][1] + IMAGE_TOKENS + AROUND
        for again in (False, True):
            for chat, (text, tokens) in zip(chats, expected, strict=True):
                said, counted, cached = await answered(bench, bench.system.api_url, chat)
                assert (said, counted) == (text, tokens)
                assert cached > 0 or not again, "vLLM's own cache knows them"

    bench.run(scenario())


def test_texts_of_a_model_that_sees_still_travel(bench: Bench) -> None:
    async def scenario() -> None:
        chat, seen = about(numbers=range(1000, 1250)), about(picture(3), numbers=range(2000, 2250))
        for asked, way in ((chat, ("remote", "long")), (seen, ("local", "unshared"))):
            name, (text, tokens) = bench.name(), await alone(bench, asked)
            said = await answered_as(bench, name, asked)
            record = await bench.record(name)
            assert said == (text, tokens)
            assert (record["route"], record["reason"], record["fallbacks"]) == (*way, [])
            assert (record["bytes"] > 0) == (way[0] == "remote")
        await bench.wait_idle()

    bench.run(scenario())


async def answered_as(bench: Bench, name: str, chat: dict[str, Any]) -> tuple[str, int]:
    url = f"{bench.system.api_url}/v1/chat/completions"
    async with bench.session.post(url, json=chat, headers={"x-request-id": name}) as answer:
        said = await answer.json()
    assert "choices" in said, said
    return said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"]

"""Picked requests of nodes with vLLM servers: the server says which tokens a prompt is, and KVCache crosses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.picked.bodies import CHAT
from node.picked.port import PREFILLER
from tests.node.picked.nodes import MODEL, PickedNode, RunningPair, running_pair, tokens_of
from tests.vllm.cases import build

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.dimensions(start="picked")]

ARCH = "gemma3"
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def nodes(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPair]:
    settings: dict[str, Any] = {
        "engine": "vllm",
        "engine_args": ("--dtype", "float32", "--num-gpu-blocks-override", "512"),
        "model": str(build(ARCH, models)),
        "block_size": 0,
        "chunk_tokens": 256,
        "max_model_len": 2048,
        "cache_bytes": 64 << 20,
        "lease_s": 60.0,
        "engine_start_timeout_s": PATIENCE_S,
    }
    with running_pair(tmp_path_factory.mktemp("picked"), **settings) as running:
        yield running


async def chatted(node: PickedNode, prefiller: str = "") -> str:
    """What a streamed chat says."""
    messages = [{"role": "user", "content": "of rivers " * 150}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
    headers = {PREFILLER: prefiller} if prefiller else {}
    async with node.node.http.post(f"{node.port.url}{CHAT}", json=body, headers=headers) as answer:
        assert answer.status == 200
        lines = (await answer.text()).splitlines()
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])


def test_tokens_texts_and_chats_are_those_of_a_plain_run(nodes: RunningPair) -> None:
    async def scenario() -> None:
        prefill, decode = nodes.prefill, nodes.decode
        for prompt in ([4 + (7919 + place * 31) % 500 for place in range(700)], "of mountains " * 100):
            plain = await prefill.complete(prompt)
            assert tokens_of(await decode.complete(prompt, prefiller=prefill.address)) == tokens_of(plain)
        assert await chatted(prefill) == await chatted(decode, prefill.address)
        await decode.counted(handed_over=3)
        assert await decode.bytes_landed() > 0
        assert prefill.node.agent.picked.legs == {"delivered": 3}
        fallen = await decode.complete("of seas " * 100, prefiller="127.0.0.1:1")
        assert tokens_of(fallen) == tokens_of(await prefill.complete("of seas " * 100))
        assert decode.node.agent.picked.fallbacks == {"unreachable": 1}
        await decode.idle()
        await prefill.idle()

    nodes.run(scenario(), PATIENCE_S)

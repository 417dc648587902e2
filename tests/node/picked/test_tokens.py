"""With a real model: tokens of a picked request are those of a plain run, and KVCache has crossed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.picked.bodies import CHAT
from node.picked.port import PREFILLER
from tests.conftest import Models
from tests.node.picked.nodes import MODEL, PickedNode, running_pair, tokens_of


@pytest.mark.e2e
def test_tokens_are_those_of_a_plain_run_and_bytes_cross(models: Models, tmp_path: Path) -> None:
    model = models("kimi_linear")
    prompt = [int(token) for token in np.random.default_rng(7).integers(4, 512, 400)]
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "tell me of rivers " * 60}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }

    settings = {"engine": "embedded", "model": str(model), "block_size": 0, "cache_bytes": 64 << 20}
    with running_pair(tmp_path, **settings) as nodes:
        prefill, decode = nodes.prefill, nodes.decode

        async def scenario() -> None:
            plain = await prefill.complete(prompt)
            handed = await decode.complete(prompt, prefiller=prefill.address)
            assert tokens_of(handed) == tokens_of(plain)
            assert await decode.bytes_landed() > 0
            await decode.counted(handed_over=1)
            before = await decode.bytes_landed()
            plain_text, handed_text = await chatted(prefill, chat), await chatted(decode, chat, prefill.address)
            assert plain_text == handed_text != ""
            assert await decode.bytes_landed() > before
            await decode.counted(handed_over=2)
            assert not decode.node.agent.picked.fallbacks
            assert prefill.node.agent.picked.legs == {"delivered": 2}
            await decode.idle()
            await prefill.idle()

        nodes.run(scenario(), 200.0)


async def chatted(node: PickedNode, chat: dict[str, Any], prefiller: str = "") -> str:
    """The text of a streamed chat."""
    headers = {PREFILLER: prefiller} if prefiller else {}
    async with node.node.http.post(f"{node.port.url}{CHAT}", json=chat, headers=headers) as answer:
        assert answer.status == 200
        lines = (await answer.text()).splitlines()
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])

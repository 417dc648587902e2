"""With a real model: tokens of a picked request are those of a plain run, and KVCache has crossed."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Models
from tests.node.picked.nodes import MODEL, pair, tokens_of
from tests.node.running import alone


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

    async def scenario() -> None:
        settings = {"engine": "embedded", "model": str(model), "block_size": 0, "cache_bytes": 64 << 20}
        async with pair(tmp_path, **settings) as (prefill, decode):
            plain = await prefill.complete(prompt)
            handed = await decode.complete(prompt, prefiller=prefill.address)
            assert tokens_of(handed) == tokens_of(plain)
            assert await decode.bytes_landed() > 0
            assert decode.node.agent.picked.requests == {"handed_over": 1}
            assert not decode.node.agent.picked.fallbacks
            assert prefill.node.agent.picked.legs == {"delivered": 1}

            before = await decode.bytes_landed()
            said = []
            for node, headers in ((prefill, {}), (decode, {"x-prefiller-host-port": prefill.address})):
                url = f"{node.port.url}/v1/chat/completions"
                async with node.node.http.post(url, json=chat, headers=headers) as answer:
                    assert answer.status == 200
                    lines = (await answer.text()).splitlines()
                parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
                said.append("".join(part["choices"][0]["delta"].get("content") or "" for part in parts))
            assert said[0] == said[1] != ""
            assert await decode.bytes_landed() > before
            assert decode.node.agent.picked.requests == {"handed_over": 2}
            await decode.idle()
            await prefill.idle()

    alone(scenario())

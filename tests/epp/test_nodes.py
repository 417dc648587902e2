"""PrfaaS nodes behind Envoy: a picker names the node that prefills, and KVCache crosses."""

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.epp.envoy import OWN
from tests.epp.world import OURS, nodes_world, until
from tests.node.picked.nodes import MODEL, running_pair

pytestmark = pytest.mark.skipif(not OURS, reason="only ours promises that")
LONG = "of rivers and of mountains " * 400  # more than 1,024 tokens by the picker's count
SHORT = "of rivers"


def test_long_prompts_are_handed_over_and_short_ones_are_not(tmp_path: Path) -> None:
    with running_pair(tmp_path, cache_bytes=256 << 20) as nodes:
        ports = {urlsplit(each.port.url).port or 0: role for each, role in zip(
            (nodes.prefill, nodes.decode), ("prefill", "decode"), strict=True
        )}  # fmt: skip

        def body(text: str) -> bytes:
            return json.dumps({"model": MODEL, "prompt": text, "max_tokens": 4, "temperature": 0}).encode()

        async def scenario() -> None:
            async with nodes_world(tmp_path, OWN, ports) as world:
                await world.knows_nodes()
                for _ in range(100):  # a proxy may be ready before its picker's answers are
                    if (await world.ask(body(SHORT), "/v1/completions")).status == 200:
                        break
                    await asyncio.sleep(0.1)
                counts = nodes.decode.node.agent.picked
                await until(lambda: _value(counts.requests.total()), bool)  # after its last byte
                assert set(counts.requests) == {"plain"}
                plain = await nodes.prefill.complete(LONG, 4)
                # What a client says of it does not count: the picker drops the header.
                told = await world.ask(body(LONG), "/v1/completions", x_prefiller_host_port="127.0.0.1:1")
                assert told.status == 200
                assert json.loads(told.body)["choices"][0]["text"] == plain["choices"][0]["text"]
                await until(lambda: _value(counts.requests["handed_over"]), bool)
                assert not counts.fallbacks
                assert await nodes.decode.bytes_landed() > 0
                await until(lambda: world.metric("prfaas_picker_requests_total"), lambda requests: requests >= 2)

        nodes.run(scenario(), 120.0)


async def _value(number: int) -> int:
    return number

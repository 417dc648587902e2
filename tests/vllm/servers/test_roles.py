"""vLLM servers whose nodes change their roles behind our gateway: each goes the other's way, and no token notices."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.agent_values import ConversionStatus
from prfaas.demo.client import complete
from tests.e2e.harness import Bench
from tests.vllm.cases import build

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.dimensions(start="roles")]

ARCH = "gemma3"
NUM_TOKENS = 700
PATIENCE_S = 300.0


def document(model: str) -> dict[str, Any]:
    """One PD cluster of two nodes, a vLLM server each."""
    return {
        "model": {"path": model, "name": "tiny"},
        "gateway": {"port": 0, "routing": {"increment_tokens": 0, "fetch_bytes_per_s": 0.0}},
        "node": {
            "engine": "vllm",
            "engine_args": ["--dtype", "float32", "--num-gpu-blocks-override", "512"],
            "chunk_tokens": 256,
            "max_model_len": 2048,
            "cache_bytes": 64 << 20,
            "lease_s": 60.0,
        },
        "clusters": [
            {
                "name": "west",
                "kind": "pd",
                "nodes": [{"node_id": "a", "role": "prefill"}, {"node_id": "b", "role": "decode"}],
            }
        ],
    }


@pytest.fixture(scope="module")
def bench(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = build(ARCH, models)
    with Bench(document(str(model)), model, tmp_path_factory.mktemp("roles")) as running:
        yield running


async def convert(bench: Bench, name: str, role: str) -> ConversionStatus:
    """Of one node, to its end."""
    agent = AgentClient(bench.node(name).agent_address, 30.0)
    try:
        epoch = (await agent.describe())[0].role_epoch + 1
        return await agent.convert(epoch, role, verify_timeout_s=PATIENCE_S, wait_s=PATIENCE_S)
    finally:
        await agent.close()


async def answers_as_one_server(bench: Bench, seed: int) -> tuple[str, str]:
    """Who prefilled and who decoded a prompt whose tokens are those of a server alone."""
    prompt, name = bench.prompt(NUM_TOKENS, seed=seed), bench.name()
    done = await bench.generate(prompt, name=name)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    salted = body | {"cache_salt": uuid.uuid4().hex}  # nothing cached fits, and the connector leaves it alone
    alone = await complete(bench.session, bench.node("b").engine_url, salted, bench.name())
    assert done.token_ids == alone.token_ids
    assert len(set(alone.token_ids)) > 3
    record = await bench.record(name)
    return record["prefill_node"], record["decode_node"]


def test_both_ways_with_equal_tokens(bench: Bench) -> None:
    async def scenario() -> None:
        assert await answers_as_one_server(bench, 1) == ("a", "b")
        for name, role in (("a", "decode"), ("b", "prefill")):
            conversion = await convert(bench, name, role)
            assert (conversion.role, conversion.outcome, conversion.detail) == (role, "converted", "")
        seeds = iter(range(2, 1000))

        async def is_the_other_way_round() -> bool:  # the gateway hears of a role a moment after who commanded it
            return await answers_as_one_server(bench, next(seeds)) == ("b", "a")

        await bench.wait_until(is_the_other_way_round, PATIENCE_S)
        await bench.wait_idle()

    bench.run(scenario(), 2 * PATIENCE_S)

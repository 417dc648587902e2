"""Data parallel ranks of a mixture of experts, a node each: two servers of one group behind our gateway.
Rank 0 prefills for rank 1.

They compute each step together: one that stood still would stop the other. (vLLM wants servers of dense models to be on their
own, without such flags: that is what all other tests have.)
"""

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.cluster.served_model import salt_of
from hybrid_cache.cache.events import Medium
from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.layout.layout import ModelLayout
from prfaas.demo.client import complete
from tests.e2e.harness import Bench
from tests.transport.path.ports import free_port
from tests.transport.proxy import Proxy
from tests.vllm.cases import build
from tests.vllm.servers.serving import LINK_BYTES_PER_S, document, heard, is_sending

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200), pytest.mark.dimensions(start="data parallel ranks")]

PATIENCE_S = 600.0
ARCH = "gpt_oss"


@pytest.fixture(scope="module")
def relay() -> Iterator[Proxy]:
    with Proxy(f"127.0.0.1:{free_port()}", LINK_BYTES_PER_S) as running:
        yield running


def of_one_group(document: dict[str, Any]) -> dict[str, Any]:
    """The same nodes as ranks 0 and 1."""
    port, common = free_port(), document["node"]["engine_args"]
    for rank, cluster in enumerate(document["clusters"]):
        (node,) = cluster["nodes"]
        group = ["--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1"]
        group += ["--data-parallel-rank", str(rank), "--data-parallel-rpc-port", str(port)]
        node["engine_args"] = [*common, *group]
    return document


@pytest.fixture(scope="module")
def bench(models: Path, relay: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = build(ARCH, models)
    with Bench(of_one_group(document(str(model), relay)), model, tmp_path_factory.mktemp("ranks")) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_left(bench: Bench) -> Iterator[None]:
    yield
    bench.run(bench.wait_idle())


async def alone(bench: Bench, node: str, prompt: list[int], max_tokens: int = 16) -> list[int]:
    """What a rank gives for a prompt that nothing is cached of."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    salted = body | {"cache_salt": uuid.uuid4().hex}
    return (await complete(bench.session, bench.node(node).engine_url, salted, bench.name())).token_ids


def test_tokens_are_those_of_one_rank_and_both_tell_what_they_hold(bench: Bench) -> None:
    async def scenario() -> None:
        prompt, name = bench.prompt(1100, seed=5), bench.name()
        done = await bench.generate(prompt, name=name)
        record = await bench.record(name)
        assert (record["route"], record["fallbacks"]) == ("remote", [])
        assert done.token_ids == await alone(bench, "far", prompt) == await alone(bench, "decode0", prompt)
        assert len(set(done.token_ids)) > 3
        layout = ModelLayout.from_json((await bench.describe("decode0")).layout_json)
        hashes = block_hashes(prompt[:-1], layout.block_size, salt_of(layout))
        for node in ("far", "decode0"):
            await heard(bench, node, hashes[: len(prompt) // layout.block_size], Medium.ENGINE)

    bench.run(scenario(), PATIENCE_S)


def test_a_rank_goes_on_while_the_other_waits_for_a_delivery(bench: Bench, relay: Proxy) -> None:
    """A server that rested would take a step every five seconds."""

    async def scenario() -> None:
        prompt = bench.prompt(1500, seed=6)
        with relay.held():
            remote = asyncio.create_task(bench.generate(prompt))
            await bench.wait_until(lambda: is_sending(bench), PATIENCE_S)
            async with asyncio.timeout(60.0):
                await alone(bench, "decode0", bench.prompt(40, seed=7), max_tokens=24)
            assert not remote.done()
        assert (await remote).token_ids == await alone(bench, "decode0", prompt)

    bench.run(scenario(), PATIENCE_S)

"""Nothing gets from one datacenter to the other: one request loses its patience, the next ones nothing; the link comes back."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document
from tests.transport.path.ports import free_port
from tests.transport.proxy import Proxy

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def relay() -> Iterator[Proxy]:
    """The way from the PrfaaS node to the decode node; the local prefill node needs none, it is on the same host."""
    with Proxy(f"127.0.0.1:{free_port()}") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def bench(models: Models, relay: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = models("kimi_linear")
    document = topology_document(model, threshold=300, chunk_tokens=128)
    decode0 = document["clusters"][1]["nodes"][1]
    decode0 |= {"transfer_port": int(relay.upstream.rpartition(":")[2]), "transfer_advertise": relay.address}
    with Bench(document, model, tmp_path_factory.mktemp("dead-link")) as running:
        yield running


async def link(bench: Bench) -> dict[str, Any]:
    async with bench.session.get(f"{bench.system.api_url}/prfaas/links") as answer:
        (found,) = json.loads(await answer.text())["data"]
    return dict(found)


async def served(bench: Bench, seed: int) -> dict[str, Any]:
    """The record of a long prompt, whose tokens were right."""
    prompt, name = bench.prompt(330, seed=seed), bench.name()
    done = await bench.generate(prompt, 4, name=name)
    assert done.token_ids == bench.expected(prompt, 4)
    return await bench.record(name)


def test_a_dead_link_costs_one_request_and_comes_back(bench: Bench, relay: Proxy) -> None:
    async def scenario() -> None:
        record = await served(bench, 1)
        assert (record["route"], record["fallbacks"]) == ("remote", [])
        relay.fail()
        record = await served(bench, 2)
        assert (record["prefill_node"], record["fallbacks"]) == ("near", ["prefill_peer_lost"])
        state = await link(bench)
        assert (state["up"], state["senders"]["far"] in ("open", "half_open")) == (False, True)
        for seed in (3, 4):
            record = await served(bench, seed)
            assert (record["route"], record["reason"], record["fallbacks"]) == ("local", "link_down", [])
        relay.mend()

        async def is_up() -> bool:
            return bool((await link(bench))["up"])

        await bench.wait_until(is_up, 120.0)
        await bench.until_link_takes(330)
        record = await served(bench, 6)
        assert (record["route"], record["fallbacks"]) == ("remote", [])
        await bench.wait_idle()

    bench.run(scenario(), 280.0)

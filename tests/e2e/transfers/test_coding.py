"""KVCache that is made smaller on its way: compressed, tokens are the same; quantised, no other tenant's tokens change."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document
from transport.coding.codec import zstd_module

pytestmark = pytest.mark.e2e

ZSTD = {"compression": "zstd"}
LOSSLESS = {"full_attention": ZSTD, "sliding_window": ZSTD, "linear_state": ZSTD}
QUANTISED = {
    "accept_quantised": True,
    "full_attention": {"quantisation": "int8", "quantise_when": "always"},
}


def system(coding: dict[str, object], models: Models, path: Path) -> Bench:
    model = models("qwen3_next")
    return Bench(topology_document(model, threshold=300, chunk_tokens=128, coding=coding), model, path)


@pytest.fixture
def lossless(models: Models, tmp_path: Path) -> Iterator[Bench]:
    with system(LOSSLESS, models, tmp_path) as bench:
        yield bench
        bench.run(bench.wait_idle())


@pytest.fixture
def quantised(models: Models, tmp_path: Path) -> Iterator[Bench]:
    with system(QUANTISED, models, tmp_path) as bench:
        yield bench
        bench.run(bench.wait_idle())


async def counted(bench: Bench, node: str, line: str) -> float:
    return await bench.metric(bench.node(node).metrics_url, line)


@pytest.mark.skipif(zstd_module() is None, reason="needs the zstd extra")
def test_compressed_kvcache_gives_the_same_tokens(lossless: Bench) -> None:
    bench = lossless

    async def scenario() -> None:
        prompt = bench.prompt(1025, seed=1)
        for length in (385, 1025):
            name = bench.name()
            await bench.until_link_takes(length)
            done = await bench.generate(prompt[:length], name=name)
            record = await bench.record(name)
            assert done.token_ids == bench.expected(prompt[:length])
            assert (record["route"], record["fallbacks"]) == ("remote", [])
            assert record["codecs"]["zstd"] > 0.5 * record["bytes"]
            assert 0 < record["bytes_saved"] < record["bytes"]
        assert await counted(bench, "far", 'prfaas_codec_coded_bytes_total{codec="zstd"') > 0
        assert await counted(bench, "decode0", 'prfaas_codec_decoded_bytes_total{codec="zstd"}') > 0
        assert await counted(bench, "decode0", "prfaas_landings_quantised_total") == 0

    bench.run(scenario())


def test_quantised_kvcache_is_said_to_be_and_reaches_no_other_request(quantised: Bench) -> None:
    bench = quantised

    async def scenario() -> None:
        prompt = bench.prompt(641, seed=2)
        for _ in range(2):  # the second finds nothing of the first on the decode node
            name = bench.name()
            await bench.until_link_takes(641)
            done = await bench.generate(prompt, name=name)
            record = await bench.record(name)
            assert len(done.token_ids) == 16
            assert (record["route"], record["fallbacks"]) == ("remote", [])
            assert record["codecs"]["int8"] >= 0.9 * 640 * 1024  # all of full attention
            assert record["bytes_saved"] > 0.6 * record["codecs"]["int8"]
        assert await counted(bench, "decode0", 'prfaas_landings_quantised_total{cache="not_reused"}') == 2
        assert await counted(bench, "decode0", 'prfaas_landings_quantised_total{cache="reused"}') == 0
        # A request that shares the prompt's beginning, but is served within the cluster, is exact to the last token.
        shared = prompt[:257]
        done = await bench.generate(shared)
        assert done.token_ids == bench.expected(shared)

    bench.run(scenario())

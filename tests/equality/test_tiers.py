"""Every architecture with its prefixes on disk: what comes back gives the same tokens as computing it.

Run by `make test-equality`.
"""

import asyncio
from collections.abc import Iterator

import pytest

from engine.models import ARCHITECTURES
from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BLOCK = 64
LENGTHS = (66, 128, 129, 130, 400, 1025)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def bench(request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    arch = str(request.param)
    document = topology_document(models(arch), threshold=1, block_size=BLOCK, cache_bytes=32 << 20)
    far = document["clusters"][0]["nodes"][0]
    far |= {"ssd_dir": str(tmp_path_factory.mktemp("ssd")), "ssd_bytes": 512 << 20}
    with Bench(document, models(arch), tmp_path_factory.mktemp(arch)) as running:
        yield running
        running.run(running.wait_idle())


async def served(bench: Bench, prompt: list[int]) -> tuple[int, bool]:
    """Tokens that were cached, and whether the tokens of the answer were right."""
    name = bench.name()
    done = await bench.generate(prompt, name=name)
    expected = await asyncio.to_thread(bench.expected, prompt)
    record = await bench.record(name)
    assert record["fallbacks"] == []
    return int(record["cached"]), done.token_ids == expected


def test_prefixes_come_back_from_disk(bench: Bench) -> None:
    async def scenario() -> None:
        prompts = [bench.prompt(length, seed=length) for length in LENGTHS]
        prefixes = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
        assert await asyncio.gather(*(served(bench, prompt) for prompt in prompts)) == [(0, True)] * len(prompts)
        for tail in ([], bench.prompt(100, seed=7)):
            await bench.crowd_out("far")
            again = await asyncio.gather(*(served(bench, [*prompt, *tail]) for prompt in prompts))
            assert again == [(prefix, True) for prefix in prefixes]
        report = (await bench.describe("far")).ssd
        assert report.promotions["ok"] >= len(prompts)
        assert (report.events["corrupt"], report.promotions["damaged"]) == (0, 0)

    bench.run(scenario(), 900.0)

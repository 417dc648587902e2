"""Every architecture with its prefixes on disk: what comes back gives the same tokens as computing it.

Run by `make test-equality`.
"""

import asyncio
from collections.abc import Iterator

import pytest

from engine.torch.tiny import ARCHITECTURES
from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.dimensions(bench=None)]

BLOCK = 64
LENGTHS = (66, 128, 129, 130, 400, 1025)
ATTEMPTS = 40


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


async def serve_from_disk(bench: Bench, prompts: list[list[int]], prefixes: list[int]) -> None:
    """Serves all prompts at once, and again those whose read was given up, until every prefix has come from the disk."""
    for _ in range(ATTEMPTS):
        await bench.crowd_out("far")
        before = await bench.reads_given_up("far")
        answers = await asyncio.gather(*(served(bench, prompt) for prompt in prompts))
        assert all(correct for _, correct in answers)
        cached = [tokens for tokens, _ in answers]
        if cached == prefixes:
            return
        missed = [index for index, prefix in enumerate(prefixes) if cached[index] != prefix]
        assert [cached[index] for index in missed] == [0] * len(missed)
        assert len(missed) <= await bench.reads_given_up("far") - before
        prompts = [prompts[index] for index in missed]
        prefixes = [reusable(len(prompt)) for prompt in prompts]  # of what has been computed now
    raise AssertionError(f"prefixes of {prefixes} tokens did not come from the disk in {ATTEMPTS} attempts")


def reusable(num_tokens: int) -> int:
    """Tokens that a prompt of that length leaves to a later one like it, whose last token is computed in any case."""
    return (num_tokens - 1) // BLOCK * BLOCK


def test_prefixes_come_back_from_disk(bench: Bench) -> None:
    async def scenario() -> None:
        prompts = [bench.prompt(length, seed=length) for length in LENGTHS]
        prefixes = [reusable(length) for length in LENGTHS]
        assert await asyncio.gather(*(served(bench, prompt) for prompt in prompts)) == [(0, True)] * len(prompts)
        for tail in ([], bench.prompt(100, seed=7)):
            await serve_from_disk(bench, [[*prompt, *tail] for prompt in prompts], prefixes)
        report = (await bench.describe("far")).ssd
        assert report.promotions["ok"] >= len(prompts)
        assert (report.events["corrupt"], report.promotions["damaged"]) == (0, 0)

    bench.run(scenario(), 900.0)

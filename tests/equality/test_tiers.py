"""Every architecture with its prefixes on disk: what comes back gives the same tokens as computing it.

Run by `make test-equality`.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from engine.torch.tiny import ARCHITECTURES
from tests.conftest import Models
from tests.e2e.beliefs import BY_LOAD
from tests.e2e.harness import Bench, topology_document
from tests.equality.sent_home import Record, calm, until_taken

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


async def served(bench: Bench, prompt: list[int], expected: list[int] | None = None) -> Record:
    """The record of a prompt that was answered with the right tokens."""
    name = bench.name()
    done = await bench.generate(prompt, name=name)
    assert done.token_ids == (expected or await asyncio.to_thread(bench.expected, prompt))
    record = await bench.record(name)
    assert record["fallbacks"] == []
    return record


async def computed(bench: Bench, length: int, sent_home: Counter[str], prompt: list[int] | None = None) -> list[int]:
    """A prompt that only the far node has computed: `prompt`, unless load sends that home."""
    taken: list[int] = []

    async def ask(attempt: int) -> Record:
        nonlocal taken
        if not attempt and prompt is not None:
            taken = prompt
            return await served(bench, prompt)
        taken, expected = await asyncio.to_thread(bench.untied, length, np.random.default_rng())
        return await served(bench, taken, expected)

    record = await until_taken(ask, lambda: calm(bench, length), sent_home)
    assert (record["route"], record["cached"]) == ("remote", 0), record["reason"]
    return taken


async def serve_from_disk(bench: Bench, prompts: list[list[int]], prefixes: list[int], sent_home: Counter[str]) -> None:
    """Serves all prompts at once until every prefix has come from the disk.

    Those whose read was given up are served again. Of those that load sends home, the home has the prefix from then on:
    others take their place.
    """
    for _ in range(ATTEMPTS):
        await bench.crowd_out("far")
        before = await bench.reads_given_up("far")
        records = await asyncio.gather(*(served(bench, prompt) for prompt in prompts))
        missed = []
        for index, record in enumerate(records):
            if record["reason"] in BY_LOAD:
                sent_home[record["reason"]] += 1
                missed.append(await computed(bench, len(prompts[index]), sent_home))
        again = [
            index
            for index, record in enumerate(records)
            if record["reason"] not in BY_LOAD and record["cached"] != prefixes[index]
        ]
        assert [records[index]["cached"] for index in again] == [0] * len(again)
        assert len(again) <= await bench.reads_given_up("far") - before
        missed += [prompts[index] for index in again]
        if not missed:
            return
        prompts = missed
        prefixes = [reusable(len(prompt)) for prompt in prompts]  # of what has been computed now
    raise AssertionError(f"prefixes of {prefixes} tokens did not come from the disk in {ATTEMPTS} attempts")


def reusable(num_tokens: int) -> int:
    """Tokens that a prompt of that length leaves to a later one like it, whose last token is computed in any case."""
    return (num_tokens - 1) // BLOCK * BLOCK


def test_prefixes_come_back_from_disk(bench: Bench, sent_home: Counter[str]) -> None:
    async def scenario() -> None:
        prompts = await asyncio.gather(
            *(computed(bench, length, sent_home, bench.prompt(length, seed=length)) for length in LENGTHS)
        )
        prefixes = [reusable(length) for length in LENGTHS]
        for tail in ([], bench.prompt(100, seed=7)):
            await serve_from_disk(bench, [[*prompt, *tail] for prompt in prompts], prefixes, sent_home)
        report = (await bench.describe("far")).ssd
        assert report.promotions["ok"] >= len(prompts)
        assert (report.events["corrupt"], report.promotions["damaged"]) == (0, 0)

    bench.run(scenario(), 900.0)

"""The full check: every architecture, prompts of 1 to 6,000 tokens, every block border and its neighbours.

Greedy tokens through gateway, clusters and transfer against a plain transformers.generate in this process, fp32, exact.
Run by `make test-equality`.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from engine.torch.tiny import ARCHITECTURES
from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document
from tests.equality.sent_home import Record, calm, until_taken

# What a sample has to cover of architectures and ways is in test_matrix; of these it takes a few, for their lengths.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.dimensions(arch=None, case=None, part=None, prefill_blocks=None, decode_blocks=None),
]

THRESHOLD = 300
MAX_TOKENS = 6000
IN_FLIGHT = 4
OUTPUT = 16
PARTS = 4  # of the lengths of one case: a sample takes one
MIN_DISTINCT = 4


def borders(block_size: int, last: int) -> list[int]:
    """Lengths that put the end of the prompt, or of its transferred part, on a border, before it or behind it."""
    near = {border + d for border in range(0, last + 1, block_size) for d in (-1, 0, 1, 2)}
    return sorted(length for length in near | {1, 2, 3, last} if 1 <= length <= last)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[(64, 1024), (256, MAX_TOKENS)], ids=["block64", "block256"])
def case(
    request: pytest.FixtureRequest, arch: str, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Bench, int, int]]:
    block_size, last = request.param
    document = topology_document(
        models(arch), threshold=THRESHOLD, block_size=block_size, chunk_tokens=512, cache_bytes=512 << 20
    )
    with Bench(document, models(arch), tmp_path_factory.mktemp(arch)) as bench:
        yield bench, block_size, last
        bench.run(bench.wait_idle())


@pytest.mark.parametrize("part", range(PARTS))
def test_cold(case: tuple[Bench, int, int], part: int, sent_home: Counter[str]) -> None:
    bench, block_size, last = case
    lengths = borders(block_size, last)[part::PARTS]
    outputs = bench.run(_all_equal(bench, {n: bench.prompt(n, seed=n) for n in lengths}, sent_home), 1500.0)
    # A model that repeats itself proves nothing; gemma3's does so in two answers of a part of 16.
    assert sum(len(set(output)) >= MIN_DISTINCT for output in outputs) > len(outputs) * 0.8


@pytest.mark.parametrize(("prefill_blocks", "decode_blocks"), [(0, 1), (3, 0), (3, 1), (1, 1)])
def test_prefixes(
    case: tuple[Bench, int, int], prefill_blocks: int, decode_blocks: int, sent_home: Counter[str]
) -> None:
    bench, block_size, _ = case
    length = THRESHOLD + 4 * block_size + 7
    first_seed = 10_000 + 10 * prefill_blocks + decode_blocks

    async def ask(attempt: int) -> Record:
        # A prefix below the threshold goes through the local prefill node to the decode node; the rest then goes remote.
        prompt, expected = await _drawn(bench, length, first_seed, attempt)
        if decode_blocks:
            await bench.generate(prompt[: decode_blocks * block_size + 1], 1)
        if prefill_blocks:
            await bench.prime("far", prompt[: prefill_blocks * block_size + 1])
        name = bench.name()
        done = await bench.generate(prompt, OUTPUT, name=name)
        assert done.token_ids == expected
        return await bench.record(name)

    async def scenario() -> None:
        record = await until_taken(ask, lambda: calm(bench, length), sent_home)
        found = (record["route"], record["cached"], record["fallbacks"])
        assert found == ("remote", prefill_blocks * block_size, []), record["reason"]

    bench.run(scenario(), 900.0)


def test_eight_in_flight(case: tuple[Bench, int, int], sent_home: Counter[str]) -> None:
    bench, block_size, _ = case
    lengths = [1, block_size - 1, block_size, block_size + 1, THRESHOLD, THRESHOLD + 1, 2 * block_size + 1, 700]
    prompts = {n: bench.prompt(n, seed=20_000 + n) for n in lengths}
    bench.run(_all_equal(bench, prompts, sent_home, in_flight=8), 900.0)


async def _all_equal(
    bench: Bench, prompts: dict[int, list[int]], sent_home: Counter[str], in_flight: int = IN_FLIGHT
) -> list[list[int]]:
    slots = asyncio.Semaphore(in_flight)
    wrong: list[str] = []

    async def one(length: int, prompt: list[int]) -> list[int]:
        outputs: list[list[int]] = []

        async def ask(attempt: int) -> Record:
            asked, expected = (prompt, []) if not attempt else await _drawn(bench, length, length, attempt)
            async with slots:
                name = bench.name()
                done = await bench.generate(asked, OUTPUT, name=name)
                expected = expected or await asyncio.to_thread(bench.expected, asked, OUTPUT)
                record = await bench.record(name)
            if done.token_ids != expected:
                wrong.append(f"{length} tokens ({record['route']}): {done.token_ids} instead of {expected}")
            if record["fallbacks"]:
                wrong.append(f"{length} tokens: fallbacks {record['fallbacks']}")
            outputs.append(expected)
            return record

        record = await until_taken(ask, lambda: calm(bench, length), sent_home)
        if length > THRESHOLD and record["route"] != "remote":
            wrong.append(f"{length} tokens went {record['route']}: {record['reason']}")
        return outputs[-1]

    outputs = await asyncio.gather(*(one(length, prompt) for length, prompt in prompts.items()))
    assert not wrong, "\n".join(wrong)
    return list(outputs)


async def _drawn(bench: Bench, length: int, seed: int, attempt: int) -> tuple[list[int], list[int]]:
    """The prompt of an attempt, and what a plain transformers.generate gives: the first one's is the seed's."""
    if not attempt:
        prompt = bench.prompt(length, seed=seed)
        return prompt, await asyncio.to_thread(bench.expected, prompt, OUTPUT)
    return await asyncio.to_thread(bench.untied, length, np.random.default_rng([seed, length, attempt]), OUTPUT)

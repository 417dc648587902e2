"""Prompts that come together share what is on its way to their decode node: fewer bytes, the same tokens."""

import asyncio

import pytest

from tests.e2e.harness import Bench

pytestmark = pytest.mark.e2e

LENGTH = 641
COUNT = 5


async def bytes_of(bench: Bench, names: list[str]) -> list[int]:
    return [(await bench.record(name))["bytes"] for name in names]


@pytest.mark.parametrize("tail", [0, 30])
def test_prompts_that_fan_out_have_the_same_tokens_and_fewer_bytes(bench: Bench, tail: int) -> None:
    async def scenario() -> None:
        shared = bench.prompt(LENGTH, seed=7000 + tail)
        prompts = [[*shared, *bench.prompt(tail, seed=number)] if tail else shared for number in range(COUNT)]
        names = [bench.name() for _ in prompts]
        done = await asyncio.gather(
            *(bench.generate(prompt, name=name) for prompt, name in zip(prompts, names, strict=True))
        )
        sent = await bytes_of(bench, names)
        assert sum(sent) < 0.8 * COUNT * max(sent)
        expected = {tuple(prompt): bench.expected(prompt) for prompt in {tuple(each) for each in prompts}}
        for prompt, completion in zip(prompts, done, strict=True):
            assert completion.token_ids == expected[tuple(prompt)]

    bench.run(scenario())


def test_the_others_have_their_tokens_when_the_first_one_is_cancelled(bench: Bench) -> None:
    async def scenario() -> None:
        prompt = bench.prompt(LENGTH, seed=7777)
        first = asyncio.create_task(bench.generate(prompt))
        await asyncio.sleep(0)
        names = [bench.name() for _ in range(4)]
        others = [asyncio.create_task(bench.generate(prompt, name=name)) for name in names]
        await asyncio.sleep(0.1)  # wherever it is by then
        first.cancel()
        expected = bench.expected(prompt)
        for other in others:
            assert (await other).token_ids == expected

    bench.run(scenario())

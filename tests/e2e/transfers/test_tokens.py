"""Greedy tokens through gateway, two clusters and a transfer equal those of one process without any of it."""

import asyncio

import pytest

from tests.e2e.harness import Bench

pytestmark = pytest.mark.e2e

BLOCK = 64
ATTEMPTS = 5


@pytest.mark.dimensions(num_tokens=None)  # all lengths and routes are sampled by `make test-equality`
@pytest.mark.parametrize(
    "num_tokens", [1, 2, 3, 63, 64, 65, 66, 127, 128, 129, 193, 300, 301, 320, 321, 385, 449, 1025]
)
def test_cold_prompts(bench: Bench, num_tokens: int) -> None:
    async def scenario() -> None:
        prompt, name = bench.prompt(num_tokens, seed=num_tokens), bench.name()
        await bench.until_link_takes(num_tokens)
        done = await bench.generate(prompt, name=name)
        record = await bench.record(name)
        assert done.token_ids == bench.expected(prompt)
        assert (record["route"], record["cached"]) == ("local" if num_tokens <= 300 else "remote", 0)
        assert record["fallbacks"] == []
        assert done.usage["prompt_tokens"] == num_tokens
        assert done.usage["completion_tokens"] == 16

    bench.run(scenario())


@pytest.mark.dimensions(prefill_has=None, decode_has=None)
@pytest.mark.parametrize(("prefill_has", "decode_has"), [(0, 256), (512, 0), (512, 256), (192, 256)])
def test_prefixes_on_either_side(bench: Bench, prefill_has: int, decode_has: int) -> None:
    async def scenario() -> None:
        prompt = bench.prompt(901, seed=1000 + prefill_has + 7 * decode_has)
        if decode_has:  # a short one goes through the local prefill node to the decode node
            await bench.generate(prompt[: decode_has + 1], 1)
        if prefill_has:  # the remote node's engine alone: nothing travels
            await bench.prime("far", prompt[: prefill_has + 1])
        name = bench.name()
        await bench.until_link_takes(901)
        done = await bench.generate(prompt, name=name)
        record = await bench.record(name)
        assert done.token_ids == bench.expected(prompt)
        assert (record["route"], record["cached"], record["fallbacks"]) == ("remote", prefill_has, [])
        assert done.cached_tokens == prefill_has

    bench.run(scenario())


def test_eight_at_once(bench: Bench) -> None:
    async def scenario() -> None:
        prompts = [bench.prompt(length, seed=50 + length) for length in (5, 64, 129, 250, 320, 400, 513, 640)]
        done = await asyncio.gather(*(bench.generate(prompt, 24) for prompt in prompts))
        for prompt, completion in zip(prompts, done, strict=True):
            expected = bench.expected(prompt, 24)
            assert completion.token_ids == expected
            assert len(set(expected)) > 5

    bench.run(scenario())


def test_most_bytes_leave_while_prefill_runs(bench: Bench) -> None:
    async def scenario() -> None:
        seen = []
        for seed in range(77, 77 + ATTEMPTS):  # what other work on the machine delays says nothing of the order
            name = bench.name()
            await bench.generate(bench.prompt(9 * 128 + 1, seed=seed), 1, name=name)
            record = await bench.record(name)
            assert record["fallbacks"] == []
            seen.append((record["route"], record["overlap"], record["kv_ready_minus_prefill_end_s"]))
            if record["route"] == "remote" and record["overlap"] >= 0.8 and seen[-1][-1] < 1.0:
                return
        raise AssertionError(f"(route, overlap, seconds after the prefill): {seen}")

    bench.run(scenario())


def test_chat_and_text_prompts(bench: Bench) -> None:
    async def scenario() -> None:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "word " * 100}],
            "max_tokens": 8,
            "temperature": 0,
        }
        answers = []
        for url in (bench.system.api_url, await bench.engine_url("decode0")):
            async with bench.session.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
                answers.append(await answer.json())
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]

    bench.run(scenario())


def test_a_second_turn_finds_the_first_answer(bench: Bench) -> None:
    """Wherever it was decoded: the gateway has its blocks moved to where the rest is computed."""

    async def scenario() -> None:
        first = bench.prompt(200, seed=4242)
        done = await bench.generate(first, 140)
        talk = [*first, *done.token_ids]
        assert done.token_ids == bench.expected(first, 140)
        full_blocks = (len(talk) - 1) // BLOCK * BLOCK
        turns = iter(range(1000))

        async def is_found() -> bool:  # the gateway hears of blocks a moment after the answer has ended
            second, name = [*talk, *bench.prompt(30, seed=next(turns))], bench.name()
            answer = await bench.generate(second, name=name)
            record = await bench.record(name)
            assert answer.token_ids == bench.expected(second)
            assert record["fallbacks"] == []
            assert record["cached"] in (192, full_blocks)
            return bool(record["cached"] == full_blocks)

        await bench.wait_until(is_found, 180.0)

    bench.run(scenario())

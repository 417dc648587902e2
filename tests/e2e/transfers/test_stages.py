"""A PrfaaS node whose engine computes in stages: an ordinary decode node goes on from what they wrote, whatever happens."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document

pytestmark = pytest.mark.e2e

LONG = 2000
STAGES = 2
ATTEMPTS = 3


@pytest.fixture(scope="module")
def bench(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = models("kimi_linear")
    document = topology_document(model, threshold=300, chunk_tokens=128)
    document["clusters"][0]["nodes"][0]["stages"] = STAGES
    with Bench(document, model, tmp_path_factory.mktemp("stages")) as running:
        yield running


async def stages_of(bench: Bench) -> list[int]:
    """The processes that the PrfaaS node's engine has started."""
    return children((await bench.describe("far")).engine_pid)


def children(engine: int) -> list[int]:
    tasks = Path(f"/proc/{engine}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def is_stage(pid: int) -> bool:
    try:
        return b"engine.staged.stage" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def answered(bench: Bench, prompt: list[int], *, cached: int = 0) -> None:
    name = bench.name()
    await bench.until_link_takes(len(prompt))
    done = await bench.generate(prompt, name=name)
    record = await bench.record(name)
    assert done.token_ids == await asyncio.to_thread(bench.expected, prompt)
    assert (record["route"], record["cached"], record["fallbacks"]) == ("remote", cached, []), record["reason"]


def test_tokens_are_those_of_one_process_alone_and_at_once(bench: Bench) -> None:
    async def scenario() -> None:
        for length in (301, 64 * 6 + 1, 1000):
            await answered(bench, bench.prompt(length, seed=length))
        await asyncio.gather(*(answered(bench, bench.prompt(700, seed=seed)) for seed in (1, 2)))
        assert len(await stages_of(bench)) == STAGES

    bench.run(scenario())


def test_a_prefix_that_stages_have_cached_is_loaded_by_them(bench: Bench) -> None:
    async def scenario() -> None:
        prompt = bench.prompt(900, seed=10)
        await bench.prime("far", prompt[: 5 * 64 + 1])
        await answered(bench, prompt, cached=5 * 64)

    bench.run(scenario())


def test_a_client_that_leaves_in_the_middle_of_a_prefill(bench: Bench) -> None:
    async def scenario() -> None:
        before = (await bench.describe("far")).load.egress_bytes_total
        running = asyncio.create_task(bench.generate(bench.prompt(20_000, seed=20), name=bench.name()))

        async def is_under_way() -> bool:
            return (await bench.describe("far")).load.egress_bytes_total > before

        await bench.wait_until(is_under_way)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await bench.wait_idle()
        await answered(bench, bench.prompt(800, seed=21))

    bench.run(scenario())


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_that_is_killed(bench: Bench, stage: int) -> None:
    async def strike(seed: int) -> bool:
        prompt, name = bench.prompt(LONG, seed=seed), bench.name()
        engine, stages = (await bench.describe("far")).engine_pid, sorted(await stages_of(bench))
        before = (await bench.describe("far")).load.egress_bytes_total
        running = asyncio.create_task(bench.generate(prompt, name=name))

        async def is_under_way() -> bool:
            return (await bench.describe("far")).load.egress_bytes_total > before

        await bench.wait_until(is_under_way)
        os.kill(stages[stage], signal.SIGKILL)
        done = await running
        assert done.token_ids == await asyncio.to_thread(bench.expected, prompt)
        await bench.wait_for_engine("far", engine, 120.0)
        assert not any(is_stage(pid) for pid in stages)
        return bool((await bench.record(name))["fallbacks"])

    async def scenario() -> None:
        for attempt in range(ATTEMPTS):  # on a busy machine a prefill may be over before its stage dies
            if await strike(300 + 10 * attempt + stage):
                break
        else:
            raise AssertionError(f"none of {ATTEMPTS} failures was counted")
        await answered(bench, bench.prompt(500, seed=70 + stage))

    bench.run(scenario(), 280.0)


def test_an_engine_that_is_killed_takes_its_stages_with_it(bench: Bench) -> None:
    async def scenario() -> None:
        engine, stages = (await bench.describe("far")).engine_pid, await stages_of(bench)
        os.kill(engine, signal.SIGKILL)
        await bench.wait_for_engine("far", engine, 120.0)
        assert not any(is_stage(pid) for pid in stages)
        await answered(bench, bench.prompt(500, seed=50))

    bench.run(scenario())

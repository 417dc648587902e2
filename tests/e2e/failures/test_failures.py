"""Processes die, connections break, clients leave: the tokens stay right and nothing is left behind."""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from prfaas.demo.client import DemoCompletion, RequestFailed
from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document
from tests.transport.path.ports import free_port
from tests.transport.proxy import Proxy

pytestmark = pytest.mark.e2e

LONG = 2000
MARK_LANDED = 200_000
"""Bytes after which a transfer of LONG tokens is certainly under way and certainly not over."""
LONG_BYTES = 870_000
"""What LONG tokens are, about."""
DRAIN_S = 240.0  # longer than an answer of LONG_ANSWER tokens takes on a busy machine
ATTEMPTS = 3
LONGEST = 20_000
"""Tokens of a prompt that computes for a long time."""
LONG_ANSWER = 1500
"""Tokens of an answer that is certainly still being written when a gateway has heard that its node drains."""


@pytest.fixture(scope="module")
def relay() -> Iterator[Proxy]:
    """What stands between the PrfaaS node and the first decode node: it can cut connections."""
    with Proxy(f"127.0.0.1:{free_port()}") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def bench(models: Models, relay: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = models("kimi_linear")
    document = topology_document(
        model, threshold=300, decode_nodes=2, chunk_tokens=128, connections=4, lease_s=20.0, drain_timeout_s=DRAIN_S
    )
    decode0 = document["clusters"][1]["nodes"][1]
    decode0 |= {"transfer_port": int(relay.upstream.rpartition(":")[2]), "transfer_advertise": relay.address}
    with Bench(document, model, tmp_path_factory.mktemp("failures")) as running:
        yield running


def start(bench: Bench, prompt: list[int], name: str) -> "asyncio.Task[DemoCompletion]":
    return asyncio.create_task(bench.generate(prompt, name=name))


@contextlib.asynccontextmanager
async def only_decode(bench: Bench, name: str) -> AsyncIterator[None]:
    """Makes the other decode node unavailable for a moment, so that a test knows where its request decodes."""
    other = next(n for n in ("decode0", "decode1") if n != name)
    engine = (await bench.describe(other)).engine_pid
    os.kill(engine, signal.SIGKILL)

    async def is_down() -> bool:
        return (await bench.describe(other)).engine_pid != engine

    async def is_out() -> bool:
        return await bench.gateway_sees(other) != "ready"

    async def is_back() -> bool:
        return await bench.gateway_sees(other) == "ready"

    await bench.wait_until(is_down)
    await bench.wait_until(is_out)
    try:
        yield
    finally:
        await bench.wait_until(is_back, 60.0)


async def _until_in_the_middle(strike: Callable[[int], Awaitable[bool]], first_seed: int) -> None:
    """Strikes until a failure was counted: on a busy machine a transfer may be over before its node dies."""
    for seed in range(first_seed, first_seed + ATTEMPTS):
        if await strike(seed):
            return
    raise AssertionError(f"none of {ATTEMPTS} failures was counted")


def test_prefill_node_killed_while_streaming(bench: Bench) -> None:
    async def strike(seed: int) -> bool:
        prompt, name = bench.prompt(LONG, seed=seed), bench.name()
        before = {node: (await bench.describe(node)).load.ingress_bytes_total for node in ("decode0", "decode1")}
        running = start(bench, prompt, name)

        async def some_landed() -> bool:
            loads = [(await bench.describe(node)).load.ingress_bytes_total - before[node] for node in before]
            return max(loads) >= MARK_LANDED

        await bench.wait_until(some_landed)
        await bench.kill("far")
        done = await running
        record = await bench.record(name)
        assert done.token_ids == bench.expected(prompt)
        await bench.restart("far")
        if not record["fallbacks"]:
            return False
        assert record["prefill_node"] == "near"
        assert record["bytes"] < LONG_BYTES - MARK_LANDED + 300_000, "what had landed must not travel again"
        return True

    bench.run(_until_in_the_middle(strike, first_seed=100), 280.0)


def test_connections_cut_while_streaming(bench: Bench, relay: Proxy) -> None:
    async def scenario() -> None:
        async with only_decode(bench, "decode0"):
            prompt, name = bench.prompt(LONG, seed=2), bench.name()
            passed = relay.total
            running = start(bench, prompt, name)
            await bench.wait_until(lambda: _reached(relay, passed + MARK_LANDED))
            for index in list(range(len(relay.pairs)))[-2:]:
                relay.cut(index)
            done = await running
            record = await bench.record(name)
        assert done.token_ids == bench.expected(prompt)
        assert (record["prefill_node"], record["fallbacks"]) == ("far", [])

    bench.run(scenario(), 280.0)


async def _reached(relay: Proxy, size: int) -> bool:
    return relay.total >= size


def test_decode_node_killed_before_the_first_token(bench: Bench) -> None:
    async def strike(seed: int) -> bool:
        prompt, name = bench.prompt(LONG, seed=seed), bench.name()
        before = {node: (await bench.describe(node)).load.ingress_bytes_total for node in ("decode0", "decode1")}
        running = start(bench, prompt, name)
        victim = ""

        async def chosen() -> bool:
            nonlocal victim
            for node, seen in before.items():
                if (await bench.describe(node)).load.ingress_bytes_total - seen >= MARK_LANDED:
                    victim = node
            return bool(victim)

        await bench.wait_until(chosen)
        await bench.kill(victim)
        done = await running
        record = await bench.record(name)
        assert done.token_ids == bench.expected(prompt)
        await bench.restart(victim)
        if not record["fallbacks"]:
            return False
        assert record["decode_node"] != victim
        return True

    bench.run(_until_in_the_middle(strike, first_seed=200), 280.0)


def test_client_leaves_during_prefill(bench: Bench) -> None:
    async def scenario() -> None:
        prompt = bench.prompt(LONGEST, seed=4)
        sent = (await bench.describe("far")).load.egress_bytes_total
        running = start(bench, prompt, bench.name())

        async def reserved() -> bool:
            return any([(await bench.describe(node)).pool.reservations for node in ("decode0", "decode1")])

        async def prefilling() -> bool:
            return (await bench.describe("far")).pool.reservations > 0

        await bench.wait_until(reserved)
        await bench.wait_until(prefilling)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await bench.wait_idle()
        sent = (await bench.describe("far")).load.egress_bytes_total - sent
        assert sent < LONGEST * LONG_BYTES / LONG / 2, "both legs must have stopped, not finished"

    bench.run(scenario())


def test_client_leaves_during_decode(bench: Bench) -> None:
    async def scenario() -> None:
        body = {
            "model": "tiny",
            "prompt": bench.prompt(40, seed=5),
            "max_tokens": 20_000,
            "ignore_eos": True,
            "stream": True,
        }
        async with bench.session.post(f"{bench.system.api_url}/v1/completions", json=body) as answer:
            await answer.content.readline()
        await bench.wait_idle()

    bench.run(scenario())


def test_an_engine_that_is_killed_finds_the_prefix_cache_again(bench: Bench) -> None:
    async def scenario() -> None:
        prompt = bench.prompt(700, seed=6)
        await bench.generate(prompt, 1)
        before = await bench.describe("far")
        os.kill(before.engine_pid, signal.SIGKILL)
        await bench.wait_for_engine("far", before.engine_pid, 60.0)
        name = bench.name()
        done = await bench.generate([*prompt, *bench.prompt(700, seed=7)], name=name)
        record = await bench.record(name)
        assert (await bench.describe("far")).boot_id == before.boot_id
        assert (record["prefill_node"], record["cached"]) == ("far", 640)
        assert done.token_ids == bench.expected([*prompt, *bench.prompt(700, seed=7)])

    bench.run(scenario(), 280.0)


def test_without_any_prefill_node_the_decode_node_does_it(bench: Bench) -> None:
    async def scenario() -> None:
        for node in ("far", "near"):
            await bench.kill(node)
        prompt, name = bench.prompt(400, seed=8), bench.name()
        await bench.wait_until(lambda: _both_down(bench))
        done = await bench.generate(prompt, name=name)
        record = await bench.record(name)
        assert done.token_ids == bench.expected(prompt)
        assert (record["target"], record["reason"]) == ("decode", "no_prefill")
        await bench.restart("far", "near")

    bench.run(scenario(), 280.0)


async def _both_down(bench: Bench) -> bool:
    return [await bench.gateway_sees(node) for node in ("far", "near")] == ["down", "down"]


def test_a_decode_node_that_is_told_to_end_finishes_its_stream_and_takes_nothing_new(bench: Bench) -> None:
    async def scenario() -> None:
        prompt, name = bench.prompt(60, seed=15), bench.name()
        running = asyncio.create_task(bench.generate(prompt, LONG_ANSWER, name=name))
        leaving = ""

        async def streaming() -> bool:
            nonlocal leaving
            for node in ("decode0", "decode1"):
                if (await bench.describe(node)).load.running:
                    leaving = node
            return bool(leaving)

        async def is_draining() -> bool:
            return await bench.gateway_sees(leaving) == "draining"

        await bench.wait_until(streaming)
        node, engine_url = bench.node(leaving), await bench.engine_url(leaving)
        os.kill(node.process.pid, signal.SIGTERM)
        await bench.wait_until(is_draining)
        assert not running.done()
        with pytest.raises(RequestFailed, match="503"):
            await bench.generate(bench.prompt(10, seed=13), 1, url=engine_url)
        elsewhere = bench.name()
        await bench.generate(bench.prompt(20, seed=14), 1, name=elsewhere)
        assert (await bench.record(elsewhere))["decode_node"] != leaving
        assert not running.done()
        done = await running
        assert done.token_ids == bench.expected(prompt, LONG_ANSWER)
        assert (await bench.record(name))["fallbacks"] == []
        assert await node.process.stop(30.0) == 0
        await bench.restart(leaving)

    bench.run(scenario(), 280.0)


def test_sigterm_lets_streams_finish_and_refuses_new_ones(models: Models, tmp_path: Path) -> None:
    """Last, on a system of its own: it ends."""
    model = models("kimi_linear")
    with Bench(topology_document(model, threshold=300), model, tmp_path) as own:

        async def scenario() -> None:
            gateway = own.system.gateway
            assert gateway is not None

            async def decoding() -> bool:
                return (await own.describe("decode0")).load.running > 0

            async def draining() -> bool:
                async with own.session.get(f"{own.system.api_url}/health") as answer:
                    return answer.status == 503

            running = asyncio.create_task(own.generate(own.prompt(100, seed=9), LONG_ANSWER))
            await own.wait_until(decoding)
            os.kill(gateway.pid, signal.SIGTERM)
            await own.wait_until(draining)
            assert not running.done()
            with pytest.raises((RequestFailed, aiohttp.ClientError)):
                await own.generate(own.prompt(10, seed=10))
            done = await running
            assert len(done.token_ids) == LONG_ANSWER
            assert await gateway.stop(10.0) == 0
            decode = own.node("decode0")
            assert await decode.process.stop(20.0) == 0

        own.run(scenario())


def test_nothing_is_left_of_a_system_that_ended(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models("kimi_linear")
    with tempfile.TemporaryDirectory() as sockets:
        monkeypatch.setenv("TMPDIR", sockets)
        _comes_and_goes(model, tmp_path, Path(sockets))


def _comes_and_goes(model: Path, tmp_path: Path, sockets: Path) -> None:
    with Bench(topology_document(model, threshold=300), model, tmp_path) as own:
        own.run(own.generate(own.prompt(350, seed=11)))
        pids = [node.process.pid for node in own.system.nodes.values()]
        pids += [own.run(own.describe(name)).engine_pid for name in own.system.nodes]
        assert len(_traces(pids, sockets)) == 2 * len(own.system.nodes)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not _traces(pids, sockets)


def _traces(pids: list[int], sockets: Path) -> list[Path]:
    """Arenas and socket directories of nodes; others may run on this machine, too."""
    arenas = [path for pid in pids for path in Path("/dev/shm").glob(f"prfaas-*-{pid}")]
    return [*arenas, *sockets.glob("prfaas-*")]

"""The SSD tier of real nodes: prefixes outlive kill -9, and a disk that lies or is full changes no token."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.cluster.served_model import salt_of
from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.layout.layout import ModelLayout
from tests.conftest import Models
from tests.e2e.harness import Bench, topology_document
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc

pytestmark = pytest.mark.e2e

LENGTH, CACHED = 400, 384
TIMEOUT_S = 280.0
ATTEMPTS = 20


@pytest.fixture(scope="module")
def ssd_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ssd")


@pytest.fixture(scope="module")
def bench(models: Models, ssd_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = models("kimi_linear")
    document = topology_document(model, threshold=100, chunk_tokens=128, cache_bytes=1 << 20)
    far = document["clusters"][0]["nodes"][0]
    far |= {"ssd_dir": str(ssd_dir), "ssd_bytes": 64 << 20}
    with Bench(document, model, tmp_path_factory.mktemp("state")) as running:
        yield running


async def ssd(bench: Bench) -> pb.SsdReport:
    return (await bench.describe("far")).ssd


async def media(bench: Bench, prompt: list[int]) -> set[int]:
    """Where the PrfaaS node has the last snapshot of `prompt`."""
    async with bench.system.agent_channel("far") as channel:
        stream = rpc.NodeAgentStub(channel).Watch(pb.WatchRequest())  # type: ignore[no-untyped-call]
        layout = ModelLayout.from_json((await stream.read()).description.layout_json)
        snapshot = (await stream.read()).snapshot
        stream.cancel()
    last = block_hashes(prompt[:CACHED], layout.block_size, salt_of(layout))[-1]
    (states,) = layout.state_groups
    return {held.medium or pb.MEDIUM_MEMORY for held in snapshot.groups if held.group == states and last in held.hashes}


async def reborn(bench: Bench) -> None:
    await bench.restart("far")

    async def is_open() -> bool:
        return (await ssd(bench)).open

    await bench.wait_until(is_open)


async def served(bench: Bench, prompt: list[int]) -> dict[str, object]:
    """The record of a request for `prompt`, whose tokens were right."""
    name = bench.name()
    done = await bench.generate(prompt, name=name)
    record = await bench.record(name)
    assert done.token_ids == bench.expected(prompt)
    assert record["fallbacks"] == []
    assert done.cached_tokens == record["cached"]
    return record


async def served_from_disk(bench: Bench, prompt: list[int]) -> dict[str, object]:
    """The record of a request for `prompt`, which is on disk alone and is waited for: reads that were not are counted."""
    for _ in range(ATTEMPTS):
        await bench.crowd_out("far")
        assert await media(bench, prompt) == {pb.MEDIUM_SSD}
        await bench.wait_until_heard("far", prompt, CACHED)
        before = await bench.reads_given_up("far")
        record = await served(bench, prompt)
        if record["cached"]:
            return record
        assert await bench.reads_given_up("far") > before
    raise AssertionError(f"the prefix did not come from the disk in {ATTEMPTS} attempts")


def test_a_prefix_that_left_memory_is_hit_on_disk(bench: Bench) -> None:
    async def scenario() -> None:
        prompt = bench.prompt(LENGTH, seed=1)
        assert (await served(bench, prompt))["cached"] == 0
        record = await served_from_disk(bench, prompt)
        assert (record["prefill_node"], record["reason"], record["cached"]) == ("far", "remote_prefix", CACHED)
        assert (await ssd(bench)).promotions["ok"] >= 1

    bench.run(scenario(), TIMEOUT_S)


def test_a_prefix_outlives_the_node(bench: Bench) -> None:
    async def scenario() -> None:
        for seed in range(200, 200 + ATTEMPTS):  # a read that is given up is counted, and proves nothing
            prompt = bench.prompt(LENGTH, seed=seed)
            await served(bench, prompt)
            await bench.crowd_out("far")
            assert await media(bench, prompt) == {pb.MEDIUM_SSD}
            await bench.kill("far")
            await reborn(bench)
            seen = await ssd(bench)
            assert seen.events["recovered"] == seen.blocks > 0
            assert seen.bytes <= seen.capacity_bytes
            await bench.wait_until_heard("far", prompt, CACHED)
            record = await served(bench, prompt)
            if record["cached"]:
                break
            assert await bench.reads_given_up("far") > 0
        assert (record["prefill_node"], record["reason"], record["cached"]) == ("far", "remote_prefix", CACHED)
        seen = await ssd(bench)
        assert (seen.promotions["ok"], seen.events["corrupt"]) == (1, 0)
        assert (await served(bench, [*prompt, *bench.prompt(100, seed=3)]))["cached"] == CACHED

    bench.run(scenario(), TIMEOUT_S)


def rot(ssd_dir: Path) -> None:
    """Flips a bit in every 4 KB."""
    for file in ssd_dir.glob("far/*.kv"):
        data = bytearray(file.read_bytes())
        for position in range(0, len(data), 4096):
            data[position] ^= 0x10
        file.write_bytes(data)


def fill_up(ssd_dir: Path) -> None:
    """From now on every write meets a full disk."""
    for file in ssd_dir.glob("far/*.kv"):
        file.unlink()
        file.symlink_to("/dev/full")


def test_what_rotted_while_the_node_was_away_is_never_served(bench: Bench, ssd_dir: Path) -> None:
    async def scenario() -> None:
        prompt = bench.prompt(LENGTH, seed=4)
        await served(bench, prompt)
        await bench.crowd_out("far")
        assert await media(bench, prompt) == {pb.MEDIUM_SSD}
        await bench.kill("far")
        rot(ssd_dir)
        await reborn(bench)
        assert (await served(bench, prompt))["prefill_node"] == "far"

    bench.run(scenario(), TIMEOUT_S)


def test_a_full_disk_costs_nothing_but_the_blocks(bench: Bench, ssd_dir: Path) -> None:
    async def scenario() -> None:
        await bench.kill("far")
        fill_up(ssd_dir)
        await reborn(bench)
        prompt = bench.prompt(LENGTH, seed=5)
        await served(bench, prompt)
        await bench.crowd_out("far")
        assert await media(bench, prompt) == set()
        assert (await ssd(bench)).events["write_errors"] > 0
        assert (await served(bench, prompt))["cached"] == 0

    bench.run(scenario(), TIMEOUT_S)

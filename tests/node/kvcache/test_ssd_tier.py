"""The SSD tier of a node: what leaves the arena comes back bit by bit, and a bad disk costs nothing but the computing."""

import asyncio
import errno
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hybrid_cache.cache.events import BlocksStored, Medium
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.hashing.block_hash import block_hashes
from hybrid_cache.layout.layout import KVCacheGroup, ModelLayout
from hybrid_cache.layout.spec import FullAttention, LinearState
from hybrid_cache.tiers.disk import DiskTier
from hybrid_cache.tiers.files import Buffer, FileDisk
from hybrid_cache.tiers.slots import HEADER_BYTES, SlotFormat
from node.config import BOOT_KEY
from node.errors import NodeConfigError
from node.kvcache.pages import ArenaPages
from node.kvcache.ssd_tier import QUEUE_BYTES, Ssd, SsdWaits, open_disk, ssd_secret
from tests.hybrid_cache.builders import FULL, hashes_of, make_layout
from tests.hybrid_cache.builders import prefill as keep
from tests.pd_cluster.handover import BLOCK, LAYOUT, HandNode, run, until
from transport.control import messages as m
from transport.control.proto import node_pb2 as pb

PROMPT = list(range(100, 100 + 6 * BLOCK + 1))
LAST = len(PROMPT) - 1
SLOT_BYTES = HEADER_BYTES + LAYOUT.block_bytes(0)


class SlowDisk(FileDisk):
    """Reads wait for `gate`; reads and writes fail on demand."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate = threading.Event()
        self.gate.set()
        self.failing: set[str] = set()

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        assert self.gate.wait(60.0)
        if "read" in self.failing:
            raise OSError(errno.EIO, "injected")
        return super().read(name, offset, into)

    def write(self, name: str, offset: int, parts: Sequence[Buffer]) -> None:
        if "write" in self.failing:
            raise OSError(errno.ENOSPC, "injected")
        super().write(name, offset, parts)


@asynccontextmanager
async def node_with_ssd(tmp_path: Path, name: str = "p", ssd_key: str = "") -> AsyncIterator[tuple[HandNode, SlowDisk]]:
    """A node whose blocks go to a directory that the next one of that name finds again."""
    disks: list[SlowDisk] = []

    def open_disk(layout: object, directory: Path, capacity_bytes: int, slots: SlotFormat | None = None) -> DiskTier:
        disks.append(SlowDisk(directory))
        return DiskTier(LAYOUT, disks[-1], capacity_bytes=capacity_bytes, slots=slots)

    class PagesAboveSlowDisk(ArenaPages):
        """An engine that computes nothing is faster than any disk: here it does not count."""

        def __init__(self, *parts: Any) -> None:
            waits = SsdWaits(first_s=60.0, landing_s=60.0)
            super().__init__(*parts, open_disk=open_disk, ssd_waits=waits)

        def computed(self, num_tokens: int, seconds: float) -> None:
            pass

    node_id = f"{name}-{hash(tmp_path)}"
    ssd_dir = str(tmp_path / "ssd")
    ssd = {"ssd_dir": ssd_dir, "ssd_bytes": 32 << 20, "ssd_key": ssd_key}
    node = HandNode(name, tmp_path, node_id=node_id, **ssd, pages=PagesAboveSlowDisk)
    await node.pages.open_ssd()
    try:
        yield node, disks[0]
        await until(lambda: node.sends_nothing() and node.incoming.is_idle())
    finally:
        disks[0].gate.set()
        disks[0].failing.clear()
        await node.close()


def report(node: HandNode) -> pb.SsdReport:
    found = node.pages.ssd_report()
    assert found is not None
    return found


async def prefill(node: HandNode, tokens: Sequence[int], job: str = "job") -> m.JobPages:
    """Computes what is not cached and keeps it; what is cached is checked bit by bit."""
    node.begin(job, tokens, len(tokens) - 1)
    pages = await node.heard()
    assert isinstance(pages, m.JobPages), pages
    node.compute(pages, tokens)
    node.check(pages, tokens)
    node.end(job)
    return pages


async def forget(node: HandNode) -> None:
    """Everything leaves memory, and arrives on disk if it can."""
    node.pages.cache.shrink(node.pages.cache.evictable_pages, time.monotonic())
    await node.pages.settled()
    await until(lambda: not report(node).queued_bytes)


def hashes(tokens: Sequence[int] = PROMPT) -> list[bytes]:
    return block_hashes(tokens[:-1], BLOCK, b"")


def test_what_left_memory_is_read_back_for_the_prefill_that_needs_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node_with_ssd(tmp_path) as (node, _):
            assert (await prefill(node, PROMPT)).cached_tokens == 0
            await forget(node)
            assert node.pages.match(hashes(), LAST).num_tokens == 0
            assert (await prefill(node, PROMPT)).cached_tokens == LAST
            assert report(node).promotions == {"ok": 1}
            assert (await prefill(node, [*PROMPT, 1, 2, 3])).cached_tokens == LAST

    run(scenario())


def test_pressure_alone_moves_prefixes_to_disk_and_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node_with_ssd(tmp_path) as (node, _):
            prompts = [[first] * 4000 for first in range(8)]
            for prompt in prompts * 2:
                await prefill(node, prompt)
            assert report(node).promotions["ok"] >= 4
            assert report(node).events["corrupt"] == 0
            node.pages.cache.check_integrity()

    run(scenario())


def test_a_restarted_node_finds_its_prefixes_and_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node_with_ssd(tmp_path) as (node, _):
            await prefill(node, PROMPT)  # stays in memory: closing saves it
        async with node_with_ssd(tmp_path) as (node, _):
            assert report(node).events["recovered"] == report(node).blocks > 0
            told = [each for each in node.pages.snapshot() if isinstance(each, BlocksStored) and not each.group]
            assert set(hashes()) <= {name for each in told if each.medium is Medium.SSD for name in each.hashes}
            assert (await prefill(node, PROMPT)).cached_tokens == LAST

    run(scenario())


def test_a_landing_gets_back_its_attention(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node_with_ssd(tmp_path) as (node, _):
            await prefill(node, PROMPT)
            await forget(node)
            request = pb.ReserveRequest(
                num_tokens=LAST, block_hashes=b"".join(hashes()), tokens_digest=b"d", request_id="r"
            )
            transfer_id, _, reservation = await node.reserve_settled(request)
            assert reservation.cached_tokens == LAST
            node.incoming.abort(transfer_id, "")

    run(scenario())


def test_a_prefix_on_disk_can_be_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node_with_ssd(tmp_path) as (source, _):
            target = HandNode("t", tmp_path)
            try:
                await prefill(source, PROMPT)
                await forget(source)
                ticket = target.reserve(PROMPT, LAST, prefix_only=True)
                assert (await source.legs.push_prefix(hashes(), ticket))[0] == LAST
                await target.incoming.commit(ticket.transfer_id, 30.0)
                pages = await prefill(target, PROMPT)
                assert pages.cached_tokens == LAST
            finally:
                await target.close()

    run(scenario())


@pytest.mark.parametrize(("key", "cached_tokens"), [("file", LAST), (BOOT_KEY, 0)])
def test_encrypted_blocks_outlive_the_node_if_their_key_does(tmp_path: Path, key: str, cached_tokens: int) -> None:
    file = tmp_path / "ssd.key"
    file.write_text("5d" * 32)
    ssd_key = str(file) if key == "file" else key

    async def scenario() -> None:
        async with node_with_ssd(tmp_path, ssd_key=ssd_key) as (node, _):
            await prefill(node, PROMPT)
            await forget(node)
            assert (await prefill(node, PROMPT)).cached_tokens == LAST
        async with node_with_ssd(tmp_path, ssd_key=ssd_key) as (node, _):
            assert (await prefill(node, PROMPT)).cached_tokens == cached_tokens
            assert report(node).events["unauthentic"] == 0

    run(scenario())


@pytest.mark.parametrize("text", ["", "5d" * 31, "no key"])
def test_a_key_that_cannot_be_used_is_named_and_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ssd.key"
    with pytest.raises(NodeConfigError, match=r"ssd_key: ssd\.key: .*No such file"):
        ssd_secret(str(file))
    file.write_text(text)
    with pytest.raises(NodeConfigError, match="64 hexadecimal digits") as refusal:
        ssd_secret(str(file))
    assert not text or text not in str(refusal.value)
    assert ssd_secret(BOOT_KEY) != ssd_secret(BOOT_KEY)


@pytest.mark.parametrize(("ssd_key", "reason"), [("", "corrupt"), ("ssd.key", "unauthentic")])
def test_damage_is_counted_and_computed_instead(tmp_path: Path, ssd_key: str, reason: str) -> None:
    (tmp_path / "ssd.key").write_text("5d" * 32)
    key = ssd_key and str(tmp_path / ssd_key)

    async def scenario() -> None:
        async with node_with_ssd(tmp_path, ssd_key=key) as (node, _):
            await prefill(node, PROMPT)
        for file in (tmp_path / "ssd").glob("*/*-0*.kv"):
            data = bytearray(file.read_bytes())
            for position in range(HEADER_BYTES + 7, len(data), SLOT_BYTES):
                data[position] ^= 1
            file.write_bytes(data)
        async with node_with_ssd(tmp_path, ssd_key=key) as (node, _):
            assert (await prefill(node, PROMPT)).cached_tokens == 0
            assert report(node).events[reason] >= 1
            assert report(node).promotions["damaged"] >= 1
            assert (await prefill(node, PROMPT)).cached_tokens == LAST  # it was computed again

    run(scenario())


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_failing_disk_costs_the_computing_only(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with node_with_ssd(tmp_path) as (node, disk):
            if kind == "write":
                disk.failing = {kind}
            await prefill(node, PROMPT)
            await forget(node)
            disk.failing = {kind}
            assert (await prefill(node, PROMPT)).cached_tokens == 0
            assert report(node).events[f"{kind}_errors"] >= 1

    run(scenario())


def test_who_would_wait_too_long_computes_and_the_next_one_finds_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node_with_ssd(tmp_path) as (node, disk):
            assert node.pages.ssd is not None
            await prefill(node, PROMPT)
            await forget(node)
            node.pages.ssd.computed(1000, 1.0)
            disk.gate.clear()
            node.begin("hasty", PROMPT, LAST)
            pages = await node.heard()
            assert isinstance(pages, m.JobPages)
            assert pages.cached_tokens == 0
            assert report(node).promotions == {"late": 1}
            disk.gate.set()
            await until(lambda: report(node).promotions.get("ok") == 1)
            node.end("hasty")
            assert (await prefill(node, PROMPT)).cached_tokens == LAST

    run(scenario())


def test_a_disk_slower_than_computing_is_not_asked(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with node_with_ssd(tmp_path) as (node, _):
            assert node.pages.ssd is not None
            for _ in range(2):  # computed, then read back: how fast the disk is, is known
                await prefill(node, PROMPT)
                await forget(node)
            node.pages.ssd.computed(10**9, 1e-6)
            node.begin("job", PROMPT, LAST)
            pages = await node.heard()
            assert isinstance(pages, m.JobPages)
            assert pages.cached_tokens == 0
            assert report(node).promotions == {"ok": 1, "slow": 1}
            node.end("job")

    run(scenario())


def test_a_model_with_large_states_has_room_for_them_in_the_queue(tmp_path: Path) -> None:
    """The 1T hybrid of docs/design/cache.md has 174 MiB of them."""
    attention = KVCacheGroup(FullAttention(1024, 512), (0,))
    states = KVCacheGroup(LinearState((174 << 20) // 48), tuple(range(1, 49)))
    layout = ModelLayout("large", "bfloat16", 512, (attention, states))
    with open_disk(layout, tmp_path, 4 << 30) as disk:
        assert disk.queue_bytes >= 2 * layout.block_bytes(1) > QUEUE_BYTES
    with open_disk(LAYOUT, tmp_path, 4 << 30) as disk:
        assert disk.queue_bytes == QUEUE_BYTES


class HungDisk(SlowDisk):
    """Neither reads nor writes come back while `gate` is shut; nor would a write after that."""

    def write(self, name: str, offset: int, parts: Sequence[Buffer]) -> None:
        assert self.gate.wait(60.0)
        super().write(name, offset, parts)


def test_an_ssd_that_hangs_does_not_keep_a_node_from_ending(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        layout = make_layout(FULL)
        cache, arena = PrefixCache(layout, 4), memoryview(bytearray(4 * layout.page_bytes))
        disk, stuck = HungDisk(tmp_path), list[threading.Thread]()
        tier = DiskTier(layout, disk, capacity_bytes=1 << 20)
        ssd = Ssd(
            cache, tier, lambda parts: [arena[at : at + size] for at, size in parts], lambda: None, time.monotonic
        )
        try:
            prompt = [1] * 2 * 4
            keep(cache, prompt)
            cache.shrink(cache.evictable_pages, 1.0)
            await ssd.settled()
            await asyncio.to_thread(tier.flush)
            keep(cache, [2] * 2 * 4)
            disk.gate.clear()
            reading = asyncio.create_task(ssd.bring_back_for_prefill(hashes_of(prompt), len(prompt)))
            await until(lambda: any(thread.name == "ssd-read" for thread in threading.enumerate()))
            async with asyncio.timeout(30.0):
                await ssd.close(save_s=0.01, end_s=0.02)
            assert "the SSD does not answer" in caplog.text
            stuck = [thread for thread in threading.enumerate() if thread.name in ("ssd-read", "disk-tier")]
            assert [thread.daemon for thread in stuck] == [True, True]
        finally:
            disk.gate.set()
            for thread in stuck:
                thread.join(60.0)
            await reading

    run(scenario())


class EagerPages(ArenaPages):
    """Looks often whether a directory is free."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts, ssd_retry_s=0.01)


def test_a_directory_in_use_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with node_with_ssd(tmp_path) as (node, _):
            ssd = {"ssd_dir": node.config.ssd_dir, "ssd_bytes": node.config.ssd_bytes}
            second = HandNode("second", tmp_path, pages=EagerPages, **ssd)
            directories = Path(node.config.ssd_dir)
            (directories / second.config.node_id).symlink_to(directories / node.config.node_id)
            opening = asyncio.create_task(second.pages.open_ssd())
            await until(lambda: caplog.text.count("no SSD tier") >= 2)
            assert not opening.done()
            assert not report(second).open
            assert (await prefill(second, PROMPT)).cached_tokens == 0
        await opening
        assert report(second).open
        await second.close()

    run(scenario())

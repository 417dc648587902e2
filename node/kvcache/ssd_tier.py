"""The SSD tier at work: what leaves the arena is copied out, what a request needs again is read back before it starts.

    a reservation evicts ──► copied by a thread, before the pages are lent ──► queued, written behind
    a prompt's blocks lie on disk ──► pages reserved ──► read by a thread ──► committed: the request finds them in memory
                                          └ slower than computing them, no room, too late: counted, and computed

All methods belong to the agent's event loop; threads only copy, read and write bytes.
"""

import asyncio
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hybrid_cache.cache.events import BlocksStored, CacheEvent
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import Purpose, Reservation
from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.tiers.disk import DiskTier
from hybrid_cache.tiers.files import FileDisk
from hybrid_cache.tiers.slots import SECRET_BYTES, SealedSlots, SlotFormat
from hybrid_cache.tiers.tiers import Promotion, Tiers, Views
from node.config import BOOT_KEY
from node.errors import NodeConfigError
from node.kvcache.demotions import Demotions
from node.kvcache.eviction_steps import evict_in_steps, pages_to_fit, takes_steps
from transport.control.proto import node_pb2 as pb
from transport.control.secret_files import read_secret
from transport.threads import in_daemon_thread

log = logging.getLogger(__name__)

MAX_PROMOTIONS: Final = 8  # each holds pages
READERS: Final = 4
QUEUE_BYTES: Final = 128 << 20  # copied, not written yet; also bounds what one reservation may wait for
QUEUE_BLOCKS: Final = 2  # of the largest blocks, if they have more bytes together: a model's states may be large
FILES_PER_GROUP: Final = 3  # blocks and two orders of use
FILE_SYSTEM_BYTES: Final = 4096  # a file takes whole ones
COMMIT_BLOCKS: Final = 2048  # of what was read, in one go: some milliseconds
MAX_ATTEMPTS: Final = 3  # a damaged block shortens a prefix; what lies before it may still do
FIRST_WAIT_S: Final = 2.0  # for a prefill, before one has been measured
MAX_WAIT_S: Final = 10.0
LANDING_WAIT_S: Final = 0.25  # the prefill of a landing starts when its ticket is there
END_S: Final = 10.0  # for a disk to write what is queued when the node ends
FORGET: Final = 0.7  # weight of what was measured before


def ssd_secret(ssd_key: str) -> bytes:
    """What a node's `ssd_key` stands for now. Raises NodeConfigError."""
    if ssd_key == BOOT_KEY:
        return secrets.token_bytes(SECRET_BYTES)
    name = f"ssd_key: {Path(ssd_key).name}"
    try:
        secret = bytes.fromhex(read_secret(Path(ssd_key)))
    except OSError as exc:
        raise NodeConfigError(f"{name}: {exc}") from exc
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise NodeConfigError(f"{name}: it must be {2 * SECRET_BYTES} hexadecimal digits")
    return secret


def slots_of(ssd_key: str, layout: ModelLayout) -> SlotFormat | None:
    """How blocks lie on disk by a node's `ssd_key`; None: as they are. Raises NodeConfigError."""
    return SealedSlots(ssd_secret(ssd_key), layout.fingerprint) if ssd_key else None


def open_disk(layout: ModelLayout, directory: Path, capacity_bytes: int, slots: SlotFormat | None = None) -> DiskTier:
    """Opens, and lists, what a node has on disk. Blocks. Raises DiskInUse and OSError."""
    groups = range(len(layout.groups))
    queue_bytes = max(QUEUE_BYTES, QUEUE_BLOCKS * max(layout.block_bytes(group) for group in groups))
    capacity_bytes -= len(groups) * FILES_PER_GROUP * FILE_SYSTEM_BYTES
    disk = FileDisk(directory)
    try:
        return DiskTier(layout, disk, capacity_bytes=capacity_bytes, queue_bytes=queue_bytes, slots=slots)
    except BaseException:
        disk.close()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdWaits:
    """How long a request waits for the disk: a prefill before one has been measured, and a landing."""

    first_s: float = FIRST_WAIT_S
    landing_s: float = LANDING_WAIT_S


WAITS: Final = SsdWaits()


class Ssd:
    """The disk below one prefix cache, and the threads between them."""

    def __init__(
        self,
        cache: PrefixCache,
        disk: DiskTier,
        views: Views,
        on_change: Callable[[], None],
        now: Callable[[], float],
        *,
        waits: SsdWaits = WAITS,
    ) -> None:
        """`on_change` is called when a promotion has changed the cache."""
        self._waits = waits
        self.promotions: Counter[str] = Counter()
        self._cache = cache
        self._disk = disk
        self._tiers = Tiers(cache, disk, views)
        self._demotions = Demotions(self._tiers.demote)
        cache.on_evict = self._demotions.add
        self._on_change = on_change
        self._now = now
        self._ids = itertools.count()
        self._readers = asyncio.Semaphore(READERS)
        self._running: dict[bytes, asyncio.Task[bool]] = {}  # by the last hash of what comes back
        self._read_bytes_per_s = 0.0  # 0: not measured yet
        self._computed_tokens, self._computed_s = 0.0, 0.0

    async def close(self, save_s: float = 0.0, end_s: float = END_S) -> None:
        """Saves what is in memory for `save_s` at most, and writes what is queued for `end_s`.

        A disk that hangs keeps a thread, which the process does not wait for when it ends.
        """
        deadline = self._now() + save_s + end_s
        if self._running:
            await asyncio.wait(self._running.values(), timeout=end_s / 2)
        await self._save(save_s)
        self._cache.on_evict = None
        await self._demotions.close()
        left_s = max(0.0, deadline - self._now())
        if not await in_daemon_thread("ssd-close", lambda: self._disk.close(left_s)):
            log.error("the SSD does not answer: what was queued is lost")

    # Leaving memory

    async def settled(self, reservation: Reservation | None = None) -> None:
        """Returns when the reservation's pages may be written into: the blocks that they held have been copied. Without a
        reservation, when every block evicted so far has been."""
        await self._demotions.settled(reservation)

    async def _save(self, timeout_s: float) -> None:
        deadline, some_bytes = self._now() + timeout_s, self._disk.queue_bytes // 4
        pages = max(1, some_bytes // self._cache.layout.page_bytes)
        while self._now() < deadline and self._cache.shrink(pages, self._now()):
            await self.settled()
            while self._disk.report().queued_bytes > some_bytes and self._now() < deadline:  # noqa: ASYNC110 a thread writes
                await asyncio.sleep(0.005)

    # Coming back

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A prefill took that long: what reading competes with."""
        self._computed_tokens = FORGET * self._computed_tokens + num_tokens
        self._computed_s = FORGET * self._computed_s + seconds

    async def bring_back_for_prefill(self, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Reads back what the disk adds to a prompt's hit, unless computing it is sooner done."""
        await self._bring_back(hashes, num_tokens, attention_only=False)

    async def bring_back_for_landing(self, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Reads back full attention, which then need not be sent here, if that takes next to no time."""
        await self._bring_back(hashes, num_tokens, attention_only=True)

    async def _bring_back(self, hashes: Sequence[bytes], num_tokens: int, *, attention_only: bool) -> None:
        deadline: float | None = None
        for _ in range(MAX_ATTEMPTS):
            have, length = self._tiers.gain(hashes, num_tokens, attention_only=attention_only)
            if length <= have:
                return
            if deadline is None:
                wait_s = self._waits.landing_s if attention_only else self._compute_s(length - have)
                deadline = self._now() + wait_s
            left_s = deadline - self._now()
            key = hashes[length // self._cache.layout.block_size - 1]
            task = self._running.get(key) or self._begin(key, hashes, (have, length), left_s, attention_only)
            if task is None:
                return
            await asyncio.wait([task], timeout=max(0.0, left_s))
            if not task.done():
                self.promotions["late"] += 1  # it goes on, for the next request
                return
            if task.cancelled() or not task.result():
                return

    def _compute_s(self, num_tokens: int) -> float:
        if not self._computed_tokens:
            return self._waits.first_s
        return min(MAX_WAIT_S, num_tokens * self._computed_s / self._computed_tokens)

    def _begin(
        self, key: bytes, hashes: Sequence[bytes], gain: tuple[int, int], left_s: float, attention_only: bool
    ) -> "asyncio.Task[bool] | None":
        have, length = gain
        kv_bytes = self._cache.layout.kv_bytes
        size = kv_bytes(length) - kv_bytes(have) + (0 if attention_only else kv_bytes(0))
        if self._read_bytes_per_s and size > self._read_bytes_per_s * left_s:
            self.promotions["slow"] += 1
            self._read_bytes_per_s *= 1.02  # so that a disk that was slow once is tried again some day
            return None
        if len(self._running) >= MAX_PROMOTIONS:
            self.promotions["busy"] += 1
            return None
        self._running[key] = task = asyncio.create_task(self._promote(key, hashes, length, attention_only))
        return task

    async def _promote(self, key: bytes, hashes: Sequence[bytes], length: int, attention_only: bool) -> bool:
        """Whether a promotion has had pages: without any, another attempt would have none either."""
        name = f"promotion-{next(self._ids)}"
        try:
            await self._make_room(name, hashes, length, attention_only)
            plan = self._tiers.plan_promotion(name, hashes, length, now=self._now(), attention_only=attention_only)
            if plan is None:
                self.promotions["no_room"] += 1
                return False
            await self._read_back(plan)
            return True
        finally:
            del self._running[key]

    async def _make_room(self, name: str, hashes: Sequence[bytes], length: int, attention_only: bool) -> None:
        cache, purpose = self._cache, Purpose.ATTENTION if attention_only else Purpose.PROMOTION
        if not takes_steps(cache, length):
            return
        if pages_to_fit(cache, hashes, length, purpose) <= cache.free_pages + cache.evictable_pages:
            await evict_in_steps(cache, name, hashes, length, purpose, self._now, self._on_change)

    async def _read_back(self, plan: Promotion) -> None:
        # Windows that are still in memory are copied with what left it, and read back like the rest.
        await self.settled(None if self._cache.layout.window_groups else plan.reservation)
        started_at = self._now()
        ok = False
        # Should this task be cancelled, the pages stay reserved: a thread may still be writing into them.
        try:
            async with self._readers:
                ok = await in_daemon_thread("ssd-read", lambda: self._tiers.read(plan))
        except Exception:
            log.exception("a prefix could not be read back")
        rate = plan.size / max(1e-6, self._now() - started_at)
        if ok:
            self._read_bytes_per_s += (1 - FORGET if self._read_bytes_per_s else 1) * (rate - self._read_bytes_per_s)
        self.promotions["ok" if ok else "damaged"] += 1
        await self._finish(plan, ok)

    async def _finish(self, plan: Promotion, ok: bool) -> None:
        """What was read joins the cache in steps, between which the loop goes on."""
        step = COMMIT_BLOCKS * self._cache.layout.block_size
        try:
            for num_tokens in range(plan.reservation.cached_tokens + step, plan.num_tokens if ok else 0, step):
                self._cache.commit(plan.request_id, num_tokens, self._now())
                await asyncio.sleep(0)
        finally:
            self._tiers.finish(plan, ok, self._now())
            self._on_change()

    # What there is

    def snapshot(self) -> Iterator[BlocksStored]:
        """Everything that can probably be read, in parts that are read when they are asked for."""
        return self._disk.snapshot()

    def take_events(self) -> list[CacheEvent]:
        """What came and went on disk since the last call."""
        return self._disk.take_events()

    def report(self) -> pb.SsdReport:
        """Contents and counts as a message."""
        report = self._disk.report()
        counted = (
            "hits", "misses", "corrupt", "unauthentic", "read_errors", "write_errors", "refused_writes", "recovered",
        )  # fmt: skip
        return pb.SsdReport(
            open=True,
            capacity_bytes=report.capacity_bytes,
            blocks=report.blocks,
            bytes=report.bytes,
            queued_bytes=report.queued_bytes,
            events={name: getattr(report, name) for name in counted},
            promotions=self.promotions,
        )

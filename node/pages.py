"""The node's pages: an arena cut by the model's layout and the hybrid cache that says what lies where."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hybrid_cache import hashing
from hybrid_cache.errors import OutOfPages
from hybrid_cache.events import BlocksRemoved, BlocksStored, CacheEvent
from hybrid_cache.layout import ModelLayout, RangeKey, Segment
from hybrid_cache.lookup import PrefixHit
from hybrid_cache.prefix_cache import PrefixCache
from hybrid_cache.reservation import Purpose, Reservation
from node.arena import Arena, arena_path
from node.broadcast import Broadcast
from node.config import NodeConfig
from node.errors import NodeRefusal
from transport.proto import node_pb2 as pb
from transport.shm import ArenaSource

MAX_TOKENS = 1 << 24
"""Longer than any context; a length beyond it is a mistake, and must not make us build lists of its size."""


def split_hashes(joined: bytes) -> list[bytes]:
    """A message's block hashes as a list. Raises NodeRefusal for a length that cannot be."""
    try:
        return hashing.split_hashes(joined)
    except ValueError as exc:
        raise NodeRefusal("bad_request", str(exc)) from exc


class Pages:
    """Arena and cache of one layout; all calls come from the agent's event loop."""

    def __init__(self, layout: ModelLayout, config: NodeConfig, events: Broadcast, now: Callable[[], float]) -> None:
        self.layout = layout
        num_pages = config.cache_bytes // layout.page_bytes
        path = arena_path(config.node_id, Path(config.run_dir))
        self.arena = Arena(path, layout.page_bytes, num_pages, hugepages=config.hugepages)
        try:
            self.cache = PrefixCache(layout, num_pages)
        except BaseException:
            self.arena.close()
            raise
        self._now = now
        self._events = events
        self._freed = asyncio.Event()

    def close(self) -> None:
        """Gives the memory back; nothing may use pages any more."""
        self.arena.close()

    def place(self, reservation: Reservation, key: RangeKey) -> tuple[Segment, ...]:
        """The arena ranges of one slab of a reservation, in order."""
        held = reservation.states if key.group in self.layout.state_groups else reservation.blocks
        return self.layout.segments(key.group, key.layer_index, held[key.group][key.block])

    def views(self, reservation: Reservation, key: RangeKey) -> list[memoryview]:
        """The same as writable memory."""
        return [self.arena.view(segment.start, segment.length) for segment in self.place(reservation, key)]

    def source(self, segments: Callable[[int], Iterable[Segment]]) -> ArenaSource:
        """The arena as a transfer's source, whose range i lies in `segments(i)`."""
        return ArenaSource(
            str(self.arena.path), self.arena.view(0, self.arena.page_bytes * self.arena.num_pages), segments
        )

    def match(self, hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """What of a prompt is cached here."""
        return self.cache.match(hashes, num_tokens)

    def reserve(self, request_id: str, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose) -> Reservation:
        """Locks reusable blocks and allocates the rest. Raises NodeRefusal.

        Without a lease of its own: who reserves must release, because only it knows when threads have let go of the pages.
        """
        self._check(hashes, num_tokens)
        return self._reserve(request_id, hashes, num_tokens, purpose)

    def _check(self, hashes: Sequence[bytes], num_tokens: int) -> None:
        if not 0 < num_tokens <= MAX_TOKENS:
            raise NodeRefusal("bad_request", f"num_tokens is {num_tokens}, allowed is 1 to {MAX_TOKENS}")
        if len(set(hashes)) != len(hashes):
            raise NodeRefusal("bad_request", "a block hash comes twice: they are not chained")
        blocks = -(-num_tokens // self.layout.block_size)
        needed = blocks * sum(self.layout.pages_per_block(group) for group in self.layout.full_groups)
        if needed > self.arena.num_pages:
            raise NodeRefusal("no_capacity", f"{needed} pages needed, the arena has {self.arena.num_pages}")

    def _reserve(self, request_id: str, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose) -> Reservation:
        try:
            reservation = self.cache.reserve(
                request_id, hashes, num_tokens, now=self._now(), ttl_s=float("inf"), purpose=purpose
            )
        except OutOfPages as exc:
            raise NodeRefusal("no_capacity", str(exc)) from exc
        finally:
            self._publish()
        return reservation

    async def reserve_when_free(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose, timeout_s: float
    ) -> Reservation:
        """`reserve`, waiting up to `timeout_s` for running requests to free pages. Raises NodeRefusal."""
        self._check(hashes, num_tokens)
        deadline = self._now() + timeout_s
        while True:
            self._freed.clear()
            try:
                return self._reserve(request_id, hashes, num_tokens, purpose)
            except NodeRefusal:
                left_s = deadline - self._now()
                if left_s <= 0 or not self.cache.report().reservations:
                    raise
            # Not wait_for: up to Python 3.11 it swallows a cancellation that meets the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._freed.wait()

    def commit(self, request_id: str, filled_tokens: int) -> None:
        """Filled blocks become prefix-cache blocks."""
        self.cache.commit(request_id, filled_tokens, now=self._now())
        self._publish()

    def release(self, request_id: str) -> None:
        """Unlocks and drops what is not prefix cache; idempotent."""
        self.cache.release(request_id, now=self._now())
        self._freed.set()
        self._publish()

    def snapshot_event(self) -> pb.NodeEvent:
        """All that is cached, as the first event of a watcher."""
        groups = [
            pb.BlocksStored(group=stored.group, hashes=b"".join(stored.hashes)) for stored in self.cache.snapshot()
        ]
        return pb.NodeEvent(snapshot=pb.CacheSnapshot(groups=groups))

    def report(self) -> pb.PoolReport:
        """Page counts as a message."""
        report = self.cache.report()
        return pb.PoolReport(
            pages_total=report.pages_total,
            pages_free=report.pages_free,
            pages_prefix=report.pages_prefix,
            pages_transfer=report.pages_transfer,
            pages_locked=report.pages_locked,
            reservations=report.reservations,
            page_bytes=self.layout.page_bytes,
        )

    def _publish(self) -> None:
        for event in self.cache.take_events():
            self._events.publish(_as_message(event))


def _as_message(event: CacheEvent) -> pb.NodeEvent:
    match event:
        case BlocksStored(group, hashes):
            return pb.NodeEvent(stored=pb.BlocksStored(group=group, hashes=b"".join(hashes)))
        case BlocksRemoved(group, hashes):
            return pb.NodeEvent(removed=pb.BlocksRemoved(group=group, hashes=b"".join(hashes)))
        case _:
            return pb.NodeEvent(cleared=pb.CacheCleared())

"""The node's pages: an arena cut by the model's layout and the hybrid cache that says what lies where."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path

from hybrid_cache.cache.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Medium, in_parts
from hybrid_cache.cache.lookup import PrefixHit
from hybrid_cache.cache.prefix_cache import PrefixCache
from hybrid_cache.cache.reservation import NO_HINTS, Hints, Purpose, Reservation
from hybrid_cache.errors import DiskInUse, OutOfPages, UnchainedHashes
from hybrid_cache.eviction.choice import policy_named
from hybrid_cache.layout.layout import ByteRange, ModelLayout
from hybrid_cache.layout.transfers import GroupRanges, RangePlaces, TransferRanges
from hybrid_cache.tiers.disk import DiskTier
from hybrid_cache.tiers.slots import SlotFormat
from node.config import NodeConfig
from node.control.broadcast import Broadcast
from node.errors import NodeConfigError, NodeRefusal
from node.kvcache.arena import Arena
from node.kvcache.eviction_steps import attention_pages, evict_in_steps, pages_to_fit, takes_steps
from node.kvcache.paced_locks import PacedLocks
from node.kvcache.paced_work import PacedWork, committed_alike, once, up_to
from node.kvcache.prompt_hashes import TWICE, CheckedHashes, read_hashes
from node.kvcache.ssd_tier import WAITS, Ssd, SsdWaits, open_disk, slots_of
from node.kvcache.tenant_pages import NOBODY, TENANTS_PART, TenantPages
from transport.control.proto import node_pb2 as pb
from transport.path.shm import ArenaSource
from transport.threads import in_daemon_thread

log = logging.getLogger(__name__)

SSD_RETRY_S = 5.0
SSD_SAVE_S = 10.0
MEDIA = {Medium.MEMORY: pb.MEDIUM_MEMORY, Medium.SSD: pb.MEDIUM_SSD, Medium.ENGINE: pb.MEDIUM_ENGINE}

LONG_BLOCKS = 512  # more of them take some milliseconds
PACED_BLOCKS = 8192  # more of them are committed and learned of in steps
COMMIT_BLOCKS = 2048  # in one such step: a millisecond or two
PART_HASHES = 2048  # in one message: less than a millisecond of work, here and at a gateway
WHOLE_PARTS = 8  # of a short snapshot: groups of few blocks, in several media
OpenDisk = Callable[[ModelLayout, Path, int, SlotFormat | None], DiskTier]

MAX_TOKENS = 1 << 24
"""Longer than any context; a length beyond it is a mistake, and must not make us build lists of its size."""


def is_paced(layout: ModelLayout, num_tokens: int) -> bool:
    """Whether a prompt of so many tokens is committed and learned of in steps."""
    return num_tokens > PACED_BLOCKS * layout.block_size


class ArenaPages:
    """Arena and cache of one layout; all calls come from the agent's event loop."""

    def __init__(
        self,
        layout: ModelLayout,
        arena: Arena,
        config: NodeConfig,
        events: Broadcast,
        now: Callable[[], float],
        *,
        open_disk: OpenDisk = open_disk,
        ssd_waits: SsdWaits = WAITS,
        ssd_retry_s: float = SSD_RETRY_S,
    ) -> None:
        """Cuts the arena into pages; what is left at its end is not used. Raises ValueError if no page fits."""
        self.layout = layout
        self.arena = arena
        self.num_pages = arena.num_bytes // layout.page_bytes
        if not self.num_pages:
            raise ValueError(f"a page has {layout.page_bytes} bytes")
        eviction = policy_named(config.eviction, layout, self.num_pages, config.eviction_history_blocks)
        self.cache = PrefixCache(layout, self.num_pages, eviction=eviction)
        self.ssd: Ssd | None = None
        self._config = config
        self._now = now
        self._events = events
        self._open_disk = open_disk
        self._ssd_waits = ssd_waits
        self._ssd_retry_s = ssd_retry_s
        self._freed = asyncio.Event()
        self._rooms = TenantPages()
        self._room_ids = itertools.count()
        self.work = PacedWork()
        self.locks = PacedLocks(self.cache, now, self.changed)
        self._long: dict[str, bytes] = {}  # requests that are committed in steps: the first block of each prompt
        # A request uses blocks that were cached: their hashes from the prompt's beginning on.
        self.on_found: Callable[[Sequence[bytes]], None] = lambda hashes: None
        self.pinned_tokens: Callable[[], int] = lambda: 0  # what contexts hold, whatever requests end

    async def open_ssd(self) -> None:
        """Opens the SSD tier, however long its directory cannot be used; what lies there can be matched from then on."""
        node_id = self._config.node_id
        directory = Path(self._config.ssd_dir) / node_id
        if self._config.certificate and not self._config.ssd_key:
            log.warning("SSD tier node=%s: KVCache lies on disk as it is; ssd_key has it encrypted", node_id)

        def opened() -> DiskTier:
            slots = slots_of(self._config.ssd_key, self.layout)
            return self._open_disk(self.layout, directory, self._config.ssd_bytes, slots)

        while True:
            opening = asyncio.ensure_future(in_daemon_thread("ssd-open", opened))
            try:
                disk = await asyncio.shield(opening)
                break
            except (DiskInUse, OSError, NodeConfigError) as exc:
                log.error("no SSD tier node=%s, next try in %.0fs: %s", node_id, self._ssd_retry_s, exc)
            except asyncio.CancelledError:
                opening.add_done_callback(_close_unused)
                raise
            await asyncio.sleep(self._ssd_retry_s)
        self.ssd = Ssd(self.cache, disk, self.segment_views, self.changed, self._now, waits=self._ssd_waits)
        for stored in self.ssd.snapshot():
            self._events.publish(as_message(stored))
            await asyncio.sleep(0)  # watchers read meanwhile
        log.info("SSD tier node=%s: %s blocks", node_id, self.ssd.report().blocks)

    async def close(self) -> None:
        """Saves what an SSD may keep; nothing may use pages any more."""
        if self.ssd:
            await self.ssd.close(SSD_SAVE_S)

    def memory(self) -> memoryview:
        """All pages, writable."""
        return self.arena.view(0, self.layout.page_bytes * self.num_pages)

    def segment_views(self, segments: Sequence[ByteRange]) -> list[memoryview]:
        """Ranges of the arena as writable memory."""
        return [self.arena.view(segment.start, segment.length) for segment in segments]

    def source(self, reservation: Reservation, ranges: TransferRanges) -> ArenaSource:
        """Where the ranges of a reservation's transfer lie, at either end of it."""
        states = self.layout.state_groups

        def pages_of(part: GroupRanges) -> Sequence[Sequence[int]]:
            if part.group in states:
                return [reservation.states[part.group][length] for length in part.blocks]
            return reservation.blocks[part.group][part.blocks.start : part.blocks.stop]

        places = RangePlaces(self.layout, ranges, pages_of)
        return ArenaSource(
            str(self.arena.path), self.memory(), lambda index: places.between(index, index + 1), places.between
        )

    def match(self, hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """What of a prompt is cached here."""
        return self.cache.match(hashes, num_tokens)

    def reserve(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        purpose: Purpose,
        hints: Hints = NO_HINTS,
        tenant: str = NOBODY,
        pinned: str = "",
    ) -> Reservation:
        """Locks reusable blocks, or takes over the locks of `pinned`, a hold of `locks`, and allocates the rest. Raises
        NodeRefusal. New pages may be written into once `settled`.

        Without a lease of its own: who reserves must release, because only it knows when threads have let go of the pages.
        """
        _check(self.layout, self.num_pages, hashes, num_tokens)
        return self._reserve(request_id, hashes, num_tokens, purpose, hints, tenant, pinned)

    @property
    def _available(self) -> int:
        """Pages that are free or could be."""
        return self.cache.free_pages + self.cache.evictable_pages

    def _reserve(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose, hints: Hints, tenant: str,
        pinned: str = "",
    ) -> Reservation:  # fmt: skip
        ahead = self.cache.pages_ahead(pinned)  # counted as if they were locked only now
        available, now = self._available + ahead, self._now()
        self._rooms.ask(tenant, now)
        wanted = self.cache.attention_pages_wanted(hashes, num_tokens, purpose) + ahead
        if not self._rooms.may_have(tenant, wanted, available, now):
            reason = TENANTS_PART if self._rooms.has_its_part(tenant, wanted) else "no_capacity"
            raise NodeRefusal(reason, f"{available} pages are left, shared with other tenants")
        if wanted > available:  # a long prompt that waits asks again at each step of a release
            raise NodeRefusal("no_capacity", f"{wanted} pages needed, {available} are left")
        with contextlib.ExitStack() as unless_returned:
            try:
                reservation = self.cache.reserve(
                    request_id, hashes, num_tokens, now=now, purpose=purpose, hints=hints,
                    begins=not is_paced(self.layout, num_tokens), pinned=pinned,
                )  # fmt: skip
                unless_returned.callback(self.release, request_id)
                self._rooms.reserved(request_id, tenant, available - self._available)
            except OutOfPages as exc:
                raise NodeRefusal("no_capacity", str(exc)) from exc
            except UnchainedHashes as exc:
                raise NodeRefusal("bad_request", str(exc)) from exc
            finally:
                self.publish()
            if purpose in (Purpose.PREFILL, Purpose.LANDING) and reservation.cached_tokens:
                self.on_found(hashes[: reservation.cached_tokens // self.layout.block_size])
            unless_returned.pop_all()
        if is_paced(self.layout, num_tokens):
            self._long[request_id] = next(iter(hashes), b"")
            self.work.add(request_id, self.cache.begin_steps(request_id, purpose, hints, now))
        return reservation

    async def reserve_when_free(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        purpose: Purpose,
        timeout_s: float,
        hints: Hints = NO_HINTS,
        tenant: str = NOBODY,
    ) -> Reservation:
        """`reserve`, waiting up to `timeout_s` for running requests to free pages. Raises NodeRefusal.

        Of tenants that wait, the one that holds least is first.
        """
        deadline = self._now() + timeout_s
        _check(self.layout, self.num_pages, hashes, num_tokens)
        await self.bring_back(hashes, num_tokens)
        unpinned = self.num_pages - attention_pages(self.layout, self.pinned_tokens())
        if self.cache.attention_pages_wanted(hashes, num_tokens, purpose) > unpinned:  # others would wait behind it
            raise NodeRefusal("no_capacity", f"contexts leave {unpinned} pages")
        self._rooms.waits(tenant)
        try:
            await self.give_way(num_tokens)
            if self._rooms.is_first(tenant):
                await self.make_room(hashes, num_tokens, purpose, tenant)
                await self.give_way(num_tokens)
            reservation = await self._reserve_in_steps(request_id, hashes, num_tokens, purpose, hints, tenant)
            while reservation is None:
                self._freed.clear()
                left_s = deadline - self._now()
                if self._rooms.is_first(tenant):
                    try:
                        reservation = self._reserve(request_id, hashes, num_tokens, purpose, hints, tenant)
                        break
                    except NodeRefusal as exc:
                        if exc.label == "bad_request" or left_s <= 0 or not self.cache.report().reservations:
                            raise
                elif left_s <= 0:
                    raise NodeRefusal("no_capacity", "tenants that hold fewer pages came first")
                # Not wait_for: up to Python 3.11 it swallows a cancellation that meets the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._freed.wait()
        finally:
            self._rooms.goes(tenant)
            self._freed.set()  # it may have kept others from trying
        return await self._when_settled(reservation)

    async def _reserve_in_steps(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose, hints: Hints, tenant: str
    ) -> Reservation | None:
        """Reserves for a long prompt if there is room now: what is cached of it is locked step by step."""
        if not is_paced(self.layout, num_tokens):
            return None
        with contextlib.suppress(NodeRefusal):
            async with self.locks.ahead(hashes, num_tokens, purpose) as pinned:
                if self._rooms.is_first(tenant):
                    return self._reserve(request_id, hashes, num_tokens, purpose, hints, tenant, pinned)
        return None

    async def make_room(self, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose, tenant: str) -> None:
        """Evicts in steps, between which the loop goes on, what a reservation of many blocks would evict at once.

        It evicts nothing for one that will be refused, and nothing that the reservation can use. What is missing in the
        end, `reserve` evicts.
        """
        if not takes_steps(self.cache, num_tokens):
            return
        wanted = self.cache.attention_pages_wanted(hashes, num_tokens, purpose)
        fits = pages_to_fit(self.cache, hashes, num_tokens, purpose) <= self._available
        if not (fits and self._rooms.may_have(tenant, wanted, self._available, self._now())):
            return
        name = f"room-{next(self._room_ids)}"
        try:
            await evict_in_steps(self.cache, name, hashes, num_tokens, purpose, self._now, self.publish)
        finally:
            self.changed()

    async def reserve_now(
        self, request_id: str, hashes: Sequence[bytes], num_tokens: int, purpose: Purpose
    ) -> Reservation:
        """`reserve`, for what gives way to everything else: it waits only for what is being given back. Raises NodeRefusal."""
        if attention_pages(self.layout, num_tokens) > self._available:
            await self.work.settled()  # some of it may free pages
        return await self._when_settled(self.reserve(request_id, hashes, num_tokens, purpose))

    async def _when_settled(self, reservation: Reservation) -> Reservation:
        try:
            await self.settled(reservation)
            await self.give_way(reservation.num_tokens)
        except BaseException:
            self.release(reservation.request_id)
            raise
        return reservation

    async def give_way(self, num_tokens: int) -> None:
        """Between two steps of a long prompt, which take milliseconds, whatever else waits on the loop goes first: what is
        ready, and for the longest prompts what a timer wakes, too.
        """
        if num_tokens > LONG_BLOCKS * self.layout.block_size:
            await asyncio.sleep(0)
        if is_paced(self.layout, num_tokens):
            await asyncio.sleep(0)

    async def bring_back(self, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Has the SSD give back what it adds to a prompt's hit, unless computing it is sooner done. If a prompt that begins
        alike is being committed, that is done first: its states are at its end.
        """
        await committed_alike(self._long, hashes, self.work)
        if self.ssd:
            await self.ssd.bring_back_for_prefill(hashes, num_tokens)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A prefill computed that much in that time."""
        if self.ssd and num_tokens:
            self.ssd.computed(num_tokens, seconds)

    async def prepare_landing(self, joined_hashes: bytes, num_tokens: int, tenant: str) -> "CheckedHashes | None":
        """Has the SSD give back full attention that need not be sent here then, and makes room for the rest. Returns the
        hashes, if it had to look at them. What is wrong with a request, `reserve` says.
        """
        fits = attention_pages(self.layout, num_tokens) <= self.cache.free_pages
        if not self.ssd and fits and not is_paced(self.layout, num_tokens):
            return None
        if not fits:
            await self.work.settled()  # some of it may free pages
        with contextlib.suppress(NodeRefusal):
            hashes = await read_hashes(joined_hashes, is_long=is_paced(self.layout, num_tokens))
            _check(self.layout, self.num_pages, hashes, num_tokens)
            await committed_alike(self._long, hashes, self.work)
            if self.ssd:
                await self.ssd.bring_back_for_landing(hashes, num_tokens)
            await self.make_room(hashes, num_tokens, Purpose.LANDING, tenant)
            return hashes
        return None

    async def settled(self, reservation: Reservation | None = None) -> None:
        """Returns when what lay in reserved pages before has been copied, should it have to be: then they may be filled."""
        if self.ssd:
            await self.ssd.settled(reservation)

    def commit(self, request_id: str, filled_tokens: int, unfilled: Container[tuple[int, int]] = ()) -> None:
        """Filled blocks become prefix-cache blocks, but those of `unfilled`: (group, block or length). Of a long prompt
        they do so in steps, and its `release` waits until they have.
        """

        def committed(tokens: int) -> None:
            self.cache.commit(request_id, tokens, self._now(), unfilled)
            self.publish()

        if is_paced(self.layout, filled_tokens) or request_id in self.work:
            step = COMMIT_BLOCKS * self.layout.block_size
            self.work.add(request_id, up_to(filled_tokens, step, committed))
        else:
            committed(filled_tokens)

    def release(self, request_id: str) -> None:
        """Unlocks and drops what is not prefix cache; idempotent. After what is still to be done for the request."""

        def released() -> None:
            self.cache.release(request_id, now=self._now())
            self._rooms.released(request_id)
            self._long.pop(request_id, None)
            self.changed()

        if request_id in self._long or request_id in self.work:
            self.work.add(request_id, self.locks.release_steps(request_id))
            self.work.add(request_id, once(released))
        else:
            released()

    def drop(self, hashes: Sequence[bytes], keep_tokens: int, unused_s: float) -> int:
        """Gives up the end of a cached prefix, as `PrefixCache.drop` does; returns how many pages that frees."""
        now = self._now()
        pages = self.cache.drop(hashes, keep_tokens, unused_since=now - unused_s, now=now)
        self.changed()
        return pages

    def tell(self, event: pb.NodeEvent) -> None:
        """Tells watchers, after what has changed in the cache."""
        self.publish()
        self._events.publish(event)

    def changed(self) -> None:
        """Pages may be free now: requests that wait for some try again, and watchers hear of it."""
        self._freed.set()
        self.publish()

    def snapshot(self) -> Iterator[CacheEvent]:
        """All that is cached, for a watcher, in parts that are read when they are asked for."""
        yield from self.cache.snapshot_parts(PART_HASHES)
        if self.ssd:
            yield from self.ssd.snapshot()

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

    def room(self) -> pb.Room:
        """What of the arena a new prompt could have."""
        free, evictable = self.cache.free_pages, self.cache.evictable_pages
        return pb.Room(
            pages_total=self.num_pages,
            pages_free=free,
            pages_evictable=evictable,
            free_tokens=self.layout.tokens_within(free),
            tokens=self.layout.tokens_within(free + evictable),
        )

    def ssd_report(self) -> pb.SsdReport | None:
        """What the SSD tier holds; None where the node has none."""
        if self.ssd:
            return self.ssd.report()
        return pb.SsdReport(open=False) if self._config.ssd_dir else None

    def publish(self) -> None:
        """Tells watchers what has changed since the last time. Disks change by themselves."""
        for event in (*self.cache.take_events(), *(self.ssd.take_events() if self.ssd else ())):
            for part in in_parts(event, PART_HASHES):
                self._events.publish(as_message(part))


def _check(layout: ModelLayout, num_pages: int, hashes: Sequence[bytes], num_tokens: int) -> None:
    if not 0 < num_tokens <= MAX_TOKENS:
        raise NodeRefusal("bad_request", f"num_tokens is {num_tokens}; it must be 1 to {MAX_TOKENS}")
    if not isinstance(hashes, CheckedHashes) and len(set(hashes)) != len(hashes):
        raise NodeRefusal("bad_request", TWICE)
    if (needed := attention_pages(layout, num_tokens)) > num_pages:
        raise NodeRefusal("no_capacity", f"{needed} pages needed, the arena has {num_pages}")


def _close_unused(opening: "asyncio.Future[DiskTier]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close(SSD_RETRY_S)  # nothing is queued


def snapshot_messages(parts: Iterator[CacheEvent]) -> Iterator[pb.NodeEvent]:
    """A snapshot as the first messages of a watcher: a short one as a whole, a long one as an empty one with more behind it."""
    first = list(itertools.islice(parts, WHOLE_PARTS + 1))
    if len(first) <= WHOLE_PARTS:
        yield pb.NodeEvent(snapshot=pb.CacheSnapshot(groups=[as_message(part).stored for part in first]))
        return
    yield pb.NodeEvent(snapshot=pb.CacheSnapshot())
    yield from map(as_message, itertools.chain(first, parts))


def as_message(event: CacheEvent) -> pb.NodeEvent:
    """A cache event as gateways hear it."""
    match event:
        case BlocksStored(group, hashes, medium):
            return pb.NodeEvent(stored=pb.BlocksStored(group=group, hashes=b"".join(hashes), medium=MEDIA[medium]))
        case BlocksRemoved(group, hashes, medium):
            return pb.NodeEvent(removed=pb.BlocksRemoved(group=group, hashes=b"".join(hashes), medium=MEDIA[medium]))
        case CacheCleared(medium):
            return pb.NodeEvent(cleared=pb.CacheCleared(medium=MEDIA[medium] if medium else pb.MEDIUM_UNSPECIFIED))

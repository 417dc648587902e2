"""Reservations: pages that other nodes fill. Prefixes are for this node's cache; a role may reserve for another use.

    Reserve ──► RESERVED ──all landed──► LANDED ──► GONE (what landed may stay as prefix cache)
                   └── abort, lease over, transfer failed ──► GONE

A reservation whose pages are lent (`IncomingUse.is_lent`) ends only when its user gives them back. A gateway that is gone
takes its reservations with it, unless an engine awaits them (see holders).

The prefix cache gets only what landed completely. Pages are released when the transfer's threads have let go of them.
"""

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from hybrid_cache.cache.reservation import Purpose, Reservation
from hybrid_cache.layout.layout import ModelLayout
from hybrid_cache.layout.transfers import transfer_ranges
from node.coding import Coding
from node.control.holders import ReservationHolders, checked_name
from node.errors import NodeRefusal
from node.kvcache.pages import ArenaPages
from node.kvcache.prompt_hashes import split_hashes
from node.transfer.listener import ExpectedTransfer, PeerListener
from transport.control.proto import node_pb2 as pb
from transport.receive.registry.landing import LandingResult
from transport.wire.sizes import RangeSizes

log = logging.getLogger(__name__)

SECRET_BYTES = 32
MAX_REMEMBERED = 1024
# What callers may say when they abort a reservation; they become metric labels.
ABORT_REASONS = frozenset({"aborted", "given_up", "prefill_failed", "prefix_not_moved", "request_ended"})


class LandingState(Enum):
    """Where a reservation is in its life."""

    RESERVED = "reserved"
    LANDED = "landed"
    GONE = "gone"


class IncomingUse(Protocol):
    """What a reservation is for. The node asks it before it ends the reservation."""

    @property
    def exact(self) -> bool:
        """Whether quantised bytes are refused."""
        ...

    @property
    def is_lent(self) -> bool:
        """Whether an engine reads the pages. Then only the end of its job ends the reservation."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Whether an engine reads the pages or waits for them. Then the end of its gateway does not end it."""
        ...

    def keeps(self, *, lossy: bool) -> bool:
        """Whether what landed becomes prefix cache; `lossy`: some of it was quantised."""
        ...


class PrefixUse:
    """A prefix for this node's cache, where other requests find it. No engine waits for it."""

    is_lent = False
    is_awaited = False

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact

    def keeps(self, *, lossy: bool) -> bool:
        """All of it: quantised bytes were accepted only if they may be reused."""
        return True


@dataclass(slots=True, kw_only=True)
class Incoming:
    """One reservation."""

    transfer_id: str
    reservation: Reservation
    use: IncomingUse
    tokens_digest: bytes
    expires_at: float
    ttl_s: float
    landed: "asyncio.Future[str]"  # "" when complete, else the reason why it never will be
    holder: str  # the gateway that reserved it; "": it did not say
    reserved_at: float
    is_booked: bool = False  # for a request that no engine has begun with
    state: LandingState = LandingState.RESERVED
    landing: ExpectedTransfer | None = None
    receiving: bool = False
    ended: str = ""  # why, once it is GONE
    last_progress: int = 0


@dataclass(slots=True)
class IncomingCounts:
    """What happened, for metrics."""

    refused: Counter[str] = field(default_factory=Counter)
    reserved: int = 0
    landed: int = 0
    quantised: dict[str, int] = field(default_factory=dict)  # of those landed, by whether they became prefix cache
    bytes_landed: int = 0
    ended: dict[str, int] = field(default_factory=dict)


class IncomingTransfers:
    """All reservations of a node. It holds their pages."""

    def __init__(
        self,
        pages: ArenaPages,
        listener: PeerListener,
        coding: Coding,
        lease_s: float,
        now: Callable[[], float],
        holders: ReservationHolders,
    ) -> None:
        self._pages = pages
        self._listener = listener
        self.coding = coding
        self._lease_s = lease_s
        self._now = now
        self._holders = holders
        self._prefix = PrefixUse(exact=not (coding.accept_quantised and coding.reuse_quantised))
        self.entries: dict[str, Incoming] = {}  # by transfer id
        self._committed: deque[str] = deque(maxlen=MAX_REMEMBERED)  # Commit may be asked again
        self.counts = IncomingCounts()

    @property
    def layout(self) -> ModelLayout:
        """The layout of the node's model."""
        return self._pages.layout

    @property
    def landing(self) -> int:
        """Transfers expected or arriving."""
        return sum(entry.receiving for entry in self.entries.values())

    def is_idle(self) -> bool:
        """Whether no reservation holds pages."""
        return not self.entries

    # Reserve

    def granted_ttl_s(self, request: pb.ReserveRequest) -> float:
        """How long a reservation may go without progress: what was asked for, the node's lease at most."""
        return min(request.ttl_s, self._lease_s) if request.ttl_s > 0 else self._lease_s

    def reserve(
        self,
        request: pb.ReserveRequest,
        use: IncomingUse | None = None,
        hashes: Sequence[bytes] | None = None,
        pinned: str = "",
    ) -> tuple[str, bytes, Reservation]:
        """Reserve pages and expect their bytes: for a prefix, unless a role has another use. `hashes` are those of the
        request, if they were read already; `pinned` as for `ArenaPages.reserve`. Raises NodeRefusal.
        """
        try:
            entry, secret = self._reserve(request, use or self._prefix, hashes, pinned)
        except NodeRefusal as exc:
            self.counts.refused[exc.label] += 1
            raise
        self.counts.reserved += 1
        if use is not None:
            entry.is_booked = True
            self._holders.booked(entry.holder)
        return entry.transfer_id, secret, entry.reservation

    async def reserve_settled(
        self, request: pb.ReserveRequest, use: IncomingUse | None = None
    ) -> tuple[str, bytes, Reservation]:
        """`reserve`, after an SSD has given back what it can; the pages may be written into. Raises NodeRefusal."""
        hashes = await self._pages.prepare_landing(request.block_hashes, request.num_tokens, request.tenant)
        async with self._pages.locks.ahead(hashes or (), request.num_tokens, Purpose.LANDING) as pinned:
            reserved = self.reserve(request, use, hashes, pinned)
        try:
            await self._pages.settled(reserved[2])
            await self._pages.give_way(request.num_tokens)
        except BaseException:
            self.abort(reserved[0], "given_up")
            raise
        return reserved

    def _reserve(
        self, request: pb.ReserveRequest, use: IncomingUse, hashes: Sequence[bytes] | None, pinned: str
    ) -> tuple[Incoming, bytes]:
        block_size = self.layout.block_size
        if request.prefix_only and request.num_tokens % block_size:
            raise NodeRefusal("bad_request", f"a prefix has whole blocks of {block_size} tokens")
        holder, now = checked_name(request.holder), self._now()
        transfer_id, secret = secrets.token_hex(16), secrets.token_bytes(SECRET_BYTES)
        sender = self._listener.known_peers.awaited(request.sender)
        ttl_s = self.granted_ttl_s(request)
        reservation = self._pages.reserve(
            transfer_id,
            split_hashes(request.block_hashes) if hashes is None else hashes,
            request.num_tokens,
            Purpose.LANDING,
            tenant=checked_name(request.tenant),
            pinned=pinned,
        )
        try:
            entry = Incoming(
                transfer_id=transfer_id,
                reservation=reservation,
                use=use,
                tokens_digest=request.tokens_digest,
                expires_at=now + ttl_s,
                ttl_s=ttl_s,
                landed=asyncio.get_running_loop().create_future(),
                holder=holder,
                reserved_at=now,
            )
            self._expect(entry, secret, sender)
        except BaseException:
            self._pages.release(transfer_id)
            raise
        self.entries[transfer_id] = entry
        return entry, secret

    def _expect(self, entry: Incoming, secret: bytes, sender: str) -> None:
        layout, reservation = self.layout, entry.reservation
        ranges = transfer_ranges(layout, reservation.num_tokens, reservation.cached_tokens)
        entry.landing = self._listener.expect(
            entry.transfer_id,
            secret,
            RangeSizes(ranges.sizes(layout)),
            self._pages.source(reservation, ranges),
            lambda result: self._received(entry, result),
            exact=entry.use.exact,
            sender=sender,
        )
        entry.receiving = True

    def _received(self, entry: Incoming, result: LandingResult) -> None:
        entry.receiving = False
        self.counts.bytes_landed += result.bytes_landed
        if entry.state is LandingState.RESERVED and result.ok:
            entry.state = LandingState.LANDED
            entry.expires_at = self._now() + entry.ttl_s
            if self._is_kept(entry, lossy=bool(result.lossy_bytes)):
                self._pages.commit(entry.transfer_id, entry.reservation.num_tokens)
            self.counts.landed += 1
            entry.landed.set_result("")
        elif entry.state is not LandingState.GONE:
            self.end(entry, result.reason or "transfer_failed")
        else:
            self._release(entry)

    def _is_kept(self, entry: Incoming, *, lossy: bool) -> bool:
        kept = entry.use.keeps(lossy=lossy)
        if lossy:
            label = "reused" if kept else "not_reused"
            self.counts.quantised[label] = self.counts.quantised.get(label, 0) + 1
        return kept

    # While it lasts

    def find(self, transfer_id: str) -> Incoming:
        """The reservation of that id, however much of it has landed. Raises NodeRefusal."""
        entry = self.entries.get(transfer_id)
        if entry is None:
            raise NodeRefusal(
                "unknown_transfer", "no such reservation: it was aborted, has expired or is from an earlier run"
            )
        return entry

    async def commit(self, transfer_id: str, timeout_s: float) -> None:
        """Wait for a prefix to land and leave it in the cache. Raises NodeRefusal, TimeoutError."""
        if transfer_id in self._committed:
            return
        entry = self.find(transfer_id)
        async with asyncio.timeout(timeout_s):
            reason = await asyncio.shield(entry.landed)
        if reason:
            raise NodeRefusal("transfer_failed", reason)
        self._committed.append(transfer_id)
        self.give_up(entry, "committed")

    def expire(self) -> list[str]:
        """End reservations whose lease is over, or whose gateway is gone. Progress renews a lease."""
        now = self._now()
        expired = []
        for entry in list(self.entries.values()):
            progress = entry.landing.bytes_landed if entry.landing else 0
            if self._is_abandoned(entry):
                expired.append(entry.transfer_id)
                log.warning("gateway gone transfer=%s state=%s", entry.transfer_id, entry.state.value)
                self.end(entry, "gateway_gone")
            elif progress > entry.last_progress or entry.use.is_lent:
                entry.last_progress, entry.expires_at = progress, now + entry.ttl_s
            elif now >= entry.expires_at:
                expired.append(entry.transfer_id)
                log.warning("lease over transfer=%s state=%s", entry.transfer_id, entry.state.value)
                self.end(entry, "lease_expired")
        return expired

    def _is_abandoned(self, entry: Incoming) -> bool:
        """An engine that has it, or waits for it, may still answer: a gateway can lose its agent and not its engine."""
        return not entry.use.is_awaited and self._holders.is_gone(entry.holder, entry.reserved_at)

    def begun(self, entry: Incoming) -> None:
        """An engine has its request, and counts it from now on."""
        if entry.is_booked:
            entry.is_booked = False
            self._holders.unbooked(entry.holder)

    # End

    def abort(self, transfer_id: str, reason: str) -> bool:
        """End a reservation; a lent one ends when its engine lets go. False for an unknown id.

        `reason` is the caller's word: one that is not known here counts as "other".
        """
        entry = self.entries.get(transfer_id)
        if entry is None:
            return False
        self.give_up(entry, reason if reason in ABORT_REASONS else "other" if reason else "aborted")
        return True

    def readdress(self, transfer_id: str, sender: str) -> bool:
        """Another sender takes over; False for an unknown id."""
        sender = self._listener.known_peers.awaited(sender)
        entry = self.entries.get(transfer_id)
        if entry is None or entry.landing is None:
            return False
        entry.landing.readdress(sender)
        return True

    def give_up(self, entry: Incoming, reason: str) -> None:
        """End a reservation, unless its pages are lent."""
        if not entry.use.is_lent:
            self.end(entry, reason)

    def end(self, entry: Incoming, reason: str) -> None:
        """End a reservation and release its pages. Only the borrower calls this for lent pages."""
        if entry.state is LandingState.GONE:
            return
        entry.state, entry.ended = LandingState.GONE, reason
        self.begun(entry)
        self.counts.ended[reason] = self.counts.ended.get(reason, 0) + 1
        if not entry.landed.done():
            entry.landed.set_result(reason)
        if entry.receiving and entry.landing:
            entry.landing.cancel(reason)  # _received releases the pages when the receiving threads have let go
        else:
            self._release(entry)

    def _release(self, entry: Incoming) -> None:
        if self.entries.pop(entry.transfer_id, None):
            self._pages.release(entry.transfer_id)

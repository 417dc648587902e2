"""The receiving side: reservations that other nodes fill, and that engines of decode nodes are lent.

    Reserve ──► RESERVED ──all landed──► LANDED ──lent──► LOADING ──given back──► gone (blocks are prefix cache)
                   │                        │                   │
                   └──── abort, lease over, transfer failed ────┴──► gone

A gateway that is gone takes with it what it held and no engine has claimed (see holders).

Committed to the prefix cache is only what landed completely. Pages go back when the transfer's threads have let go of them.
"""

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from hybrid_cache.cache.reservation import Purpose, Reservation
from hybrid_cache.layout.layout import transfer_ranges
from node.control.holders import ReservationHolders, checked_name
from node.errors import NodeRefusal
from node.kvcache.pages import ArenaPages, split_hashes
from node.transfer.links import IncomingTransfer, PeerLinks
from transport.control.proto import node_pb2 as pb
from transport.receive.registry.landing import LandingResult

log = logging.getLogger(__name__)

SECRET_BYTES = 32
MAX_REMEMBERED = 1024
# What callers may say when they abort a reservation; they become metric labels.
ABORT_REASONS = frozenset({"aborted", "given_up", "prefill_failed", "prefix_not_moved", "request_ended"})


class LandingState(Enum):
    """Where a reservation is in its life."""

    RESERVED = "reserved"
    LANDED = "landed"
    LOADING = "loading"
    GONE = "gone"


@dataclass(slots=True)
class Incoming:
    """One reservation."""

    transfer_id: str
    reservation: Reservation
    tokens_digest: bytes
    expires_at: float
    ttl_s: float
    landed: "asyncio.Future[str]"  # "" when complete, else the reason why it never will be
    holder: str  # the gateway that reserved it; "": it did not say
    reserved_at: float
    state: LandingState = LandingState.RESERVED
    landing: IncomingTransfer | None = None
    receiving: bool = False
    prefix_only: bool = False  # no engine waits for it
    reusable: bool = True  # once it has landed: it is prefix cache, and so may be what is computed on top of it
    last_progress: int = 0
    claims: int = 0  # engines that wait for it


@dataclass(slots=True)
class ConsumerCounts:
    """What happened, for metrics."""

    refused: Counter[str] = field(default_factory=Counter)
    reserved: int = 0
    landed: int = 0
    quantised: dict[str, int] = field(default_factory=dict)  # of those landed, by whether they became prefix cache
    bytes_landed: int = 0
    ended: dict[str, int] = field(default_factory=dict)


class Consumer:
    """All reservations of a node."""

    def __init__(
        self, pages: ArenaPages, links: PeerLinks, lease_s: float, now: Callable[[], float], holders: ReservationHolders
    ) -> None:
        self._pages = pages
        self._links = links
        self._lease_s = lease_s
        self._now = now
        self._holders = holders
        self.incoming: dict[str, Incoming] = {}  # by transfer id
        self._decodes_beginning = 0
        self._committed: deque[str] = deque(maxlen=MAX_REMEMBERED)  # Commit may be asked again
        self.counts = ConsumerCounts()

    @property
    def landing(self) -> int:
        """Transfers expected or arriving."""
        return sum(entry.receiving for entry in self.incoming.values())

    @property
    def expects_decodes(self) -> bool:
        """Whether a reservation is for an engine that will decode, or one that waits for an SSD will be."""
        return bool(self._decodes_beginning) or any(not entry.prefix_only for entry in self.incoming.values())

    def is_idle(self) -> bool:
        """Whether no reservation holds pages."""
        return not self.incoming

    # From the gateway

    def granted_ttl_s(self, request: pb.ReserveRequest) -> float:
        """How long a reservation may go without progress: what was asked for, the node's lease at most."""
        return min(request.ttl_s, self._lease_s) if request.ttl_s > 0 else self._lease_s

    def reserve(self, request: pb.ReserveRequest) -> tuple[str, bytes, Reservation]:
        """Allocates pages and expects their bytes. Raises NodeRefusal."""
        try:
            entry, secret = self._reserve(request)
        except NodeRefusal as exc:
            self.counts.refused[exc.label] += 1
            raise
        self.counts.reserved += 1
        return entry.transfer_id, secret, entry.reservation

    async def reserve_settled(self, request: pb.ReserveRequest) -> tuple[str, bytes, Reservation]:
        """`reserve`, after an SSD has given back what it can; the pages may be written into. Raises NodeRefusal."""
        self._decodes_beginning += not request.prefix_only
        try:
            await self._pages.bring_back_for_landing(request.block_hashes, request.num_tokens)
        finally:
            self._decodes_beginning -= not request.prefix_only
        reserved = self.reserve(request)
        try:
            await self._pages.settled()
        except BaseException:
            self.abort(reserved[0], "given_up")
            raise
        return reserved

    def _reserve(self, request: pb.ReserveRequest) -> tuple[Incoming, bytes]:
        block_size = self._pages.layout.block_size
        if request.prefix_only and request.num_tokens % block_size:
            raise NodeRefusal("bad_request", f"a prefix has whole blocks of {block_size} tokens")
        holder, now = checked_name(request.holder), self._now()
        transfer_id, secret = secrets.token_hex(16), secrets.token_bytes(SECRET_BYTES)
        ttl_s = self.granted_ttl_s(request)
        reservation = self._pages.reserve(
            transfer_id,
            split_hashes(request.block_hashes),
            request.num_tokens,
            Purpose.LANDING,
            tenant=checked_name(request.tenant),
        )
        try:
            landed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            entry = Incoming(
                transfer_id,
                reservation,
                request.tokens_digest,
                now + ttl_s,
                ttl_s,
                landed,
                holder,
                now,
                prefix_only=request.prefix_only,
            )
            self._expect(entry, secret, exact=self._wants_exact(request.prefix_only), sender=request.sender)
        except BaseException:
            self._pages.release(transfer_id)
            raise
        self.incoming[transfer_id] = entry
        return entry, secret

    def _wants_exact(self, prefix_only: bool) -> bool:
        """A prefix is copied here to be found by other requests."""
        coding = self._links.coding
        return not coding.accept_quantised or (prefix_only and not coding.reuse_quantised)

    def _expect(self, entry: Incoming, secret: bytes, *, exact: bool, sender: str) -> None:
        layout, reservation = self._pages.layout, entry.reservation
        ranges = transfer_ranges(layout, reservation.num_tokens, reservation.cached_tokens)
        entry.landing = self._links.expect(
            entry.transfer_id,
            secret,
            [layout.slab_bytes(key.group) for key in ranges],
            lambda i: self._pages.views(reservation, ranges[i]),
            lambda result: self._received(entry, result),
            exact=exact,
            sender=sender,
        )
        entry.receiving = True

    def _received(self, entry: Incoming, result: LandingResult) -> None:
        entry.receiving = False
        self.counts.bytes_landed += result.bytes_landed
        if entry.state is LandingState.RESERVED and result.ok:
            entry.state = LandingState.LANDED
            entry.expires_at = self._now() + entry.ttl_s
            entry.reusable = self._may_be_reused(result)
            if entry.reusable:
                self._pages.commit(entry.transfer_id, entry.reservation.num_tokens)
            self.counts.landed += 1
            entry.landed.set_result("")
        elif entry.state is not LandingState.GONE:
            self._drop(entry, result.reason or "transfer_failed")
        else:
            self._free(entry)

    def _may_be_reused(self, result: LandingResult) -> bool:
        """Quantised KVCache serves its own request; others would take it for exact."""
        if not result.lossy_bytes:
            return True
        reused = self._links.coding.reuse_quantised
        label = "reused" if reused else "not_reused"
        self.counts.quantised[label] = self.counts.quantised.get(label, 0) + 1
        return reused

    async def commit(self, transfer_id: str, timeout_s: float) -> None:
        """Waits for a prefix to land and leaves it in the cache. Raises NodeRefusal, and TimeoutError."""
        if transfer_id in self._committed:
            return
        entry = self.find(transfer_id)
        async with asyncio.timeout(timeout_s):
            reason = await asyncio.shield(entry.landed)
        if reason:
            raise NodeRefusal("transfer_failed", reason)
        self._committed.append(transfer_id)
        self.give_up(entry, "committed")

    def abort(self, transfer_id: str, reason: str) -> bool:
        """Frees a reservation; a loading one goes when its engine lets go. False for an unknown id.

        `reason` is the caller's word: one that is not known here counts as "other".
        """
        entry = self.incoming.get(transfer_id)
        if entry is None:
            return False
        self.give_up(entry, reason if reason in ABORT_REASONS else "other" if reason else "aborted")
        return True

    def readdress(self, transfer_id: str, sender: str) -> bool:
        """Another sender takes over; False for an unknown id."""
        entry = self.incoming.get(transfer_id)
        if entry is None or entry.landing is None:
            return False
        entry.landing.readdress(sender)
        return True

    def expire(self) -> list[str]:
        """Drops reservations whose lease is over, or whose gateway is gone; one that makes progress has its lease renewed."""
        now = self._now()
        expired = []
        for entry in list(self.incoming.values()):
            progress = entry.landing.bytes_landed if entry.landing else 0
            if self._is_abandoned(entry):
                expired.append(entry.transfer_id)
                log.warning("gateway gone transfer=%s state=%s", entry.transfer_id, entry.state.value)
                self._drop(entry, "gateway_gone")
            elif progress > entry.last_progress or entry.state is LandingState.LOADING:
                entry.last_progress, entry.expires_at = progress, now + entry.ttl_s
            elif now >= entry.expires_at:
                expired.append(entry.transfer_id)
                log.warning("lease over transfer=%s state=%s", entry.transfer_id, entry.state.value)
                self._drop(entry, "lease_expired")
        return expired

    def _is_abandoned(self, entry: Incoming) -> bool:
        """An engine that has it, or waits for it, may still answer: a gateway can lose its agent and not its engine."""
        is_claimed = entry.claims > 0 or entry.state is LandingState.LOADING
        return not is_claimed and self._holders.is_gone(entry.holder, entry.reserved_at)

    # For a role, whose engines may be lent what landed

    def find(self, transfer_id: str) -> Incoming:
        """The reservation of that id, however much of it has landed. Raises NodeRefusal."""
        entry = self.incoming.get(transfer_id)
        if entry is None:
            raise NodeRefusal("unknown_transfer", "no such reservation: aborted, expired or of an earlier start")
        return entry

    @contextmanager
    def claimed(self, entry: Incoming) -> Iterator[None]:
        """An engine waits for it inside the block: its gateway's end does not end it."""
        entry.claims += 1
        try:
            yield
        finally:
            entry.claims -= 1

    def lend(self, entry: Incoming) -> None:
        """Its pages are the caller's until `give_back`: nothing else ends it. Raises NodeRefusal unless it has just landed."""
        if entry.state is not LandingState.LANDED:
            raise NodeRefusal("claimed_twice", f"the reservation is {entry.state.value}")
        entry.state = LandingState.LOADING

    def give_back(self, entry: Incoming, reason: str) -> None:
        """Who had the pages has let go of them; the reservation is over."""
        self._drop(entry, reason)

    def give_up(self, entry: Incoming, reason: str) -> None:
        """Ends a reservation, unless its pages are lent: while an engine reads them, only that engine can end it."""
        if entry.state is not LandingState.LOADING:
            self._drop(entry, reason)

    def _drop(self, entry: Incoming, reason: str) -> None:
        if entry.state is LandingState.GONE:
            return
        entry.state = LandingState.GONE
        self.counts.ended[reason] = self.counts.ended.get(reason, 0) + 1
        if not entry.landed.done():
            entry.landed.set_result(reason)
        if entry.receiving and entry.landing:
            entry.landing.cancel(reason)  # _received frees the pages when the receiving threads have let go
        else:
            self._free(entry)

    def _free(self, entry: Incoming) -> None:
        if self.incoming.pop(entry.transfer_id, None):
            self._pages.release(entry.transfer_id)

"""Prefills for other nodes: KVCache leaves while it is computed, and cached prefixes leave whole.

    begin ── check the ticket ── reserve ── open the push ── cached ranges leave ── each range when computed ── Delivered
                                                └ end ── abort the push ── lanes let go ── release

A leg holds its pages from the reservation on. It releases them when the engine has ended the job *and* no lane reads them.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from hybrid_cache.cache.reservation import Purpose, Reservation
from node.coding import Coding
from node.errors import NodeRefusal
from node.kvcache.pages import ArenaPages
from node.transfer.job_replies import OK, Reply
from node.transfer.services import AdmitLeg, Clock, Reserve
from prfaas_cluster.coding import formats_of
from prfaas_cluster.links import EgressLinks, OutgoingTransfer
from prfaas_cluster.outgoing import OutgoingRanges
from transport.control import messages as m
from transport.send.schedule.push import PushResult
from transport.send.spec import Urgency

log = logging.getLogger(__name__)

PREFIX_PUSH_TIMEOUT_S: Final = 120.0


class PrefillSender:
    """Opens pushes of reserved pages. The caller holds the pages until the push is done."""

    def __init__(self, pages: ArenaPages, links: EgressLinks, coding: Coding) -> None:
        self.pages = pages
        self._links = links
        self._coding = coding

    def check_layout(self, ticket: m.TicketInfo) -> None:
        """Raises NodeRefusal for a receiver that could not use what is sent."""
        if ticket.layout_fingerprint != self.pages.layout.fingerprint:
            raise NodeRefusal(
                "layout_mismatch", f"the receiver holds KVCache of layout {ticket.layout_fingerprint[:12]}"
            )
        if not 0 <= ticket.have_tokens <= ticket.num_tokens:
            raise NodeRefusal("bad_request", f"the receiver has {ticket.have_tokens} of {ticket.num_tokens} tokens")

    def open(
        self,
        reservation: Reservation,
        ticket: m.TicketInfo,
        on_done: Callable[[PushResult], None],
        *,
        rebalancing: bool = False,
    ) -> tuple[OutgoingRanges, OutgoingTransfer]:
        """Open a push. Raises NodeRefusal.

        A copy that other requests will find (`rebalancing`) must be exact, and gives way to what a request waits for.
        """
        ranges = OutgoingRanges(self.pages, reservation, ticket.have_tokens)
        formats = formats_of(self._coding, self.pages.layout, ranges.ranges, exact=rebalancing)
        urgency = Urgency.BULK if rebalancing else Urgency.NORMAL
        push = self._links.push(ticket, ranges.sizes, ranges.source, on_done, formats=formats, urgency=urgency)
        return ranges, push


class PrefillLeg:
    """A prefill for another node. `on_pushed` hears how its push went, `on_released` that its pages are free."""

    def __init__(
        self,
        job: str,
        reservation: Reservation,
        reply: Reply,
        pages: ArenaPages,
        now: Clock,
        on_pushed: Callable[[PushResult], None],
        on_released: Callable[["PrefillLeg"], None],
    ) -> None:
        self.reservation = reservation
        self.transfer_id = ""
        self._job = job
        self._reply = reply
        self._pages = pages
        self._now = now
        self._on_pushed = on_pushed
        self._on_released = on_released
        self._started_at = now()
        self._ranges: OutgoingRanges | None = None
        self._push: OutgoingTransfer | None = None
        self._result: PushResult | None = None
        self._pushed_s = 0.0
        self._prefill_end_s: float | None = None
        self._bytes_before_prefill_end = 0
        self._has_ended = False

    def open(self, ticket: m.TicketInfo, sender: PrefillSender) -> None:
        """Open the push; what is cached leaves at once. Raises NodeRefusal."""
        self._ranges, self._push = sender.open(self.reservation, ticket, self._pushed)
        self.transfer_id = ticket.transfer_id
        self._push.ready(self._ranges.cached())

    @property
    def is_pushing(self) -> bool:
        """Whether lanes may still read the pages."""
        return self._push is not None and self._result is None

    @property
    def bytes_sent(self) -> int:
        """Bytes that have left so far."""
        return self._push.bytes_sent if self._push else 0

    def layer_done(self, message: m.LayerDone) -> None:
        """Slabs that the engine completed may leave. Raises MessageError."""
        if self._push and self._ranges:
            self._push.ready(self._ranges.layer_done(message.group, message.layer, message.num_tokens))

    def state_done(self, message: m.StateDone) -> None:
        """A snapshot that the engine completed may leave. Raises MessageError."""
        if self._push and self._ranges:
            self._push.ready(self._ranges.state_done(message.group, message.layer, message.num_tokens))

    def prefill_done(self, after_s: float, bytes_sent: int) -> None:
        """The engine has computed the prompt."""
        self._prefill_end_s, self._bytes_before_prefill_end = after_s, bytes_sent
        self._report()

    def outcome(self, reason: str) -> str:
        """How the job ended, if its engine ended it for that reason (empty: all went well)."""
        if self._result is None:
            return reason or "engine_ended"
        if self._result.ok and self._prefill_end_s is not None:
            return OK
        return self._result.reason or reason or "engine_ended"

    def abort(self, reason: str) -> bool:
        """Stop the push; the engine hears that it failed, and ends the job. False if there is nothing to stop."""
        if self._push is None or self._result is not None or self._has_ended:
            return False
        self._push.abort(reason)
        return True

    def end(self, reason: str) -> None:
        """The engine has ended the job: release the pages, now or once the lanes have let go."""
        self._has_ended = True
        if self._push is not None and self._result is None:
            self._push.abort(reason)  # _pushed releases the pages when the lanes have let go
        else:
            self._release()

    def _pushed(self, result: PushResult) -> None:
        self._result, self._pushed_s = result, self._now() - self._started_at
        self._on_pushed(result)
        if not result.ok:
            log.warning("push failed job=%s reason=%s", self._job, result.reason)
        self._report()
        if self._has_ended:
            self._release()

    def _release(self) -> None:
        self._pages.release(self.reservation.request_id)
        self._on_released(self)

    def _report(self) -> None:
        """Tell the engine how the push went: at once if it failed, else when the prefill is over, too."""
        result = self._result
        # The last bytes often arrive before the engine has said that it is done.
        if result is None or self._has_ended or (result.ok and self._prefill_end_s is None):
            return
        self._reply(
            m.Delivered(
                job=self._job,
                ok=result.ok,
                reason=result.reason,
                bytes_total=result.stats.bytes_sent,
                bytes_saved=result.stats.bytes_saved,
                codecs=dict(result.stats.bytes_by_codec),
                bytes_before_prefill_end=self._bytes_before_prefill_end,
                prefill_end_s=self._prefill_end_s or 0.0,
                delivered_s=self._pushed_s,
                link=self._push.kind if self._push else "",
            )
        )


class PrefillLegs:
    """All transfers that leave a node. `admit` raises NodeRefusal while the node takes no prefill for another one."""

    def __init__(self, sender: PrefillSender, now: Clock, admit: AdmitLeg) -> None:
        self._sender = sender
        self._pages = sender.pages
        self._now = now
        self._admit = admit
        self._beginning = 0  # legs that wait for pages
        self._legs: set[PrefillLeg] = set()  # that hold pages
        self._prefixes: set[asyncio.Future[PushResult]] = set()
        self._ids = itertools.count()
        self.pushed = Counter(ok=0)  # of legs, by outcome

    @property
    def sending(self) -> int:
        """Transfers on their way."""
        return sum(leg.is_pushing for leg in self._legs) + len(self._prefixes)

    @property
    def has_legs(self) -> bool:
        """Whether a prefill for another node is computed, leaves, or waits for pages."""
        return bool(self._beginning or self._legs)

    def is_idle(self) -> bool:
        """Whether nothing holds pages or waits for some."""
        return not (self.has_legs or self._prefixes)

    # Legs

    async def begin(self, message: m.BeginPrefill, ticket: m.TicketInfo, reply: Reply, reserve: Reserve) -> PrefillLeg:
        """Reserve a prefill's pages and open its push to the holder of `ticket`. Raises NodeRefusal."""
        self._admit()
        self._check_ticket(message, ticket)
        self._beginning += 1
        try:
            reservation = await reserve()
        finally:
            self._beginning -= 1
        leg = PrefillLeg(
            message.job, reservation, reply, self._pages, self._now, self._count_push, self._legs.discard
        )  # fmt: skip
        self._legs.add(leg)
        try:
            leg.open(ticket, self._sender)
        except BaseException:
            leg.end("internal")
            raise
        return leg

    def _check_ticket(self, message: m.BeginPrefill, ticket: m.TicketInfo) -> None:
        self._sender.check_layout(ticket)
        if ticket.tokens_digest != message.tokens_digest or ticket.num_tokens != message.num_tokens:
            raise NodeRefusal("digest_mismatch", "the ticket was made for other tokens")

    def _count_push(self, result: PushResult) -> None:
        self.pushed[OK if result.ok else result.reason] += 1

    def abort(self, transfer_id: str, reason: str) -> bool:
        """Stop the push to a reservation. False for an unknown id."""
        stopped = [leg.abort(reason) for leg in self._legs if leg.transfer_id == transfer_id]
        return any(stopped)

    # Prefixes

    async def push_prefix(self, hashes: Sequence[bytes], ticket: m.TicketInfo) -> tuple[int, int]:
        """Send a cached prefix of `ticket.num_tokens` tokens; returns tokens and bytes. Raises NodeRefusal, TimeoutError."""
        self._sender.check_layout(ticket)
        reservation = await self._reserve_prefix(hashes, ticket.num_tokens)
        done: asyncio.Future[PushResult] = asyncio.get_running_loop().create_future()
        try:
            ranges, push = self._sender.open(reservation, ticket, done.set_result, rebalancing=True)
        except BaseException:
            self._pages.release(reservation.request_id)
            raise
        # However the wait below ends, lanes may still be reading; the pages go when they have let go.
        self._prefixes.add(done)
        done.add_done_callback(lambda _: self._prefix_pushed(done, reservation))
        push.ready(range(len(ranges.ranges)))
        try:
            async with asyncio.timeout(PREFIX_PUSH_TIMEOUT_S):
                result = await asyncio.shield(done)
        except BaseException:
            push.abort("given_up")
            raise
        if not result.ok:
            raise NodeRefusal("push_failed", result.reason)
        return ticket.num_tokens, result.stats.bytes_sent

    async def _reserve_prefix(self, hashes: Sequence[bytes], num_tokens: int) -> Reservation:
        await self._pages.bring_back(hashes, num_tokens)
        if self._pages.match(hashes, num_tokens).num_tokens != num_tokens:
            raise NodeRefusal("not_cached", f"no prefix of {num_tokens} tokens is cached here")
        blocks = hashes[: num_tokens // self._pages.layout.block_size]
        return self._pages.reserve(f"prefix-{next(self._ids)}", blocks, num_tokens, Purpose.PREFILL)

    def _prefix_pushed(self, done: "asyncio.Future[PushResult]", reservation: Reservation) -> None:
        self._prefixes.remove(done)
        self._pages.release(reservation.request_id)

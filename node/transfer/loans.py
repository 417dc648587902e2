"""The prefill side: pages for prefill jobs, and their KVCache leaving while it is computed.

    BeginPrefill ── reserve ──► JobPages ──► LayerDone/StateDone ──► PrefillDone ── commit ──► Delivered ──► EndJob ── release
                       └ open push ─► cached slabs at once ─► each slab when computed ─► all acknowledged ┘

Pages stay reserved until the engine has ended the job *and* the push has let go of them: a lane may be reading them.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hybrid_cache.cache.reservation import Hints, Purpose, Reservation
from hybrid_cache.layout.layout import ModelLayout, RangeKey, transfer_ranges
from node.coding import formats_of
from node.errors import NodeRefusal
from node.kvcache.pages import ArenaPages, split_hashes
from node.transfer.job_replies import OK, JobKey, JobReplies, Reply, job_pages, noting_refusals
from node.transfer.links import OutgoingTransfer, PeerLinks
from transport.control import messages as m
from transport.path.shm import ArenaSource
from transport.send.schedule.push import PushResult
from transport.send.spec import Urgency

log = logging.getLogger(__name__)

PREFIX_PUSH_TIMEOUT_S = 120.0
MAX_BRANCHES = 8
MAX_CATEGORY_CHARS = 64
# Kinds of jobs: for another node, for the prefix cache here, what an engine computed while it answered, and looks into the cache.
LEG, LOCAL, ANSWER, LOOKUP = "leg", "local", "answer", "lookup"


class OutgoingLoan:
    """One transfer that leaves this node: which of its ranges are computed, and what has been sent when."""

    def __init__(self, pages: ArenaPages, reservation: Reservation, have_tokens: int) -> None:
        self._layout = pages.layout
        self._pages = pages
        self._reservation = reservation
        self.num_tokens = reservation.num_tokens
        self.ranges = transfer_ranges(pages.layout, reservation.num_tokens, have_tokens)
        self._index = {key: i for i, key in enumerate(self.ranges)}
        self._attention_groups = (*pages.layout.full_groups, *pages.layout.window_groups)
        self._computed: dict[tuple[int, int], int] = {}  # (group, layer index) -> blocks that are complete

    @property
    def sizes(self) -> list[int]:
        """Bytes of each range."""
        return [self._layout.slab_bytes(key.group) for key in self.ranges]

    @property
    def source(self) -> ArenaSource:
        """Where the bytes lie, for lanes that send them and for receivers on this host that fetch them."""
        return self._pages.source(lambda i: self._pages.place(self._reservation, self.ranges[i]))

    def cached(self) -> list[int]:
        """Ranges that lie in the prefix cache already."""
        full_blocks = self._reservation.cached_tokens // self._layout.block_size
        ready = []
        for i, key in enumerate(self.ranges):
            is_state = key.group in self._layout.state_groups
            if (key.block == self._reservation.cached_tokens) if is_state else (key.block < full_blocks):
                ready.append(i)
        return ready

    def layer_done(self, group: int, layer: int, num_tokens: int) -> list[int]:
        """Ranges of `layer` that became complete with its first `num_tokens` tokens. Raises MessageError."""
        layer_index = self._layer_index(group, layer, self._attention_groups)
        num_tokens, size = min(num_tokens, self.num_tokens), self._layout.block_size
        complete = -(-num_tokens // size) if num_tokens >= self.num_tokens else num_tokens // size
        first = self._computed.get((group, layer_index), self._reservation.cached_tokens // size)
        self._computed[group, layer_index] = max(first, complete)
        return self._present(RangeKey(group, layer_index, block) for block in range(first, complete))

    def state_done(self, group: int, layer: int, num_tokens: int) -> list[int]:
        """The range of `layer`'s snapshot, if it is the one that travels. Raises MessageError."""
        layer_index = self._layer_index(group, layer, self._layout.state_groups)
        return self._present([RangeKey(group, layer_index, num_tokens)])

    def _layer_index(self, group: int, layer: int, groups: Sequence[int]) -> int:
        if group not in groups or layer not in self._layout.groups[group].layers:
            raise m.MessageError(f"layer {layer} of group {group} is nothing of that kind")
        return self._layout.groups[group].layers.index(layer)

    def _present(self, keys: Iterable[RangeKey]) -> list[int]:
        return [self._index[key] for key in keys if key in self._index]


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A prefill the engine works on."""

    job: str
    owner: object
    reservation: Reservation
    reply: Reply
    started_at: float
    is_lookup: bool = False
    outgoing: OutgoingLoan | None = None
    push: OutgoingTransfer | None = None
    transfer_id: str = ""  # of what is pushed
    link: str = ""
    prefill_end_s: float | None = None
    bytes_before_prefill_end: int = 0
    pushed_s: float = 0.0
    result: PushResult | None = None
    ended: bool = False

    @property
    def pushing(self) -> bool:
        """Whether lanes may still read the pages."""
        return self.push is not None and self.result is None

    @property
    def kind(self) -> str:
        """Whom it is computed for."""
        if self.is_lookup:
            return LOOKUP
        if self.reservation.purpose is Purpose.ANSWER:
            return ANSWER
        return LOCAL if self.push is None else LEG

    def outcome(self, reason: str) -> str:
        """How it ended, when its engine ended it for that reason (none: all went well)."""
        if self.push is None:
            return OK if self.prefill_end_s is not None else reason or OK
        if self.result is None:
            return reason or "engine_ended"
        return (
            OK if self.result.ok and self.prefill_end_s is not None else self.result.reason or reason or "engine_ended"
        )


@dataclass(slots=True)
class ProducerCounts:
    """What happened, for metrics."""

    refused: Mapping[str, int]
    delivered: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    dropped_pages: int = 0  # of prefixes, by command
    jobs: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and outcome


def hints_of(message: m.BeginPrefill) -> Hints:
    """What an engine has been told of a prompt. What makes no sense there is of no use, and does no harm."""
    branches = tuple(length for length in message.branch_tokens[:MAX_BRANCHES] if length > 0)
    useful = message.useful_tokens
    return Hints(
        branch_tokens=branches,
        category=message.category[:MAX_CATEGORY_CHARS],
        useful_tokens=None if useful is None else max(0, useful),
    )


class Producer:
    """All prefill jobs of a node."""

    def __init__(
        self,
        pages: ArenaPages,
        links: PeerLinks,
        room_timeout_s: float,
        now: Callable[[], float],
        admit_leg: Callable[[], None] = lambda: None,
    ) -> None:
        """`admit_leg` raises NodeRefusal when the node takes no prefill for another one."""
        self._pages = pages
        self._admit_leg = admit_leg
        self._legs_beginning = 0
        self._links = links
        self._room_timeout_s = room_timeout_s
        self._now = now
        self._ids = itertools.count()
        self._begins = JobReplies()
        self._jobs: dict[JobKey, PrefillJob] = {}  # that engines work on
        self._leaving: set[PrefillJob] = set()  # ended, but lanes may still read their pages
        self._prefixes: set[asyncio.Future[PushResult]] = set()
        self.counts = ProducerCounts(self._begins.refused)

    @property
    def layout(self) -> ModelLayout:
        """The layout of the node's model."""
        return self._pages.layout

    @property
    def sending(self) -> int:
        """Transfers on their way."""
        return sum(job.pushing for job in self._jobs.values()) + len(self._leaving) + len(self._prefixes)

    @property
    def has_legs(self) -> bool:
        """Whether a prefill for another node is computed, or leaves, or waits for pages."""
        return bool(self._legs_beginning or self._leaving) or any(job.kind == LEG for job in self._jobs.values())

    def is_idle(self) -> bool:
        """Whether nothing holds pages or waits for some."""
        return not (self._jobs or self._begins or self._leaving or self._prefixes)

    # From the engine

    def begin(self, message: m.BeginPrefill, owner: object, reply: Reply) -> None:
        """Answers with JobPages or Refused, now or when pages are free. Raises MessageError for a name in use."""
        key = (id(owner), message.job)
        if key in self._begins or key in self._jobs:
            raise m.MessageError(f"job {message.job!r} has begun already")
        if message.cached_only:
            noting = noting_refusals(reply, lambda reason: self._take_back(key, reason))
            self._begins.start(key, lambda: self._look_up(key, message, owner, reply), noting)
            return
        kind = ANSWER if message.computed else LOCAL if message.ticket is None else LEG
        noting = noting_refusals(reply, lambda reason: self._refused(key, kind, reason))
        self._begins.start(key, lambda: self._begin(key, message, owner, reply), noting)

    async def _begin(self, key: JobKey, message: m.BeginPrefill, owner: object, reply: Reply) -> m.JobPages:
        if message.ticket is None:
            reservation = await self._reserve(message)
            job = PrefillJob(message.job, owner, reservation, reply, self._now())
        else:
            job = await self._begin_leg(message, message.ticket, owner, reply)
        self._jobs[key] = job
        return job_pages(message.job, job.reservation)

    def _refused(self, key: JobKey, kind: str, reason: str) -> None:
        self._ended(kind, reason)
        self._take_back(key, reason)

    def _take_back(self, key: JobKey, reason: str) -> None:
        """What an engine has not been told of it cannot end."""
        if job := self._jobs.pop(key, None):
            self._end(job, reason)

    async def _look_up(self, key: JobKey, message: m.BeginPrefill, owner: object, reply: Reply) -> m.JobPages:
        if message.num_tokens <= 0:
            raise NodeRefusal("bad_request", f"num_tokens is {message.num_tokens}, allowed is 1 and more")
        hashes = split_hashes(message.hashes)
        await self._pages.bring_back(hashes, message.num_tokens)
        found = self._pages.match(hashes, message.num_tokens).num_tokens
        if not found:
            groups = self.layout.groups
            return m.JobPages(
                job=message.job,
                num_tokens=0,
                cached_tokens=0,
                blocks=tuple(() for _ in groups),
                states=tuple({} for _ in groups),
            )
        reservation = await self._pages.reserve_now(
            f"lookup-{next(self._ids)}", hashes[: found // self.layout.block_size], found, Purpose.PREFILL
        )
        self._jobs[key] = PrefillJob(message.job, owner, reservation, reply, self._now(), is_lookup=True)
        return job_pages(message.job, reservation)

    async def _begin_leg(
        self, message: m.BeginPrefill, ticket: m.TicketInfo, owner: object, reply: Reply
    ) -> PrefillJob:
        self._admit_leg()
        self._check_ticket(message, ticket)
        self._legs_beginning += 1
        try:
            job = PrefillJob(message.job, owner, await self._reserve(message), reply, self._now())
        finally:
            self._legs_beginning -= 1
        try:
            self._open_push(job, ticket)
        except BaseException:
            self._end(job, "internal")
            raise
        return job

    async def _reserve(self, message: m.BeginPrefill) -> Reservation:
        name, hashes = f"prefill-{next(self._ids)}", split_hashes(message.hashes)
        if message.computed:
            return await self._pages.reserve_now(name, hashes, message.num_tokens, Purpose.ANSWER)
        return await self._pages.reserve_when_free(
            name, hashes, message.num_tokens, Purpose.PREFILL, self._room_timeout_s, hints_of(message), message.tenant
        )

    def _check_ticket(self, message: m.BeginPrefill, ticket: m.TicketInfo) -> None:
        self._check_layout(ticket)
        if ticket.tokens_digest != message.tokens_digest or ticket.num_tokens != message.num_tokens:
            raise NodeRefusal("digest_mismatch", "the ticket was made for other tokens")

    def _check_layout(self, ticket: m.TicketInfo) -> None:
        if ticket.layout_fingerprint != self.layout.fingerprint:
            raise NodeRefusal(
                "layout_mismatch", f"the receiver holds KVCache of layout {ticket.layout_fingerprint[:12]}"
            )
        if not 0 <= ticket.have_tokens <= ticket.num_tokens:
            raise NodeRefusal("bad_request", f"the receiver has {ticket.have_tokens} of {ticket.num_tokens} tokens")

    def _open_push(self, job: PrefillJob, ticket: m.TicketInfo) -> None:
        job.outgoing, job.push = self._push(job.reservation, ticket, lambda result: self._pushed(job, result))
        job.transfer_id, job.link = ticket.transfer_id, job.push.kind
        job.push.ready(job.outgoing.cached())

    def _push(
        self,
        reservation: Reservation,
        ticket: m.TicketInfo,
        on_done: Callable[[PushResult], None],
        *,
        rebalancing: bool = False,
    ) -> tuple[OutgoingLoan, OutgoingTransfer]:
        """Opens a push of reserved pages, or gives them back. Raises NodeRefusal.

        What is copied for other requests to find (`rebalancing`) must be exact, and gives way to what a request waits for.
        """
        try:
            outgoing = OutgoingLoan(self._pages, reservation, ticket.have_tokens)
            formats = formats_of(self._links.coding, self.layout, outgoing.ranges, exact=rebalancing)
            urgency = Urgency.BULK if rebalancing else Urgency.NORMAL
            push = self._links.push(ticket, outgoing.sizes, outgoing.source, on_done, formats=formats, urgency=urgency)
            return outgoing, push
        except BaseException:
            self._pages.release(reservation.request_id)
            raise

    def layer_done(self, message: m.LayerDone, owner: object) -> None:
        """Slabs that the engine completed may leave."""
        job = self._jobs.get((id(owner), message.job))
        if job and job.push and job.outgoing:
            job.push.ready(job.outgoing.layer_done(message.group, message.layer, message.num_tokens))

    def state_done(self, message: m.StateDone, owner: object) -> None:
        """A snapshot that the engine completed may leave."""
        job = self._jobs.get((id(owner), message.job))
        if job and job.push and job.outgoing:
            job.push.ready(job.outgoing.state_done(message.group, message.layer, message.num_tokens))

    def prefill_done(self, message: m.PrefillDone, owner: object) -> None:
        """The prompt's full blocks and aligned snapshots become prefix cache. Raises MessageError for what cannot be."""
        job = self._jobs.get((id(owner), message.job))
        if job is None:
            return
        job.prefill_end_s = self._now() - job.started_at
        if job.kind != ANSWER:  # no prompt was computed for it
            self._computed(job, message.computed_tokens, message.compute_s)
        if job.push:
            job.bytes_before_prefill_end = job.push.bytes_sent
        self._pages.commit(job.reservation.request_id, message.num_tokens, frozenset(message.unfilled))
        self._report(job)

    def _computed(self, job: PrefillJob, num_tokens: int | None, seconds: float | None) -> None:
        """Notes what the model did for a job, by what the engine says or by what the agent sees of it."""
        if num_tokens is None:
            num_tokens = job.reservation.num_tokens - job.reservation.cached_tokens
        if seconds is None:
            seconds = job.prefill_end_s or 0.0
        if not (0 <= num_tokens <= job.reservation.num_tokens and 0.0 <= seconds < float("inf")):
            raise m.MessageError(f"job {job.job!r} computed {num_tokens} tokens in {seconds} s")
        self.counts.prefilled_tokens += num_tokens
        self.counts.cached_tokens += job.reservation.num_tokens - num_tokens
        if num_tokens:
            self._pages.computed(num_tokens, seconds)

    def end(self, message: m.EndJob, owner: object) -> None:
        """The engine is through with the job, or gave it up."""
        key = (id(owner), message.job)
        self._begins.cancel(key)
        if job := self._jobs.pop(key, None):
            self._ended(job.kind, job.outcome(message.reason))
            self._end(job, message.reason or "engine_ended")

    def engine_gone(self, owner: object) -> None:
        """The engine died: its jobs end, what it committed stays."""
        self._begins.cancel_all(id(owner))
        for key in [key for key in self._jobs if key[0] == id(owner)]:
            job = self._jobs.pop(key)
            self._ended(job.kind, job.outcome("engine_gone"))
            self._end(job, "engine_gone")

    def _ended(self, kind: str, outcome: str) -> None:
        self.counts.jobs[kind, outcome] += 1

    def _end(self, job: PrefillJob, reason: str) -> None:
        job.ended = True
        if job.pushing and job.push:
            self._leaving.add(job)  # _pushed frees the pages when the lanes have let go
            job.push.abort(reason)
        else:
            self._pages.release(job.reservation.request_id)

    def _pushed(self, job: PrefillJob, result: PushResult) -> None:
        job.result, job.pushed_s = result, self._now() - job.started_at
        if result.ok:
            self.counts.delivered += 1
        else:
            self.counts.failed[result.reason] = self.counts.failed.get(result.reason, 0) + 1
            log.warning("push failed job=%s reason=%s", job.job, result.reason)
        self._report(job)
        if job in self._leaving:
            self._leaving.remove(job)
            self._pages.release(job.reservation.request_id)

    def _report(self, job: PrefillJob) -> None:
        """Tells the engine how the push went: at once when it failed, else when the prefill is over, too."""
        result = job.result
        # The last bytes often arrive before the engine has said that it is done.
        if result is None or job.ended or (result.ok and job.prefill_end_s is None):
            return
        job.reply(
            m.Delivered(
                job=job.job,
                ok=result.ok,
                reason=result.reason,
                bytes_total=result.stats.bytes_sent,
                bytes_saved=result.stats.bytes_saved,
                codecs=dict(result.stats.bytes_by_codec),
                bytes_before_prefill_end=job.bytes_before_prefill_end,
                prefill_end_s=job.prefill_end_s or 0.0,
                delivered_s=job.pushed_s,
                link=job.link,
            )
        )

    # From the gateway, and from another node

    def abort(self, transfer_id: str, reason: str) -> bool:
        """Stops a push; its engine hears that it failed, and ends the job. False for an unknown id."""
        pushing = [job for job in self._jobs.values() if job.pushing and job.transfer_id == transfer_id]
        for job in pushing:
            assert job.push is not None
            job.push.abort(reason)
        return bool(pushing)

    def drop_prefix(self, hashes: Sequence[bytes], keep_tokens: int, unused_s: float) -> int:
        """Gives up the end of a cached prefix; returns how many pages that frees. Raises NodeRefusal."""
        if not unused_s >= 0:
            raise NodeRefusal("bad_request", f"unused_s is {unused_s}, allowed is 0 and more")
        pages = self._pages.drop(hashes, keep_tokens, unused_s)
        self.counts.dropped_pages += pages
        return pages

    async def push_prefix(self, hashes: list[bytes], ticket: m.TicketInfo) -> tuple[int, int]:
        """Sends a cached prefix of `ticket.num_tokens` tokens; returns tokens and bytes. Raises NodeRefusal."""
        self._check_layout(ticket)
        await self._pages.bring_back(hashes, ticket.num_tokens)
        if self._pages.match(hashes, ticket.num_tokens).num_tokens != ticket.num_tokens:
            raise NodeRefusal("not_cached", f"no prefix of {ticket.num_tokens} tokens is cached here")
        reservation = self._pages.reserve(
            f"prefix-{next(self._ids)}", hashes[: ticket.num_tokens // self.layout.block_size],
            ticket.num_tokens, Purpose.PREFILL,
        )  # fmt: skip
        done: asyncio.Future[PushResult] = asyncio.get_running_loop().create_future()
        outgoing, push = self._push(reservation, ticket, done.set_result, rebalancing=True)
        # However the wait below ends, lanes may still be reading; the pages go when they have let go.
        self._prefixes.add(done)
        done.add_done_callback(lambda _: self._prefix_pushed(done, reservation))
        push.ready(range(len(outgoing.ranges)))
        try:
            async with asyncio.timeout(PREFIX_PUSH_TIMEOUT_S):
                result = await asyncio.shield(done)
        except BaseException:
            push.abort("given_up")
            raise
        if not result.ok:
            raise NodeRefusal("push_failed", result.reason)
        return ticket.num_tokens, result.stats.bytes_sent

    def _prefix_pushed(self, done: "asyncio.Future[PushResult]", reservation: Reservation) -> None:
        self._prefixes.remove(done)
        self._pages.release(reservation.request_id)

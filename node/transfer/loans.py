"""Pages on loan to the node's engine, one job each: prefills, answers to be kept, looks into the cache.

    BeginPrefill ── reserve ──► JobPages ──► LayerDone/StateDone ──► PrefillDone ── commit ──► EndJob ── release
                       └ with a ticket: a leg of `prfaas_cluster` sends what is computed, and holds the pages

A loan without a leg releases its pages when its engine ends the job. A leg releases them itself, once no lane reads them.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hybrid_cache.cache.reservation import Hints, Purpose, Reservation
from hybrid_cache.layout.layout import ModelLayout
from node.errors import NodeRefusal
from node.kvcache.pages import ArenaPages, is_paced
from node.kvcache.prompt_hashes import read_hashes, split_hashes
from node.transfer.job_replies import OK, JobKey, JobReplies, Reply, job_pages, noting_refusals
from node.transfer.services import OutgoingLeg, OutgoingLegs
from transport.control import messages as m

MAX_BRANCHES = 8
MAX_CATEGORY_CHARS = 64
# Kinds of jobs: for another node, for the prefix cache here, what an engine computed while it answered, and looks into the cache.
LEG, LOCAL, ANSWER, LOOKUP = "leg", "local", "answer", "lookup"


@dataclass(slots=True, eq=False)
class EngineLoan:
    """Pages that the engine works on, and whom it works for."""

    job: str
    kind: str
    reservation: Reservation
    started_at: float
    leg: OutgoingLeg | None = None
    prefill_end_s: float | None = None

    def outcome(self, reason: str) -> str:
        """How it ended, if its engine ended it for that reason (empty: all went well)."""
        if self.leg is not None:
            return self.leg.outcome(reason)
        return OK if self.prefill_end_s is not None else reason or OK


@dataclass(slots=True)
class LoanCounts:
    """What happened, for metrics."""

    refused: Mapping[str, int]
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    dropped_pages: int = 0  # of prefixes, by command
    jobs: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and outcome


def hints_of(message: m.BeginPrefill) -> Hints:
    """What an engine was told of a prompt. Impossible values are dropped or clipped."""
    branches = tuple(length for length in message.branch_tokens[:MAX_BRANCHES] if length > 0)
    useful = message.useful_tokens
    return Hints(
        branch_tokens=branches,
        category=message.category[:MAX_CATEGORY_CHARS],
        useful_tokens=None if useful is None else max(0, useful),
    )


class EngineLoans:
    """All loans of a node. `legs` takes over the pages of those that are for another node."""

    def __init__(self, pages: ArenaPages, legs: OutgoingLegs, room_timeout_s: float, now: Callable[[], float]) -> None:
        self._pages = pages
        self._legs = legs
        self._room_timeout_s = room_timeout_s
        self._now = now
        self._ids = itertools.count()
        self._begins = JobReplies()
        self._loans: dict[JobKey, EngineLoan] = {}
        self.counts = LoanCounts(self._begins.refused)

    @property
    def layout(self) -> ModelLayout:
        """The layout of the node's model."""
        return self._pages.layout

    def is_idle(self) -> bool:
        """Whether no engine has pages or waits for some."""
        return not (self._loans or self._begins)

    def begin(self, message: m.BeginPrefill, owner: object, reply: Reply) -> None:
        """Answer with JobPages or Refused, now or when pages are free. Raises MessageError for a name in use."""
        key = (id(owner), message.job)
        if key in self._begins or key in self._loans:
            raise m.MessageError(f"job {message.job!r} has started already")
        if message.cached_only:
            noting = noting_refusals(reply, lambda reason: self._take_back(key, reason))
            self._begins.start(key, lambda: self._look_up(key, message), noting)
            return
        kind = ANSWER if message.computed else LOCAL if message.ticket is None else LEG
        noting = noting_refusals(reply, lambda reason: self._refused(key, kind, reason))
        self._begins.start(key, lambda: self._begin(key, message, kind, reply), noting)

    async def _begin(self, key: JobKey, message: m.BeginPrefill, kind: str, reply: Reply) -> m.JobPages:
        if message.ticket is None:
            loan = EngineLoan(message.job, kind, await self._reserve(message), self._now())
        else:
            leg = await self._legs.begin(message, message.ticket, reply, lambda: self._reserve(message))
            loan = EngineLoan(message.job, kind, leg.reservation, self._now(), leg)
        self._loans[key] = loan
        await self._pages.give_way(message.num_tokens)
        return job_pages(message.job, loan.reservation)

    async def _look_up(self, key: JobKey, message: m.BeginPrefill) -> m.JobPages:
        if message.num_tokens <= 0:
            raise NodeRefusal("bad_request", f"num_tokens is {message.num_tokens}; it must be at least 1")
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
        self._loans[key] = EngineLoan(message.job, LOOKUP, reservation, self._now())
        return job_pages(message.job, reservation)

    async def _reserve(self, message: m.BeginPrefill) -> Reservation:
        name = f"prefill-{next(self._ids)}"
        hashes = await read_hashes(message.hashes, is_long=is_paced(self.layout, message.num_tokens))
        if message.computed:
            return await self._pages.reserve_now(name, hashes, message.num_tokens, Purpose.ANSWER)
        return await self._pages.reserve_when_free(
            name, hashes, message.num_tokens, Purpose.PREFILL, self._room_timeout_s, hints_of(message), message.tenant
        )

    def _refused(self, key: JobKey, kind: str, reason: str) -> None:
        self.counts.jobs[kind, reason] += 1
        self._take_back(key, reason)

    def _take_back(self, key: JobKey, reason: str) -> None:
        """An engine cannot end a job that it was never told of."""
        if loan := self._loans.pop(key, None):
            self._release(loan, reason)

    def layer_done(self, message: m.LayerDone, owner: object) -> None:
        """Slabs that the engine completed may leave. Raises MessageError."""
        if leg := self._leg_of(message.job, owner):
            leg.layer_done(message)

    def state_done(self, message: m.StateDone, owner: object) -> None:
        """A snapshot that the engine completed may leave. Raises MessageError."""
        if leg := self._leg_of(message.job, owner):
            leg.state_done(message)

    def _leg_of(self, job: str, owner: object) -> OutgoingLeg | None:
        loan = self._loans.get((id(owner), job))
        return None if loan is None else loan.leg

    def prefill_done(self, message: m.PrefillDone, owner: object) -> None:
        """Full blocks and aligned snapshots of the prompt become prefix cache. Raises MessageError."""
        loan = self._loans.get((id(owner), message.job))
        if loan is None:
            return
        after_s = loan.prefill_end_s = self._now() - loan.started_at
        if loan.kind != ANSWER:  # no prompt was computed for it
            self._computed(loan, message.computed_tokens, message.compute_s)
        sent = loan.leg.bytes_sent if loan.leg else 0
        self._pages.commit(loan.reservation.request_id, message.num_tokens, frozenset(message.unfilled))
        if loan.leg:
            loan.leg.prefill_done(after_s, sent)

    def _computed(self, loan: EngineLoan, num_tokens: int | None, seconds: float | None) -> None:
        """Note what the model computed, as the engine says, or as the agent sees it."""
        if num_tokens is None:
            num_tokens = loan.reservation.num_tokens - loan.reservation.cached_tokens
        if seconds is None:
            seconds = loan.prefill_end_s or 0.0
        if not (0 <= num_tokens <= loan.reservation.num_tokens and 0.0 <= seconds < float("inf")):
            raise m.MessageError(f"job {loan.job!r} computed {num_tokens} tokens in {seconds} s")
        self.counts.prefilled_tokens += num_tokens
        self.counts.cached_tokens += loan.reservation.num_tokens - num_tokens
        if num_tokens:
            self._pages.computed(num_tokens, seconds)

    def end(self, message: m.EndJob, owner: object) -> None:
        """The engine has finished the job, or gave it up."""
        key = (id(owner), message.job)
        self._begins.cancel(key)
        if loan := self._loans.pop(key, None):
            self.counts.jobs[loan.kind, loan.outcome(message.reason)] += 1
            self._release(loan, message.reason or "engine_ended")

    def engine_gone(self, owner: object) -> None:
        """The engine died: its jobs end. What it committed stays in the prefix cache."""
        self._begins.cancel_all(id(owner))
        for key in [key for key in self._loans if key[0] == id(owner)]:
            loan = self._loans.pop(key)
            self.counts.jobs[loan.kind, loan.outcome("engine_gone")] += 1
            self._release(loan, "engine_gone")

    def _release(self, loan: EngineLoan, reason: str) -> None:
        if loan.leg is not None:
            loan.leg.end(reason)
        else:
            self._pages.release(loan.reservation.request_id)

    def drop_prefix(self, hashes: Sequence[bytes], keep_tokens: int, unused_s: float) -> int:
        """Give up the end of a cached prefix; returns how many pages that frees. Raises NodeRefusal."""
        if not unused_s >= 0:
            raise NodeRefusal("bad_request", f"unused_s is {unused_s}; it must be at least 0")
        pages = self._pages.drop(hashes, keep_tokens, unused_s)
        self.counts.dropped_pages += pages
        return pages

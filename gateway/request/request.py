"""One request: what it is, when things happened to it, and the record that stays of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from gateway.api.dialects.translator import ResponseTranslator
from gateway.api.openai import Call
from gateway.auth.keyring import EVERYBODY, Tenant
from gateway.cluster.agent_values import PrefillOutcome
from gateway.cluster.node import ClusterNode
from gateway.cluster.served_model import ServedModel, short
from gateway.prompt.prompt import Prompt, PromptModel
from gateway.prompt.tokenizer_trust import Reading
from gateway.ratelimit.limiter import UNLIMITED, TenantLimiter
from gateway.request.trace_context import TraceContext
from planner.decisions.admission.classes import UNPROMISED, ServiceClass
from planner.decisions.routing.offload import Route
from planner.decisions.routing.sides import ClusterWeighed


@dataclass(slots=True)
class Timeline:
    """When each step was reached, in seconds of the gateway's monotonic clock; None: not (yet)."""

    arrived: float
    routed: float | None = None
    prefill_start: float | None = None
    prefill_end: float | None = None
    kv_ready: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_token is None else self.last_token - self.arrived

    @property
    def kv_wait_s(self) -> float | None:
        """kv_ready − prefill_end: what the transfer added to the prefill."""
        if self.kv_ready is None or self.prefill_end is None:
            return None
        return self.kv_ready - self.prefill_end

    def relative(self) -> dict[str, float]:
        """Seconds after arrival of every step that was reached."""
        steps = {name: getattr(self, name) for name in self.__slots__}
        return {name: round(at - self.arrived, 6) for name, at in steps.items() if at is not None}


class BrokenOff(msgspec.Struct, frozen=True):
    """Why an answer ended before its end: `reason` is a metric label, `status` is what it counts as.

    500 to 503 as for an answer that never began, 499 where the client or no one is to blame.
    """

    reason: str
    detail: str
    status: int = 502


@dataclass(frozen=True, slots=True)
class Heard:
    """What an engine had said by a time at which its client was not behind: what comes after goes at the client's pace."""

    until: float
    tokens: int


@dataclass(slots=True)
class RequestProgress:
    """How far a request is, and what befell it on its way. Only the recorder writes it."""

    timeline: Timeline
    route: Route | None = None
    plan_version: int = 0  # of the plan under which it was last routed; 0: none
    prefill_node: str = ""
    prefilling_since: float | None = None  # a prefill leg is under way
    legs: int = 0  # that engines were sent for it, and did not turn away
    wasted_prefill_s: float = 0.0  # computed for an answer that never began
    origin: str = ""  # the cluster that computes its prompt
    destination: str = ""  # the cluster that its KVCache was sent to
    is_remote: bool = False  # whether that node, which may not be the one first chosen, is in a PrfaaS cluster
    outcome: PrefillOutcome | None = None
    fallbacks: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)  # fallbacks, if it is not the client's mistake
    fetched_from: str = ""  # the node whose prefix was sent to the prefill node for this request
    is_recomputed: bool = False  # the decode node computed a prompt whose KVCache should have come
    deaths: list[str] = field(default_factory=list)  # nodes whose engine died while it worked on this
    broken: list[tuple[ClusterNode, tuple[str, int]]] = field(default_factory=list)  # engines that may have died
    served: ServedModel | None = None  # the revision that was chosen
    prompt: Prompt | None = (
        None  # the client's in that revision, and what has been answered once another engine goes on
    )
    answered: list[int] = field(default_factory=list)  # tokens that the client has had from engines that failed
    takeovers: int = 0  # engines that went on with its answer
    gap_s: float = 0.0  # the longest time that it took one, from the failure to its first bytes
    unheard_tokens: int = 0  # estimate of what its engine had said when it was over
    is_unheard: bool = False  # its client left: that estimate counts

    def forget_prefill(self) -> None:
        """A new attempt begins: what an earlier one's prefill came to no longer counts."""
        self.outcome, self.is_recomputed, self.fetched_from = None, False, ""
        self.timeline.prefill_start = self.timeline.prefill_end = self.timeline.kv_ready = None


@dataclass(slots=True)
class StreamState:
    """An answer on its way to its client. The relay owns it; others may only break it off."""

    events: int = 0  # SSE events relayed
    completion_tokens: int | None = None  # as the answer names them, or its usage says; a stream need not have either
    is_between_events: bool = True  # the last one relayed was whole
    writing_since: float | None = None  # when the client was last offered bytes that it has not taken yet
    heard: Heard | None = None  # before its client had to be waited for, or all
    broken_off: BrokenOff | None = None  # its client is given no more of its answer than it had by then
    kept_bytes: int = 0  # of the names of its answer's tokens, for another engine to go on with; 0: it could not

    def break_off(self, why: BrokenOff) -> None:
        """It ends here, unless it has ended before."""
        self.broken_off = self.broken_off or why


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A call on its way. `id` is the client's or ours; `leg_id` is ours and unique, for what nodes key by it."""

    id: str
    leg_id: str
    call: Call
    asked: Prompt  # the client's
    offered: ServedModel  # when it was read
    progress: RequestProgress
    drawn_by: str = ""  # its revision of the model: one for all answers to a client's call; "": by `leg_id`
    service: ServiceClass = UNPROMISED
    tenant: Tenant = EVERYBODY
    allowance: TenantLimiter = UNLIMITED
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    trace: TraceContext | None = None  # None: traces are off
    telling: ResponseTranslator | None = None  # None: the client speaks as engines do
    model: PromptModel | None = None  # as its prompt was read, should it be read again
    reading: Reading = Reading.OWN  # which reader
    token_ids: msgspec.Raw | None = field(default=None, repr=False)  # as JSON, where an engine has read it
    stream: StreamState = field(default_factory=StreamState)

    @property
    def served(self) -> ServedModel:
        """The revision of the model that serves it, once one is chosen."""
        return self.progress.served or self.offered

    @property
    def prompt(self) -> Prompt:
        """The client's prompt, and what has been answered once an engine has failed."""
        return self.progress.prompt or self.asked

    @property
    def is_unshared(self) -> bool:
        """Whether KVCache computed elsewhere is of no use to it."""
        return self.call.options.is_unshared or self.reading is Reading.ALONE or self.prompt.is_alone

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: as they are named or its usage counts them, else one for each event but its end and its usage.

        Some engines send a role by itself, and several tokens in one event.
        """
        if self.progress.is_unheard:
            return self.progress.unheard_tokens
        if self.stream.completion_tokens is not None:
            return self.stream.completion_tokens
        return max(0, self.stream.events - 1 - self.call.options.wants_usage)

    def falls_behind(self, now: float) -> None:
        """Its client has to be waited for, now or at the end: how fast its engine is has been seen by now."""
        if self.stream.heard is None:
            self.stream.heard = Heard(now, self.output_tokens)

    @property
    def tbt_s(self) -> float | None:
        """Mean time from token to token of a whole stream, as its engine says them."""
        first, last, tokens = self.progress.timeline.first_token, self.progress.timeline.last_token, self.output_tokens
        if self.stream.heard is not None:
            last, tokens = self.stream.heard.until, self.stream.heard.tokens
        if not self.call.stream or not self.is_answered or first is None or last is None or tokens < 2:
            return None
        return (last - first) / (tokens - 1)

    @property
    def is_answered(self) -> bool:
        """Whether the client has everything it will get."""
        return self.progress.timeline.last_token is not None

    @property
    def is_served(self) -> bool:
        """Whether the client has its whole answer: a stream that broke off has been told so, and ended."""
        return self.is_answered and self.stream.broken_off is None

    @property
    def has_cost(self) -> bool:
        """Whether an engine was given work for it, even if its client left before the end."""
        return self.progress.legs > 0

    @property
    def route_label(self) -> str:
        """`local`, `remote`, or `none` before a decision. A prefill on the decode node is local."""
        if self.progress.route is None:
            return "none"
        return "remote" if self.progress.is_remote else "local"

    @property
    def reason_label(self) -> str:
        return str(self.progress.route.reason) if self.progress.route else "none"


def kept(request: Request) -> str:
    """What came of a stream's promises; "" for an answer that is not streamed: its client sees no single tokens."""
    ttft_s, tbt_s, service = request.progress.timeline.ttft_s, request.tbt_s, request.service
    if not request.call.stream or ttft_s is None:
        return ""
    if ttft_s > min(service.ttft_s, service.deadline_s):
        return "late_first_token"
    return "slow_tokens" if tbt_s is not None and tbt_s > service.tbt_s else "kept"


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a finished request: a line of `GET /prfaas/requests`."""

    seq: int
    id: str
    status: int
    arrived_s: float  # on the gateway's own clock: differences mean something, the value does not
    endpoint: str
    stream: bool
    service_class: str
    tenant: str
    route: str
    target: str
    reason: str
    prefill_node: str
    decode_node: str
    total: int
    uncached: int
    cached: int
    output_tokens: int
    threshold: float
    plan: int  # the version followed when it was routed; 0: none
    model: str  # as clients call it
    revision: str  # of the model, as it was last routed; "": not routed
    fallbacks: list[str]
    ttft_s: float | None
    predicted_ttft_s: float | None  # as routing saw it, from then on
    wasted_prefill_s: float
    e2e_s: float | None
    bytes: int
    link: str
    takeovers: int  # engines that went on with its answer when the one before had failed
    gap_s: float  # the longest of the times from such a failure to the next bytes
    fetched_from: str
    bytes_saved: int  # of `bytes`, by coding on the way
    predicted_bytes: int  # that the decision expected to cross a link, coding included
    codecs: dict[str, int]  # bytes by codec; "int8" and "fp8" mean that the answer was decoded from quantised KVCache
    overlap: float | None
    kv_ready_minus_prefill_end_s: float | None
    timeline: dict[str, float]
    considered: tuple[ClusterWeighed, ...] = ()  # clusters that could have prefilled, and why others did not
    error: str = ""


def cached_tokens(request: Request) -> int:
    """Prompt tokens that were not computed, as far as is known here."""
    if request.progress.is_recomputed or request.progress.route is None:
        return 0
    cached = (
        request.progress.outcome.cached_tokens if request.progress.outcome else request.progress.route.cached_tokens
    )
    return min(cached, request.asked.num_tokens)  # of what has been answered, too, where another engine goes on


def record_of(request: Request, seq: int, status: int, error: str = "") -> RequestRecord:
    """The record of `request` once it is over. `cached` is what the prefill reused, `uncached` what it computed."""
    route, outcome, timeline = request.progress.route, request.progress.outcome, request.progress.timeline
    total = request.asked.num_tokens
    cached = cached_tokens(request)
    sent = outcome.bytes_total if outcome else 0
    return RequestRecord(
        seq=seq,
        id=request.id,
        status=status,
        arrived_s=round(timeline.arrived, 6),
        endpoint=request.call.dialect or request.call.endpoint,
        stream=request.call.stream,
        service_class=request.service.name,
        tenant=request.tenant.name,
        route=request.route_label,
        target=str(route.target) if route else "none",
        reason=request.reason_label,
        prefill_node=request.progress.prefill_node,
        decode_node=route.decode_node if route else "",
        total=total,
        uncached=total - cached,
        cached=cached,
        output_tokens=request.output_tokens,
        threshold=route.threshold_tokens if route else 0.0,
        plan=request.progress.plan_version,
        model=request.served.name,
        revision=short(request.served.revision) if route else "",
        fallbacks=list(request.progress.fallbacks),
        ttft_s=_rounded(timeline.ttft_s),
        predicted_ttft_s=_rounded(max(route.ttft_s, route.link_s)) if route else None,
        wasted_prefill_s=round(request.progress.wasted_prefill_s, 6),
        e2e_s=_rounded(timeline.e2e_s),
        bytes=sent,
        link=outcome.link if outcome else "",
        takeovers=request.progress.takeovers,
        gap_s=round(request.progress.gap_s, 6),
        fetched_from=request.progress.fetched_from,
        bytes_saved=outcome.bytes_saved if outcome else 0,
        predicted_bytes=round(route.coded_bytes) if route else 0,
        codecs=outcome.codecs if outcome else {},
        overlap=_overlap(outcome) if outcome else None,
        kv_ready_minus_prefill_end_s=_rounded(timeline.kv_wait_s),
        timeline=timeline.relative(),
        considered=route.considered if route else (),
        error=error,
    )


def _overlap(outcome: PrefillOutcome) -> float | None:
    """The part of what was sent that had left when the prefill ended."""
    if not outcome.bytes_total or outcome.bytes_before_prefill_end is None:
        return None
    return round(outcome.bytes_before_prefill_end / outcome.bytes_total, 6)


def _rounded(seconds: float | None) -> float | None:
    """To microseconds: what is beyond is noise of the subtraction."""
    return None if seconds is None else round(seconds, 6)

"""Records what became of a request: for its record, the log and the metrics."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from gateway.api.usage import recompute_reason
from gateway.auth.keyring import Tenant
from gateway.cluster.agent_values import PrefillOutcome
from gateway.cluster.node import ClusterNode
from gateway.cluster.served_model import ServedModel
from gateway.errors import ApiError, NodeFailure, TenantLimited
from gateway.prompt.prompt import Prompt
from gateway.request.request import Request, RequestRecord
from gateway.telemetry.load_report import OfferedLoad
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.record_ring import RecordRing
from planner.decisions.failures.retries import NOTHING_DONE, FailedStage
from planner.decisions.routing.offload import Route, Target
from planner.decisions.views import ClusterKind

log = logging.getLogger("prfaas.gateway.route")

BUSY: Final = (429, 503)  # that would have been served by a larger system

CLIENT_LEFT: Final = "client_closed"
CLIENT_CLOSED: Final = 499  # nginx's status for a client that did not wait

OnEnded = Callable[[Request, RequestRecord, float], None]  # with the time of arrival, in seconds since 1970


class RequestRecorder:
    """Keeps the books of requests: alone writes their progress."""

    def __init__(
        self,
        metrics: Metrics,
        records: RecordRing,
        offered: OfferedLoad,
        clock: Callable[[], float],
        on_ended: Sequence[OnEnded] = (),
    ) -> None:
        self._offered = offered
        self._on_ended = on_ended
        self._metrics = metrics
        self._records = records
        self._clock = clock

    def asked(self, chosen: Route) -> None:
        """A request has its first route, whether it comes to that or not."""
        self._offered.asked(chosen.uncached_tokens)

    def turned_away(self, error: ApiError, tenant: Tenant) -> None:
        """A request was answered with an error before it was read."""
        self._metrics.rejected(error.code or "invalid", error.status, tenant.name)
        if error.status in BUSY and not isinstance(error, TenantLimited):
            self._offered.refused_unread()

    def decides(self, request: Request, plan_version: int) -> None:
        """It is about to be routed, by the plan of this version; 0: by none."""
        request.progress.plan_version = plan_version

    def serves(self, request: Request, served: ServedModel) -> None:
        """It goes to nodes of this revision, and has its names there."""
        request.progress.served, request.progress.prompt = served, request.prompt.within(served.revision)

    def routed(self, request: Request, chosen: Route, tries: int) -> None:
        """A route was chosen, after `tries` that failed."""
        self._metrics.travelled(request)  # for a try that is over, whose outcome is forgotten below
        if request.progress.timeline.routed is None:
            request.progress.timeline.routed = self._clock()
        request.progress.route = chosen
        request.progress.prefill_node = chosen.prefill_node or chosen.decode_node
        request.progress.is_remote = chosen.target is Target.REMOTE
        request.progress.forget_prefill()
        log.info("route id=%s %s%s", request.id, chosen, f" attempt={tries + 1}" if tries else "")

    def fell_back(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """A first choice did not work out."""
        request.progress.fallbacks.append(reason)
        self._metrics.fallback(reason)
        log.warning("fallback id=%s reason=%s%s", request.id, reason, f" ({error})" if error else "")

    def far_hit(self, request: Request, told_tokens: int, cached_tokens: int) -> None:
        """A node far away has computed a prompt. Its digest had told that so many tokens of it are cached."""
        is_held = cached_tokens >= told_tokens
        self._metrics.far_hit("held" if is_held else "missing")
        if not is_held:
            self.fell_back(request, "summary_wrong")

    def doubted(self, request: Request, reason: str, error: Exception | None = None) -> None:
        """A node refused what the client wrote: that is the client's mistake, unless the decode node answers it."""
        request.progress.doubts.append(reason)
        log.info("refused id=%s reason=%s%s", request.id, reason, f" ({error})" if error else "")

    def _settle_doubts(self, request: Request, status: int) -> None:
        doubts, request.progress.doubts = request.progress.doubts, []
        if status < 400 or status >= 500:
            for reason in doubts:
                self.fell_back(request, reason)

    def prefilling(self, request: Request, node: ClusterNode) -> None:
        """`node` computes the prompt, be it the one that was chosen or another one."""
        request.progress.prefilling_since = self._clock()
        request.progress.prefill_node, request.progress.origin = node.id, node.cluster
        request.progress.is_remote = node.info is not None and node.info.cluster_kind == ClusterKind.PRFAAS

    @contextmanager
    def leg(self, request: Request) -> Iterator[None]:
        """A leg of it: its cost is charged even if its client does not wait, unless the engine has turned it away."""
        request.progress.legs += 1
        try:
            yield
        except NodeFailure as error:
            if error.failure in NOTHING_DONE:
                request.progress.legs -= 1
            raise

    def fetched(self, request: Request, source: ClusterNode) -> None:
        """Its prefill node was sent a prefix that `source` had."""
        request.progress.fetched_from = source.id

    def recomputes(self, request: Request) -> None:
        """The decode node is told to compute the prompt itself."""
        request.progress.is_recomputed = True

    def goes_on(self, request: Request, prompt: Prompt, answered: list[int]) -> None:
        """Another engine is to go on after the tokens `answered`, the end of `prompt` now."""
        request.progress.prompt, request.progress.answered = prompt, answered

    def broke(self, request: Request, node: ClusterNode, engine: tuple[str, int]) -> None:
        """An engine broke its stream, and may have died of it."""
        request.progress.broken.append((node, engine))

    def take_broken(self, request: Request) -> list[tuple[ClusterNode, tuple[str, int]]]:
        """The engines that broke its stream since this was last asked."""
        broken, request.progress.broken = request.progress.broken, []
        return broken

    def died(self, request: Request, node: ClusterNode) -> None:
        """An engine of `node` died while it worked on this."""
        request.progress.deaths.append(node.id)

    def unheard(self, request: Request, tokens: int) -> None:
        """It is over. Its engine had said so many tokens, as is estimated, that no client has read."""
        request.progress.unheard_tokens = tokens

    def delivered(self, request: Request, outcome: PrefillOutcome, decode: ClusterNode) -> None:
        """The KVCache is with the decode node."""
        now, timeline = self._clock(), request.progress.timeline
        request.progress.prefilling_since = None
        request.progress.outcome, request.progress.destination = outcome, decode.cluster
        # The node tells durations, not times: they are counted back from its answer, never to before the routing.
        earliest = timeline.routed or timeline.arrived
        timeline.kv_ready = now
        if outcome.bytes_before_prefill_end is not None:  # else its node does not tell the two apart
            timeline.prefill_end = max(earliest, now - max(0.0, outcome.delivered_s - outcome.prefill_end_s))
        timeline.prefill_start = max(earliest, now - max(0.0, outcome.delivered_s - outcome.prefill_start_s))

    def notice_recompute(self, request: Request, chunk: bytes) -> None:
        """A decode node that could not use what landed says so in its answer; that is not to go by unseen."""
        if not request.progress.is_recomputed and (reason := recompute_reason(chunk)) is not None:
            request.progress.is_recomputed = True
            self.fell_back(request, f"recompute_{reason}")

    def taken_over(self, request: Request, gap_s: float) -> None:
        """Another engine has gone on with its answer, `gap_s` after the one before had failed."""
        request.progress.takeovers += 1
        request.progress.gap_s = max(request.progress.gap_s, gap_s)
        self._metrics.taken_over("continued", gap_s)
        log.info("takeover id=%s after=%d gap=%.3fs", request.id, len(request.progress.answered), gap_s)

    def not_taken_over(self, request: Request, reason: str) -> None:
        """No node goes on with an answer that the client has a part of; "ended": only its end was missing."""
        self._metrics.taken_over(reason)
        log.warning("no takeover id=%s reason=%s", request.id, reason)

    def not_tried_again(self, request: Request, stage: FailedStage) -> None:
        """What failed would have been asked of another node, had that not happened too often of late."""
        self._metrics.retry_refused(stage)
        log.warning("not tried again id=%s stage=%s: the budget is spent", request.id, stage)

    def killed_engines(self, request: Request, shape: str, is_refused: bool) -> None:
        """As many engines died under a request as may; others of its shape are refused from now on, or not."""
        self._metrics.upkeep.poisoned("refused" if is_refused else "answered_before")
        note = "others like it are refused" if is_refused else "others like it have been answered, and are not refused"
        log.error(
            "poison id=%s engines of %s died: %s (%s)", request.id, ", ".join(request.progress.deaths), note, shape
        )

    def answering(self, request: Request, status: int) -> None:
        """The decode node has begun to answer."""
        self._settle_doubts(request, status)
        request.progress.timeline.first_token = self._clock()

    def relayed(self, request: Request) -> None:
        """The client has all that it will get, if it had not before."""
        if request.progress.timeline.last_token is None:
            request.progress.timeline.last_token = self._clock()

    def closed(self, request: Request, status: int, error: str, code: str) -> None:
        """The request is over, however it ended; `code` is why.

        An answer that broke off counts by its end, not by the status that it began with.
        """
        if (broken := request.stream.broken_off) is not None:
            status, error, code = broken.status, broken.detail, broken.reason
        elif code == CLIENT_LEFT and request.progress.unheard_tokens:
            request.progress.is_unheard = True
        self._settle_doubts(request, status)
        request.progress.wasted_prefill_s = self._wasted_s(request)
        record = self._records.add(request, status, error)
        if self._on_ended:
            arrived_unix_s = datetime.now(UTC).timestamp() - (self._clock() - request.progress.timeline.arrived)
            for on_ended in self._on_ended:
                on_ended(request, record, arrived_unix_s)
        self._metrics.finished(request, status, code)
        if status == 200:
            self._offered.answered(request.output_tokens)

    def _wasted_s(self, request: Request) -> float:
        """Prefill seconds of a request whose answer has not begun; of a leg cut short, those that routing predicted."""
        route, outcome = request.progress.route, request.progress.outcome
        if route is None or request.progress.timeline.first_token is not None:
            return 0.0
        if outcome is not None:
            return max(0.0, outcome.prefill_end_s - outcome.prefill_start_s)
        if request.progress.prefilling_since is None:
            return 0.0
        queue_s = route.ttft_s - route.compute_s
        return min(route.compute_s, max(0.0, self._clock() - request.progress.prefilling_since - queue_s))

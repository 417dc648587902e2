"""The scheduler's side of the connector: it asks the agent for pages, and instructs vLLM and the workers.

A prefill leg stops one token short of its prompt, which the decode side computes: with recurrent states anything else
would apply a token twice. It may sample one token more than it was asked for, because a request that waits for its
delivery must not be finished: its answer says whether the KVCache arrived. While it waits it is not scheduled.

Methods belong to vLLM's scheduler thread: a request whose pages are on their way is asked about again. They wait only
while every request waits for the agent. A step of vLLM that computes nothing still wakes its workers, which then spin for
a second: a decode server that went on asking for its landing would take a core or two, perhaps from the prefill.
Nothing here may raise into vLLM's step, which would end the server: a request that cannot be served is left to vLLM.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from engine.errors import RequestError
from engine.openai.api import KVTransfer, KVTransferParams, transfer_of
from engine.vllm import internals
from engine.vllm.layout import VllmLayout
from engine.vllm.scheduler_side import media
from engine.vllm.scheduler_side.agent import VllmAgentThread
from engine.vllm.scheduler_side.errands import AgentEvent, Arrived, ErrandFailed, ErrandWritten, Granted
from engine.vllm.scheduler_side.handover import Handover, HandoverCounts, HandoverPhase, HandoverRoute
from engine.vllm.scheduler_side.saves import begin_computing, frozen, is_last, step_save
from engine.vllm.scheduler_side.steps import ArenaRef, ForwardStep, LoadBlocks, SaveBlocks, StateOffer
from hybrid_cache.hashing.block_hash import model_salt, namespaced
from transport.control.messages import JobPages

log = logging.getLogger(__name__)

LOCAL_WAIT_S: Final = 1.0  # a cache must not keep requests waiting longer than computing would
LEG_WAIT_S: Final = 60.0  # agents refuse earlier; this is for one that says nothing
CLAIM_GRACE_S: Final = 10.0  # the agent watches the landing's own deadline
DELIVERY_WAIT_S: Final = 3600.0  # a push that makes no progress fails long before
IDLE_WAIT_S: Final = 0.002  # the most that a new request is kept waiting by those that cannot go on
MAX_REST_S: Final = 5.0  # without a step of vLLM, should anything but agent, requests and deadlines need one
REPORT_INTERVAL_S: Final = 0.05
REPEAT_INTERVAL_S: Final = 1.0  # of an unchanged load: waking the agent's thread costs more than all else in a step

NO_OFFERS: Final[Mapping[str, Sequence[StateOffer]]] = MappingProxyType({})
NO_DRAFTS: Final[Mapping[str, Sequence[int]]] = MappingProxyType({})


class SchedulerSide:
    """All requests of one vLLM engine."""

    def __init__(
        self,
        layout: VllmLayout,
        agent: VllmAgentThread,
        now: Callable[[], float],
        *,
        local_tier: bool = True,
        engine: internals.EngineAround = internals.NO_ENGINE,
    ) -> None:
        """`engine`: the one that makes this, as far as it can be found."""
        self._layout = layout
        self._agent = agent
        self._now = now
        self._local_tier = local_tier
        self._engine = engine
        self._has_rested = False  # in the step that is being put together
        self._block_size = layout.model.block_size
        self._salt = model_salt(layout.model.fingerprint)
        self._requests: dict[str, Any] = {}
        self._handovers: dict[str, Handover] = {}
        self._errands: dict[int, Handover] = {}
        self._arena: ArenaRef | None = None
        self._grants: list[JobPages] = []
        self._loads: list[LoadBlocks] = []
        self._counts = HandoverCounts()
        self._reported_s = float("-inf")
        self._said: tuple[int, int, int] | None = None
        self._said_s = float("-inf")

    # A request's life, in the order in which vLLM calls

    def on_new_request(self, request: Any) -> None:
        """Takes a request up. What another node waits for is asked for at once; what is only cache, when its turn comes."""
        self._requests[request.request_id] = request
        handover = self._handover(request)
        if handover is None:
            return
        self._handovers[request.request_id] = handover
        if handover.route is HandoverRoute.LEG:
            internals.stop_before_last(request)
        if reason := handover.reason or self._unsuited(request, handover.transfer):
            self._give_up(handover, reason)
        elif handover.route is HandoverRoute.LOCAL:
            handover.phase = HandoverPhase.NEW
        else:
            self._ask(handover)

    def num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """Tokens beyond `num_computed_tokens` that can be loaded; None: ask again."""
        num_prompt_tokens = request.num_prompt_tokens
        self._hear()
        handover = self._handovers.get(request.request_id)
        if handover is None:
            return 0
        if handover.phase is HandoverPhase.NEW:
            self._ask(handover)
        if handover.phase is HandoverPhase.ASKED and self._rest():
            self._hear()
        if request.num_prompt_tokens != num_prompt_tokens:  # cut by what was heard: vLLM's own hit may be longer now
            return None
        if handover.phase is HandoverPhase.ASKED:
            if self._now() < handover.deadline_s:
                return None
            self._fail(handover, "timeout")
            return None
        if handover.phase is HandoverPhase.HELD:  # preempted while it waits: nothing to do before its delivery
            return None
        if handover.phase not in (HandoverPhase.GRANTED, HandoverPhase.DELIVERED):
            return 0
        assert handover.pages is not None
        ready = handover.pages.num_tokens
        if handover.phase is HandoverPhase.GRANTED and handover.route is not HandoverRoute.LANDING:
            ready = handover.pages.cached_tokens
            if handover.route is HandoverRoute.LEG and ready >= handover.prefill_tokens:
                self._send_cached(handover)
                return None
        if handover.phase is HandoverPhase.DELIVERED and (not request.num_preemptions or handover.lacks_state(ready)):
            return 0
        if ready > request.num_prompt_tokens:  # cut after its delivery: there is nothing to load into
            return 0
        handover.offered_from = num_computed_tokens
        return max(0, ready - num_computed_tokens)

    def after_alloc(self, request: Any, tables: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """vLLM has blocks for the request; `num_external_tokens` are to be loaded into them."""
        handover = self._handovers.get(request.request_id)
        if handover is None or handover.phase not in (HandoverPhase.GRANTED, HandoverPhase.DELIVERED):
            return
        assert handover.pages is not None
        if num_external_tokens > 0:
            handover.phase = HandoverPhase.LOADING
            stop = handover.offered_from + num_external_tokens
            self._loads.append(
                LoadBlocks(request.request_id, handover.pages.job, handover.offered_from, stop, frozen(tables))
            )
        elif handover.phase is HandoverPhase.DELIVERED:
            pass
        elif handover.route is HandoverRoute.LANDING:
            self._finish(handover, loaded=handover.offered_from >= handover.pages.num_tokens)
        else:
            handover.cached_tokens = handover.offered_from  # found in vLLM's own cache
            self._begin_computing(handover)

    def build_step(
        self,
        scheduled: Mapping[str, int],
        tables_of: Callable[[str], Sequence[Sequence[int]]],
        offers: Mapping[str, Sequence[StateOffer]] = NO_OFFERS,
        drafts: Mapping[str, Sequence[int]] = NO_DRAFTS,
    ) -> ForwardStep:
        """What the workers do besides computing `scheduled` tokens of each request. `tables_of`: block ids of one. `offers`:
        states that the step leaves in other blocks than at its end, by request. `drafts`: those of the tokens that are some."""
        in_lockstep = self._engine.in_lockstep
        if not scheduled and not self._loads and not self._rest() and self._is_waiting() and not in_lockstep:
            self._agent.news.wait(IDLE_WAIT_S)
        self._has_rested = False
        self._hear()
        saves = [
            save
            for request_id, num_tokens in scheduled.items()
            if (handover := self._handovers.get(request_id)) is not None
            and (
                save := self._save(
                    handover, num_tokens, tables_of, offers.get(request_id, ()), len(drafts.get(request_id, ()))
                )
            )
            is not None
        ]
        self._report_load(scheduled)
        step = ForwardStep(
            str(self._agent.rank_socket),
            self._arena,
            tuple(self._grants),
            tuple(saves),
            tuple(self._loads),
            is_idle=not scheduled and not in_lockstep,
        )
        self._grants, self._loads = [], []
        return step

    def loads_ended(self, done: set[str], failed: set[str]) -> None:
        """All ranks have finished the loads of these requests, or could not."""
        for request_id in done:
            handover = self._handovers.get(request_id)
            if handover is None or handover.phase is not HandoverPhase.LOADING:
                continue
            if handover.finished:  # aborted meanwhile
                self._finish(handover, reason="aborted")
                del self._handovers[request_id]
                if handover.route is HandoverRoute.LEG:
                    self._counts.legs["aborted"] += 1
            elif request_id in failed:
                self._load_failed(handover)
            else:
                self._loaded(handover)

    def request_finished(self, request: Any) -> dict[str, Any] | None:
        """The request is over, however it ended; returns what its answer carries as `kv_transfer_params`."""
        self._requests.pop(request.request_id, None)
        handover = self._handovers.get(request.request_id)
        if handover is None:
            return None
        handover.finished = True
        if handover.phase is HandoverPhase.LOADING:
            return None  # its pages are being read: `loads_ended` gives them back
        del self._handovers[request.request_id]
        self._finish(handover, reason="" if handover.outcome else "aborted")
        if handover.route is HandoverRoute.LEG:
            self._counts.legs["delivered" if handover.outcome else handover.reason or "ended_early"] += 1
        return handover.answer()

    def take_counts(self) -> HandoverCounts:
        """What happened since the last call."""
        counts, self._counts = self._counts, HandoverCounts()
        return counts

    # Which way

    def _handover(self, request: Any) -> Handover | None:
        """None for a request whose KVCache no other request can use."""
        prompt, reason = list(request.prompt_token_ids or ()), ""
        insets = media.insets_of(request)
        try:
            transfer = _transfer(request.kv_transfer_params)
        except RequestError as exc:
            log.warning("kv_transfer_params of id=%s: %s", request.request_id, exc)
            transfer, reason = KVTransfer(), "bad_request"
        asked = request.kv_transfer_params if isinstance(request.kv_transfer_params, Mapping) else {}
        if transfer.ticket is not None or (reason and asked.get("do_remote_decode")):
            if len(prompt) < 2:
                reason = "bad_request"
            elif media.reaches_the_end(request):
                reason = "media_at_end"
            return Handover(
                request=request, route=HandoverRoute.LEG, prompt=prompt, transfer=transfer, insets=insets, reason=reason
            )
        if transfer.transfer_id is not None and len(prompt) > 1:
            return Handover(
                request=request, route=HandoverRoute.LANDING, prompt=prompt, transfer=transfer, insets=insets
            )
        if reason:
            self._counts.fallbacks[reason] += 1
        if not self._local_tier or (len(prompt) - 1) < self._block_size or self._unsuited(request, transfer):
            return None
        return Handover(request=request, route=HandoverRoute.LOCAL, prompt=prompt, transfer=transfer, insets=insets)

    def _unsuited(self, request: Any, transfer: KVTransfer) -> str:
        salts = self._agent.block_salts or (self._salt,)
        return internals.unsuited(
            request, lambda namespace: any(transfer.salt == namespaced(salt, namespace) for salt in salts)
        )

    def _ask(self, handover: Handover) -> None:
        handover.phase = HandoverPhase.ASKED
        handover.asked_s = self._now()
        transfer, request_id = handover.transfer, handover.request.request_id
        if handover.route is HandoverRoute.LANDING:
            assert transfer.transfer_id is not None
            handover.deadline_s = handover.asked_s + transfer.timeout_s + CLAIM_GRACE_S
            handover.errand = self._agent.claim(
                handover.prompt, transfer.salt, transfer.transfer_id, transfer.timeout_s, handover.insets
            )
        else:
            handover.deadline_s = handover.asked_s + (LEG_WAIT_S if transfer.ticket else LOCAL_WAIT_S)
            num_tokens = handover.prefill_tokens
            if transfer.ticket is None:
                num_tokens -= num_tokens % self._block_size  # only whole blocks can be reused
            handover.errand = self._agent.begin(
                request_id,
                handover.prompt,
                num_tokens,
                transfer.salt,
                transfer.ticket,
                transfer.hints,
                handover.insets,
            )
        self._errands[handover.errand] = handover

    # What the agent says

    def _hear(self) -> None:
        for event in self._agent.poll():
            handover = self._errands.get(event.errand)
            if handover is not None:
                self._heard(handover, event)

    def _heard(self, handover: Handover, event: AgentEvent) -> None:
        match event:
            case Granted():
                self._granted(handover, event)
            case ErrandFailed(reason=reason):
                self._fail(handover, reason)
            case Arrived(outcome=outcome):
                handover.outcome = outcome
                self._counts.delivered_bytes += outcome.bytes_total
                self._counts.overlapped_bytes += outcome.bytes_before_prefill_end
                self._let_finish(handover)
            case ErrandWritten():
                if handover.route is HandoverRoute.LOCAL:
                    self._finish(handover)

    def _granted(self, handover: Handover, event: Granted) -> None:
        if handover.phase is not HandoverPhase.ASKED:
            return
        if handover.route is HandoverRoute.LANDING and event.pages.num_tokens != handover.prefill_tokens:
            self._fail(handover, "digest_mismatch")
            return
        handover.pages, self._arena = event.pages, event.arena
        handover.phase = HandoverPhase.GRANTED
        self._grants.append(event.pages)

    def _fail(self, handover: Handover, reason: str) -> None:
        """The agent cannot, or can no longer, do what was asked."""
        if handover.phase is HandoverPhase.LOADING:
            handover.reason = reason  # the ranks have let go: the load ends in failure, if it has not ended already
            return
        was = handover.phase
        self._finish(handover, reason=reason)
        if handover.route is not HandoverRoute.LEG:
            self._counts.fallbacks[reason] += 1
            log.warning("fallback id=%s reason=%s", handover.request.request_id, reason)
            if handover.route is HandoverRoute.LANDING and was in (HandoverPhase.ASKED, HandoverPhase.GRANTED):
                handover.recomputed = reason
                self._go_local(handover)
            return
        handover.reason = reason
        if was in (HandoverPhase.ASKED, HandoverPhase.GRANTED):
            internals.shrink(handover.request)
        elif was is not HandoverPhase.COMPUTING or not self._engine.end(handover.request, handover.answer()):
            internals.sample_one(handover.request)
            self._let_finish(handover)

    def _give_up(self, handover: Handover, reason: str) -> None:
        """Nothing has been asked yet, and nothing will be."""
        handover.reason = reason
        if handover.route is HandoverRoute.LEG:
            internals.shrink(handover.request)
        else:
            self._counts.fallbacks[reason] += 1
            if handover.route is HandoverRoute.LANDING:
                handover.recomputed = reason

    def _go_local(self, handover: Handover) -> None:
        handover.route = HandoverRoute.LOCAL
        if self._local_tier and handover.prefill_tokens >= self._block_size:
            self._ask(handover)

    def _finish(self, handover: Handover, *, loaded: bool = False, reason: str = "") -> None:
        """No more loads or saves: the pages go back."""
        handover.phase = HandoverPhase.OVER
        if self._errands.pop(handover.errand, None) is not None:
            self._agent.end(handover.errand, loaded=loaded, reason=reason)
            if handover.pages is not None:
                self._grants = [pages for pages in self._grants if pages.job != handover.pages.job]

    # Computing

    def _loaded(self, handover: Handover) -> None:
        assert handover.pages is not None
        if handover.outcome is not None:
            handover.phase = HandoverPhase.DELIVERED
        elif handover.reason and handover.route is not HandoverRoute.LANDING:  # the pages were lost behind it
            self._begin_computing(handover)
            self._fail(handover, handover.reason)
        elif handover.route is HandoverRoute.LANDING:
            self._counts.landed_tokens += handover.prefill_tokens - handover.offered_from
            self._finish(handover, loaded=True)
        else:
            handover.cached_tokens = handover.pages.cached_tokens
            self._counts.cached_tokens += handover.cached_tokens - handover.offered_from
            self._begin_computing(handover)

    def _load_failed(self, handover: Handover) -> None:
        """vLLM starts the request over; what it computes is saved no more than it is loaded."""
        self._counts.fallbacks[handover.reason or "load_failed"] += 1
        log.warning("load failed id=%s reason=%s", handover.request.request_id, handover.reason or "load_failed")
        if handover.route is HandoverRoute.LEG and handover.outcome is None and not handover.reason:
            self._begin_computing(handover)  # the pages are ours: only what they hold could not be used
            return
        reason = handover.reason or "load_failed"
        self._finish(handover, reason=reason)
        if handover.route is HandoverRoute.LANDING:
            handover.recomputed = reason
        elif handover.route is HandoverRoute.LEG and not handover.request.num_preemptions:
            internals.shrink(handover.request)
        elif handover.route is HandoverRoute.LEG:
            internals.sample_one(handover.request)

    def _begin_computing(self, handover: Handover) -> None:
        assert handover.pages is not None
        begin_computing(handover, self._now())
        if handover.saved_tokens >= handover.pages.num_tokens and handover.route is HandoverRoute.LOCAL:
            self._agent.complete(handover.errand)
            self._finish(handover)

    def _send_cached(self, handover: Handover) -> None:
        """All of a leg is cached and on its way. vLLM has to compute something: let it be little."""
        assert handover.pages is not None
        self._begin_computing(handover)
        handover.cached_tokens = handover.pages.cached_tokens
        self._agent.complete(handover.errand)
        self._hold(handover)
        internals.shrink(handover.request)

    def _save(
        self,
        handover: Handover,
        num_tokens: int,
        tables_of: Callable[[str], Sequence[Sequence[int]]],
        offers: Sequence[StateOffer],
        drafted: int,
    ) -> SaveBlocks | None:
        """What this step adds to the pages of a request."""
        if handover.phase is not HandoverPhase.COMPUTING:
            return None
        tables = tables_of(handover.request.request_id)
        save = step_save(self._layout, handover, num_tokens, tables, offers, drafted)
        if save is not None and is_last(handover):
            self._agent.last_step(
                handover.errand,
                sorted(handover.unfilled_windows | handover.unsaved_states),
                computed_tokens=max(0, save.stop - (handover.computed_from or 0)),
                so_far_s=self._now() - handover.computing_s,
            )
            if handover.route is HandoverRoute.LEG:
                self._hold(handover, drafted)
        return save

    def _hold(self, handover: Handover, drafted: int = 0) -> None:
        handover.phase = HandoverPhase.HELD
        handover.deadline_s = self._now() + DELIVERY_WAIT_S
        internals.hold(handover.request)
        internals.make_room(handover.request, drafted)

    def _let_finish(self, handover: Handover) -> None:
        if handover.phase is HandoverPhase.HELD:
            handover.phase = HandoverPhase.DELIVERED
            internals.sample_one(handover.request)
        internals.let_go(handover.request)

    def _rest(self) -> bool:
        """Waits, once a step, if every request waits for the agent: until it has news, vLLM has, or a wait has been too long.
        Not where other engines take their steps with this one: they would wait, too."""
        if self._has_rested or self._engine.in_lockstep or not self._all_wait():
            return self._has_rested
        self._has_rested = True
        self._report_load({}, at_once=True)
        until_s = min(self._now() + MAX_REST_S, *(handover.deadline_s for handover in self._handovers.values()))
        while not self._agent.news.wait(IDLE_WAIT_S) and not self._engine.has_input() and self._now() < until_s:
            pass
        return True

    def _all_wait(self) -> bool:
        waiting = all(
            handover.phase in (HandoverPhase.ASKED, HandoverPhase.HELD) for handover in self._handovers.values()
        )
        return waiting and bool(self._handovers) and self._requests.keys() <= self._handovers.keys()

    def _is_waiting(self) -> bool:
        return any(handover.phase in (HandoverPhase.ASKED, HandoverPhase.HELD) for handover in self._handovers.values())

    def _report_load(self, scheduled: Mapping[str, int], *, at_once: bool = False) -> None:
        now = self._now()
        if now - self._reported_s < REPORT_INTERVAL_S and self._requests and not at_once:
            return
        self._reported_s = now
        held = [handover for handover in self._handovers.values() if handover.phase is HandoverPhase.HELD]
        for handover in held:
            if now >= handover.deadline_s:
                self._fail(handover, "delivery_timeout")
        running = sum(request_id in self._requests for request_id in scheduled) + len(held)
        queued = sum(max(0, r.num_prompt_tokens - r.num_computed_tokens) for r in self._requests.values())
        load = (running, max(0, len(self._requests) - running), queued)
        if load != self._said or now - self._said_s >= REPEAT_INTERVAL_S:
            self._said, self._said_s = load, now
            self._agent.report_load(*load)


def _transfer(params: Any) -> KVTransfer:
    """What a request's `kv_transfer_params` ask for. Anybody may have written them. Raises RequestError."""
    try:
        return transfer_of(msgspec.json.decode(msgspec.json.encode(params or {}), type=KVTransferParams))
    except (msgspec.MsgspecError, TypeError, ValueError, ArithmeticError, RecursionError) as exc:
        raise RequestError(f"they are no transfer: {exc}") from exc

"""One request's life inside an engine: the source of its KVCache, the destination of its own, and its tokens.

    local         agent lends pages ─ load cached prefix ─ compute the rest into pages ─ give back ─ decode
    prefill leg   same, with a ticket: the agent pushes layers while they are computed ─ wait until delivered
    decode leg    wait for the landing ─ load it ─ give back ─ decode          landing fails: go on as local

When an answer has ended, its KVCache is offered to the agent as prefix cache (engine.serving.keeping). Without an agent
the local path is just computation. Every detour has a reason and is counted.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from engine.agent.base import Engine
from engine.agent.job_pages import JobKV
from engine.agent.link import AgentJob, AgentLink
from engine.errors import RequestError, TransferError
from engine.metrics import EngineMetrics
from engine.openai.api import KVTransfer
from engine.runtime.runner import ModelRunner
from engine.runtime.sampling import SamplingParams
from engine.runtime.scheduler import Event, Finished, ModelWork, NewToken, Prefilled, WorkFailed
from engine.runtime.turns import HALF_LIFE_S, may_begin
from engine.serving.keeping import AnswerKeeper
from hybrid_cache.hashing.block_hash import block_hashes, tokens_digest
from transport.control.messages import Delivered
from transport.turns import Turns

log = logging.getLogger(__name__)

MAX_REQUESTS: Final = 256
LONG_PROMPT_TOKENS: Final = 8192  # hashing takes about 0.3 µs per token: longer prompts go to a worker thread


@dataclass(slots=True, kw_only=True)
class ServedRequest:
    """A parsed request and its outcome.

    The last `num_answered` tokens of `prompt` are the answer's: another engine has given them, this one goes on.
    """

    id: str
    prompt: list[int]
    params: SamplingParams | None  # None: a prefill leg
    transfer: KVTransfer
    arrived_s: float
    num_answered: int = 0
    cached_tokens: int = 0
    recomputed: str | None = None  # why KVCache that should have come was computed here
    answer: list[int] = field(default_factory=list, repr=False)
    last_token_s: float = field(default=0.0, repr=False)

    @property
    def tokens_out(self) -> int:
        return len(self.answer)

    @property
    def prefill_tokens(self) -> int:
        """Tokens whose KVCache another node could compute: all but the last."""
        return len(self.prompt) - 1


@dataclass(frozen=True, slots=True)
class Delivery:
    """A finished prefill leg. Times are seconds after the leg asked for pages."""

    num_tokens: int
    cached_tokens: int
    prefill_start_s: float
    outcome: Delivered

    def to_dict(self) -> dict[str, Any]:
        return {
            "delivered": True,
            "num_tokens": self.num_tokens,
            "cached_tokens": self.cached_tokens,
            "bytes_total": self.outcome.bytes_total,
            "bytes_before_prefill_end": self.outcome.bytes_before_prefill_end,
            "bytes_saved": self.outcome.bytes_saved,
            "codecs": self.outcome.codecs,
            "prefill_start_s": self.prefill_start_s,
            "prefill_end_s": self.outcome.prefill_end_s,
            "delivered_s": self.outcome.delivered_s,
            "link": self.outcome.link,
        }


class GenerationService:
    """Serves requests on one model. Its methods belong to the event loop's thread."""

    def __init__(
        self,
        engine: Engine,
        model: ModelRunner,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        *,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self.engine: Final = engine
        self.model: Final = model
        self.metrics: Final = metrics
        self.clock: Final = clock
        self.link: AgentLink | None = None
        self.draining = False
        self._is_ending = False
        self._active: Counter[str] = Counter()  # requests by flow
        self._asked: Turns[str] = Turns(HALF_LIFE_S)  # flows that have sent some lately
        self._keeper = AnswerKeeper(model, engine.layout.block_size, metrics)
        self._max_requests = max_requests
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        """Requests that are being served."""
        return self._active.total()

    async def tokens(self, request: ServedRequest) -> AsyncGenerator[NewToken, None]:
        """The output of a request, token by token. Closing the iterator aborts it. Raises RequestError."""
        outcome = "aborted"
        self._admit(request)
        try:
            async with aclosing(self._events(request)) as events:
                async for event in events:
                    if isinstance(event, Prefilled):
                        self._note_prefill(request, event)
                    elif isinstance(event, NewToken):
                        self._note_token(request, event)
                        outcome = event.finish_reason or outcome
                        yield event
        except TransferError as exc:
            outcome = "failed"
            raise _as_request_error(exc) from exc
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._leave("generate", outcome, request)

    async def prefill_leg(self, request: ServedRequest) -> Delivery:
        """Computes a prompt's KVCache for the holder of a ticket. Raises RequestError."""
        outcome = "aborted"
        self._admit(request)
        try:
            delivery = await self._deliver(request)
            outcome = "delivered"
            self.metrics.on_leg(outcome, delivery.outcome.bytes_total)
            return delivery
        except TransferError as exc:
            outcome = exc.reason
            self.metrics.on_leg(outcome)
            raise _as_request_error(exc) from exc
        finally:
            self._leave("prefill_leg", outcome, request)

    def refuse_new(self) -> None:
        """Refuses new requests until `resume`."""
        self.draining = True

    def resume(self) -> None:
        """Takes new requests again, unless the engine is about to end."""
        self.draining = self._is_ending

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests for good and waits for those that run. False if some still run after `timeout_s`."""
        self.draining = self._is_ending = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Drops work that no client waits for."""
        await self._keeper.close()

    def report_load(self) -> None:
        load = self.model.load
        self.metrics.on_load(load.running, load.waiting, load.queued_tokens)
        if self.link is not None:
            self.metrics.on_agent(connected=self.link.connected)
            self.link.report_load(
                load.running, load.waiting, load.queued_tokens, slots=self.model.slots, steps=self.model.steps
            )

    # Which way

    async def _events(self, request: ServedRequest) -> AsyncGenerator[Event, None]:
        if request.transfer.transfer_id is not None and request.prefill_tokens:
            try:
                async with aclosing(self._from_landing(request)) as events:
                    async for event in events:
                        yield event
                return
            except TransferError as exc:
                if request.tokens_out:
                    raise
                request.recomputed = exc.reason
                self._note_fallback(request, exc)
        async with aclosing(self._from_here(request)) as events:
            async for event in events:
                yield event

    async def _from_landing(self, request: ServedRequest) -> AsyncGenerator[Event, None]:
        link, transfer = self._require_link(), request.transfer
        assert transfer.transfer_id is not None
        _, digest = await self._identify(request, with_hashes=False)
        job = link.claim_landing(transfer.transfer_id, digest, transfer.timeout_s)
        try:
            kv = await job.pages()
            if kv.num_tokens != request.prefill_tokens:
                raise TransferError("digest_mismatch", f"{kv.num_tokens} tokens landed, not {request.prefill_tokens}")
            request.cached_tokens = kv.cached_tokens
            async with aclosing(self._compute(request, kv, kv.num_tokens)) as events:
                async for event in events:
                    if isinstance(event, Prefilled):
                        job.end(loaded=True)
                    yield event
        finally:
            job.end(reason="not loaded")

    async def _from_here(self, request: ServedRequest) -> AsyncGenerator[Event, None]:
        job = await self._local_pages(request)
        try:
            async with aclosing(self._local_events(request, job)) as events:
                async for event in events:
                    yield event
        except TransferError as exc:
            # Pages that cannot be read: once more, without them.
            if request.tokens_out or job is None:
                raise
            self._note_fallback(request, exc)
            job.end(reason=exc.reason)
            request.cached_tokens = 0
            async with aclosing(self._compute(request, None, 0)) as events:
                async for event in events:
                    yield event
        finally:
            if job is not None:
                job.end(reason="aborted")

    async def _local_events(self, request: ServedRequest, job: AgentJob | None) -> AsyncGenerator[Event, None]:
        kv = job.kv if job is not None else None
        request.cached_tokens = kv.cached_tokens if kv is not None else 0
        async with aclosing(self._compute(request, kv, request.cached_tokens)) as events:
            async for event in events:
                if isinstance(event, Prefilled) and job is not None:
                    _prefilled(job, request, event)
                    job.end()
                yield event

    async def _local_pages(self, request: ServedRequest) -> AgentJob | None:
        """A loan of pages for our own prefix cache; none is no reason to refuse a request."""
        if self.link is None or not request.prefill_tokens:
            return None
        hashes, digest = await self._identify(request)
        job = None
        try:
            hints = request.transfer.hints
            flow = request.transfer.part.flow
            job = self.link.begin_prefill(request.id, hashes, request.prefill_tokens, digest, None, hints, flow)
            await job.pages()
            return job
        except TransferError as exc:
            self._note_fallback(request, exc)
            if job is not None:
                job.end(reason=exc.reason)
            return None
        except BaseException:
            if job is not None:
                job.end(reason="aborted")
            raise

    async def _deliver(self, request: ServedRequest) -> Delivery:
        link, ticket = self._require_link(), request.transfer.ticket
        assert ticket is not None
        hashes, digest = await self._identify(request)
        if ticket.layout_fingerprint != self.engine.layout.fingerprint:
            raise TransferError("layout_mismatch", "the receiver's KVCache has another layout")
        if ticket.tokens_digest != digest or ticket.num_tokens != request.prefill_tokens:
            raise TransferError("digest_mismatch", "the ticket was made for other tokens")
        asked_s = self.clock()
        job = link.begin_prefill(request.id, hashes, request.prefill_tokens, digest, ticket, request.transfer.hints)
        try:
            kv = await job.pages()
            request.cached_tokens = kv.cached_tokens
            started_s = asked_s
            async with aclosing(self._compute(request, kv, kv.cached_tokens, job)) as events:
                async for event in events:
                    if isinstance(event, Prefilled):
                        started_s = event.started_s
                        self._note_prefill(request, event)
                        _prefilled(job, request, event)
            delivered = await job.delivered()
        except BaseException as exc:
            job.end(reason=exc.reason if isinstance(exc, TransferError) else "aborted")
            raise
        job.end()
        return Delivery(request.prefill_tokens, request.cached_tokens, started_s - asked_s, delivered)

    async def _compute(
        self, request: ServedRequest, kv: JobKV | None, load_tokens: int, pushing: AgentJob | None = None
    ) -> AsyncGenerator[Event, None]:
        """Events of the model for this request; leaving early aborts the work. So does a failure of `pushing`."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Event] = asyncio.Queue()
        work = ModelWork(
            id=request.id,
            prompt=request.prompt,
            params=request.params,
            emit=lambda event: _from_model(loop, inbox, event),
            part=request.transfer.part,
            kv=kv,
            load_tokens=load_tokens,
            num_answered=request.num_answered,
            keeps=self.link is not None and request.params is not None and (kv is None or kv.exact),
        )
        if pushing is not None:
            pushing.on_failure = lambda error: inbox.put_nowait(WorkFailed(error))
        self.model.submit(work)
        self.report_load()
        try:
            while not isinstance(event := await inbox.get(), Finished):
                if isinstance(event, WorkFailed):
                    raise event.error
                yield event
            if event.sequence is not None:
                self._keep_answer(request, event.sequence)
        finally:
            work.abort()

    def _keep_answer(self, request: ServedRequest, sequence: Any) -> None:
        if self.link is None or self.draining:
            self.metrics.on_answer("no_agent" if self.link is None else "draining")
            return
        tokens = [*request.prompt, *request.answer]
        self._keeper.keep(self.link, request.id, tokens, request.transfer.salt, sequence)

    # Bookkeeping

    def _admit(self, request: ServedRequest) -> None:
        """While others are active, a tenant leaves some places to them, beyond as many as run at once."""
        if self.draining:
            raise RequestError("the engine is shutting down", status=503, kind="server_error", code="draining")
        flow, free, now = request.transfer.part.flow, self._max_requests - self.active, self.clock()
        self._asked.charge(flow, 1, now)
        is_bound = flow and self._active[flow] >= self.model.slots
        if free <= 0 or (is_bound and not may_begin(self._asked, [flow], self._active, free, now)):
            raise RequestError(
                f"{self.active} requests are being served already", status=503, kind="server_error", code="queue_full"
            )
        self._active[flow] += 1
        self._idle.clear()

    def _leave(self, kind: str, outcome: str, request: ServedRequest) -> None:
        flow = request.transfer.part.flow
        self._active[flow] -= 1
        if not self._active[flow]:
            del self._active[flow]
        if not self._active:
            self._idle.set()
        e2e_s = self.clock() - request.arrived_s
        self.metrics.on_request_done(kind, outcome, e2e_s)
        self.report_load()
        log.info(
            "done id=%s kind=%s outcome=%s prompt=%d cached=%d out=%d e2e=%.3fs",
            request.id,
            kind,
            outcome,
            len(request.prompt),
            request.cached_tokens,
            request.tokens_out,
            e2e_s,
        )

    def _require_link(self) -> AgentLink:
        if self.link is None:
            raise TransferError("no_agent", "this engine runs without an agent")
        return self.link

    async def _identify(self, request: ServedRequest, *, with_hashes: bool = True) -> tuple[bytes, bytes]:
        """Concatenated block hashes of the prefill's full blocks, and the digest of all tokens."""
        block_size, salt = self.engine.layout.block_size, request.transfer.salt

        def identify() -> tuple[bytes, bytes]:
            hashes = block_hashes(request.prompt[:-1], block_size, salt) if with_hashes else []
            return b"".join(hashes), tokens_digest(request.prompt, salt)

        if len(request.prompt) < LONG_PROMPT_TOKENS:
            return identify()
        return await asyncio.to_thread(identify)

    def _note_prefill(self, request: ServedRequest, event: Prefilled) -> None:
        landed = request.transfer.transfer_id is not None and request.recomputed is None
        local = request.cached_tokens
        self.metrics.on_prefilled(
            computed=1 if landed else len(request.prompt) - local,
            local_cache=local,
            transferred=event.num_tokens - local if landed else 0,
            queue_s=max(0.0, event.started_s - request.arrived_s),
            prefill_s=event.ended_s - event.started_s,
        )
        log.debug("prefilled id=%s tokens=%d cached=%d landed=%s", request.id, event.num_tokens, local, landed)

    def _note_token(self, request: ServedRequest, event: NewToken) -> None:
        if request.tokens_out:
            self.metrics.on_next_token(event.at_s - request.last_token_s)
        else:
            self.metrics.on_first_token(event.at_s - request.arrived_s)
        request.answer.append(event.sampled.token)
        request.last_token_s = event.at_s

    def _note_fallback(self, request: ServedRequest, error: TransferError) -> None:
        self.metrics.on_fallback(error.reason)
        log.warning("fallback id=%s reason=%s %s", request.id, error.reason, error.detail)


def _prefilled(job: AgentJob, request: ServedRequest, event: Prefilled) -> None:
    job.prefill_done(event.num_tokens, event.num_tokens - request.cached_tokens, event.ended_s - event.started_s)


def _from_model(loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[Event], event: Event) -> None:
    """Called on the model's thread. A closed loop (RuntimeError) means that nothing listens."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(inbox.put_nowait, event)


_STATUS: Final = {
    "digest_mismatch": 409,
    "layout_mismatch": 409,
    "no_capacity": 503,
    "tenants_part": 503,
    "draining": 503,
    # Well, and in another role by now, or on its way to it.
    "converting": 503,
    "wrong_role": 503,
    # Says something about the way to the receiver, and nothing about the prompt.
    "peer_lost": 502,
    # The receiver does not talk to this node at all: its operator should see that by name.
    "identity": 502,
    "integrity_mode": 502,
}


def _as_request_error(error: TransferError) -> RequestError:
    known = error.reason in _STATUS
    return RequestError(
        str(error),
        status=_STATUS.get(error.reason, 502),
        kind="server_error",
        code=error.reason if known else "kv_transfer_failed",
    )

"""The connector's link to its node's agent: an event loop on a thread of its own beside vLLM's scheduler.

The scheduler's thread asks and goes on; results are events that it polls. What workers write is announced to the agent
from here at once, so layers leave the node while the model computes the next ones.
"""

import asyncio
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from engine.agent.link import AgentJob, AgentLink
from engine.errors import TransferError
from engine.vllm.layout import VllmLayout
from engine.vllm.scheduler_side.errands import AgentEvent, Arrived, Errand, ErrandFailed, ErrandWritten, Granted
from engine.vllm.scheduler_side.steps import (
    ArenaRef,
    LayerWritten,
    LetGo,
    RankHello,
    RankMessage,
    SaveFailed,
    StateWritten,
    StepWritten,
)
from engine.vllm.worker_side.ranks import RankServer
from hybrid_cache.cache.reservation import NO_HINTS, Hints
from hybrid_cache.hashing.block_hash import Inset, block_hashes, tokens_digest
from transport.control.messages import LayerDone, StateDone, TicketInfo, Welcome

log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 10.0
LONG_PROMPT_TOKENS: Final = 8192  # hashing takes about 0.3 µs per token: longer prompts go to a worker thread


class VllmAgentThread:
    """Jobs for the scheduler's side of the connector. Public methods may be called from any thread, and never wait."""

    def __init__(
        self,
        socket: Path,
        layout: VllmLayout,
        *,
        model_id: str,
        max_model_len: int,
        http_url: str,
        notice: str = "",
        takes_media: bool = False,
    ) -> None:
        self.news: Final = threading.Event()  # set with every event
        self._socket = socket
        self._layout = layout
        self._model_id = model_id
        self._max_model_len = max_model_len
        self._http_url = http_url
        self._notice = notice
        self._takes_media = takes_media
        self._events: queue.SimpleQueue[AgentEvent] = queue.SimpleQueue()
        self._errands: dict[int, Errand] = {}
        self._by_job: dict[str, Errand] = {}
        self._count = 0
        self._generation = 0
        self._arena: ArenaRef | None = None
        self._closing: set[asyncio.Task[None]] = set()
        # In the agent's directory, which goes with it, if this process is killed, too; a path of a socket has a limit of 107
        # bytes, so the name is no longer than that of the agent's.
        self.rank_socket: Final = socket.with_name(f"r{secrets.token_hex(5)}")
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._link: AgentLink
        self._ranks: RankServer
        self._thread = threading.Thread(target=self._run, name="prfaas-agent", daemon=True)

    def start(self) -> None:
        """Starts the thread; the connection comes up when there is an agent. Raises TimeoutError."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TimeoutError("the agent's thread did not start")

    def close(self) -> None:
        """Hangs up. Jobs that still run end with the connection."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_TIMEOUT_S)
        self.rank_socket.unlink(missing_ok=True)

    @property
    def connected(self) -> bool:
        """Whether the agent has answered our Hello."""
        return self._link.connected

    @property
    def block_salts(self) -> tuple[bytes, ...]:
        """That names of blocks may start from; none: the agent does not say."""
        return self._link.block_salts

    def poll(self) -> list[AgentEvent]:
        """What happened since the last call."""
        self.news.clear()
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        num_tokens: int,
        salt: bytes,
        ticket: TicketInfo | None,
        hints: Hints = NO_HINTS,
        insets: Sequence[Inset] = (),
    ) -> int:
        """Asks for pages for the first `num_tokens` tokens of a prompt; returns the errand's number."""
        errand = self._new(num_tokens)
        self._on_loop(lambda: self._start(errand, self._begin(errand, request_id, prompt, salt, ticket, hints, insets)))
        return errand.number

    def claim(
        self, prompt: Sequence[int], salt: bytes, transfer_id: str, timeout_s: float, insets: Sequence[Inset] = ()
    ) -> int:
        """Asks for a landing's pages; returns the errand's number."""
        errand = self._new(0)
        self._on_loop(lambda: self._start(errand, self._claim(errand, prompt, salt, transfer_id, timeout_s, insets)))
        return errand.number

    def last_step(
        self, errand: int, unfilled: Sequence[tuple[int, int]], *, computed_tokens: int, so_far_s: float
    ) -> None:
        """The step that is about to run computes the last tokens. `unfilled`: (group, block or length) that stay empty;
        `so_far_s`: since the first step that computed some of `computed_tokens` was put together.
        """

        def note() -> None:
            if (entry := self._errands.get(errand)) is not None:
                entry.unfilled = tuple(unfilled)
                entry.computed_tokens, entry.began_s = computed_tokens, self._loop.time() - so_far_s

        self._on_loop(note)

    def complete(self, errand: int) -> None:
        """Everything was cached: nothing will be written."""

        def note() -> None:
            if (entry := self._errands.get(errand)) is not None:
                self._complete(entry)

        self._on_loop(note)

    def end(self, errand: int, *, loaded: bool = False, reason: str = "") -> None:
        """The errand is over: its pages go back once no rank touches them."""
        self._on_loop(lambda: self._end(errand, loaded, reason))

    def report_load(self, running: int, waiting: int, queued_tokens: int) -> None:
        self._on_loop(lambda: self._link.report_load(running, waiting, queued_tokens))

    def _new(self, num_tokens: int) -> Errand:
        self._count += 1
        return Errand(self._count, num_tokens)

    def _on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # closed: the engine is shutting down
            log.debug("no loop any more")

    # The loop's thread from here on

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._ranks = RankServer(self.rank_socket, self._hear_rank, ranks=self._layout.workers)
        await self._ranks.start()
        self._link = AgentLink(
            self._socket,
            self._layout.model,
            model_id=self._model_id,
            max_model_len=self._max_model_len,
            http_url=self._http_url,
            notice=self._notice,
            takes_media=self._takes_media,
            on_welcome=self._welcome,
            on_drain=lambda: log.info("the agent drains: running requests finish"),
            on_resume=lambda: log.info("the agent takes requests again"),
            on_lost=self._release_all,
        )
        running = asyncio.create_task(self._link.run())
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            tasks = [running, *self._closing, *(errand.task for errand in self._errands.values() if errand.task)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._ranks.close()
            for errand in self._errands.values():
                if errand.job is not None:
                    errand.job.on_failure = None  # refers to its errand, and so keeps the arena mapped
            self._errands.clear()
            self._by_job.clear()

    def _welcome(self, welcome: Welcome) -> None:
        self._generation += 1
        self._arena = ArenaRef(welcome.arena_path, welcome.page_bytes, welcome.num_pages, self._generation)

    async def _release_all(self) -> None:
        """Before the connection is closed: the agent lends its pages to others after that."""
        await asyncio.gather(*(self._ranks.release(job) for job in tuple(self._by_job)))

    def _post(self, event: AgentEvent) -> None:
        self._events.put(event)
        self.news.set()

    def _start(self, errand: Errand, work: Coroutine[Any, Any, None]) -> None:
        self._errands[errand.number] = errand
        errand.task = asyncio.get_running_loop().create_task(self._guard(errand, work))

    async def _guard(self, errand: Errand, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except TransferError as exc:
            log.warning("errand=%d reason=%s %s", errand.number, exc.reason, exc.detail)
            self._post(ErrandFailed(errand.number, exc.reason))
        except Exception as exc:  # a request that hears nothing would wait for its deadline
            log.exception("errand=%d", errand.number)
            self._post(ErrandFailed(errand.number, type(exc).__name__))

    async def _begin(
        self,
        errand: Errand,
        request_id: str,
        prompt: Sequence[int],
        salt: bytes,
        ticket: TicketInfo | None,
        hints: Hints,
        insets: Sequence[Inset],
    ) -> None:
        def identify() -> tuple[bytes, bytes]:
            size = self._layout.model.block_size
            hashes = block_hashes(prompt[: errand.num_tokens], size, salt, insets=insets)
            return b"".join(hashes), tokens_digest(prompt, salt, insets)

        hashes, digest = await _where(len(prompt), identify)
        if ticket is not None:
            self._check_ticket(ticket, digest, errand.num_tokens)
        job = self._link.begin_prefill(request_id, hashes, errand.num_tokens, digest, ticket, hints)
        await self._granted(errand, job)
        if ticket is not None:
            self._post(Arrived(errand.number, await job.delivered()))

    def _check_ticket(self, ticket: TicketInfo, digest: bytes, num_tokens: int) -> None:
        if ticket.layout_fingerprint != self._layout.model.fingerprint:
            raise TransferError(
                "layout_mismatch",
                "the receiver's KVCache has another layout: other model, dtype, block size or drafts, or recurrent states "
                f"cut for another number of ranks than the {self._layout.ranks} here",
            )
        if ticket.tokens_digest != digest or ticket.num_tokens != num_tokens:
            raise TransferError("digest_mismatch", "the ticket was made for other tokens")

    async def _claim(
        self,
        errand: Errand,
        prompt: Sequence[int],
        salt: bytes,
        transfer_id: str,
        timeout_s: float,
        insets: Sequence[Inset],
    ) -> None:
        digest = await _where(len(prompt), lambda: tokens_digest(prompt, salt, insets))
        job = self._link.claim_landing(transfer_id, digest, timeout_s)
        await self._granted(errand, job)

    async def _granted(self, errand: Errand, job: AgentJob) -> None:
        errand.job = job
        await job.pages()
        assert job.granted is not None
        assert self._arena is not None
        errand.num_tokens = job.granted.num_tokens
        self._by_job[job.job] = errand
        job.on_failure = lambda error: self._post(ErrandFailed(errand.number, error.reason))
        self._post(Granted(errand.number, job.granted, self._arena))

    def _end(self, number: int, loaded: bool, reason: str) -> None:
        errand = self._errands.pop(number, None)
        if errand is None:
            return
        if errand.task is not None:
            errand.task.cancel()
        if errand.job is not None:
            task = asyncio.get_running_loop().create_task(self._give_back(errand.job, loaded, reason))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _give_back(self, job: AgentJob, loaded: bool, reason: str) -> None:
        if job.job in self._by_job:
            await self._ranks.release(job.job)
            self._by_job.pop(job.job, None)
        job.on_failure = None
        job.end(loaded=loaded, reason=reason)

    # What ranks write

    def _hear_rank(self, rank: int, message: RankMessage) -> None:
        if isinstance(message, RankHello | LetGo) or (errand := self._by_job.get(message.job)) is None:
            return
        done: LayerDone | StateDone | None = None
        match message:
            case LayerWritten():
                done = errand.layer_written(self._layout, rank, message)
            case StateWritten():
                done = errand.state_written(self._layout, rank, message)
            case StepWritten():
                if errand.step_written(self._layout, rank, message):
                    if unwritten := errand.unwritten(self._layout):
                        self._save_failed(errand, rank, f"layers that no rank has written: {', '.join(unwritten)}")
                    self._complete(errand)
            case SaveFailed(reason=reason):
                self._save_failed(errand, rank, reason)
        if done is not None:
            self._link.send_for_job(done)

    def _save_failed(self, errand: Errand, rank: int, reason: str) -> None:
        log.error("errand=%d rank=%d: %s", errand.number, rank, reason)
        errand.complete = True  # never: the step's end is reported all the same
        self._post(ErrandFailed(errand.number, "save_failed"))

    def _complete(self, errand: Errand) -> None:
        if errand.job is None or errand.complete:
            return
        errand.complete = True
        self._link.send_for_job(errand.done(self._loop.time()))
        self._post(ErrandWritten(errand.number))


async def _where(num_tokens: int, work: Callable[[], Any]) -> Any:
    """Short work here, long work on another thread."""
    return work() if num_tokens < LONG_PROMPT_TOKENS else await asyncio.to_thread(work)


def agent_socket(setting: object) -> Path:
    """The agent's socket out of the connector's configuration. Raises ValueError."""
    path = str(setting or os.environ.get("PRFAAS_AGENT_SOCKET", ""))
    if not path:
        raise ValueError(
            "the connector needs its agent's socket: agent_socket in kv_connector_extra_config; "
            "`prfaas node --engine vllm` sets it"
        )
    return Path(path)

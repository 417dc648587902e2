"""The engine's end of the Unix socket to its node's agent.

The agent owns pages and transfers, the engine computes: a job is a loan of pages. The link reconnects by itself; jobs
of a lost connection are over (their pages may belong to others by now), and the engine goes on without prefix reuse.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

from engine.agent.job_pages import JobKV, MappedArena
from engine.errors import AgentGone, PagesInvalid, TransferError
from hybrid_cache.cache.reservation import NO_HINTS, Hints
from hybrid_cache.layout.layout import ModelLayout
from transport.control.messages import (
    BeginPrefill,
    BlockSalts,
    BootstrapAddress,
    ClaimLanding,
    ControlMessage,
    Delivered,
    Drain,
    EndJob,
    Hello,
    JobPages,
    LayerDone,
    LoadReport,
    MessageBuffer,
    MessageError,
    PrefillDone,
    Refused,
    Resume,
    StateDone,
    TicketInfo,
    Welcome,
    decode_from_agent,
    encode,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

READ_BYTES: Final = 1 << 18
RETRY_MIN_S: Final = 0.05
RETRY_MAX_S: Final = 1.0
WELCOME_TIMEOUT_S: Final = 10.0
LOAD_REPORT_INTERVAL_S: Final = 0.05


class AgentJob:
    """A loan of pages. `end` gives them back; it must be called, once is enough."""

    def __init__(self, link: "AgentLink", job: str) -> None:
        self._link = link
        self.job: Final = job
        self.kv: JobKV | None = None
        self.granted: JobPages | None = None
        self.on_failure: Callable[[TransferError], None] | None = None
        self._pages: asyncio.Future[JobPages] = link.loop.create_future()
        self._delivered: asyncio.Future[Delivered] = link.loop.create_future()
        self._ended = False

    async def pages(self) -> JobKV:
        """The pages, once the agent has them. Raises TransferError with the agent's reason, or AgentGone."""
        pages = await self._pages
        try:
            self.kv = self._link.map_job(pages)
        except PagesInvalid as exc:
            raise TransferError("pages_invalid", str(exc)) from exc
        self.granted = pages
        return self.kv

    async def delivered(self) -> Delivered:
        """The outcome of the push. Raises TransferError when it failed."""
        return await self._delivered

    def prefill_done(self, num_tokens: int, computed_tokens: int, compute_s: float) -> None:
        self._link.send_for_job(
            PrefillDone(job=self.job, num_tokens=num_tokens, computed_tokens=computed_tokens, compute_s=compute_s)
        )

    def end(self, *, loaded: bool = False, reason: str = "") -> None:
        """No more reads or writes from here; then the pages go back."""
        if self._ended:
            return
        self._ended = True
        if self.kv is not None:
            self.kv.revoke()
        self._link.send_for_job(EndJob(job=self.job, loaded=loaded, reason=reason))
        self._link.forget(self.job)
        self._pages.cancel()
        self._delivered.cancel()

    # What the link hears from the agent

    def hear(self, message: JobPages | Refused | Delivered) -> None:
        match message:
            case JobPages():
                _resolve(self._pages, message)
            case Delivered(ok=True):
                _resolve(self._delivered, message)
            case Delivered():
                self.fail(TransferError(message.reason or "push_failed"))
            case Refused():
                self.fail(TransferError(message.reason, message.detail))

    def fail(self, error: TransferError) -> None:
        """Work that still runs for this job is wasted."""
        if self.kv is not None:
            self.kv.revoke()
        for future in (self._pages, self._delivered):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as seen: a job may end before anybody awaits this one
        if self.on_failure is not None:
            self.on_failure(error)


class AgentLink:
    """A connection to the agent that reconnects by itself. All methods belong to the event loop's thread."""

    def __init__(
        self,
        path: Path,
        layout: ModelLayout,
        *,
        model_id: str,
        max_model_len: int,
        http_url: str,
        notice: str = "",
        not_done_json: str = "",
        takes_media: bool = False,
        rooms: BootstrapAddress | None = None,
        on_welcome: Callable[[Welcome], None],
        on_drain: Callable[[], None],
        on_resume: Callable[[], None],
        on_lost: Callable[[], Awaitable[None]] | None = None,
        hold: Callable[[int], None] | None = None,
    ) -> None:
        """The agent lends pages again once we have hung up: `on_lost` ends the processes that read and write them
        elsewhere. `hold` gives each connection's descriptor to such processes. So if ours is killed, the connection
        ends with the last of them."""
        self.loop: Final = asyncio.get_running_loop()
        self._path = path
        self._layout = layout
        self._hello = Hello(
            engine_pid=os.getpid(),
            model_id=model_id,
            layout_json=layout.to_json(),
            max_model_len=max_model_len,
            http_url=http_url,
            notice=notice,
            not_done_json=not_done_json,
            takes_media=takes_media,
            rooms=rooms,
        )
        self._on_welcome = on_welcome
        self._on_drain = on_drain
        self._on_resume = on_resume
        self._on_lost = on_lost
        self._hold = hold
        self.block_salts: tuple[bytes, ...] = ()  # that names of blocks may start from; none: the agent does not say
        self._writer: asyncio.StreamWriter | None = None
        self._arena: MappedArena | None = None
        self._jobs: dict[str, AgentJob] = {}
        self._job_count = 0
        self._welcomed = asyncio.Event()
        self._wanted_load: LoadReport | None = None
        self._sent_load: LoadReport | None = None
        self._load_timer: asyncio.TimerHandle | None = None
        self._complaint = ""
        self._retry_s = RETRY_MIN_S  # grows until an agent takes us

    @property
    def connected(self) -> bool:
        return self._arena is not None

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    async def wait_connected(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._welcomed.wait()
        return self.connected

    async def run(self) -> None:
        """Connects, and again whenever the connection is lost, until cancelled."""
        while True:
            try:
                await self._session()
                self._complain("it hung up")
            except (OSError, MessageError, TimeoutError, PagesInvalid) as exc:
                self._complain(str(exc) or type(exc).__name__)
            except (
                Exception
            ):  # ours, but nothing else looks after a lost link: without one the engine is alone for ever
                log.exception("agent %s: the connection is replaced by another one", self._path)
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(RETRY_MAX_S, 2 * self._retry_s)

    def _complain(self, text: str) -> None:
        """Once per trouble, not once per attempt."""
        if text != self._complaint:
            log.warning("agent %s: %s", self._path, text)
        self._complaint = text

    # Jobs

    def begin_prefill(
        self,
        request_id: str,
        hashes: bytes,
        num_tokens: int,
        tokens_digest: bytes,
        ticket: TicketInfo | None,
        hints: Hints = NO_HINTS,
        tenant: str = "",
    ) -> AgentJob:
        """Asks for pages, as a part of those of `tenant` if there is no ticket. Raises AgentGone when there is no agent."""
        job = self._new_job()
        self.send(
            BeginPrefill(
                job=job.job,
                request_id=request_id,
                hashes=hashes,
                num_tokens=num_tokens,
                tokens_digest=tokens_digest,
                ticket=ticket,
                branch_tokens=hints.branch_tokens,
                category=hints.category,
                useful_tokens=hints.useful_tokens,
                tenant=tenant if ticket is None else ticket.tenant,
            )
        )
        return job

    def offer_answer(self, request_id: str, hashes: bytes, num_tokens: int) -> AgentJob:
        """Asks for pages for what a prompt and its answer left in the model. Raises AgentGone when there is no agent."""
        return self._borrow(request_id, hashes, num_tokens, computed=True)

    def look_up(self, request_id: str, hashes: bytes, num_tokens: int) -> AgentJob:
        """Asks for pages of what is cached of a prompt, to read. Raises AgentGone when there is no agent."""
        return self._borrow(request_id, hashes, num_tokens, cached_only=True)

    def _borrow(
        self, request_id: str, hashes: bytes, num_tokens: int, *, computed: bool = False, cached_only: bool = False
    ) -> AgentJob:
        job = self._new_job()
        self.send(
            BeginPrefill(
                job=job.job,
                request_id=request_id,
                hashes=hashes,
                num_tokens=num_tokens,
                tokens_digest=b"",  # for tickets
                computed=computed,
                cached_only=cached_only,
            )
        )
        return job

    def claim_landing(self, transfer_id: str, tokens_digest: bytes, timeout_s: float) -> AgentJob:
        """Asks for a reservation's pages, once all has landed. Raises AgentGone when there is no agent."""
        job = self._new_job()
        self.send(ClaimLanding(job=job.job, transfer_id=transfer_id, tokens_digest=tokens_digest, timeout_s=timeout_s))
        return job

    def _new_job(self) -> AgentJob:
        if not self.connected:
            raise AgentGone("no agent is connected")
        self._job_count += 1
        job = AgentJob(self, f"{os.getpid()}-{self._job_count}")
        self._jobs[job.job] = job
        return job

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)

    def map_job(self, pages: JobPages) -> JobKV:
        """The job's pages as memory. Writes are announced to the agent in the order in which they happen."""
        if self._arena is None:
            raise AgentGone("the agent left while pages were on their way")

        def announce(message: type[LayerDone] | type[StateDone]) -> Callable[[int, int, int], None]:
            def announcement(group: int, layer: int, num_tokens: int) -> None:
                done = message(job=pages.job, group=group, layer=layer, num_tokens=num_tokens)
                self.loop.call_soon_threadsafe(self.send_for_job, done)

            return announcement

        return JobKV(self._layout, self._arena, pages, on_layer=announce(LayerDone), on_state=announce(StateDone))

    # Load

    def report_load(
        self,
        running: int,
        waiting: int,
        queued_tokens: int,
        *,
        slots: int = 0,
        steps: tuple[tuple[float, float], ...] = (),
    ) -> None:
        """Tells the agent, at once or within LOAD_REPORT_INTERVAL_S of the last report."""
        self._wanted_load = LoadReport(
            running=running, waiting=waiting, queued_tokens=queued_tokens, slots=slots, steps=steps
        )
        if self._load_timer is None:
            self._send_load()

    def _send_load(self) -> None:
        self._load_timer = None
        if self._wanted_load is None or self._wanted_load == self._sent_load or not self.connected:
            return
        self._sent_load = self._wanted_load
        self.send(self._sent_load)
        self._load_timer = self.loop.call_later(LOAD_REPORT_INTERVAL_S, self._send_load)

    # The connection

    def send(self, message: ControlMessage) -> None:
        """Frames are small and the agent reads at once: nothing here waits."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    def send_for_job(self, message: LayerDone | StateDone | PrefillDone | EndJob) -> None:
        """Sends nothing about jobs that have ended or that belonged to another agent."""
        if message.job in self._jobs:
            self.send(message)

    async def _session(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path)
        self._writer = writer
        try:
            if self._hold is not None:
                self._hold(_descriptor(writer))
            self.send(self._hello)
            await self._read(reader)
        finally:
            self._lose()
            if self._on_lost is not None:
                await self._on_lost()
            if self._hold is not None:
                _hang_up(_descriptor(writer))
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        buffer = MessageBuffer()
        while data := await self._some(reader):
            for body in buffer.feed(data):
                self._hear(decode_from_agent(body))

    async def _some(self, reader: asyncio.StreamReader) -> bytes:
        """Only the first answer is waited for: a connection that stays silent is not an agent."""
        # Not wait_for: in Python 3.11 it forgets a cancellation that comes with the bytes, and the link would go on for ever.
        async with asyncio.timeout(None if self.connected else WELCOME_TIMEOUT_S):
            return await reader.read(READ_BYTES)

    def _hear(self, message: ControlMessage) -> None:
        match message:
            case Welcome():
                self._welcome(message)
            case BlockSalts():
                self.block_salts = message.salts
            case Drain():
                self._on_drain()
            case Resume():
                self._on_resume()
            case JobPages() | Refused() | Delivered():
                # An answer may cross with our EndJob; then it is not wanted any more.
                if (job := self._jobs.get(message.job)) is not None:
                    job.hear(message)

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.page_bytes != self._layout.page_bytes:
            raise PagesInvalid(f"the arena has pages of {welcome.page_bytes} bytes, not {self._layout.page_bytes}")
        self._arena = MappedArena.open(Path(welcome.arena_path), welcome.page_bytes, welcome.num_pages)
        self.block_salts = welcome.block_salts
        self._sent_load = None
        self._complaint = ""
        self._welcomed.set()
        self._on_welcome(welcome)
        self._send_load()
        self._retry_s = RETRY_MIN_S
        log.info("agent %s connected, %d pages", self._path, welcome.num_pages)

    def _lose(self) -> None:
        self._writer = None
        self._arena = None
        self._welcomed.clear()
        if self._load_timer is not None:
            self._load_timer.cancel()
            self._load_timer = None
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.fail(AgentGone("the agent hung up"))


def _descriptor(writer: asyncio.StreamWriter) -> int:
    number: int = writer.get_extra_info("socket").fileno()
    return number


def _hang_up(descriptor: int) -> None:
    """Closes it for all processes that hold the connection."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)

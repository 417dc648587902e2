"""One request's pages on their way: out of a prefill server into its agent, and out of a decode server's agent into its pool.

    SendingHandoff     chunks of pages ──► the agent's pages ──► pushed while later chunks are computed ──► delivered
    ReceivingHandoff   reserve ──► ticket, for the prefill server ──► landed ──► copied into the server's pages

Blocks have no names here: nothing of it becomes prefix cache. Once `give_up` has returned the server's pages are no longer
touched, so that it may give them to another request.
"""

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from engine.agent.block_copies import Bytes
from engine.agent.job_pages import JobKV
from engine.errors import PagesInvalid, TransferError
from engine.sglang.agent_thread import SglangAgentThread
from engine.sglang.disaggregation.pools import PageIndex
from transport.control.messages import Delivered, TicketInfo

log = logging.getLogger(__name__)

GIVEN_UP: Final = "given_up"
NO_ROOM: Final = "no_capacity"  # an agent's reason
ROOM_TIMEOUT_S: Final = 120.0  # for an agent that waits until other requests free pages
LANDING_ROOM_S: Final = 5.0  # for one that does not: a gateway may have another decode node
ASK_AGAIN_S: Final = 0.05


class PoolPages(Protocol):
    """A server's pages by buffer, as rows of tokens; `select` names some of them to the device, once for all buffers."""

    def __len__(self) -> int: ...
    def select(self, pages: PageIndex) -> Any: ...
    def read(self, buffer: int, index: Any) -> Bytes: ...
    def write(self, buffer: int, index: Any, tokens: Bytes) -> None: ...

    def wait(self) -> None:
        """Returns when the device has done all that it was given."""
        ...


class PoolReservations(Protocol):
    """The object that reserves pages for landings, and gives them back."""

    async def reserve(self, request_id: str, num_tokens: int, digest: bytes) -> TicketInfo: ...
    async def abort(self, transfer_id: str) -> None: ...


class PageChunk(NamedTuple):
    """Pages that are computed; `first` is the number of their first one within the request."""

    first: int
    pages: PageIndex
    is_last: bool
    wait: Callable[[], None] | None = None  # returns once the device has computed them


class _Handoff:
    """The common part of both directions: a task on the agent's thread, and an end that is reported once."""

    def __init__(self, agent: SglangAgentThread, pool: PoolPages, name: str, on_end: Callable[[str], None]) -> None:
        """`on_end` hears "" or why it failed, on the agent's thread; not after `give_up`."""
        self._agent = agent
        self._pool = pool
        self._name = name
        self._on_end = on_end
        self._touching = threading.Lock()  # the server's pages
        self._given_up = False
        self._is_writing = False  # the device may still fill pages
        self._task: asyncio.Task[None] | None = None

    def give_up(self) -> None:
        """Ends it. When this returns the server's pages are no longer read or written. Any thread."""
        with self._touching:
            self._given_up = True
            is_writing = self._is_writing
        if is_writing:
            self._pool.wait()
        self._agent.later(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def start() -> None:
            if not self._given_up:
                self._task = asyncio.get_running_loop().create_task(self._run(work))

        self._agent.later(start)

    async def _run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        reason = ""
        try:
            await work()
        except (TransferError, PagesInvalid) as exc:
            reason = str(exc)
        except TimeoutError:
            reason = "the agent did not answer in time"
        except Exception as exc:  # a request that hears nothing would wait for its deadline
            log.exception("handoff %s", self._name)
            reason = f"{type(exc).__name__}: {exc}"
        if not self._given_up:
            self._on_end(reason)

    def _check_ours(self) -> None:
        """Raises TransferError once it is given up. To be called with the lock."""
        if self._given_up:
            raise TransferError(GIVEN_UP)


class SendingHandoff(_Handoff):
    """Pages that leave. Chunks are put in their order; the last one says so."""

    def __init__(
        self, agent: SglangAgentThread, pool: PoolPages, name: str, ticket: TicketInfo, on_end: Callable[[str], None]
    ) -> None:
        super().__init__(agent, pool, name, on_end)
        self._ticket = ticket
        self._chunks: asyncio.Queue[PageChunk] = asyncio.Queue()
        self._begin(self._send)

    def put(self, chunk: PageChunk) -> None:
        """More pages are computed, and stay until `on_end` or `give_up`. Any thread."""
        self._agent.later(lambda: self._chunks.put_nowait(chunk))

    async def _send(self) -> None:
        ticket = self._ticket
        job = self._agent.link.begin_prefill(self._name, b"", ticket.num_tokens, ticket.tokens_digest, ticket)
        reason = GIVEN_UP
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                kv = await job.pages()
            delivered = asyncio.ensure_future(job.delivered())
            try:
                await self._copy_all(kv, delivered)
                job.prefill_done(ticket.num_tokens, 0, 0.0)
                async with asyncio.timeout(ticket.ttl_s):
                    await delivered
            finally:
                delivered.cancel()
            reason = ""
        except TransferError as exc:
            reason = exc.reason
            raise
        finally:
            job.end(reason=reason)

    async def _copy_all(self, kv: JobKV, delivered: "asyncio.Future[Delivered]") -> None:
        while True:
            getting = asyncio.ensure_future(self._chunks.get())
            try:
                either: set[asyncio.Future[Any]] = {getting, delivered}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if delivered.done():  # before all is there: it has failed
                    delivered.result()
                chunk = await getting
            finally:
                getting.cancel()
            await asyncio.to_thread(self._copy, kv, chunk)
            if chunk.is_last:
                return

    def _copy(self, kv: JobKV, chunk: PageChunk) -> None:
        start = chunk.first * self._agent.layout.block_size
        if chunk.wait is not None:
            chunk.wait()
        if not len(chunk.pages):
            return
        index = self._pool.select(chunk.pages)
        self._pool.wait()
        for buffer in range(len(self._pool)):
            with self._touching:
                self._check_ours()
                tokens = self._pool.read(buffer, index)
            kv.write_attention(buffer, start, tokens, np.empty((len(tokens), 0), np.uint8))
            kv.check_ours()


class ReceivingHandoff(_Handoff):
    """Pages that arrive, for `pages` of the server's pool."""

    def __init__(
        self,
        agent: SglangAgentThread,
        pool: PoolPages,
        reservations: PoolReservations,
        name: str,
        pages: PageIndex,
        *,
        timeout_s: float,
        on_ticket: Callable[[TicketInfo], None],
        on_end: Callable[[str], None],
    ) -> None:
        """`on_ticket` is called on the agent's thread, and must not wait."""
        super().__init__(agent, pool, name, on_end)
        self._reservations = reservations
        self._pages = pages
        self._timeout_s = timeout_s
        self._on_ticket = on_ticket
        self._begin(self._land)

    async def _land(self) -> None:
        digest = secrets.token_bytes(32)  # of no tokens: the ticket's holder has it
        num_tokens = len(self._pages) * self._agent.layout.block_size
        ticket = await self._reserved(num_tokens, digest)
        loaded = False
        try:
            with self._touching:
                self._check_ours()  # else who sends has been told that it is over
            job = self._agent.link.claim_landing(ticket.transfer_id, digest, self._timeout_s)
            reason = GIVEN_UP
            try:
                self._on_ticket(ticket)
                kv = await job.pages()
                await asyncio.to_thread(self._copy, kv)
                loaded, reason = True, ""
            except TransferError as exc:
                reason = exc.reason
                raise
            finally:
                job.end(loaded=loaded, reason=reason)
        finally:
            if not loaded:
                await self._reservations.abort(ticket.transfer_id)

    async def _reserved(self, num_tokens: int, digest: bytes) -> TicketInfo:
        """A ticket, as soon as the agent has room: what it lent to other requests comes back. Raises TransferError."""
        waited_s = 0.0
        while True:
            reserving = asyncio.ensure_future(self._reservations.reserve(self._name, num_tokens, digest))
            try:
                return await asyncio.shield(reserving)
            except asyncio.CancelledError:  # given up, and the pages may be ours by now
                with contextlib.suppress(TransferError):
                    await self._reservations.abort((await reserving).transfer_id)
                raise
            except TransferError as exc:
                if exc.reason != NO_ROOM or waited_s >= LANDING_ROOM_S:
                    raise
            await asyncio.sleep(ASK_AGAIN_S)
            waited_s += ASK_AGAIN_S

    def _copy(self, kv: JobKV) -> None:
        num_tokens = len(self._pages) * self._agent.layout.block_size
        index = self._pool.select(self._pages)
        try:
            for buffer in range(len(self._pool)):
                tokens, _ = kv.read_attention(buffer, 0, num_tokens)
                kv.check_ours()
                with self._touching:
                    self._check_ours()
                    self._is_writing = True
                    self._pool.write(buffer, index, tokens)
        finally:  # whatever has happened, nothing of it is under way when the pages are another's
            self._pool.wait()
            self._is_writing = False

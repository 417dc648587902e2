"""The local socket between the scheduler's side of the connector and its workers, one connection per rank.

It exists so that a layer is announced the moment it is written, not when the step that computes it ends.
"""

import asyncio
import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine.vllm.scheduler_side.steps import LetGo, RankHello, RankMessage, Release, decode_from_rank, decode_to_rank
from transport.control.messages import ControlMessage, MessageBuffer, MessageError, encode

log = logging.getLogger(__name__)

READ_BYTES: Final = 1 << 16
CONNECT_TIMEOUT_S: Final = 10.0
LET_GO_TIMEOUT_S: Final = 3.0  # until an operator should know; an agent that hung up ends the engine soon after
MAX_UNSENT: Final = 100_000  # messages of about a hundred bytes
ALL_THERE_TIMEOUT_S: Final = 3.0  # for ranks to connect, which they do in the first step that they see


class RankServer:
    """The scheduler's end. All methods belong to the event loop's thread."""

    def __init__(
        self,
        path: Path,
        on_message: Callable[[int, RankMessage], None],
        *,
        ranks: int,
        let_go_timeout_s: float = LET_GO_TIMEOUT_S,
    ) -> None:
        self.path: Final = path
        self._let_go_timeout_s = let_go_timeout_s
        self._on_message = on_message
        self._num_ranks = ranks
        self._all_there = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._letting_go: dict[str, tuple[set[int], asyncio.Future[None]]] = {}

    async def start(self) -> None:
        """Starts listening. Raises OSError."""
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._writers.values()):
            writer.close()
        await self._server.wait_closed()

    async def release(self, job: str) -> None:
        """Returns when no rank touches the job's pages any more. A rank that is stuck keeps them from everybody else."""
        if not self._all_there.is_set():  # a step that grants the pages may be on its way to ranks that are yet to come
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ALL_THERE_TIMEOUT_S):
                    await self._all_there.wait()
        if job not in self._letting_go:  # else another rank has asked already: all may go on only when it is over
            waiting = {rank for rank, writer in self._writers.items() if not writer.is_closing()}
            if not waiting:
                return
            self._letting_go[job] = (waiting, asyncio.get_running_loop().create_future())
            for rank in tuple(waiting):
                self._writers[rank].write(encode(Release(job=job)))
        waiting, done = self._letting_go[job]
        await asyncio.wait({done}, timeout=self._let_go_timeout_s)
        if not done.done():
            log.error("ranks %s do not release job=%s: they keep its pages", sorted(waiting), job)
            await asyncio.wait({done})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank, buffer = -1, MessageBuffer()
        try:
            while data := await reader.read(READ_BYTES):
                for body in buffer.feed(data):
                    message = decode_from_rank(body)
                    if isinstance(message, RankHello):
                        rank = message.rank
                        self._writers[rank] = writer
                        if len(self._writers) == self._num_ranks:
                            self._all_there.set()
                    elif isinstance(message, LetGo):
                        self._gone(rank, message.job)
                    else:
                        self._on_message(rank, message)
        except (OSError, MessageError) as exc:
            log.error("rank %d: %s", rank, exc)
        finally:
            if self._writers.get(rank) is writer:
                del self._writers[rank]
            for job in tuple(self._letting_go):
                self._gone(rank, job)  # a rank that is gone touches nothing
            writer.close()

    def _gone(self, rank: int, job: str) -> None:
        waiting, done = self._letting_go.get(job, (set(), None))
        waiting.discard(rank)
        if done is not None and not waiting:
            del self._letting_go[job]
            if not done.done():
                done.set_result(None)


class RankLink:
    """A worker's end: sends from any thread without waiting, hears on a thread of its own."""

    def __init__(
        self, path: str, rank: int, on_release: Callable[[str], None], on_lost: Callable[[], None] = lambda: None
    ) -> None:
        """Connects. `on_lost`: the other end counts this rank as gone, so it must touch no pages. Raises OSError."""
        self._on_release = on_release
        self._on_lost = on_lost
        self._unsent: queue.SimpleQueue[ControlMessage | None] = queue.SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(CONNECT_TIMEOUT_S)
            self._socket.connect(path)
            self._socket.settimeout(None)
        except OSError:
            self._socket.close()
            raise
        self.send(RankHello(rank=rank))
        self._threads = [
            threading.Thread(target=self._tell, name="prfaas-rank-send", daemon=True),
            threading.Thread(target=self._hear, name="prfaas-rank", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: ControlMessage) -> None:
        """A peer that is gone hears nothing. One that does not listen misses what is beyond a limit: nothing is taken for
        written that is not, and pages that it is not told of stay where they are."""
        if self._unsent.qsize() < MAX_UNSENT:
            self._unsent.put(message)

    def close(self) -> None:
        self._unsent.put(None)  # after what is still to be said
        self._threads[0].join(CONNECT_TIMEOUT_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._threads[1].join(CONNECT_TIMEOUT_S)

    def _tell(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._unsent.get()) is not None:
                self._socket.sendall(encode(message))

    def _hear(self) -> None:
        buffer = MessageBuffer()
        try:
            while data := self._socket.recv(READ_BYTES):
                for body in buffer.feed(data):
                    release = decode_to_rank(body)
                    self._on_release(release.job)
                    self.send(LetGo(job=release.job))
        except (OSError, MessageError) as exc:
            log.error("the scheduler's side cannot be heard any more: %s", exc)
        finally:
            self._on_lost()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # the sender stops
            self._unsent.put(None)
            self._threads[0].join()
            self._socket.close()

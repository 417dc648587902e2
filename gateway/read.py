"""The third room: bytes of a body become a call and its prompt, and the event loop goes on meanwhile.

The shortest bodies are read at once, and chats that go on by little: handing one to a thread and back takes as long. Other
short ones, and long ones that are mostly text, are read in threads of this process: what they have in common with earlier ones
is not tokenised or hashed again.
Any other would hold the interpreter's lock for as long as its JSON is decoded or its tokens become a list (up to seconds for
10 MB), so it goes to a process, started when the first one comes.
"""

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

import numpy as np

from gateway.breakpoints import is_marked, unmarked
from gateway.dialects.translation import call_in
from gateway.errors import ApiError, ReaderDied
from gateway.openai import Call, Endpoint
from gateway.prompts import Model, Prompt, PromptMemory, prompt_of, read_call
from gateway.reading_process import LENGTHS, Question, answer_of, header_of
from gateway.tasks import TaskSet
from prompts.errors import TakesLonger
from prompts.tokenizer import TextTokenizer

log = logging.getLogger("prfaas.gateway.read")

T = TypeVar("T")

TINY_BODY_BYTES: Final = 4 * 1024  # read in 0.1 ms, at worst in 2
SHORT_BODY_BYTES: Final = 128 * 1024  # the worst JSON of this length is decoded in 3 ms
LONG_BODY_BYTES: Final = 512 * 1024  # at worst as many new tokens: 8 ms to make a list of them
LONGER_BODY_BYTES: Final = 2 * 1024 * 1024  # where tokens are no list (prompts.encoder): 2 ms for its JSON
NEW_BYTES: Final = 16 * 1024  # of a chat that goes on: tokenised in 0.2 ms by a fast encoder, at worst in 5
MAX_COMMAS_AND_BRACKETS: Final = 24 * 1024  # no JSON has more values; prose of that length has a third as many
PIECE_BYTES: Final = 256 * 1024
END_S: Final = 5.0


class Reader:
    """Reads bodies: `threads` short ones and as many long ones at once."""

    def __init__(self, tokenizer: TextTokenizer, tasks: TaskSet, *, threads: int = 2, timeout_s: float = 120.0) -> None:
        self._tokenizer = tokenizer
        self._memory = PromptMemory(tokenizer)
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenise")
        self._turns = asyncio.Semaphore(threads)
        self._idle: list[ReadingProcess] = []

    @property
    def num_idle(self) -> int:
        """Processes that wait for a long body."""
        return len(self._idle)

    async def read(
        self, endpoint: Endpoint, body: bytes, model: Model, tenant: bytes = b"", answered: Sequence[int] = ()
    ) -> tuple[Call, Prompt]:
        """The call that `body` makes, and its prompt, with what has been `answered` after it. Raises ApiError.

        Nothing is remembered for anybody but `tenant`.
        """
        marked = is_marked(body)  # each mark has the conversation up to it rendered and tokenised, twice at worst
        if len(body) <= TINY_BODY_BYTES and not marked:
            return read_call(endpoint, body, model, self._memory, tenant, answered)
        is_fast = self._tokenizer.encoder.is_fast
        loop, memory = asyncio.get_running_loop(), self._memory
        reading = partial(read_call, endpoint, body, model, memory, tenant, answered)
        if len(body) <= (LONGER_BODY_BYTES if is_fast else LONG_BODY_BYTES) and _is_mostly_text(body):
            if endpoint is not Endpoint.CHAT or answered or marked:
                return await loop.run_in_executor(self._threads, reading)
            call, marks = unmarked(call_in(endpoint, body), may_be_marked=False)
            try:
                most_new = NEW_BYTES if is_fast else TINY_BODY_BYTES
                return call, prompt_of(call, model, memory, tenant, most_new, marks=marks)
            except TakesLonger:
                longer = partial(prompt_of, call, model, memory, tenant, marks=marks)
                return call, await loop.run_in_executor(self._threads, longer)
        if len(body) <= SHORT_BODY_BYTES:
            return await loop.run_in_executor(self._threads, reading)
        await self._turns.acquire()
        # A task of its own: should the client leave, the process still gets its question whole, and its answer is taken.
        asked = Question(endpoint, model, tenant, list(answered))
        asking = self._tasks.start(self._ask(asked, body), "read", expected=(ApiError,))
        return await asyncio.shield(asking)

    async def think(self, work: Callable[[PromptMemory], T]) -> T:
        """What `work` comes to in a thread. It must not hold the interpreter's lock for long."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, self._memory)

    async def close(self) -> None:
        """Ends threads and processes."""
        idle, self._idle = self._idle, []
        try:
            await asyncio.gather(*(process.close() for process in idle))
        finally:
            self._threads.shutdown(wait=True, cancel_futures=True)

    async def _ask(self, question: Question, body: bytes) -> tuple[Call, Prompt]:
        process: ReadingProcess | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                process = await self._process()
                header, data = await process.ask(header_of(question, len(body)), body)
            self._idle.append(process)
            process = None
            # Its hashes may be a hundred thousand objects.
            loop = asyncio.get_running_loop()
            answering = partial(answer_of, header, data, question.endpoint)
            call, prompt, distrusted = await loop.run_in_executor(self._threads, answering)
            if distrusted:
                self._tokenizer.encoder.distrust(distrusted, "in a process that reads long bodies")
            return call, prompt
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            log.error("a process that read a body of %d bytes is gone: %r", len(body), error)
            raise ReaderDied from error
        finally:
            self._turns.release()
            if process is not None:
                await process.close()

    async def _process(self) -> "ReadingProcess":
        """One that waits for work, or a new one. Which ended while it waited did not die of what comes next."""
        while self._idle:
            process = self._idle.pop()
            if not process.is_alive:
                log.warning("a process that was to read bodies has ended; another one takes its place")
            elif process.is_fast == self._tokenizer.encoder.is_fast:
                return process
            await process.close()
        return await ReadingProcess.start(self._tokenizer, self._threads)


class ReadingProcess:
    """One `gateway.reading_process`, and the socket to it."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        is_fast: bool,
    ) -> None:
        self.pid = process.pid
        self.is_fast = is_fast  # by what it was told
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, tokenizer: TextTokenizer, threads: Executor) -> "ReadingProcess":
        """A process that has been told its tokenizer. Should nobody wait for it any more, its thread ends it."""
        ours, theirs = socket.socketpair()
        spawning = threads.submit(spawn, theirs)
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=4 * PIECE_BYTES)
            try:
                process = await asyncio.shield(asyncio.wrap_future(spawning))
            except BaseException:
                writer.transport.abort()
                raise
        except BaseException:
            spawning.add_done_callback(partial(_end_unwanted, theirs))
            raise
        blueprint = tokenizer.blueprint()
        writer.write(header_of(blueprint))
        return cls(process, reader, writer, blueprint.fast)

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    async def ask(self, header: bytes, body: bytes) -> tuple[bytes, bytearray]:
        """Header and data of the answer. Raises ConnectionError or IncompleteReadError when the process has died."""
        self._writer.write(header)
        for start in range(0, len(body), PIECE_BYTES):
            self._writer.write(body[start : start + PIECE_BYTES])
            await self._writer.drain()
        header_size, size = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
        return await self._reader.readexactly(header_size), await self._data(size)

    async def _data(self, size: int) -> bytearray:
        """In pieces: none of the steps is long."""
        data, filled = bytearray(size), 0
        while filled < size:
            piece = await self._reader.read(min(PIECE_BYTES, size - filled))
            if not piece:
                raise ConnectionResetError("the process has closed its socket")
            data[filled : filled + len(piece)] = piece
            filled += len(piece)
        return data

    async def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self._writer.transport.abort()
        self._process.kill()
        await asyncio.to_thread(_reap, self._process)


def _is_mostly_text(body: bytes) -> bool:
    """Whether decoding `body` makes few objects, each of which begins after a comma or a bracket."""
    data = np.frombuffer(body, np.uint8)  # counts faster as bytes do
    return bool(sum(np.count_nonzero(data == mark) for mark in b",[{") <= MAX_COMMAS_AND_BRACKETS)


def spawn(stdin: socket.socket) -> "subprocess.Popen[bytes]":
    """A process with `stdin`, which this thread alone may close: a number that is free again is somebody else's next."""
    with stdin:
        return subprocess.Popen([sys.executable, "-m", "gateway.reading_process"], stdin=stdin.fileno())


def _end_unwanted(stdin: socket.socket, spawning: "Future[subprocess.Popen[bytes]]") -> None:
    stdin.close()  # never begun
    if not spawning.cancelled() and spawning.exception() is None:
        spawning.result().kill()
        _reap(spawning.result())


def _reap(process: "subprocess.Popen[bytes]") -> None:
    """Waits for the end of a process that has been killed; the kernel may hold it back for as long as it likes."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        log.error("a process that read bodies does not end: pid=%d", process.pid)

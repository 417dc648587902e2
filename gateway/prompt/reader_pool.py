"""The processes that read long bodies: the first is there before it is needed, further ones as bodies wait.

A process takes a second or more to load a large vocabulary. A body does not wait for that if a process is about to be free:

    warm ──► the first ──ready──► place ──► a body ──answered──► place …
    a body waits, and there may be more ──► another one ──ready──► place
    a process has died ──► another one ──ready──► its place
"""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import msgspec

from gateway.prompt.reader_process import LENGTHS, StartReader, header_of
from gateway.prompt.reader_queue import ReadingQueue
from gateway.tasks import TaskSet
from planner.decisions.admission.waiting import TenantShare
from prompts.tokens.encoder import EncoderVerdict
from prompts.tokens.tokenizer import TextTokenizer
from transport.control.python_command import python_module

log = logging.getLogger("prfaas.gateway.read")

PIECE_BYTES: Final = 256 * 1024
END_S: Final = 5.0
GONE: Final = (TimeoutError, OSError, asyncio.IncompleteReadError)


class ReadingPool:
    """At most `most` processes of one tokenizer; `threads` starts them, `tasks` owns what goes on beside."""

    def __init__(self, tokenizer: TextTokenizer, threads: Executor, tasks: TaskSet, most: int, start_s: float) -> None:
        self._encoder = tokenizer.encoder
        # In a file, once: it may have tens of megabytes, and putting it together holds the interpreter's lock.
        self._blueprint = anonymous_file(msgspec.msgpack.encode(tokenizer.blueprint()))
        self._threads = threads
        self._tasks = tasks
        self._most = most
        self._start_s = start_s
        self._queue = ReadingQueue(0)
        self._idle: list[ReadingProcess] = []
        self._places = 0  # those there are or will be, taken or not
        self._starting: set[asyncio.Task[None]] = set()

    @property
    def num_idle(self) -> int:
        """Processes that wait for a long body."""
        return len(self._idle)

    async def warm(self) -> None:
        """Starts the first one, and waits until it is there, or has failed to be."""
        if not self._places:
            self._grow()
        if self._starting:
            await asyncio.wait(self._starting.copy())

    async def take(self, share: TenantShare, num_bytes: int, check: Callable[[], None]) -> None:
        """Waits for a place, which `process` gives back. Should `check` raise when it is there, nothing is taken."""
        if not self._queue.has_free and self._places < self._most:
            self._grow()
        await self._queue.take(share, num_bytes)
        try:
            check()
        except BaseException:
            self._queue.give_back()
            raise

    @asynccontextmanager
    async def process(self, timeout_s: float) -> AsyncIterator["ReadingProcess"]:
        """A process for a place that has been taken, to be asked once inside the block, for so long.

        Raises what `GONE` lists; the process is ended then.
        """
        process: ReadingProcess | None = None
        try:
            async with asyncio.timeout(timeout_s):
                process = await self._idle_one()
                yield process
            self._idle.append(process)
            process = None
        except BaseException:
            self._start(self._replace(process))
            raise
        self._queue.give_back()

    async def close(self) -> None:
        """Ends the idle processes, and those that start."""
        for task in self._starting:
            task.cancel()
        if self._starting:
            await asyncio.wait(self._starting)
        idle, self._idle = self._idle, []
        await asyncio.gather(*(process.close() for process in idle))

    def forget(self) -> None:
        """Closes the tokenizer's file: no thread starts a process any more."""
        os.close(self._blueprint)

    def _grow(self) -> None:
        self._places += 1
        self._start(self._replace(None))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._tasks.start(work, "start_reader")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _replace(self, dead: "ReadingProcess | None") -> None:
        """Has a new process take a place. If none starts, the place is free all the same: the next body in it starts one."""
        try:
            if dead is not None:
                await dead.close()
            async with asyncio.timeout(self._start_s):
                self._idle.append(await self._new())
        except GONE as error:
            log.error("a process for reading bodies did not start: %r", error)
        finally:
            self._queue.give_back()

    async def _idle_one(self) -> "ReadingProcess":
        """An idle process, or a new one. A process that ended while idle did not die of the next body."""
        while self._idle:
            process = self._idle.pop()
            if not process.is_alive:
                log.warning("a process for reading bodies has ended; another one takes its place")
            elif process.is_fast == self._encoder.is_fast:
                return process
            await process.close()
        return await self._new()

    async def _new(self) -> "ReadingProcess":
        known = self._encoder.verdict if self._encoder.is_fast else None
        return await ReadingProcess.start(known, self._blueprint, self._threads)


class ReadingProcess:
    """One `gateway.prompt.reader_process`, and the socket to it."""

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
    async def start(cls, known: EncoderVerdict | None, blueprint: int, threads: Executor) -> "ReadingProcess":
        """A process that has loaded its tokenizer. If the caller is cancelled, the thread that spawns the process ends it.

        Raises what `GONE` lists.
        """
        ours, theirs = socket.socketpair()
        spawning = threads.submit(spawn, theirs, blueprint)
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=4 * PIECE_BYTES)
            try:
                writer.write(header_of(StartReader(known)))
                process = await asyncio.shield(asyncio.wrap_future(spawning))
                header_size, _ = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
                await reader.readexactly(header_size)
            except BaseException:
                writer.transport.abort()
                raise
        except BaseException:
            spawning.add_done_callback(partial(_end_unwanted, theirs))
            raise
        return cls(process, reader, writer, known is not None)

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


def anonymous_file(data: bytes) -> int:
    """The descriptor of a file without a name; in memory, where the system can."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("tokenizer")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor


def spawn(stdin: socket.socket, blueprint: int) -> "subprocess.Popen[bytes]":
    """A process with `stdin`, which this thread alone may close: the system gives a free descriptor's number away again."""
    with stdin:
        return subprocess.Popen(
            [*python_module("gateway.prompt.reader_process"), str(blueprint)],
            stdin=stdin.fileno(),
            pass_fds=[blueprint],
        )


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
        log.error("a process for reading bodies does not end: pid=%d", process.pid)

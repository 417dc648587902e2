"""Turns the bytes of a body into a call and its prompt, without holding the event loop.

The shortest bodies are read at once, and chats that go on by little: handing one to a thread and back takes as long. Other
short ones, and long ones that are mostly text or token ids, are read in threads of this process: what they have in common with
earlier ones is not tokenised or hashed again.
Any other would hold the interpreter's lock while its JSON is decoded or its tokens become a list, up to seconds for
10 MB. So it goes to a process (`gateway.prompt.reader_pool`).

Threads and processes are few: tenants get them in turn, by bytes (`gateway.prompt.reader_queue`). A body whose tenant is
refused by then is not read.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Final, TypeVar

import numpy as np

from gateway.api.dialects.translation import call_in
from gateway.api.openai import Call, Endpoint
from gateway.errors import ApiError, ReaderDied
from gateway.prompt.cache_breakpoints import is_marked, unmarked
from gateway.prompt.prompt import Prompt, PromptMemory, PromptModel, prompt_of, read_call
from gateway.prompt.reader_pool import GONE, ReadingPool
from gateway.prompt.reader_process import ReadQuestion, answer_of, header_of
from gateway.prompt.reader_queue import CLASS_BYTES, ReadingQueue, ReadingRoom
from gateway.tasks import TaskSet
from planner.decisions.admission.waiting import EVERYBODYS, TenantShare
from prompts.errors import TakesLonger
from prompts.tokens.ids import may_be_ids
from prompts.tokens.tokenizer import TextTokenizer

log = logging.getLogger("prfaas.gateway.read")

T = TypeVar("T")

TINY_BODY_BYTES: Final = 4 * 1024  # read in 0.1 ms, at worst in 2
SHORT_BODY_BYTES: Final = 128 * 1024  # the worst JSON of this length is decoded in 3 ms
LONG_BODY_BYTES: Final = 512 * 1024  # at worst as many new tokens: 8 ms to make a list of them
LONGER_BODY_BYTES: Final = 2 * 1024 * 1024  # where tokens are no list (prompts.tokens.encoder): 2 ms for its JSON
NEW_BYTES: Final = 16 * 1024  # of a chat that goes on: tokenised in 0.2 ms by a fast encoder, at worst in 5
MAX_COMMAS_AND_BRACKETS: Final = 24 * 1024  # no JSON has more values; prose of that length has a third as many
OWN_PLACES: Final = 1  # of each class of shorter bodies, which those of no other class take
MAX_READING_BYTES: Final = 512 * 1024 * 1024


def nothing() -> None:
    """No reason to refuse."""


class PromptReader:
    """Reads bodies: `threads` short ones and as many long ones at once."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        tasks: TaskSet,
        *,
        threads: int = 2,
        timeout_s: float = 120.0,
        room: ReadingRoom | None = None,
    ) -> None:
        """`room` is for what waits here; readers of several models may share one."""
        self._tokenizer = tokenizer
        self._memory = PromptMemory(tokenizer)
        self._tasks = tasks
        self._timeout_s = timeout_s
        # A place is a thread, and each process has one to be started and to have its answers taken.
        most = threads + OWN_PLACES * len(CLASS_BYTES) + threads
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="tokenise")
        self._queue = ReadingQueue(threads, OWN_PLACES)
        self.room = room or ReadingRoom(MAX_READING_BYTES)
        self._pool = ReadingPool(tokenizer, self._threads, tasks, threads, timeout_s)

    @property
    def num_idle(self) -> int:
        """Processes that wait for a long body."""
        return self._pool.num_idle

    async def warm(self, timeout_s: float) -> None:
        """Starts a process for long bodies, and waits for so long until it is there."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._pool.warm()
        except TimeoutError:
            log.warning("the process that reads long bodies has not started within %g s", timeout_s)

    async def read(
        self,
        endpoint: Endpoint,
        body: bytes,
        model: PromptModel,
        tenant: bytes = b"",
        answered: Sequence[int] = (),
        share: TenantShare = EVERYBODYS,
        check: Callable[[], None] = nothing,
    ) -> tuple[Call, Prompt]:
        """The call that `body` makes, and its prompt, with what has been `answered` after it. Raises ApiError.

        Nothing is remembered for anybody but `tenant`. A body that waits does so for `share`, and is not read if `check` raises
        then.
        """
        marked = is_marked(body)  # each mark has the conversation up to it rendered and tokenised, twice at worst
        if len(body) <= TINY_BODY_BYTES and not marked:
            return read_call(endpoint, body, model, self._memory, tenant, answered)
        encoder, memory = self._tokenizer.encoder, self._memory
        is_fast = encoder.is_fast
        reading = partial(read_call, endpoint, body, model, memory, tenant, answered)
        longest = LONGER_BODY_BYTES if is_fast and encoder.has_room else LONG_BODY_BYTES
        if len(body) <= longest and _is_mostly_text(body):
            if endpoint is not Endpoint.CHAT or answered or marked:
                return await self._in_thread(reading, share, len(body), check)
            call, marks = unmarked(call_in(endpoint, body), may_be_marked=False)
            try:
                most_new = NEW_BYTES if is_fast else TINY_BODY_BYTES
                return call, prompt_of(call, model, memory, tenant, most_new, marks=marks)
            except TakesLonger:
                longer = partial(prompt_of, call, model, memory, tenant, marks=marks)
                return call, await self._in_thread(longer, share, len(body), check)
        if len(body) <= SHORT_BODY_BYTES or _is_of_ids(endpoint, body):
            return await self._in_thread(reading, share, len(body), check)
        with ExitStack() as held:
            held.enter_context(self.room.held(share.flow, len(body)))
            await self._pool.take(share, len(body), check)
            # A task of its own: should the client leave, the process still gets its question whole, and its answer is taken.
            asked = ReadQuestion(endpoint, model, tenant, list(answered))
            asking = self._tasks.start(self._ask(asked, body, held.pop_all()), "read", expected=(ApiError,))
        try:
            return await asyncio.shield(asking)
        finally:
            del asking  # an error knows this frame and the task that error: together they would keep the body

    async def think(
        self, work: Callable[[PromptMemory], T], share: TenantShare = EVERYBODYS, num_bytes: int = TINY_BODY_BYTES
    ) -> T:
        """What `work` on so many bytes comes to in a thread. It must not hold the interpreter's lock for long."""
        return await self._in_thread(partial(work, self._memory), share, num_bytes, nothing)

    async def close(self) -> None:
        """Ends threads and processes."""
        try:
            await self._pool.close()
        finally:
            # What a thread does for a client that has left may take seconds, and other models are served meanwhile.
            await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
            self._pool.forget()

    async def _in_thread(
        self, work: Callable[[], T], share: TenantShare, num_bytes: int, check: Callable[[], None]
    ) -> T:
        with self.room.held(share.flow, num_bytes):
            place = await self._queue.take(share, num_bytes)
            loop = asyncio.get_running_loop()
            try:
                check()
                working = self._threads.submit(work)
            except BaseException:
                self._queue.give_back(place)
                raise
            # A thread that works for a client that has left is still taken.
            working.add_done_callback(lambda _: loop.call_soon_threadsafe(self._queue.give_back, place))
            return await asyncio.wrap_future(working)

    async def _ask(self, question: ReadQuestion, body: bytes, held: ExitStack) -> tuple[Call, Prompt]:
        """Asks a process whose place has been taken; `held` is left when the answer is there."""
        with held:
            try:
                async with self._pool.process(self._timeout_s) as process:
                    header, data = await process.ask(header_of(question, len(body)), body)
            except GONE as error:
                log.error("a process that read a body of %d bytes is gone: %r", len(body), error)
                raise ReaderDied from error
            # Its hashes may be a hundred thousand objects.
            answering = partial(answer_of, header, data, question.endpoint)
            call, prompt, distrusted = await asyncio.get_running_loop().run_in_executor(self._threads, answering)
        if distrusted:
            self._tokenizer.encoder.distrust(distrusted, "in a process that reads long bodies")
        return call, prompt


def _is_mostly_text(body: bytes) -> bool:
    """Whether decoding `body` makes few objects; each begins after a comma or a bracket."""
    data = np.frombuffer(body, np.uint8)  # counts faster as bytes do
    return bool(sum(np.count_nonzero(data == mark) for mark in b",[{") <= MAX_COMMAS_AND_BRACKETS)


def _is_of_ids(endpoint: Endpoint, body: bytes) -> bool:
    """Whether `body` is little else than token ids, which become an array in pieces."""
    return endpoint is Endpoint.COMPLETIONS and len(body) <= LONGER_BODY_BYTES and may_be_ids(body, TINY_BODY_BYTES)

"""Blocks of the agent's prefix cache, for threads that wait: SGLang reads and writes storage on threads of its own.

An event loop on another thread keeps up the link to the agent. Each call borrows pages of one prompt, copies on the caller's
thread, and gives them back; without an agent, or without an answer in time, nothing is cached and nothing is kept.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from engine.agent_link import AgentJob, AgentLink
from engine.errors import AgentGone, PagesInvalid, TransferError
from engine.pages import Bytes, JobKV
from hybrid_cache.layout import ModelLayout

T = TypeVar("T")

log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 30.0
ANSWER_TIMEOUT_S: Final = 10.0  # an agent answers at once, unless an SSD has to give blocks back
CLOSE_TIMEOUT_S: Final = 10.0

# (layer, first token, K rows, V rows): rows are [tokens, bytes]
Take = Callable[[int, int, Bytes, Bytes], None]
# (layer, first token, end) -> K rows and V rows
Give = Callable[[int, int, int], tuple[Bytes, Bytes]]


class BlockStore:
    """What one server keeps in its agent's pages. Methods may be called from any thread, and wait.

    Only for layouts of one group of full attention.
    """

    def __init__(
        self,
        socket: Path,
        layout: ModelLayout,
        *,
        model_id: str,
        max_model_len: int,
        http_url: str,
        notice: str = "",
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.layout: Final = layout
        self.counts: Final[Counter[str]] = Counter()  # calls that came to nothing, by reason
        self._socket = socket
        self._model_id = model_id
        self._max_model_len = max_model_len
        self._http_url = http_url
        self._notice = notice
        self._answer_timeout_s = answer_timeout_s
        self._lock = threading.Lock()  # counts
        self._requests = 0
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._link: AgentLink
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="prfaas-agent", daemon=True)

    def start(self) -> None:
        """Starts the thread; the connection comes up when there is an agent. Raises TimeoutError."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TimeoutError("the agent's thread did not start")

    def close(self) -> None:
        """Hangs up. Calls that still wait end as if nothing were cached."""
        if self._started.is_set() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(CLOSE_TIMEOUT_S)

    def wait_connected(self, timeout_s: float) -> bool:
        """Whether there is an agent within that time."""
        return self._ask(self._link.wait_connected(timeout_s), timeout_s + CLOSE_TIMEOUT_S)

    # Each of these takes the names of a prompt's blocks from its first one on

    def cached_blocks(self, names: Sequence[bytes]) -> int:
        """How many of these blocks are cached, from the first one on."""
        try:
            with self._lent(names, cached_only=True) as (_, kv):
                return kv.cached_tokens // self.layout.block_size
        except (TransferError, PagesInvalid, TimeoutError) as exc:
            self._count("lookup", exc)
            return 0

    def load(self, names: Sequence[bytes], first: int, take: Take) -> int:
        """Hands over blocks [first, len(names)), layer by layer; returns how many of them are cached: later ones are not.

        What was handed over counts only once this has returned: pages may be lost meanwhile.
        """
        size = self.layout.block_size
        try:
            with self._lent(names, cached_only=True) as (_, kv):
                stop = kv.cached_tokens // size
                if stop <= first:
                    return 0
                for layer in self.layout.groups[0].layers:
                    take(layer, first * size, *kv.read_attention(layer, first * size, stop * size))
                    kv.check_ours()
                return stop - first
        except (TransferError, PagesInvalid, TimeoutError) as exc:
            self._count("load", exc)
            return 0

    def save(self, names: Sequence[bytes], first: int, give: Give) -> bool:
        """Keeps blocks [first, len(names)), unless they are kept already; False if they could not all be."""
        size = self.layout.block_size
        try:
            with self._lent(names, cached_only=False) as (job, kv):
                if kv.cached_tokens < first * size:
                    raise TransferError("prefix_not_cached", f"{kv.cached_tokens // size} of the {first} blocks before")
                if kv.cached_tokens < kv.num_tokens:
                    for layer in self.layout.groups[0].layers:
                        kv.write_attention(layer, kv.cached_tokens, *give(layer, kv.cached_tokens, kv.num_tokens))
                        kv.check_ours()
                    self._later(lambda: job.prefill_done(kv.num_tokens, 0, 0.0))
                return True
        except (TransferError, PagesInvalid, TimeoutError) as exc:
            self._count("save", exc)
            return False

    @contextmanager
    def _lent(self, names: Sequence[bytes], *, cached_only: bool) -> Iterator[tuple[AgentJob, JobKV]]:
        """Pages of the prompt: of what is cached of it, or of all of it."""
        begun: list[AgentJob] = []  # ended even if its pages come in the moment in which nobody waits any more
        try:
            kv = self._ask(self._begin(b"".join(names), len(names), cached_only, begun), self._answer_timeout_s)
            yield begun[0], kv
        finally:
            self._later(lambda: _end_all(begun))

    def _count(self, what: str, error: Exception) -> None:
        reason = error.reason if isinstance(error, TransferError) else type(error).__name__
        with self._lock:
            self.counts[f"{what}_{reason}"] += 1
            is_first = self.counts[f"{what}_{reason}"] == 1
        log.log(logging.WARNING if is_first else logging.DEBUG, "%s of blocks: %s", what, error or reason)

    def _ask(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """What `work` comes to on the loop's thread. Raises what it raises, TimeoutError, and AgentGone once closed."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # closed
            work.close()
            raise AgentGone("the server is shutting down") from None
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise AgentGone("the server is shutting down") from None
        except TimeoutError:
            future.cancel()
            raise

    def _later(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # closed: the agent has its pages back
            log.debug("no loop any more")

    # The loop's thread from here on

    async def _begin(self, hashes: bytes, num_blocks: int, cached_only: bool, begun: list[AgentJob]) -> JobKV:
        self._requests += 1
        name, num_tokens = f"pages-{self._requests}", num_blocks * self.layout.block_size
        ask = self._link.look_up if cached_only else self._link.offer_answer
        job = ask(name, hashes, num_tokens)
        begun.append(job)
        try:
            return await job.pages()
        except BaseException:
            job.end()
            raise

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._link = AgentLink(
            self._socket,
            self.layout,
            model_id=self._model_id,
            max_model_len=self._max_model_len,
            http_url=self._http_url,
            notice=self._notice,
            on_welcome=lambda welcome: None,
            on_drain=lambda: log.info("the agent drains: what runs is finished"),
        )
        keeping_up = asyncio.create_task(self._link.run())
        self._started.set()
        try:
            await self._stop.wait()
        finally:
            waiting = {keeping_up, *asyncio.all_tasks()} - {asyncio.current_task()}
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


def _end_all(jobs: Sequence[AgentJob]) -> None:
    for job in jobs:
        job.end()

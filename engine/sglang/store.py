"""Blocks of the agent's prefix cache, for threads that wait: SGLang reads and writes storage on threads of its own.

An event loop on another thread keeps up the link to the agent. Each call borrows pages of one prompt, copies on the caller's
thread, and gives them back; without an agent, or without an answer in time, nothing is cached and nothing is kept.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from engine.agent.block_copies import Bytes
from engine.agent.job_pages import JobKV
from engine.agent.link import AgentJob
from engine.errors import PagesInvalid, TransferError
from engine.sglang.agent_thread import SglangAgentThread
from hybrid_cache.layout.layout import ModelLayout

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 10.0  # an agent answers at once, unless an SSD has to give blocks back

# (layer, first token, K rows, V rows): rows are [tokens, bytes]
Take = Callable[[int, int, Bytes, Bytes], None]
# (layer, first token, end) -> K rows and V rows
Give = Callable[[int, int, int], tuple[Bytes, Bytes]]

# what was asked for (lookup, load or save), and the reason why it came to nothing
OnFallback = Callable[[str, str], None]


def _unheard(what: str, reason: str) -> None: ...


class BlockStore:
    """One server's blocks in its agent's pages. Methods may be called from any thread, and wait.

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
        on_fallback: OnFallback = _unheard,
    ) -> None:
        """`on_fallback` hears of calls that came to nothing, on their own threads."""
        self.layout: Final = layout
        self.counts: Final[Counter[str]] = Counter()  # calls that came to nothing, by reason
        self._on_fallback = on_fallback
        self._answer_timeout_s = answer_timeout_s
        self._lock = threading.Lock()  # counts
        self._requests = 0
        self._agent = SglangAgentThread(
            socket, layout, model_id=model_id, max_model_len=max_model_len, http_url=http_url, notice=notice
        )

    def start(self) -> None:
        """Starts the thread; the connection comes up when there is an agent. Raises TimeoutError."""
        self._agent.start()

    def close(self) -> None:
        """Hangs up. Calls that still wait end as if nothing were cached."""
        self._agent.close()

    def wait_connected(self, timeout_s: float) -> bool:
        """Whether there is an agent within that time."""
        return self._agent.wait_connected(timeout_s)

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
                    self._agent.later(lambda: job.prefill_done(kv.num_tokens, 0, 0.0))
                return True
        except (TransferError, PagesInvalid, TimeoutError) as exc:
            self._count("save", exc)
            return False

    @contextmanager
    def _lent(self, names: Sequence[bytes], *, cached_only: bool) -> Iterator[tuple[AgentJob, JobKV]]:
        """Pages of the prompt: of what is cached of it, or of all of it."""
        begun: list[AgentJob] = []  # ended even if its pages come when they are not awaited any more
        try:
            kv = self._agent.ask(self._begin(b"".join(names), len(names), cached_only, begun), self._answer_timeout_s)
            yield begun[0], kv
        finally:
            self._agent.later(lambda: _end_all(begun))

    def _count(self, what: str, error: Exception) -> None:
        reason = error.reason if isinstance(error, TransferError) else type(error).__name__
        with self._lock:
            self.counts[f"{what}_{reason}"] += 1
            is_first = self.counts[f"{what}_{reason}"] == 1
        self._on_fallback(what, reason)
        log.log(logging.WARNING if is_first else logging.DEBUG, "%s of blocks: %s", what, error or reason)

    # The loop's thread from here on

    async def _begin(self, hashes: bytes, num_blocks: int, cached_only: bool, begun: list[AgentJob]) -> JobKV:
        self._requests += 1
        name, num_tokens = f"pages-{self._requests}", num_blocks * self.layout.block_size
        ask = self._agent.link.look_up if cached_only else self._agent.link.offer_answer
        job = ask(name, hashes, num_tokens)
        begun.append(job)
        try:
            return await job.pages()
        except BaseException:
            job.end()
            raise


def _end_all(jobs: Sequence[AgentJob]) -> None:
    for job in jobs:
        job.end()

"""Answers as prefix cache: the next turn of a conversation begins with the last answer, which must not be computed again.

    answer ends ─ ask the agent for pages ─ the model copies, a piece per round ─ PrefillDone ─ EndJob

No request waits for it, so it yields: to anything in the model's round, to requests that need the pages, and to a
shutdown. It also yields to later answers, because a waiting sequence keeps its memory in the model.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Final

from engine.agent.link import AgentJob, AgentLink
from engine.errors import EngineError, TransferError
from engine.metrics import EngineMetrics
from engine.runtime.runner import ModelRunner
from engine.runtime.scheduler import Event, Keep, WorkFailed
from hybrid_cache.hashing.block_hash import block_hashes

log = logging.getLogger(__name__)

MAX_KEEPING: Final = 8  # sequences that have ended and still hold memory in the model


class AnswerKeeper:
    """Puts finished answers into the agent's pages. Its methods belong to the event loop's thread."""

    def __init__(self, model: ModelRunner, block_size: int, metrics: EngineMetrics) -> None:
        self._model = model
        self._block_size = block_size
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, link: AgentLink, request_id: str, tokens: Sequence[int], salt: bytes, sequence: Any) -> None:
        """Keeps what `sequence` has marked of `tokens`, prompt and answer, in the background; or counts why not."""
        if len(self._tasks) >= MAX_KEEPING:
            self._metrics.on_answer("busy")
            return
        task = asyncio.get_running_loop().create_task(
            self._keep(link, request_id, tokens[: sequence.marked_tokens], salt, sequence), name=f"keep {request_id}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Drops the answers that are not kept yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, link: AgentLink, request_id: str, tokens: Sequence[int], salt: bytes, sequence: Any) -> None:
        outcome, added = "aborted", 0
        try:
            hashes = await asyncio.to_thread(block_hashes, tokens, self._block_size, salt)
            added = await self._fill(link.offer_answer(request_id, b"".join(hashes), len(tokens)), sequence)
            outcome = "kept"
        except TransferError as exc:
            outcome = exc.reason
        except Exception:
            outcome = "failed"
            log.exception("the answer of %s is not kept", request_id)
        finally:
            self._metrics.on_answer(outcome, added)
            log.debug("answer id=%s outcome=%s tokens=%d added=%d", request_id, outcome, len(tokens), added)

    async def _fill(self, job: AgentJob, sequence: Any) -> int:
        """Returns how many tokens more are prefix cache than before."""
        reason = "aborted"
        try:
            kv = await job.pages()
            loop = asyncio.get_running_loop()
            done: asyncio.Future[Event] = loop.create_future()
            job.on_failure = lambda error: _settle(done, WorkFailed(error))
            work = Keep(sequence=sequence, kv=kv, emit=lambda event: _from_model(loop, done, event))
            self._model.submit(work)
            try:
                _check(await done)
            finally:
                work.abort()
            job.prefill_done(kv.num_tokens, 0, 0.0)
            reason = ""
            return kv.num_tokens - kv.cached_tokens
        except EngineError as exc:
            reason = exc.reason if isinstance(exc, TransferError) else "failed"
            raise
        finally:
            job.end(reason=reason)


def _check(event: Event) -> None:
    if isinstance(event, WorkFailed):
        raise event.error


def _from_model(loop: asyncio.AbstractEventLoop, done: "asyncio.Future[Event]", event: Event) -> None:
    """Called on the model's thread. A closed loop (RuntimeError) means that nothing listens."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, done, event)


def _settle(done: "asyncio.Future[Event]", event: Event) -> None:
    if not done.done():
        done.set_result(event)

"""Tasks that each send one reply to an engine: every job gets JobPages or Refused, whatever happens."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine

from hybrid_cache.cache.reservation import Reservation
from node.errors import NodeRefusal
from transport.control import messages as m

log = logging.getLogger(__name__)

Reply = Callable[[m.AgentMessage], None]
JobKey = tuple[int, str]
"""The identity of an engine's connection, and the name that the engine gave the job."""

OK = "ok"  # the outcome of a job that went as it should

Answer = Callable[[], Coroutine[None, None, m.JobPages]]


class JobReplies:
    """Tasks that end in an answer; `refused` counts those that were none, by label."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self._tasks: dict[JobKey, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()  # those that are not awaited any more, too

    def __bool__(self) -> bool:
        """Whether any of them may still hold what it has reserved: one that was cancelled needs a turn to give it back."""
        return bool(self._running)

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, key: JobKey) -> bool:
        return key in self._tasks

    def start(self, key: JobKey, answer: Answer, reply: Reply) -> None:
        """Sends what `answer()` comes to; a NodeRefusal, or any other error, becomes a Refused."""
        task = asyncio.create_task(self._run(key, answer, reply))
        self._tasks[key] = task
        self._running.add(task)
        task.add_done_callback(lambda _: self._forget(key, task))

    def cancel(self, key: JobKey) -> None:
        """This answer is not awaited any more."""
        if task := self._tasks.pop(key, None):
            task.cancel()

    def cancel_all(self, owner: int) -> None:
        """The same for all answers to one connection."""
        for key in [key for key in self._tasks if key[0] == owner]:
            self.cancel(key)

    def _forget(self, key: JobKey, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _run(self, key: JobKey, answer: Answer, reply: Reply) -> None:
        job = key[1]
        try:
            reply(await answer())
        except NodeRefusal as exc:
            self.refused[exc.label] += 1
            log.warning("refused job=%s reason=%s", job, exc)
            reply(m.Refused(job=job, reason=exc.label, detail=exc.detail))
        except Exception as exc:  # an engine that hears nothing would wait for ever
            self.refused["internal"] += 1
            log.exception("no answer to job=%s", job)
            reply(m.Refused(job=job, reason="internal", detail=str(exc)))


def noting_refusals(reply: Reply, note: Callable[[str], None]) -> Reply:
    """`reply`, and `note` hears the reason of every Refused that passes."""

    def noting(message: m.AgentMessage) -> None:
        if isinstance(message, m.Refused):
            note(message.reason)
        reply(message)

    return noting


def job_pages(job: str, reservation: Reservation, *, exact: bool = True) -> m.JobPages:
    """A reservation as the engine hears of it; see JobPages for `exact`."""
    return m.JobPages(
        job=job,
        num_tokens=reservation.num_tokens,
        cached_tokens=reservation.cached_tokens,
        blocks=reservation.blocks,
        states=reservation.states,
        exact=exact,
    )

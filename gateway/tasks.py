"""Tasks with an owner that sees their end: none is lost, none ends unseen.

A task that fails in a way its starter did not name is an error of ours. It is logged with its traceback and counted, and
work that is to go on for ever is begun again after a pause.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

log = logging.getLogger("prfaas.gateway.tasks")

T = TypeVar("T")
BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
SEEN: Final = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)


class TaskSet:
    """Owns tasks. `on_unforeseen` is told the name of each that ended in an unexpected error."""

    def __init__(self, on_unforeseen: Callable[[str], None]) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_unforeseen = on_unforeseen

    def __len__(self) -> int:
        return len(self._tasks)

    def start(
        self, work: Coroutine[Any, Any, T], name: str, *, expected: tuple[type[Exception], ...] = ()
    ) -> asyncio.Task[T]:
        """Begins `work`. Its awaiter deals with the errors of `expected`; all others are counted here."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._ended(ended, name, expected))
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> "asyncio.Task[None]":
        """Has `work` done for ever: it is begun again, after a pause that grows, whenever it ends."""
        return self.start(self._for_ever(work, name), name)

    async def join(self, timeout_s: float) -> None:
        """Waits for all tasks; what is not done in time is cancelled."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        await self._cancel(late)

    async def cancel(self) -> None:
        """Ends all tasks now."""
        await self._cancel(set(self._tasks))

    async def _cancel(self, tasks: set[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _for_ever(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        failures = 0
        while True:
            try:
                await work()
                failures = 0
            except Exception as error:
                self.unforeseen(name, error)
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
            failures += 1

    def _ended(self, task: asyncio.Task[Any], name: str, expected: tuple[type[Exception], ...]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, expected):
            self.unforeseen(name, error)

    def unforeseen(self, name: str, error: BaseException) -> None:
        """Counts and logs an unforeseen error, in the work called `name`."""
        log.error("%s failed in an unforeseen way", name, exc_info=error)
        self._on_unforeseen(name)

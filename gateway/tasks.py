"""Work that outlives the request it belongs to: freeing what nodes hold for a client that is gone."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger("prfaas.gateway.tasks")
T = TypeVar("T")


class TaskSet:
    """Owns tasks: none is lost to the garbage collector, none is left behind at the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def join(self, timeout_s: float) -> None:
        """Waits for all tasks; what is not done in time is cancelled."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # Whoever awaits the task gets its error; asking here only keeps asyncio from reporting it a second time.
        if not task.cancelled() and (error := task.exception()):
            log.debug("a background task failed: %s", error)

"""Background work of the agent, each piece with an owner that sees its end: counted, logged at error, begun again."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

log = logging.getLogger(__name__)

AGAIN_S: Final = 1.0  # an error that comes at once, every time, must not fill the log

Work = Callable[[], Awaitable[None]]
T = TypeVar("T")


class Tasks:
    """What runs until it is cancelled or returns. `failures` counts its errors, by name."""

    def __init__(self, failures: Counter[str], again_s: float = AGAIN_S) -> None:
        self.failures = failures
        self._again_s = again_s
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, work: Work) -> None:
        """Runs `work`, and again after an error, until it returns."""
        task = asyncio.create_task(self._run(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, name: str, work: Work) -> None:
        while True:
            try:
                return await work()
            except Exception:  # whatever it is, what the node lives on goes on
                self.failures[name] += 1
                log.exception("%s failed, again in %.1fs", name, self._again_s)
            await asyncio.sleep(self._again_s)

    def cancel(self) -> None:
        """Tells all of it to end."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Ends all of it."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """For the event loop: a callback raised, or a task that was not awaited."""
        self.failures["callback"] += 1
        log.error("%s", context.get("message"), exc_info=context.get("exception"))


def on_loop(callback: Callable[[T], None]) -> Callable[[T], None]:
    """`callback` for threads to call: it runs on the loop that runs now, or not at all once that loop is closed."""
    loop = asyncio.get_running_loop()

    def call(result: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(callback, result)

    return call

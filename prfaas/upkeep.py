"""A child process that ends is started again, and the console hears of it.

All of them have been up once, so even one that says that it cannot be started may be started later: when its model's directory is
back, say. One that never stays up ends the system only if there is nothing without it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from node.restarts import Restarts
from prfaas.errors import StartError

MAX_RESTARTS: Final = 5  # within a minute, or without having come up
RARELY_S: Final = 30.0  # then

Pause = Callable[[float], Awaitable[None]]


class Ending(Protocol):
    """A child process."""

    @property
    def name(self) -> str: ...
    async def wait(self) -> int: ...
    async def stop(self, timeout_s: float) -> int | None: ...


async def keep_up(
    process: Ending,
    start_again: Callable[[], Awaitable[Ending]],
    report: Callable[[str], None],
    now: Callable[[], float],
    *,
    pause: Pause = asyncio.sleep,
    max_restarts: int = MAX_RESTARTS,
    is_needed: bool = False,
) -> None:
    """Runs until cancelled. `start_again` returns once the new process is ready.

    Raises StartError when it is in vain for one that is needed; others are tried rarely.
    """
    restarts = Restarts(max_restarts)
    reason = f"status {await process.wait()}"
    while True:
        pause_s = restarts.on_death(now())
        if pause_s is None and is_needed:
            raise StartError(f"{process.name} ended {restarts.deaths} times, at last with {reason}: given up")
        pause_s = RARELY_S if pause_s is None else pause_s
        report(f"{process.name} ended with {reason}: it is started again in {pause_s:g} s")
        await pause(pause_s)
        try:
            process = await start_again()
        except (StartError, OSError) as exc:  # no room for its configuration, no memory for a process: may pass
            reason = str(exc)
            continue
        report(f"{process.name} is back")
        restarts.on_ready()
        reason = f"status {await process.wait()}"

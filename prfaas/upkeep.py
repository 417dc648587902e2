"""A child process that ends is started again, and the console hears of it; one that never stays up ends the system."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from node.restarts import Restarts
from prfaas.errors import StartError, StartRefused

MAX_RESTARTS: Final = 5  # within a minute, or without having come up

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
) -> None:
    """Runs until cancelled. `start_again` returns once the new process is ready. Raises StartError when it is in vain."""
    restarts = Restarts(max_restarts)
    reason = f"status {await process.wait()}"
    while True:
        pause_s = restarts.on_death(now())
        if pause_s is None:
            raise StartError(f"{process.name} ended {restarts.deaths} times, at last with {reason}: given up")
        report(f"{process.name} ended with {reason}: it is started again in {pause_s:g} s")
        await pause(pause_s)
        try:
            process = await start_again()
        except StartRefused:
            raise
        except (StartError, OSError) as exc:  # no room for its configuration, no memory for a process: may pass
            reason = str(exc)
            continue
        report(f"{process.name} is back")
        restarts.on_ready()
        reason = f"status {await process.wait()}"

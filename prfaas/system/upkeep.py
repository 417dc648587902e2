"""A child process that ends is started again, and the console hears of it.

One that has never been up ends the system when it says that it never can be, or fails by itself again and again; being killed
says nothing. Of one that has been up once, even a start that is refused may succeed later: when its model's directory is back,
say. It ends the system only if there is nothing without it, and it never stays up.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

from node.process.restarts import FIRST_BACKOFF_S, Restarts
from prfaas.errors import StartError, StartKilled, StartRefused

MAX_RESTARTS: Final = 5  # within a minute, or without having come up
RARELY_S: Final = 30.0  # then
NEXT_LINE: Final = "\n"

Pause = Callable[[float], Awaitable[None]]


class Ending(Protocol):
    """A child process."""

    @property
    def name(self) -> str: ...
    async def wait(self) -> int: ...
    async def stop(self, timeout_s: float) -> int | None: ...


Started = TypeVar("Started", bound=Ending)


async def first_start(
    name: str,
    start: Callable[[], Awaitable[Started]],
    report: Callable[[str], None],
    now: Callable[[], float],
    *,
    pause: Pause = asyncio.sleep,
    max_restarts: int = MAX_RESTARTS,
) -> Started:
    """What `start` returns once the process is ready. Raises StartError: at once what refuses, later what is in vain."""
    restarts = Restarts(max_restarts)
    while True:
        try:
            return await start()
        except StartRefused:
            raise
        except StartKilled as exc:
            pause_s, reason = FIRST_BACKOFF_S, str(exc)
        except (StartError, OSError) as exc:
            allowed_s = restarts.on_death(now())
            if allowed_s is None:
                raise
            pause_s, reason = allowed_s, str(exc)
        reason = reason.partition("; end of ")[0].partition(NEXT_LINE)[0]  # a log's end is for whom it ends
        report(f"{name} did not come up: {reason}: it is started again in {pause_s:g} s")
        await pause(pause_s)


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

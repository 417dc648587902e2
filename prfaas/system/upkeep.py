"""A child process that ends is started again, and the console hears of it.

One that has never been up ends the system when it says that it never can be, or fails by itself again and again. Of one that
has been up once, even a start that is refused may succeed later: when its model's directory is back, say. It ends the system
only if there is nothing without it, and it fails by itself again and again. Being killed from outside says nothing of a process.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from node.process.restarts import Restarts
from prfaas.errors import StartError, StartKilled, StartRefused
from prfaas.system.process import is_from_outside

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
        except (StartError, OSError) as exc:
            end = _no_start_of(name, exc)
            pause_s = restarts.on_kill(now()) if end.was_killed else restarts.on_death(now())
            if pause_s is None:
                raise
        report(f"{end.text}: it is started again in {pause_s:g} s")
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

    Raises StartError when one that is needed fails by itself too often; others are tried rarely.
    """
    restarts = Restarts(max_restarts)
    end = _end_of(process.name, await process.wait())
    while True:
        pause_s = restarts.on_kill(now()) if end.was_killed else restarts.on_death(now())
        if pause_s is None and is_needed:
            raise StartError(f"{process.name} failed {restarts.deaths} times and is given up; last: {end.text}")
        pause_s = RARELY_S if pause_s is None else pause_s
        report(f"{end.text}: it is started again in {pause_s:g} s")
        await pause(pause_s)
        try:
            process = await start_again()
        except (StartError, OSError) as exc:  # no room for its configuration, no memory for a process: may pass
            end = _no_start_of(process.name, exc)
            continue
        report(f"{process.name} is back")
        restarts.on_ready()
        end = _end_of(process.name, await process.wait())


@dataclass(frozen=True, slots=True)
class End:
    """How a process, or a start of one, came to its end."""

    text: str
    was_killed: bool


def _end_of(name: str, status: int) -> End:
    return End(f"{name} ended with status {status}", is_from_outside(status))


def _no_start_of(name: str, reason: StartError | OSError) -> End:
    text = (
        str(reason).partition("; end of ")[0].partition(NEXT_LINE)[0]
    )  # the log's end is for starts that are given up
    return End(f"{name} did not come up: {text}", isinstance(reason, StartKilled))

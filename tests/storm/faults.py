"""What happens to a system without help: processes killed and stopped, links cut and stalled, disk and memory full."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.storm.system import StormSystem

PIECE: Final = 1 << 20
MOST_AT_ONCE: Final = 3  # so that something is left to answer with


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault, how often it is drawn, and how long it lasts at least and at most."""

    name: str
    weight: float
    shortest_s: float
    longest_s: float
    strike: Callable[[StormSystem, random.Random, float], Awaitable[str]] = field(repr=False)


async def kill(system: StormSystem, rng: random.Random, kind: str) -> str:
    """kill -9 of one process of a kind."""
    victims = [each for each in system.processes() if each.kind == kind]
    if not victims:
        return "none runs"
    victim = rng.choice(victims)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim.pid, signal.SIGKILL)
    return f"{victim.kind} {victim.node}"


async def stop(system: StormSystem, rng: random.Random, lasts_s: float) -> str:
    """SIGSTOP of any process, SIGCONT later."""
    victims = system.processes()
    if not victims:
        return "none runs"
    victim = rng.choice(victims)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            os.kill(victim.pid, signal.SIGCONT)
    return f"{victim.kind} {victim.node} for {lasts_s:.1f} s"


async def cut(system: StormSystem, rng: random.Random, _: float) -> str:
    """Every connection of one link at once."""
    name = rng.choice(sorted(system.relays))
    relay = system.relays[name]
    for index in range(len(relay.pairs)):
        relay.cut(index)
    return name


async def stall(system: StormSystem, rng: random.Random, lasts_s: float) -> str:
    """Nothing passes on one link, and no end is told."""
    name = rng.choice(sorted(system.relays))
    relay = system.relays[name]
    stalled = set(range(len(relay.pairs)))
    relay.stalled |= stalled
    try:
        await asyncio.sleep(lasts_s)
    finally:
        relay.stalled -= stalled
    return f"{name} for {lasts_s:.1f} s"


async def fill(system: StormSystem, directory: str, lasts_s: float) -> str:
    """Takes all the room of a file system that the system has to itself, and gives it back."""
    filler = system.inside(directory) / "filler"
    try:
        written = await asyncio.to_thread(_write_until_full, filler)
        await asyncio.sleep(lasts_s)
    finally:
        with contextlib.suppress(OSError):
            filler.unlink()
    return f"{written >> 20} MiB for {lasts_s:.1f} s"


def _write_until_full(filler: Path) -> int:
    written = 0
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            written += file.write(bytes(PIECE))
    return written


def faults(system: StormSystem) -> list[Fault]:
    """All kinds that this machine allows. An engine takes seconds to come back on two cores, so kills of it are rarer."""
    kinds = [
        Fault("kill engine", 5, 0, 0, lambda s, rng, _: kill(s, rng, "engine")),
        Fault("kill agent", 3, 0, 0, lambda s, rng, _: kill(s, rng, "agent")),
        Fault("kill gateway", 4, 0, 0, lambda s, rng, _: kill(s, rng, "gateway")),
        Fault("stop", 30, 0.1, 3.0, stop),
        Fault("cut", 30, 0, 0, cut),
        Fault("stall", 20, 0.2, 5.0, stall),
    ]
    if system.isolated:
        kinds += [
            Fault("disk full", 4, 0.5, 4.0, lambda s, _, lasts_s: fill(s, str(s.home / "ssd"), lasts_s)),
            Fault("memory full", 4, 0.5, 4.0, lambda s, _, lasts_s: fill(s, "/dev/shm", lasts_s)),
        ]
    return kinds


class Weather:
    """Strikes at random, a bounded number of times."""

    def __init__(self, system: StormSystem, rng: random.Random, report: Callable[[str], None]) -> None:
        self._system = system
        self._rng = rng
        self._report = report
        self.struck: dict[str, int] = {}

    async def blow(self, number: int, seconds: float) -> None:
        """`number` faults over `seconds`, as a Poisson process; returns when the last one is over."""
        kinds = faults(self._system)
        free = asyncio.Semaphore(MOST_AT_ONCE)
        times = sorted(self._rng.uniform(0.0, seconds) for _ in range(number))
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for at_s in times:
                await asyncio.sleep(max(0.0, began + at_s - asyncio.get_running_loop().time()))
                await free.acquire()
                fault = self._rng.choices(kinds, [each.weight for each in kinds])[0]
                group.create_task(self._strike(fault, at_s)).add_done_callback(lambda _: free.release())
            await asyncio.sleep(max(0.0, began + seconds - asyncio.get_running_loop().time()))

    async def _strike(self, fault: Fault, at_s: float) -> None:
        self.struck[fault.name] = self.struck.get(fault.name, 0) + 1
        what = await fault.strike(self._system, self._rng, self._rng.uniform(fault.shortest_s, fault.longest_s))
        self._report(f"{at_s:7.1f} s  {fault.name:<12} {what}")

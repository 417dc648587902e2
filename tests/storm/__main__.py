"""`python -m tests.storm --faults 500 --seconds 600`: a system under traffic and faults, and nobody who helps it.

It passes if every greedy answer had the right tokens or an error, no request hung, everything was back and nothing was left
within a minute after the last fault, no process grew, and everything ended when it was told to.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import Final

import aiohttp

from engine.model.tiny import build_model
from tests.storm.faults import Weather
from tests.storm.system import POLL_S, StormSystem
from tests.storm.traffic import Traffic, questions

WORKERS: Final = 4
START_S: Final = 180.0
CALM_S: Final = 60.0  # after the last fault everything must be back within this
END_S: Final = 90.0
RSS_EVERY_S: Final = 10.0
RSS_SETTLED_S: Final = 60.0  # a process may grow for so long after its start
RSS_GROWTH: Final = 1.25
RSS_MARGIN_BYTES: Final = 48 << 20


class Sizes:
    """Resident memory of every process, when it had settled and when it was last seen."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._settled: dict[int, int] = {}
        self._last: dict[int, tuple[str, int]] = {}

    def note(self, system: StormSystem, now: float) -> None:
        for each in system.processes():
            first = self._seen.setdefault(each.pid, now)
            if now - first >= RSS_SETTLED_S:
                self._settled.setdefault(each.pid, each.rss_bytes)
                self._last[each.pid] = (f"{each.kind} {each.node}", each.rss_bytes)

    def grown(self) -> list[str]:
        """Processes that grew, one line each."""
        return [
            f"{name} (pid {pid}) grew from {settled >> 20} to {last >> 20} MiB"
            for pid, settled in self._settled.items()
            for name, last in [self._last[pid]]
            if last > settled * RSS_GROWTH + RSS_MARGIN_BYTES
        ]

    async def watch(self, system: StormSystem) -> None:
        """Notes sizes until it is cancelled."""
        while True:
            self.note(system, asyncio.get_running_loop().time())
            await asyncio.sleep(RSS_EVERY_S)


async def main(arguments: argparse.Namespace) -> int:
    home = Path(arguments.home or tempfile.mkdtemp(prefix="storm-"))
    model = home / "model"
    build_model("kimi_linear", model, report=lambda line: None)
    rng = random.Random(arguments.seed)
    print(f"storm of {arguments.faults} faults in {arguments.seconds:.0f} s, seed {arguments.seed}; logs in {home}")
    asked = await asyncio.to_thread(questions, model, rng.getrandbits(32))
    failures: list[str] = []
    async with StormSystem(model, home) as system, aiohttp.ClientSession() as session:
        if not system.isolated:
            print("not root: disk and shared memory are not filled")
        if not await system.until_ready(session, START_S):
            print((home / "up.log").read_text()[-2000:])
            print("FAILED: the system did not start")
            return 1
        traffic, sizes = Traffic(system.api_url, asked, rng), Sizes()
        weather = Weather(system, rng, lambda line: print(line, flush=True))
        workers = [asyncio.create_task(traffic.worker(session)) for _ in range(WORKERS)]
        watch = asyncio.create_task(sizes.watch(system))
        await weather.blow(arguments.faults, arguments.seconds)
        failures += await _after_the_storm(system, session, traffic, workers)
        watch.cancel()
        failures += sizes.grown()
        failures += await system.end(END_S)
        await asyncio.gather(watch, return_exceptions=True)
    failures += [f"wrong tokens: {line}" for line in traffic.wrong]
    if traffic.outcomes["hung"]:
        failures.append(f"{traffic.outcomes['hung']} requests hung")
    print("faults  ", ", ".join(f"{number} {name}" for name, number in sorted(weather.struck.items())))
    print("answers ", ", ".join(f"{number} {name}" for name, number in sorted(traffic.outcomes.items())))
    for error, number in traffic.errors.most_common(12):
        print(f"  {number:5d} x {error}")
    for failure in failures:
        print("FAILED:", failure)
    print("the storm is over:", "something broke" if failures else "nothing wrong, nothing hung, nothing left")
    return 1 if failures else 0


async def _after_the_storm(
    system: StormSystem, session: aiohttp.ClientSession, traffic: Traffic, workers: list["asyncio.Task[None]"]
) -> list[str]:
    """Waits until all is well again; what is not after a minute, one line each."""
    loop = asyncio.get_running_loop()
    over = loop.time()
    failures = []
    ready = await system.until_ready(session, CALM_S)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    failures += [f"a worker ended: {w.exception()!r}" for w in workers if not w.cancelled() and w.exception()]
    if system.returncode is not None:
        return [*failures, f"prfaas up ended by itself with status {system.returncode}"]
    if not ready:
        return [*failures, f"not every node was ready {CALM_S:.0f} s after the last fault"]
    print(f"all ready {loop.time() - over:.1f} s after the last fault")
    held = await system.held()
    while held and loop.time() - over < CALM_S:
        await asyncio.sleep(POLL_S)
        held = await system.held()
    failures += [f"{name}: {what} {CALM_S:.0f} s after the last fault" for name, what in held.items()]
    calm = Traffic(system.api_url, traffic.asked, random.Random(0))
    for question in traffic.asked:
        await calm.ask(session, question)
    failures += [f"wrong tokens after the storm: {line}" for line in calm.wrong]
    failures += [f"{n} answers after the storm were {what}" for what, n in calm.outcomes.items() if what != "right"]
    return failures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--home", help="where logs are kept (default: a new temporary directory)")
    sys.exit(asyncio.run(main(parser.parse_args())))

"""`python -m tests.storm --faults 500 --seconds 600`: a system under traffic and faults, without any help.

Faults strike while it starts, too. Two tenants ask, some requests are for several answers. It passes if every greedy answer had
the right tokens or an error, and no request hung. Within a minute after the last fault everything must be back and nothing left.
No process may grow, and everything must end when it is told to.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp

from engine.torch.tiny import build_model
from prfaas.commands.keys import new_key
from tests.e2e.tls import is_wanted
from tests.storm.faults import Weather
from tests.storm.system import POLL_S, Running, StormSystem
from tests.storm.traffic import Traffic, questions

WORKERS: Final = 4
START_S: Final = 180.0
CALM_S: Final = 60.0  # after the last fault everything must be back within this
END_S: Final = 90.0
EARLY_S: Final = 20.0  # of the start, in which faults strike already
EARLY_SHARE: Final = 0.1  # of the faults
LEAST_EARLY: Final = 3
GROWTH: Final = 1.2  # what a process may take, for what it took when all was quiet
TENANTS: Final = ("acme", "beta")


class Sizes:
    """What each process takes of memory when all is quiet, once everything has been asked."""

    def __init__(self, quiet: Sequence[Running]) -> None:
        self._of: dict[int, int] = {each.pid: each.own_bytes for each in quiet}
        self._of_kind: dict[str, int] = {}
        for each in quiet:
            self._of_kind[each.kind] = max(each.own_bytes, self._of_kind.get(each.kind, 0))

    def grown(self, now: Sequence[Running]) -> list[str]:
        """Processes that take more than GROWTH allows, one line each; one that was started again beside its peers."""
        return [
            f"{each.kind} {each.node} (pid {each.pid}) has {each.own_bytes >> 20} MiB, when it was quiet {quiet >> 20} MiB"
            for each in now
            for quiet in [self._of.get(each.pid, self._of_kind.get(each.kind, 0))]
            if each.own_bytes > GROWTH * quiet
        ]


async def main(arguments: argparse.Namespace) -> int:
    home = Path(arguments.home or tempfile.mkdtemp(prefix="storm-"))
    model = home / "model"
    build_model("kimi_linear", model, report=lambda line: None)
    rng = random.Random(arguments.seed)
    how = f"seed {arguments.seed}{', mutual TLS' if arguments.tls else ''}"
    print(f"storm of {arguments.faults} faults in {arguments.seconds:.0f} s, {how}; logs in {home}")
    asked = await asyncio.to_thread(questions, model, rng.getrandbits(32))
    failures: list[str] = []
    keys = {tenant: new_key() for tenant in TENANTS}
    async with StormSystem(model, home, keys, has_tls=arguments.tls) as system, system.client() as session:
        if not system.isolated:
            print("not root: disk and shared memory are not filled")
        weather = Weather(system, rng, lambda line: print(line, flush=True))
        early = min(arguments.faults, max(LEAST_EARLY, round(EARLY_SHARE * arguments.faults)))
        await weather.blow(early, min(EARLY_S, arguments.seconds))
        if not await system.until_ready(session, START_S):
            print((home / "up.log").read_text()[-2000:])
            print("FAILED: the system did not start, or not again")
            return 1
        traffic = Traffic(system.api_url, asked, rng, list(keys.values()))
        failures += await _calm(session, traffic, "before the storm")
        sizes = Sizes(system.processes())
        workers = [asyncio.create_task(traffic.worker(session)) for _ in range(WORKERS)]
        await weather.blow(arguments.faults - early, arguments.seconds)
        failures += await _after_the_storm(system, session, traffic, workers)
        if system.returncode is None:
            failures += sizes.grown(system.processes())
            failures += await asyncio.to_thread(system.in_clear)
        failures += await system.end(END_S)
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
    return [*failures, *await _calm(session, traffic, "after the storm")]


async def _calm(session: aiohttp.ClientSession, traffic: Traffic, when: str) -> list[str]:
    """Everything is asked while nothing happens, for one answer and for several; what is not right, one line each."""
    calm = traffic.again()
    await calm.ask_all(session)
    await calm.ask_all(session, n=2)
    failures = [f"wrong tokens {when}: {line}" for line in calm.wrong]
    return failures + [f"{n} answers {when} were {what}" for what, n in calm.outcomes.items() if what != "right"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--tls", action="store_true", default=is_wanted(), help="mutual TLS on every hop")
    parser.add_argument("--home", help="where logs are kept (default: a new temporary directory)")
    sys.exit(asyncio.run(main(parser.parse_args())))

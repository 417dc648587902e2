"""`python -m tests.fleet --seconds 1800`: a fleet in which something happens all the time, under load.

Nodes stand in a watched file, in a folder, in a double of Kubernetes and in a real etcd. They join, leave, are killed, move
and stop; registries are killed, compacted and restored; gateways are replaced and killed, so is the plan service that leads;
clocks jump. Now and then all of it is quiet. The fleet passes if no accepted request was lost, but those that a killed gateway
was answering, and no token was wrong. After each period of churn every gateway must see what is there within five seconds. A
tenant that asks for more than its limit may be at most 2 % over it, and nothing may be left.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp

from node.process.owned_names import sweep_directories, sweep_files
from tests.fleet.children import descriptors
from tests.fleet.churn import POLL_S, Churn
from tests.fleet.judgement import asked_too_little, grown, left, over_limit
from tests.fleet.load import Load
from tests.fleet.system import CAPPED_PER_MINUTE, Fleet
from tests.membership.etcd.servers import etcd_binary
from tests.storm.system import held_at

PERIOD_S: Final = 60.0  # of churn, at most, before it is quiet
SHORTEST_S: Final = 10.0  # of churn that is left: it is not worth a period
CONVERGED_S: Final = 5.0
HELD_S: Final = 60.0  # after the end of load, nodes hold nothing
CLIENTS: Final = 6
PER_S: Final = 0.5  # events
MOST_DESCRIPTORS: Final = 24  # more than before any load; and a connection that is kept with each other node
MOST_PATIENCE_S: Final = 60.0  # for views that do not converge: then the rest of the run goes on
SHARED_MEMORY: Final = Path("/dev/shm")
ALONE: Final = "PRFAAS_FLEET_ALONE"


class Run:
    """One run, and what was wrong in it."""

    def __init__(self, fleet: Fleet, load: Load, churn: Churn) -> None:
        self.fleet, self.load, self.churn = fleet, load, churn
        self.converged_s: list[float] = []
        self.failures: list[str] = []

    async def last(self, http: aiohttp.ClientSession, seconds: float) -> None:
        """Load for so long, and churn in periods, each of them followed by quiet."""
        loop = asyncio.get_running_loop()
        await self.converge(http, MOST_PATIENCE_S)  # so many processes have just started
        first = self._descriptors()
        await self.load.use_up(http)
        self.load.let_in = self.load.capped_asked = 0
        began = loop.time()
        clients = [asyncio.create_task(self.load.converse(http)) for _ in range(CLIENTS)]
        clients.append(asyncio.create_task(self.load.press(http)))
        while (remaining_s := seconds - (loop.time() - began)) > SHORTEST_S:
            await self.churn.run(min(PERIOD_S, remaining_s), PER_S)
            await self.converge(http)
        await self.churn.fill()
        await self.converge(http)
        for client in clients:
            client.cancel()
        ended = await asyncio.gather(*clients, return_exceptions=True)
        self.failures += [f"a client ended: {each!r}" for each in ended if not isinstance(each, asyncio.CancelledError)]
        if self.fleet.etcd is not None:
            await self.load.use_up(http)
            taken_s = loop.time() - began
            self.failures += filter(None, [
                over_limit(self.load.let_in, taken_s, CAPPED_PER_MINUTE, len(self.fleet.gateways)),
                asked_too_little(self.load.capped_asked, taken_s, CAPPED_PER_MINUTE),
            ])  # fmt: skip
            print(f"let in {self.load.let_in} of {self.load.capped_asked} requests of the tenant with a limit in "
                  f"{taken_s:.0f} s, {CAPPED_PER_MINUTE * taken_s / 60:.0f} allowed")  # fmt: skip
        self.failures += await self._held()
        self.failures += grown(first, self._descriptors(), MOST_DESCRIPTORS + len(self.fleet.nodes), "descriptors")

    async def converge(self, http: aiohttp.ClientSession, within_s: float = CONVERGED_S) -> None:
        """Waits until every gateway sees what is there; later than `within_s` is a failure."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        late = wrong = await self.fleet.wrong_views(http)
        while wrong and loop.time() - began < MOST_PATIENCE_S:
            await asyncio.sleep(POLL_S)
            late, wrong = wrong, await self.fleet.wrong_views(http)
        self.converged_s.append(loop.time() - began)
        if self.converged_s[-1] > within_s:
            self.failures.append(
                f"views were right {self.converged_s[-1]:.1f} s after a period, the last one wrong: {late}"
            )
        print(f"{loop.time():9.1f}  views right after {self.converged_s[-1]:.2f} s; {len(self.fleet.living)} nodes; "
              f"{dict(self.load.outcomes)}", flush=True)  # fmt: skip

    async def _held(self) -> list[str]:
        """What nodes hold though there is no load, one line each."""
        loop = asyncio.get_running_loop()
        until, held = loop.time() + HELD_S, {"": "?"}
        while held and loop.time() < until:
            found = {name: await held_at(agent) for name, agent in self.fleet.living.items()}
            held = {name: what for name, what in found.items() if what}
        return [f"{name} {what} {HELD_S:.0f} s after the load" for name, what in held.items()]

    def _descriptors(self) -> dict[int, int]:
        """Of processes that live as long as the run, by pid."""
        nodes = [node.child.pid for node in self.fleet.nodes.values() if node.child is not None]
        return {pid: descriptors(pid) for pid in nodes}


async def main(arguments: argparse.Namespace) -> int:
    home = Path(arguments.home or tempfile.mkdtemp(prefix="fleet-"))
    rng = random.Random(arguments.seed)
    binary = rng.choice(arguments.etcd) if arguments.etcd else None
    print(f"{arguments.nodes} nodes, {arguments.gateways} gateways, {arguments.seconds:.0f} s, seed {arguments.seed}; "
          f"etcd: {binary or 'none here, so no node is in it and limits are not judged'}; logs in {home}")  # fmt: skip
    fleet = Fleet(home, arguments.nodes, arguments.gateways, binary)
    load = Load(lambda: [*fleet.urls.values()], fleet.killed, rng)
    run = Run(fleet, load, Churn(fleet, rng, lambda line: print(line, flush=True)))
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await fleet.start()
            await run.last(http, arguments.seconds)
    finally:
        left_behind = await fleet.end()
    failures = [*run.failures, *fleet.failures, *left_behind, *_files_left(home / "tmp")]
    failures += [f"wrong tokens: {line}" for line in load.wrong]
    failures += [f"{load.outcomes[what]} requests {what}" for what in ("lost", "hung") if load.outcomes[what]]
    never = [each.name for each in run.churn.kinds() if not run.churn.happened[each.name]]
    print("events   ", ", ".join(f"{number} {name}" for name, number in sorted(run.churn.happened.items())))
    print("not drawn", ", ".join(never) or "nothing")
    print("answers  ", ", ".join(f"{number} {name}" for name, number in sorted(load.outcomes.items())))
    for reason, number in load.reasons.most_common(12):
        print(f"  {number:5d} x {reason}")
    print(f"views right after {max(run.converged_s):.2f} s at most, in {len(run.converged_s)} periods")
    for failure in failures:
        print("FAILED:", failure)
    print("the fleet:", "something broke" if failures else "nothing lost, nothing wrong, nothing left")
    return 1 if failures else 0


def _files_left(temporary: Path) -> Sequence[str]:
    """What is left of our names. Names of killed processes go with the next look of any process of ours."""
    sweep_directories(temporary)
    found = [str(path) for path in temporary.iterdir() if path.name.startswith("prfaas")]
    if ALONE in os.environ:
        sweep_files(SHARED_MEMORY)
        found += map(str, SHARED_MEMORY.iterdir())
    return left(found)


def _with_own_memory() -> None:
    """Runs this program anew with a /dev/shm of its own, so that what is left there is ours."""
    mount = 'mount -t tmpfs -o size=3g tmpfs /dev/shm && exec "$@"'
    again = [sys.executable, "-m", "tests.fleet", *sys.argv[1:]]
    os.environ[ALONE] = "1"
    os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh", *again])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--etcd", nargs="*", help="binaries, the seed takes one (default: ETCD_BINARY)")
    parser.add_argument("--home", help="where logs are kept (default: a new temporary directory)")
    chosen = parser.parse_args()
    chosen.etcd = [os.path.abspath(binary) for binary in chosen.etcd or [*filter(None, [etcd_binary()])]]
    if os.geteuid() == 0 and ALONE not in os.environ:
        _with_own_memory()
    sys.exit(asyncio.run(main(chosen)))

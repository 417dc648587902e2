"""`python -m tests.fleet.upgrade --other COMMIT`: a fleet of COMMIT becomes one of this checkout, and back, under load.

Everything of COMMIT runs first. Half of the nodes and one gateway are replaced by this checkout's, one after the other; then
they are rolled back, with what they share in registries and on disk; then all is replaced. The fleet passes if no request was
lost or refused, no token was wrong, and every gateway sees what is there at each step.
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

from tests.e2e.mixed_versions import PATH, ROOT, check_imports, unpacked
from tests.fleet.children import Child
from tests.fleet.load import Load
from tests.fleet.plans import NAMES as PLAN_SERVICES
from tests.fleet.system import Fleet
from tests.membership.etcd.servers import etcd_binary

CLIENTS: Final = 4
SETTLES_S: Final = 60.0
POLL_S: Final = 0.1
STEP_S: Final = 1.0  # under load, between two replacements


class TwoVersions(Fleet):
    """A fleet in which each process runs from the checkout that `checkouts` names, and from `first` unless it does."""

    def __init__(self, home: Path, nodes: int, gateways: int, etcd: str | None, first: Path) -> None:
        super().__init__(home, nodes, gateways, etcd)
        self.first = first
        self.checkouts: dict[str, Path] = {}

    async def _started(self, name: str, *command: str) -> Child:
        environment = {**self._environment, PATH: str(self.checkouts.get(name, self.first))}
        return await Child.start(command, self.home / "logs" / f"{name}.log", environment)


class Upgrade:
    """Replaces what runs, and looks whether it is whole at every step."""

    def __init__(self, fleet: TwoVersions, load: Load, http: aiohttp.ClientSession) -> None:
        self.fleet, self.load, self.http = fleet, load, http
        self.failures: list[str] = []

    async def to(self, checkout: Path, names: Sequence[str]) -> None:
        """Has these run from there from now on, one after the other."""
        for name in names:
            self.fleet.checkouts[name] = checkout
            if name in self.fleet.gateways:
                await self.fleet.replace_gateway(name)
            elif self.fleet.plans is not None and name in PLAN_SERVICES:
                self.failures += await self.fleet.plans.restart(name)
            else:
                await self.fleet.end_node(self.fleet.nodes[name])
                await self.fleet.start_node(self.fleet.nodes[name])
            await self._whole()
            await asyncio.sleep(STEP_S)
        version = "this checkout" if checkout == ROOT else "the other one"
        print(f"{', '.join(names)} run from {version}: {dict(self.load.outcomes)}", flush=True)

    async def _whole(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + SETTLES_S
        while (wrong := await self.fleet.wrong_views(self.http)) and loop.time() < until:  # noqa: ASYNC110 no event tells
            await asyncio.sleep(POLL_S)
        self.failures += wrong


async def main(arguments: argparse.Namespace) -> int:
    home = Path(arguments.home or tempfile.mkdtemp(prefix="upgrade-"))
    other = unpacked(arguments.other, home / "other")
    check_imports(other)
    check_imports(ROOT)
    print(f"from {arguments.other} to this checkout with {arguments.nodes} nodes, "
          f"etcd: {arguments.etcd or 'none here'}; logs in {home}", flush=True)  # fmt: skip
    fleet = TwoVersions(home, arguments.nodes, arguments.gateways, arguments.etcd, other)
    load = Load(lambda: [*fleet.urls.values()], fleet.killed, random.Random(arguments.seed))
    failures: list[str] = []
    try:
        await fleet.start()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            upgrade = Upgrade(fleet, load, http)
            clients = [asyncio.create_task(load.converse(http)) for _ in range(CLIENTS)]
            nodes, gateways = [*fleet.nodes], [*fleet.gateways]
            plans = PLAN_SERVICES if fleet.plans is not None else ()
            half = [*nodes[: len(nodes) // 2], *gateways[:1], *plans[:1]]
            await upgrade.to(ROOT, half)
            await upgrade.to(other, half)
            await upgrade.to(ROOT, [*gateways, *plans, *nodes])
            for client in clients:
                client.cancel()
            ended = await asyncio.gather(*clients, return_exceptions=True)
            failures += [f"a client: {each!r}" for each in ended if not isinstance(each, asyncio.CancelledError)]
            failures += upgrade.failures
    finally:
        failures += await fleet.end()
    failures += [*fleet.failures, *(f"wrong tokens: {line}" for line in load.wrong)]
    failures += [
        f"{load.outcomes[what]} requests {what}" for what in ("lost", "hung", "refused") if load.outcomes[what]
    ]
    print("answers  ", ", ".join(f"{number} {name}" for name, number in sorted(load.outcomes.items())))
    for reason, number in load.reasons.most_common(12):
        print(f"  {number:5d} x {reason}")
    for failure in failures:
        print("FAILED:", failure)
    print("the upgrade:", "something broke" if failures else "nothing lost, nothing refused, nothing wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.fleet.upgrade", description=__doc__)
    parser.add_argument(
        "--other", default="HEAD~1", metavar="COMMIT", help="the version of before (default: %(default)s)"
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--etcd", default=etcd_binary(), help="a binary (default: ETCD_BINARY)")
    parser.add_argument("--home", help="where logs are kept (default: a new temporary directory)")
    chosen = parser.parse_args()
    chosen.etcd = os.path.abspath(chosen.etcd) if chosen.etcd else None
    sys.exit(asyncio.run(main(chosen)))

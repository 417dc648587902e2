"""What happens to a fleet: members join, leave, die, move and stop; registries fail; gateways are replaced."""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.fleet.children import children_of
from tests.fleet.system import EtcdBackups, Fleet, FleetNode

MOST_AT_ONCE: Final = 5
LEAST_SHARE: Final = 0.6  # of the decode nodes, and of those that prefill, run whatever happens
NODES_KEY: Final = "/prfaas/nodes/registered/"
REGISTERED_S: Final = 60.0  # nodes renew every ten seconds, and then find that etcd has forgotten them
KILLED_APART_S: Final = 4.0
POLL_S: Final = 0.1
JUMPS_S: Final = (0.0, 5.0, 3_600.0, 86_400.0, 3.15e7, 3.15e8)


@dataclass(frozen=True, slots=True)
class Event:
    """A kind of event, and how often it is drawn. It says what it did, or nothing if it could not."""

    name: str
    weight: float
    happen: Callable[[], Awaitable[str]] = field(repr=False)


class Churn:
    """Draws events by chance, a bounded number of them at once, and none twice for one member."""

    def __init__(self, fleet: Fleet, rng: random.Random, report: Callable[[str], None]) -> None:
        self.fleet, self.rng = fleet, rng
        self.happened: Counter[str] = Counter()
        self._report = report
        self._busy: set[str] = set()  # registries and gateways
        self._backups = EtcdBackups(fleet.etcd, fleet.home) if fleet.etcd is not None else None
        self._has_backup = False

    def kinds(self) -> list[Event]:
        found = [
            Event("join", 18, self._join),
            Event("leave", 8, self._leave),
            Event("kill", 8, self._kill),
            Event("move", 8, self._move),
            Event("stop", 10, self._stop),
            Event("replace gateway", 5, self._replace),
            Event("kill gateway", 3, self._kill_gateway),
            Event("clock jumps", 5, self._set_clock),
            Event("file malformed", 3, self._spoil),
            Event("api server killed", 3, self._lose_api),
            Event("api server compacted", 3, self._forget_api),
        ]
        if self._backups is not None:
            found += [
                Event("etcd killed", 3, self._lose_etcd),
                Event("etcd compacted", 3, self._compact_etcd),
                Event("etcd restored", 2, self._restore_etcd),
                Event("plan leader killed", 3, self._kill_plan_leader),
            ]
        return found

    async def run(self, seconds: float, per_s: float) -> None:
        """Events as a Poisson process; returns when the last one is over."""
        loop, kinds = asyncio.get_running_loop(), self.kinds()
        until, free = loop.time() + seconds, asyncio.Semaphore(MOST_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            while loop.time() < until:
                await asyncio.sleep(min(self.rng.expovariate(per_s), until - loop.time()))
                await free.acquire()
                # What has happened least is drawn first, so that a short run has most of the kinds.
                weights = [each.weight / (1 + self.happened[each.name]) ** 0.5 for each in kinds]
                event = self.rng.choices(kinds, weights)[0]
                group.create_task(self._happen(event)).add_done_callback(lambda _: free.release())

    async def fill(self) -> None:
        """Starts what is not there, so that a period begins with all nodes."""
        gone = [node for node in self.fleet.nodes.values() if not node.lives and not node.is_busy]
        await asyncio.gather(*map(self.fleet.start_node, gone))

    async def _happen(self, event: Event) -> None:
        began = asyncio.get_running_loop().time()
        try:
            what = await event.happen()
        except Exception as error:
            what = f"failed: {error!r}"
            self.fleet.failures.append(f"{event.name} {what}")
        if what:
            self.happened[event.name] += 1
            took_s = asyncio.get_running_loop().time() - began
            self._report(f"{began:9.1f}  {event.name:<20} {what} ({took_s:.1f} s)")

    # Nodes

    async def _join(self) -> str:
        return await self._to_node(self._gone(), self.fleet.start_node)

    async def _leave(self) -> str:
        return await self._to_node(self._spare(), self.fleet.end_node)

    async def _kill(self) -> str:
        return await self._alone("kill", lambda: self._to_node(self._spare(), self._killed))

    async def _move(self) -> str:
        """Dies, and comes back under the same name at another address."""

        async def move(node: FleetNode) -> None:
            await self._killed(node)
            await self.fleet.start_node(node)

        return await self._alone("kill", lambda: self._to_node(self._spare(), move))

    async def _killed(self, node: FleetNode) -> None:
        """A gateway does not try a request again that two engines died with: the next one dies after it has ended."""
        await self.fleet.kill_node(node)
        await asyncio.sleep(KILLED_APART_S)

    async def _stop(self) -> str:
        """Says nothing for a while, as if it were cut off: agent and engine stand still."""
        lasts_s = self.rng.uniform(0.3, 12.0)

        async def stop(node: FleetNode) -> None:
            assert node.child is not None
            pids = [node.child.pid, *children_of(node.child.pid)]
            _signal(pids, signal.SIGSTOP)
            try:
                await asyncio.sleep(lasts_s)
            finally:
                _signal(pids, signal.SIGCONT)

        return await self._to_node(self._spare(), stop)

    async def _to_node(self, candidates: list[FleetNode], do: Callable[[FleetNode], Awaitable[Any]]) -> str:
        if not candidates:
            return ""
        node = self.rng.choice(candidates)
        node.is_busy = True
        try:
            await do(node)
        finally:
            node.is_busy = False
        return f"{node.name} in {node.registry}"

    def _gone(self) -> list[FleetNode]:
        return [node for node in self.fleet.nodes.values() if not node.lives and not node.is_busy]

    def _spare(self) -> list[FleetNode]:
        """Those that run, of roles that have enough of them."""
        nodes = [*self.fleet.nodes.values()]
        fit = {
            (cluster, role)
            for cluster, role in {(node.cluster, node.role) for node in nodes}
            for of in [[node for node in nodes if (node.cluster, node.role) == (cluster, role)]]
            if sum(node.lives and not node.is_busy for node in of) > LEAST_SHARE * len(of)
        }
        return [node for node in nodes if node.lives and not node.is_busy and (node.cluster, node.role) in fit]

    # Gateways and registries

    async def _replace(self) -> str:
        name = self.rng.choice(sorted(self.fleet.gateways) or [""])
        if not name:
            return ""
        return await self._alone(name, lambda: self.fleet.replace_gateway(name))

    async def _kill_gateway(self) -> str:
        name = self.rng.choice(sorted(self.fleet.gateways) or [""])
        if len(self.fleet.gateways) < 2:  # one has to answer
            return ""
        return await self._alone(name, lambda: self.fleet.kill_gateway(name))

    async def _set_clock(self) -> str:
        """By seconds to years, either way, or back to what is right."""
        living = [node.name for node in self.fleet.nodes.values() if node.lives]
        name = self.rng.choice([*living, *self.fleet.gateways, *self.fleet.gateways])
        wrong_by_s = self.rng.choice(JUMPS_S) * self.rng.choice((-1.0, 1.0))
        self.fleet.set_clock(name, wrong_by_s)
        return f"{name} by {wrong_by_s:.0f} s"

    async def _kill_plan_leader(self) -> str:
        """Not while etcd is away: then no service leads."""
        plans = self.fleet.plans
        assert plans is not None
        return await self._alone("etcd", plans.kill_leader)

    async def _spoil(self) -> str:
        """The watched file says nothing that can be read, and then does again."""

        async def spoil() -> None:
            (self.fleet.home / "nodes.toml").write_text("[[nodes")
            await asyncio.sleep(self.rng.uniform(0.5, 4.0))
            self.fleet.listed()

        return await self._alone("file", spoil)

    async def _lose_api(self) -> str:
        async def lose() -> None:
            async with self.fleet.api_is_changed:
                await asyncio.to_thread(self.fleet.api.kill)
                await asyncio.sleep(self.rng.uniform(0.5, 8.0))
                await asyncio.to_thread(self.fleet.api.start)

        return await self._alone("api", lose)

    async def _forget_api(self) -> str:
        return await self._alone("api", lambda: asyncio.to_thread(self.fleet.api.forget))

    async def _lose_etcd(self) -> str:
        """Half of the time a backup is made of it meanwhile."""
        etcd, backups = self.fleet.etcd, self._backups
        assert etcd is not None
        assert backups is not None

        async def lose() -> None:
            if self.rng.random() < 0.5 or not self._has_backup:
                await asyncio.to_thread(backups.save)
                self._has_backup = True
            await asyncio.to_thread(etcd.kill)
            await asyncio.sleep(self.rng.uniform(0.5, 8.0))
            await asyncio.to_thread(etcd.start)

        return await self._alone("etcd", lose)

    async def _compact_etcd(self) -> str:
        etcd = self.fleet.etcd
        assert etcd is not None
        return await self._alone("etcd", lambda: asyncio.to_thread(etcd.compact))

    async def _restore_etcd(self) -> str:
        """It has what a backup has, which is old; nodes then find that they are not in it."""
        backups = self._backups
        assert backups is not None

        async def restore() -> None:
            if not self._has_backup:
                await asyncio.to_thread(backups.save)
                self._has_backup = True
                await asyncio.sleep(2.0)
            await asyncio.to_thread(backups.restore)
            await self._registered_again()

        return await self._alone("etcd", restore)

    async def _registered_again(self) -> None:
        etcd = self.fleet.etcd
        assert etcd is not None
        missing: set[str] = set()
        try:
            async with asyncio.timeout(REGISTERED_S):
                while missing := self._unlisted(await asyncio.to_thread(etcd.values, NODES_KEY)):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            self.fleet.failures.append(f"{sorted(missing)} not in etcd {REGISTERED_S:.0f} s after it was restored")

    def _unlisted(self, values: Mapping[str, str]) -> set[str]:
        """Nodes to which nothing happens, and that etcd does not have, or has at another address."""
        nodes = [node for node in self.fleet.nodes.values() if node.registry == "etcd" and not node.is_busy]
        return {node.name for node in nodes if node.lives and f'"{node.agent}"' not in values.get(node.name, "")}

    async def _alone(self, what: str, do: Callable[[], Awaitable[Any]]) -> str:
        """Nothing else happens to the same thing meanwhile."""
        if what in self._busy:
            return ""
        self._busy.add(what)
        try:
            said = await do()
        finally:
            self._busy.discard(what)
        return said if isinstance(said, str) else what


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

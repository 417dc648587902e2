"""Has the gateway's nodes follow its registries: nodes join, leave and move while requests run.

A node that leaves is out of all decisions at once. What it has under way ends; only then is the connection to its agent closed.
What was learned of a node follows its identity, and is forgotten when it has been gone for long.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.cluster.agent_client import AgentClient, NearClusters
from gateway.cluster.node import ClusterNode
from gateway.cluster.registry import NODE_TIMES, Clusters, NodeTimes
from gateway.config.gateway import GatewayConfig
from membership.changes import ChangeKind, MemberChange, changes
from membership.fleet import MemberFleet
from membership.member import Member
from membership.view import View

log = logging.getLogger("prfaas.gateway.members")

STATIC: Final = "static"  # [[gateway.nodes]], as a registry
TICK_S: Final = 0.25  # between two looks whether a node that has left has ended its work
AT_ONCE: Final = 16  # changes in one step of the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """A registry as operators see it. `refused` are members that it lists, and that may not be spoken to.

    `left_out` counts by reason what it lists and what cannot be used.
    """

    source: str
    state: str
    members: int
    refused: int
    frozen_s: float
    reason: str
    problems: tuple[str, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterParts:
    """What a roster acts on. `join` and `leave` tell other workers, `forget` tells those who learn of nodes.

    `remembered` are nodes that have left, with their clusters: what is known of their links stays for a while.
    """

    clusters: Clusters
    agent_of: Callable[[Member], AgentClient]
    join: Callable[[Sequence[ClusterNode]], None]
    leave: Callable[[ClusterNode], None]
    forget: Callable[[str], None]
    on_change: Callable[[str], None]
    near: NearClusters = field(default_factory=NearClusters)
    remembered: dict[str, str] = field(default_factory=dict)


class Roster:
    """The members that the gateway knows, and its node for each. A new list of a registry comes by `saw`."""

    def __init__(
        self, config: GatewayConfig, parts: RosterParts, clock: Callable[[], float], times: NodeTimes = NODE_TIMES
    ) -> None:
        """`parts.clusters` has the nodes of `config` already, in its order."""
        self._parts = parts
        self._clock = clock
        self._times = times
        self._admits = config.admits
        self._drain_s = config.timeouts.drain_s
        self._fleet = MemberFleet({STATIC: View()})
        for source in config.membership.sources():
            self._fleet = self._fleet.seen(source.name, View())
        self._fleet = self._fleet.seen(STATIC, _static(config))
        self._members = {node.member.id: node.member for node in config.nodes}
        self._nodes = dict(zip(self._members, parts.clusters.nodes, strict=True))
        self._left: dict[ClusterNode, tuple[float, float]] = {}  # when, and since when without requests
        self._gone: dict[str, float] = {}  # names of nodes that left, and until when they are remembered
        self._refused: set[str] = set()
        self._differs = asyncio.Event()

    @property
    def is_synced(self) -> bool:
        """Whether every registry has been read once."""
        return self._fleet.is_synced

    @property
    def remembered(self) -> Mapping[str, str]:
        """Nodes that have left of late, with their clusters."""
        return self._parts.remembered

    def status(self) -> list[SourceStatus]:
        """Every registry, the one that counts first."""
        now = self._clock()
        return [self._status(source, view, now) for source, view in self._fleet.views.items()]

    def _status(self, source: str, view: View, now: float) -> SourceStatus:
        return SourceStatus(
            source=source,
            state=view.state,
            members=len(view.members),
            refused=sum(not self._admits(member) for member in view.members.values()),
            frozen_s=view.frozen_s(now),
            reason=view.reason,
            problems=view.problems,
            left_out=view.left_out,
        )

    def configure(self, config: GatewayConfig) -> None:
        """The gateway's file has been read again."""
        self._admits = config.admits
        self._parts.near.names = config.near
        self.saw(STATIC, _static(config))

    def saw(self, source: str, view: View) -> None:
        """A registry has another view."""
        before = self._fleet.views.get(source, View())
        self._fleet = self._fleet.seen(source, view)
        if view.frozen_since is not None and view.reason != before.reason:
            log.error("members: %s is lost, its %d nodes stay as they are: %s", source, len(view.members), view.reason)
        elif view.frozen_since is None and before.frozen_since is not None:
            log.warning("members: %s is back", source)
        for problem in set(view.problems) - set(before.problems):
            log.warning("members: %s: %s", source, problem)
        self._differs.set()

    async def run(self) -> None:
        """Follows the registries, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._differs.wait()
            await self.tick()

    async def tick(self) -> None:
        """One step: takes over what differs, and lets go of what is over."""
        if self._differs.is_set():
            self._differs.clear()
            await self._take_over()
        for node in self._ended():
            self._parts.leave(node)
            await self._parts.clusters.end(node)
            await self._parts.clusters.tidy()
        self._forget()

    async def _take_over(self) -> None:
        try:
            for number, change in enumerate(changes(dict(self._members), self._wanted())):
                self._apply(change)
                if number % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)
        except BaseException:
            self._differs.set()  # what was not taken over is, the next time
            raise

    def _wanted(self) -> dict[str, Member]:
        """All members that may be spoken to."""
        found = self._fleet.members()
        refused = {id_ for id_, member in found.items() if not self._admits(member)}
        for id_ in sorted(refused - self._refused):
            log.error(
                "members: %s is left out: %s is another machine, and traffic to it would be in clear",
                id_,
                found[id_].agent,
            )
        self._refused = refused
        return {id_: member for id_, member in found.items() if id_ not in refused}

    def _apply(self, change: MemberChange) -> None:
        clusters, id_ = self._parts.clusters, change.id
        if change.after is None:
            node = self._nodes.pop(id_)
            clusters.leave(node)
            self._parts.remembered[node.id] = node.cluster
            self._gone[node.id] = self._clock() + self._times.remember_s
            del self._members[id_]
        else:
            if change.kind is ChangeKind.JOINED:
                clusters.join(self._made(change.after))
            elif change.kind is ChangeKind.MOVED:
                clusters.move(self._nodes[id_], self._made(change.after))
            self._members[id_] = change.after
        self._parts.on_change(change.kind)
        log.info("members: %s %s", id_, change)

    def _made(self, member: Member) -> ClusterNode:
        node = self._nodes[member.id] = ClusterNode(self._parts.agent_of(member), member.id)
        self._parts.join([node])
        return node

    def _ended(self) -> list[ClusterNode]:
        """Nodes that have left and have nothing under way any more, or have had for as long as a drain may take."""
        now, retired = self._clock(), self._parts.clusters.retired
        left, self._left, found = self._left, {}, []
        for node in retired:
            at, idle_since = left.get(node, (now, now))
            if node.own_requests:
                idle_since = now
            self._left[node] = at, idle_since
            if now - idle_since >= self._times.linger_s:
                found.append(node)
            elif now - at >= self._drain_s:
                log.error(
                    "members: %s left %.0f s ago, and still has %d requests", node.id, now - at, node.own_requests
                )
                found.append(node)
        return found

    def _forget(self) -> None:
        """What was learned of nodes that left long ago, and have not come back."""
        now = self._clock()
        for name in [name for name, until in self._gone.items() if now >= until]:
            del self._gone[name]
            self._parts.remembered.pop(name, None)
            if all(node.id != name for node in self._parts.clusters.nodes):
                self._parts.forget(name)


def _static(config: GatewayConfig) -> View:
    members = {node.agent: node.member for node in config.nodes}
    return View(members=members, is_synced=True)

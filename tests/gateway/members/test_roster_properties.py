"""Whatever registries say, and whenever: the gateway ends with the last list, and no booking is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.node import ClusterNode, NodeWork
from gateway.cluster.registry import Clusters
from gateway.config.gateway import GatewayConfig, NodeAddress
from gateway.members.roster import Roster, RosterParts
from gateway.tasks import TaskSet
from membership.changes import ChangeKind
from membership.member import Member
from membership.view import RegistryReading, View

STATIC = "127.0.0.1:7000"
IDS = [f"d{number}" for number in range(5)]
WORK = NodeWork(tokens=7)


class StillAgent(AgentClient):
    """Is only closed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


class Gateway:
    """A roster and the nodes that it keeps, by a clock of the test's; no node answers."""

    def __init__(self, config: GatewayConfig) -> None:
        self.now = 0.0
        self.errors = list[str]()
        self.shared = list[ClusterNode]()
        self.forgotten = list[str]()
        self.counted = list[str]()
        self.clusters = Clusters(
            [StillAgent(each.agent) for each in config.nodes], self.clock, tasks=TaskSet(self.errors.append)
        )
        self.shared += self.clusters.nodes
        self.roster = Roster(
            config,
            RosterParts(
                clusters=self.clusters,
                agent_of=lambda member: StillAgent(member.agent),
                join=self.shared.extend,
                leave=self.shared.remove,
                forget=self.forgotten.append,
                on_change=self.counted.append,
            ),
            self.clock,
        )

    def clock(self) -> float:
        return self.now

    def known(self) -> dict[str, str]:
        return {node.member_id: node.agent.address for node in self.clusters.nodes}

    async def passes(self, seconds: float) -> None:
        self.now += seconds
        await self.roster.tick()


def config() -> GatewayConfig:
    return GatewayConfig(tokenizer_dir=Path("unused"), nodes=(NodeAddress(agent=STATIC),))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


LISTS = st.dictionaries(st.sampled_from(IDS), st.integers(7001, 7009))
STEPS = st.one_of(
    LISTS,
    st.sampled_from(["fails", "begins", "ends"]),
    st.floats(0.1, 8.0),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=30), st.randoms(use_true_random=False))
def test_the_gateway_ends_with_the_last_list_and_loses_no_booking(steps: list[object], chance: object) -> None:
    async def scenario() -> None:
        gateway, view = Gateway(config()), View()
        booked = list[ClusterNode]()
        choose = chance.choice  # type: ignore[attr-defined]
        for step in steps:
            match step:
                case dict():
                    members = [Member(id=id_, agent=f"127.0.0.1:{port}") for id_, port in step.items()]
                    view = view.read(RegistryReading(members=members), gateway.now)
                    gateway.roster.saw("file", view)
                case float():
                    await gateway.passes(step)
                case "fails":
                    view = view.failed("it is not there", gateway.now)
                    gateway.roster.saw("file", view)
                case "begins":
                    booked.append(choose(gateway.clusters.nodes))
                    booked[-1].take(WORK)
                case "ends" if booked:
                    booked.pop(chance.randrange(len(booked))).give_back(WORK)  # type: ignore[attr-defined]
            everyone = {*gateway.clusters.nodes, *gateway.clusters.retired}
            assert sum(node.own_requests for node in everyone) == len(booked)
            assert not any(node.agent.is_closed for node in booked if isinstance(node.agent, StillAgent))
        await gateway.passes(0.1)
        # Of several ids at one address the first one is taken.
        wanted = {STATIC: STATIC}
        for member in view.members.values():
            if member.agent not in wanted.values():
                wanted[member.id] = member.agent
        assert gateway.known() == wanted
        for node in booked:
            node.give_back(WORK)
        await gateway.passes(0.1)
        await gateway.passes(10.0)
        assert not gateway.clusters.retired
        assert set(gateway.shared) == set(gateway.clusters.nodes)
        assert gateway.errors == []

    run(scenario)


def test_of_a_thousand_members_one_change_makes_one_node() -> None:
    async def scenario() -> None:
        gateway = Gateway(config())
        members = {f"n{number}": Member(id=f"n{number}", agent=f"127.0.0.1:{8000 + number}") for number in range(1000)}
        gateway.roster.saw("file", View(members=members, is_synced=True))
        await gateway.passes(0.1)
        before = set(gateway.clusters.nodes)
        assert len(before) == 1001
        more = {**members, "n1000": Member(id="n1000", agent="127.0.0.1:9000")}
        gateway.roster.saw("file", View(members=more, is_synced=True))
        await gateway.passes(0.1)
        assert [node.id for node in set(gateway.clusters.nodes) - before] == ["n1000"]
        assert gateway.counted == [ChangeKind.JOINED] * 1001

    run(scenario)

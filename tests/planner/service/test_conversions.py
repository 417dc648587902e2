"""Epochs of leaders: a node that has heard of a later leader does nothing more for an earlier one."""

import asyncio
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.conversion import Command, Conversion, LeapingCommand, StaleCommand, step
from planner.decisions.plans.live_plan import LivePlan, PlanSetting
from planner.decisions.plans.offered import NodeReport
from planner.decisions.views import ClusterKind, Role
from planner.service.conversions import EPOCHS_PER_TERM, AgentConverter, ConversionFailed, next_epoch
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc

TERMS = st.integers(1, 40_000)


def plan_of(term: int) -> LivePlan:
    return LivePlan(version=7, term=term, made_at=0.0, setting=PlanSetting(threshold_tokens=1.0), reason="")


class Agent(rpc.NodeAgentServicer):
    """A node by the rules of nodes, whose engine drains when it is told to."""

    def __init__(self, **standing: Any) -> None:
        self.standing = Conversion(role="decode", target="decode", **standing)
        self.described = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.NodeDescription:
        answer = pb.NodeDescription(conversion=self._report())
        self.described.set()
        await self.may_answer.wait()
        return answer

    async def Convert(self, request: pb.ConvertRequest, context: Any) -> pb.Conversion:
        command = Command(epoch=request.epoch, role=request.role, drain_timeout_s=9.0, verify_timeout_s=9.0)
        try:
            self.standing = step(self.standing, command, 0.0).conversion
        except (StaleCommand, LeapingCommand) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return self._report()

    def _report(self) -> pb.Conversion:
        standing = self.standing
        outcome = standing.outcome if not standing.is_converting else ""
        return pb.Conversion(epoch=standing.epoch, target=standing.target, outcome=outcome)


async def asked(agent: Agent, role: Role, term: int) -> str:
    """Why the node does not convert; "": it does."""
    server = grpc.aio.server()
    rpc.add_NodeAgentServicer_to_server(agent, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    node = NodeReport(
        node_id="n", agent=f"127.0.0.1:{port}", cluster="w", kind=ClusterKind.PD, role=Role.DECODE, state="ready"
    )
    try:
        await AgentConverter(1.0).convert(node, role, plan_of(term))
    except ConversionFailed as error:
        return str(error)
    finally:
        await server.stop(None)
    return ""


@given(st.lists(TERMS, min_size=1, max_size=20))
def test_a_node_obeys_no_leader_after_a_later_one(leaders: list[int]) -> None:
    """Each looks at the node before it commands, however late: so it would take the next epoch of all."""
    newest, latest = 0, 0
    for term in leaders:
        if term >= latest:
            epoch = next_epoch(term, newest)
            assert epoch > newest
            newest, latest = epoch, term
        else:
            with pytest.raises(ConversionFailed, match="later term"):
                next_epoch(term, newest)


@given(TERMS, TERMS, st.integers(0, EPOCHS_PER_TERM - 1))
def test_a_command_that_was_worked_out_before_is_stale(one: int, other: int, by_people: int) -> None:
    earlier, later = sorted((one, other))
    seen_before = next_epoch(earlier, 0)
    newest = later * EPOCHS_PER_TERM + by_people
    assert later == earlier or seen_before < newest


def test_a_person_may_command_between_two_commands_of_a_leader() -> None:
    first = next_epoch(3, 0)
    assert next_epoch(3, first + 1) == first + 2


def test_versions_as_epochs_of_earlier_releases_come_before_all_terms() -> None:
    assert next_epoch(1, 7) == EPOCHS_PER_TERM


def test_a_deposed_leader_is_refused_before_and_after_it_has_looked() -> None:
    async def scenario() -> None:
        agent = Agent()
        assert await asked(agent, Role.DECODE, 2) == ""
        why = await asked(agent, Role.PREFILL, 1)
        assert "a leader of a later term than 1" in why

        agent = Agent()
        agent.may_answer.clear()
        deposed = asyncio.create_task(asked(agent, Role.PREFILL, 1))
        await agent.described.wait()  # it has seen a node without commands
        agent.standing = step(
            agent.standing,
            Command(epoch=2 * EPOCHS_PER_TERM, role="decode", drain_timeout_s=9.0, verify_timeout_s=9.0),
            0.0,
        ).conversion
        agent.may_answer.set()
        assert "wants prefill, but epoch 131072 wants decode" in await deposed
        assert agent.standing.role == "decode"
        assert not agent.standing.is_converting

    asyncio.run(scenario())

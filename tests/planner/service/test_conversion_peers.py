"""The plan service, and commands, ask nodes only: what shows another role's certificate, or a revoked one, is told nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import tomli_w

from planner.decisions.plans.live_plan import LivePlan, PlanSetting
from planner.decisions.plans.offered import NodeReport
from planner.decisions.views import ClusterKind, Role
from planner.service.conversions import AgentConverter, ConversionFailed
from prfaas.commands.convert import agents_of, answering
from tests.node.running import alone
from tests.peers import HOST, Peers
from tests.transport.control.grpc_tls import server_credentials
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc
from transport.peers.name import PeerName, PeerRole
from transport.wire.identity import Identity

PLAN = LivePlan(version=7, term=1, made_at=0.0, setting=PlanSetting(threshold_tokens=1.0), reason="")


class Agent(rpc.NodeAgentServicer):
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.NodeDescription:
        self.asked += 1
        return pb.NodeDescription(node_id=HOST, cluster="west", cluster_kind="pd", role="decode")

    async def Convert(self, request: pb.ConvertRequest, context: Any) -> pb.Conversion:
        self.asked += 1
        return pb.Conversion(epoch=request.epoch, target=request.role, outcome="converted")


@asynccontextmanager
async def showing(identity: Identity) -> AsyncIterator[tuple[str, Agent]]:
    server, agent = grpc.aio.server(), Agent()
    rpc.add_NodeAgentServicer_to_server(agent, server)  # type: ignore[no-untyped-call]
    port = server.add_secure_port("127.0.0.1:0", server_credentials(identity))
    await server.start()
    try:
        yield f"127.0.0.1:{port}", agent
    finally:
        await server.stop(None)


def report(address: str) -> NodeReport:
    return NodeReport(
        node_id=HOST, agent=address, cluster="west", kind=ClusterKind.PD, role=Role.DECODE, state="ready"
    )  # fmt: skip


async def converted(address: str, identity: Identity) -> str:
    """Why the node was not; "": it was."""
    try:
        await AgentConverter(1.0, identity).convert(report(address), Role.PREFILL, PLAN)
    except ConversionFailed as error:
        return str(error)
    return ""


async def answers(address: str, identity: Identity, folder: Path) -> list[str]:
    """The nodes that `prfaas drain` and `prfaas convert` would see."""
    files = {key: str(getattr(identity, key)) for key in ("certificate", "key", "authority", "revoked")}
    table = {"tokenizer_dir": ".", "nodes": [{"agent": address, "name": HOST}], **files}
    (folder / "gateway.toml").write_text(tomli_w.dumps({"gateway": table}))
    async with agents_of(folder / "gateway.toml", identity.certificate) as agents:
        return [node.info.node_id for node in await answering(agents)]


@pytest.mark.parametrize("role", list(PeerRole))
def test_only_nodes_that_count_are_asked(role: PeerRole, peers: Peers, tmp_path: Path) -> None:
    async def scenario() -> None:
        is_node = role in (PeerRole.PREFILL, PeerRole.NODE)
        revoked = tmp_path / "revoked"
        planner, operator = (
            replace(peers.by_role[each], revoked=revoked) for each in (PeerRole.PLANNER, PeerRole.OPERATOR)
        )
        shown = peers.issue(PeerName("prfaas", "west", role, HOST))
        async with showing(shown) as (address, agent):
            revoked.write_text("")
            why = await converted(address, planner)
            assert why == "" if is_node else f"{role}/{HOST} may not node.serve" in why
            assert await answers(address, operator, tmp_path) == ([HOST] if is_node else [])
            assert (agent.asked > 0) is is_node
            revoked.write_text(f"{HOST}\n")
            agent.asked = 0
            assert f"{HOST} is revoked" in await converted(address, planner)
            assert await answers(address, operator, tmp_path) == []
            assert agent.asked == 0

    alone(scenario())


def test_another_node_than_the_one_that_is_meant_is_not_asked(peers: Peers, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with showing(peers.by_role[PeerRole.NODE]) as (address, agent):
            planner, operator = peers.by_role[PeerRole.PLANNER], peers.by_role[PeerRole.OPERATOR]
            (tmp_path / "revoked").touch()
            assert f"thief-node is not the node west/{HOST}" in await converted(address, planner)
            assert agent.asked == 0
            assert await answers(address, replace(operator, revoked=tmp_path / "revoked"), tmp_path) == []

    alone(scenario())


def test_a_stranger_is_not_asked(peers: Peers) -> None:
    async def scenario() -> None:
        async with showing(peers.stranger) as (address, agent):
            planner = peers.by_role[PeerRole.PLANNER]
            assert (await converted(address, planner)).startswith("no look at its certificate")
            assert agent.asked == 0

    asyncio.run(scenario())

"""Which peers are watched as agents, and which are not, whatever they do to the look at their certificates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from gateway.cluster.agent_client import AgentClient
from gateway.errors import AgentCallFailed
from tests.gateway.worlds import PATIENCE_S, on_loop
from tests.peers import HOST, Peers
from transport.control.credentials import server_credentials
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc
from transport.peers.name import PeerRole
from transport.wire.identity import Identity

HTTP2 = b"\x02h2"  # gRPC offers it in its ClientHello, the look does not


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Peers:
    return Peers(tmp_path_factory.mktemp("peers"))


class Agent(rpc.NodeAgentServicer):
    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.NodeEvent]:
        yield pb.NodeEvent(seq=1, description=pb.NodeDescription(node_id="d0", cluster="west", cluster_kind="pd"))


class Front:
    """Before an agent: resets the first `resets` connections that a look makes."""

    def __init__(self, port: int, resets: int) -> None:
        self.resets = resets
        self._port = port

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.read(4096)
        if HTTP2 not in hello and self.resets:
            self.resets -= 1
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        far_writer.write(hello)
        await asyncio.gather(_relay(reader, far_writer), _relay(far_reader, writer))


async def _relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError), closing(sink):
        while data := await source.read(65536):
            sink.write(data)


@asynccontextmanager
async def watched(shown: Identity, gateway: Identity, resets: int) -> AsyncIterator[AgentClient]:
    server = grpc.aio.server()
    rpc.add_NodeAgentServicer_to_server(Agent(), server)  # type: ignore[no-untyped-call]
    port = server.add_secure_port("127.0.0.1:0", server_credentials(shown))
    await server.start()
    listening = await asyncio.start_server(Front(port, resets), "127.0.0.1", 0)
    address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    client = AgentClient(address, PATIENCE_S, gateway, HOST, guard=gateway.guard())
    try:
        yield client
    finally:
        await client.close()
        listening.close()
        await server.stop(0)


async def seen(client: AgentClient) -> str:
    """The first event, or why it did not come."""
    try:
        async for event in client.watch(1.0, PATIENCE_S):
            return type(event).__name__
    except AgentCallFailed as error:
        return error.reason
    return ""


@pytest.mark.parametrize("role", [PeerRole.NODE, PeerRole.PLANNER])
def test_who_resets_the_look_is_not_watched(role: PeerRole, peers: Peers, tmp_path: Path) -> None:
    revoked = tmp_path / "revoked"
    revoked.write_text("thief-node\n")

    @on_loop
    async def scenario() -> None:
        gateway = replace(peers.by_role[PeerRole.GATEWAY], revoked=revoked)
        async with watched(peers.by_role[role], gateway, resets=2) as client:
            assert [await seen(client) for _ in range(3)] == ["unreachable", "unreachable", "identity"]

    scenario()


def test_a_look_that_broke_is_made_again(peers: Peers) -> None:
    @on_loop
    async def scenario() -> None:
        async with watched(peers.by_role[PeerRole.NODE], peers.by_role[PeerRole.GATEWAY], resets=1) as client:
            assert [await seen(client) for _ in range(2)] == ["unreachable", "NodeInfo"]

    scenario()


def test_an_agent_of_another_authority_is_none(peers: Peers) -> None:
    @on_loop
    async def scenario() -> None:
        async with watched(peers.stranger, peers.by_role[PeerRole.GATEWAY], resets=0) as client:
            assert await seen(client) == "identity"

    scenario()

"""Which peers are watched as agents, and which are not, whatever they do to the look at their certificates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.registry import Clusters
from gateway.errors import AgentCallFailed
from gateway.tasks import TaskSet
from tests.gateway.worlds import PATIENCE_S, on_loop, until
from tests.peers import HOST, Peers
from tests.transport.control.grpc_tls import server_credentials
from transport.control.certificates import Authority
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc
from transport.peers.guard import GRACE_S, Guard
from transport.peers.name import PeerName, PeerRole, of_grpc, of_pem
from transport.wire.identity import Identity

HTTP2 = b"\x02h2"  # gRPC offers it in its ClientHello, the look does not


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Peers:
    return Peers(tmp_path_factory.mktemp("peers"))


class Agent(rpc.NodeAgentServicer):
    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.NodeEvent]:
        about = pb.NodeDescription(node_id="d0", cluster="west", cluster_kind="pd", role="decode")
        yield pb.NodeEvent(seq=1, description=about)


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
        async with watched(peers.server, peers.by_role[PeerRole.GATEWAY], resets=1) as client:
            assert [await seen(client) for _ in range(2)] == ["unreachable", "NodeInfo"]

    scenario()


def test_an_agent_of_another_authority_is_none(peers: Peers) -> None:
    @on_loop
    async def scenario() -> None:
        async with watched(peers.stranger, peers.by_role[PeerRole.GATEWAY], resets=0) as client:
            assert await seen(client) == "identity"

    scenario()


def test_a_node_that_says_it_is_another_one_is_none(peers: Peers) -> None:
    @on_loop
    async def scenario() -> None:
        gateway = peers.by_role[PeerRole.GATEWAY]
        async with watched(peers.by_role[PeerRole.NODE], gateway, resets=0) as client:
            with pytest.raises(AgentCallFailed, match="east/node/thief-node is not the node west/d0"):
                await anext(client.watch(1.0, PATIENCE_S))
            shown = of_pem(peers.by_role[PeerRole.PREFILL].certificate.read_bytes())
            assert "is not the node west/d0" in client.kept.refusal(shown)  # nor does another one take its calls

    scenario()


class HastyClient(AgentClient):
    """Looks at its own certificate after each event."""

    renew_look_s = renew_spread_s = 0.0


class Talker(Agent):
    """Goes on and on; notes each certificate that it is watched with."""

    def __init__(self) -> None:
        self.serials: list[int] = []
        self.said = 0

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.NodeEvent]:
        peer = of_grpc(context.auth_context())
        assert peer is not None
        self.serials.append(peer.serial)
        async for event in super().Watch(request, context):
            yield event
        for seq in count(2):
            yield pb.NodeEvent(seq=seq, load=pb.Load())
            self.said = seq
            await asyncio.sleep(0.01)


def test_a_new_certificate_is_shown_without_losing_the_node(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    name = PeerName("prfaas", "any", PeerRole.GATEWAY, "gateway")
    gateway = authority.issue("gateway", peer=name)
    node = authority.issue("d0", [HOST, "127.0.0.1"], peer=PeerName("prfaas", "west", PeerRole.NODE, "d0"))
    first = of_pem(gateway.certificate.read_bytes()).serial

    @on_loop
    async def scenario() -> None:
        talker, lost, server = Talker(), list[str](), grpc.aio.server()
        rpc.add_NodeAgentServicer_to_server(talker, server)  # type: ignore[no-untyped-call]
        port = server.add_secure_port("127.0.0.1:0", server_credentials(node))
        await server.start()
        client = HastyClient(f"127.0.0.1:{port}", PATIENCE_S, gateway, HOST, guard=gateway.guard())
        clusters = Clusters([client], asyncio.get_running_loop().time, tasks=TaskSet(lost.append), on_lost=lost.append)
        clusters.start()
        await until(lambda: clusters.nodes[0].connected)
        key = gateway.key.read_bytes()
        gateway.key.write_text("on its way")
        said = talker.said
        await until(lambda: talker.said > said + 5)  # looks at files that do not fit change nothing
        assert talker.serials == [first]
        gateway.key.write_bytes(key)
        authority.issue("gateway", peer=name)
        await until(lambda: len(talker.serials) == 2)
        assert talker.serials[1] == of_pem(gateway.certificate.read_bytes()).serial != first
        assert clusters.nodes[0].connected
        assert lost == []
        await clusters.close()
        await server.stop(0)

    scenario()


def test_a_node_whose_certificate_ends_is_lost_only_if_it_was_not_replaced(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    gateway = authority.issue("gateway", peer=PeerName("prfaas", "any", PeerRole.GATEWAY, "gateway"))

    def issued(days: float) -> tuple[Identity, float]:
        """The node's files, and when they end."""
        names, peer = [HOST, "127.0.0.1"], PeerName("prfaas", "west", PeerRole.NODE, "d0")
        node = authority.issue("d0", names, days=days, peer=peer)
        return node, of_pem(node.certificate.read_bytes()).ends_at

    @on_loop
    async def scenario() -> None:
        node, ends_at = issued(days=1)
        talker, lost, server, wall = Talker(), list[str](), grpc.aio.server(), [0.0]
        rpc.add_NodeAgentServicer_to_server(talker, server)  # type: ignore[no-untyped-call]
        port = server.add_secure_port("127.0.0.1:0", server_credentials(node))
        await server.start()
        guard = Guard(gateway.own_name(), unix_s=lambda: wall[0])
        client = HastyClient(f"127.0.0.1:{port}", PATIENCE_S, gateway, HOST, guard=guard)
        clusters = Clusters([client], asyncio.get_running_loop().time, tasks=TaskSet(lost.append), on_lost=lost.append)
        clusters.start()
        await until(lambda: clusters.nodes[0].connected)
        _, later = issued(days=9)
        wall[0] = ends_at + GRACE_S
        await until(lambda: len(talker.serials) == 2)
        said = talker.said
        await until(lambda: talker.said != said)
        assert clusters.nodes[0].connected
        assert lost == []
        wall[0] = later + GRACE_S
        await until(lambda: not clusters.nodes[0].connected)
        assert lost[0] == "identity"
        await clusters.close()
        await server.stop(0)

    scenario()

"""The table of rights, cell by cell: real certificates of each role, real listeners."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.message_factory import GetMessageClass

from node.control import rights as interceptor
from node.control.call_server import CallServer
from node.control.control_server import ControlServer
from node.grpc_service import NodeService, serve
from tests.gateway.worlds import on_both_loops
from tests.node.running import new_runner, until
from tests.peers import HOST, OWN, Peers
from tests.transport.peers.two_sites import GATEWAY, TwoSites
from transport.control.calls import AGENT, CALLER
from transport.control.credentials import channel_credentials, channel_options, takes_old_tls
from transport.control.messages import MessageBuffer, frame
from transport.control.proto import node_pb2 as pb
from transport.control.proto import node_pb2_grpc as rpc
from transport.path.tcp import parse_address
from transport.peers.guard import GRACE_S, LOOK_AT_ENDS_S, Guard
from transport.peers.name import PeerRole, of_pem
from transport.peers.rights import ASK_ENGINE, CALLS, FRAMES, RPCS, SAID_BY_RECEIVERS, SAID_BY_SENDERS, may
from transport.wire.connection import TRANSITIONS, ConnectionRole
from transport.wire.frames import KINDS
from transport.wire.identity import Identity

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["NodeAgent"].methods}
# Written down once more: a cell that changes by mistake is seen here.
ALLOWED = {
    PeerRole.GATEWAY: {
        "Describe", "Reserve", "Commit", "Abort", "Readdress", "Load", "DropPrefix", "Probe", "Watch", "ShareEgress",
        "CreateContext", "ExtendContext", "DeleteContext",
    },
    PeerRole.PREFILL: set(),
    PeerRole.NODE: set(),
    PeerRole.PLANNER: {"Describe", "Convert"},
    PeerRole.OPERATOR: {"Describe", "Convert", "Drain", "Undrain"},
}  # fmt: skip
PATIENCE_S = 60.0


def said(role: ConnectionRole) -> set[str]:
    return {kind.__name__ for kinds in TRANSITIONS[role].values() for kind in kinds}


def test_every_call_and_frame_has_its_row() -> None:
    assert set(RPCS) == set(METHODS)
    assert set(CALLS) == {field.name for field in pb.Call.DESCRIPTOR.oneofs_by_name["call"].fields}
    assert set(FRAMES) == {kind.__name__ for kind in KINDS}
    assert set(SAID_BY_SENDERS) == said(ConnectionRole.RECEIVER)
    assert set(SAID_BY_SENDERS + SAID_BY_RECEIVERS) == said(ConnectionRole.RECEIVER) | said(ConnectionRole.SENDER)


@pytest.mark.parametrize("role", list(PeerRole))
def test_the_table_says_what_it_is_meant_to_say(role: PeerRole) -> None:
    assert {name for name in RPCS if may(role, f"rpc.{name}")} == ALLOWED[role]
    assert all(may(role, f"call.{name}") is (role is PeerRole.GATEWAY) for name in CALLS)
    assert all(may(role, f"transfer.{name}") is (role in (PeerRole.PREFILL, PeerRole.NODE)) for name in FRAMES)
    assert may(role, ASK_ENGINE) is (role is PeerRole.GATEWAY)
    assert not may(role, "rpc.NoSuchCall")


class Deaf(rpc.NodeAgentServicer):
    """Every call that gets this far is unimplemented but Watch, which says nothing and goes on."""

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.NodeEvent]:
        yield pb.NodeEvent(seq=1)
        await asyncio.Event().wait()


@asynccontextmanager
async def agent(identity: Identity, guard: Guard) -> AsyncIterator[int]:
    server, port = await serve(cast(NodeService, Deaf()), "127.0.0.1", 0, identity, guard)
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def stub_of(port: int, identity: Identity) -> AsyncIterator[Any]:
    options = channel_options(HOST)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", channel_credentials(identity), options) as channel:
        yield rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]


async def outcome(stub: Any, name: str) -> tuple[str, str]:
    """What comes of a call: a status, and its sentence."""
    answer = getattr(stub, name)(GetMessageClass(METHODS[name].input_type)(), timeout=PATIENCE_S)
    try:
        if METHODS[name].server_streaming:
            await answer.read()
            answer.cancel()
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def test_a_thief_of_each_certificate_gets_through_what_the_table_says(peers: Peers, tmp_path: Path) -> None:
    async def scenario() -> None:
        identity, guard = peers.guarded(tmp_path / "revoked")
        async with agent(identity, guard) as port:
            for role, thief in peers.by_role.items():
                async with stub_of(port, thief) as stub:
                    found = {name: await outcome(stub, name) for name in METHODS}
                got_through = {name for name, (code, _) in found.items() if code in ("OK", "UNIMPLEMENTED")}
                assert got_through == ALLOWED[role]
                for name in METHODS.keys() - ALLOWED[role]:
                    code, why = found[name]
                    assert code == "PERMISSION_DENIED"
                    assert why.startswith(f"spiffe://prfaas/east/{role}/thief-{role} may not rpc.{name}: that is for ")
                    assert guard.refused[f"rpc.{name}", role] == 1

    with new_runner() as runner:
        runner.run(scenario())


def test_who_has_no_name_another_trust_or_no_good_certificate_gets_nowhere(peers: Peers, tmp_path: Path) -> None:
    async def scenario() -> None:
        identity, guard = peers.guarded(tmp_path / "revoked")
        async with agent(identity, guard) as port:
            for thief, code, sentence in (
                (peers.nameless, "PERMISSION_DENIED", "no URIs, where one must be spiffe://TRUST/CLUSTER/ROLE/NAME"),
                (peers.nameless, "PERMISSION_DENIED", "`prfaas certificates` issues one: CLUSTER/ROLE/NAME"),
                (peers.twofold, "PERMISSION_DENIED", "2 URIs, where one must be spiffe://TRUST/CLUSTER/ROLE/NAME"),
                (peers.abroad, "PERMISSION_DENIED", "is of another trust domain"),
                (peers.expired, "UNAVAILABLE", ""),
                (peers.stranger, "UNAVAILABLE", ""),
            ):
                async with stub_of(port, thief) as stub:
                    found = await outcome(stub, "Describe")
                assert found[0] == code
                assert sentence in found[1]

    with new_runner() as runner:
        runner.run(scenario())


def test_handshakes_that_fail_at_the_control_port_are_counted_by_address(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server, port = await serve(cast(NodeService, Deaf()), "127.0.0.1", 0, peers.server)
        try:
            for number, thief in enumerate((peers.expired, peers.stranger), start=1):
                async with stub_of(port, thief) as stub:
                    assert (await outcome(stub, "Describe"))[0] == "UNAVAILABLE"
                assert server.ended["handshake"] >= number
            before = server.ended["handshake"]
            assert not await takes_old_tls(f"127.0.0.1:{port}", peers.by_role[PeerRole.GATEWAY], PATIENCE_S)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                assert (await outcome(rpc.NodeAgentStub(channel), "Describe"))[0] == "UNAVAILABLE"  # type: ignore[no-untyped-call]
            assert server.ended["handshake"] >= before + 2
        finally:
            await server.stop(None)

    with new_runner() as runner:
        runner.run(scenario())
    assert any(
        line.getMessage().startswith("a connection of 127.0.0.1 to the control service ended (handshake): ")
        for line in caplog.records
    )


def test_a_process_of_this_machine_that_calls_grpc_behind_the_front_gets_nowhere(peers: Peers) -> None:
    async def scenario() -> None:
        server, port = await serve(cast(NodeService, Deaf()), "127.0.0.1", 0, peers.server)
        try:
            async with stub_of(port, peers.by_role[PeerRole.GATEWAY]) as stub:
                assert (await outcome(stub, "Reserve"))[0] == "UNIMPLEMENTED"
                async with grpc.aio.insecure_channel(server.inside.removeprefix("http://")) as channel:
                    behind = rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]
                    for name in METHODS:
                        code, why = await outcome(behind, name)
                        assert code == "PERMISSION_DENIED"
                        assert why.startswith("the certificate has no rights: it has not come")
        finally:
            await server.stop(None)

    with new_runner() as runner:
        runner.run(scenario())


class Told(rpc.NodeAgentServicer):
    """Describes nothing, and keeps gRPC's names of those that have asked for it."""

    def __init__(self) -> None:
        self.callers: list[str] = []

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.NodeDescription:
        self.callers.append(context.peer())
        return pb.NodeDescription()


@asynccontextmanager
async def behind(server: ControlServer, local: tuple[str, int]) -> AsyncIterator[Any]:
    """Calls of gRPC itself, from an address of this machine."""
    inside = parse_address(server.inside.removeprefix("http://"))

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*inside, local_addr=local)
        with suppress(ConnectionError):
            await asyncio.gather(carry(reader, back), carry(there, writer))

    async with await asyncio.start_server(serve_one, "127.0.0.1", 0) as detour:
        port = detour.sockets[0].getsockname()[1]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]


def test_the_port_of_a_caller_is_its_own_on_no_other_address_of_the_machine(peers: Peers) -> None:
    async def scenario() -> None:
        service = Told()
        server, port = await serve(cast(NodeService, service), "127.0.0.1", 0, peers.server)
        try:
            async with stub_of(port, peers.by_role[PeerRole.GATEWAY]) as stub:
                assert (await outcome(stub, "Describe"))[0] == "OK"
                async with stub_of(port, peers.by_role[PeerRole.OPERATOR]) as other:
                    assert (await outcome(other, "Describe"))[0] == "OK"
                addresses = [each.split(":")[1] for each in service.callers]
                assert len({*addresses, "127.0.0.1"}) == 3, "none is ever another's"
                number = int(service.callers[0].rpartition(":")[2])
                for address in ("127.0.0.1", "127.0.0.2"):
                    async with behind(server, (address, number)) as thief:
                        assert (await outcome(thief, "Describe"))[0] == "PERMISSION_DENIED"
            assert len(service.callers) == 2
        finally:
            await server.stop(None)

    with new_runner() as runner:
        runner.run(scenario())


class AllLeft:
    """Callers whose connections end before their calls begin."""

    def __call__(self, peer: str) -> None:
        return None

    def has_left(self, peer: str) -> bool:
        return True


def test_a_call_of_who_has_left_is_not_taken_for_a_strangers(peers: Peers) -> None:
    async def scenario() -> None:
        guard, service = peers.server.guard(), Told()
        server = grpc.aio.server(interceptors=[interceptor.RightsInterceptor(guard, AllLeft())])
        rpc.add_NodeAgentServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = rpc.NodeAgentStub(channel)  # type: ignore[no-untyped-call]
                assert await outcome(stub, "Describe") == ("CANCELLED", "the caller has left")
            assert not guard.refused
            assert not service.callers
        finally:
            await server.stop(None)

    with new_runner() as runner:
        runner.run(scenario())


def test_a_server_that_ends_has_the_front_call_nobody_who_takes_its_port(peers: Peers) -> None:
    async def scenario() -> None:
        heard: list[bytes] = []

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(await reader.read(1))
            writer.close()

        server, port = await serve(cast(NodeService, Deaf()), "127.0.0.1", 0, peers.server)
        gateway = peers.by_role[PeerRole.GATEWAY]
        async with stub_of(port, gateway) as stub:
            watch = stub.Watch(pb.WatchRequest())
            await watch.read()
            stopping = asyncio.create_task(server.stop(2.0))
            thief: asyncio.Server | None = None
            while thief is None:
                with suppress(OSError):
                    thief = await asyncio.start_server(listen, *parse_address(server.inside.removeprefix("http://")))
                await asyncio.sleep(0.01)
            assert not stopping.done()
            async with stub_of(port, gateway) as late:
                with pytest.raises(grpc.aio.AioRpcError):
                    await late.Describe(pb.DescribeRequest(), timeout=1.0)
            await stopping
            thief.close()
        assert heard == []

    with new_runner() as runner:
        runner.run(scenario())


def test_a_gateway_minted_by_another_site_s_authority_gets_nowhere(tmp_path: Path) -> None:
    sites = TwoSites(tmp_path)

    async def scenario() -> None:
        async with agent(sites.home, sites.home.guard()) as port:
            for site, code in (
                ("any", "UNIMPLEMENTED"),
                ("remote", "PERMISSION_DENIED"),
                ("home", "PERMISSION_DENIED"),
            ):
                async with stub_of(port, sites.issue(site, GATEWAY)) as stub:
                    found = await outcome(stub, "Describe")
                assert found[0] == code
                assert code == "UNIMPLEMENTED" or f"is signed by {site}/authority.pem, which signs for" in found[1]

    with new_runner() as runner:
        runner.run(scenario())


def test_a_revoked_gateway_loses_its_stream_and_gets_no_other(peers: Peers, tmp_path: Path) -> None:
    async def scenario() -> None:
        identity, guard = peers.guarded(tmp_path / "revoked")
        async with agent(identity, guard) as port, stub_of(port, peers.by_role[PeerRole.GATEWAY]) as stub:
            stream = stub.Watch(pb.WatchRequest(), timeout=PATIENCE_S)
            assert (await stream.read()).seq == 1
            (tmp_path / "revoked").write_text("thief-gateway\n")

            async def is_ended() -> bool:
                return guard.end_revoked() == 1

            await until(is_ended)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stream.read()
            assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert ended.value.details() == "spiffe://prfaas/east/gateway/thief-gateway is revoked"
            assert await outcome(stub, "Reserve") == ("PERMISSION_DENIED", ended.value.details())

    with new_runner() as runner:
        runner.run(scenario())


def test_a_stream_and_a_kept_connection_end_some_time_after_their_certificate(peers: Peers) -> None:
    gateway = peers.by_role[PeerRole.GATEWAY]
    ends_at = of_pem(gateway.certificate.read_bytes()).ends_at

    @on_both_loops
    async def scenario() -> None:
        now, wall = [0.0], [0.0]
        guard = Guard(OWN, None, lambda: now[0], lambda: wall[0])
        server = CallServer(Generous())
        kept = await server.start("127.0.0.1", 0, peers.server, guard)
        async with agent(peers.server, guard) as port, stub_of(port, gateway) as stub:
            stream = stub.Watch(pb.WatchRequest(), timeout=PATIENCE_S)
            assert (await stream.read()).seq == 1
            async with connected(kept, gateway) as (reader, _):
                now[0], wall[0] = 2 * LOOK_AT_ENDS_S, ends_at + GRACE_S - 1
                assert guard.end_revoked() == 0
                now[0], wall[0] = 4 * LOOK_AT_ENDS_S, ends_at + GRACE_S
                assert guard.end_revoked() == 2
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await stream.read()
                assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert ended.value.details() == "spiffe://prfaas/east/gateway/thief-gateway is expired"
                with suppress(ConnectionError):
                    assert await reader.read() == b""
            assert server.ended["expired"] == 1
        await server.close(0.0)

    scenario()


class Generous:
    """Refuses no peer."""

    async def reserve(self, request: pb.ReserveRequest) -> pb.Ticket:
        return pb.Ticket(transfer_id="t")

    def abort(self, request: pb.AbortRequest) -> pb.Done:
        return pb.Done(ok=True)


CALLED = {
    "introduce": pb.Call(id=1, introduce=pb.Introduce(holder="h")),
    "reserve": pb.Call(id=2, timeout_s=PATIENCE_S, reserve=pb.ReserveRequest(request_id="r")),
    "abort": pb.Call(id=3, abort=pb.AbortRequest(transfer_id="t")),
}


@asynccontextmanager
async def connected(port: int, identity: Identity) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    context: ssl.SSLContext = identity.client_context()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=HOST)
    try:
        writer.write(CALLER)
        assert await reader.readexactly(len(AGENT)) == AGENT
        yield reader, writer
    finally:
        writer.transport.abort()


async def answered(port: int, identity: Identity, calls: Iterable[pb.Call]) -> dict[int, str]:
    """By number, why a call was refused; empty: it was not."""
    found: dict[int, str] = {}
    wanted = list(calls)
    async with connected(port, identity) as (reader, writer):
        writer.write(b"".join(frame(call.SerializeToString()) for call in wanted))
        frames = MessageBuffer()
        while len(found) < len(wanted):
            data = await reader.read(1 << 16)
            assert data, "the agent hung up"
            for answer in map(pb.CallAnswer.FromString, frames.feed(data)):
                found[answer.id] = answer.refusal.reason
    return found


def test_a_thief_of_each_certificate_is_heard_by_the_table_over_kept_connections(peers: Peers, tmp_path: Path) -> None:
    @on_both_loops
    async def scenario() -> None:
        assert set(CALLED) == set(CALLS)
        identity, guard = peers.guarded(tmp_path / "revoked")
        server = CallServer(Generous())
        port = await server.start("127.0.0.1", 0, identity, guard)
        try:
            for role, thief in peers.by_role.items():
                refused = await answered(port, thief, CALLED.values())
                expected = "" if role is PeerRole.GATEWAY else interceptor.DENIED
                assert refused == dict.fromkeys((1, 2, 3), expected)
            for thief in (peers.nameless, peers.twofold, peers.abroad):
                assert set((await answered(port, thief, CALLED.values())).values()) == {interceptor.DENIED}
            for thief in (peers.expired, peers.stranger):
                with pytest.raises((OSError, asyncio.IncompleteReadError)):
                    await answered(port, thief, CALLED.values())
            assert not await takes_old_tls(f"127.0.0.1:{port}", peers.by_role[PeerRole.GATEWAY], PATIENCE_S)
        finally:
            await server.close(0.0)

    scenario()


def test_a_revoked_gateways_kept_connection_ends(peers: Peers, tmp_path: Path) -> None:
    @on_both_loops
    async def scenario() -> None:
        (tmp_path / "revoked").write_text("")
        identity, guard = peers.guarded(tmp_path / "revoked")
        server = CallServer(Generous())
        port = await server.start("127.0.0.1", 0, identity, guard)
        try:
            async with connected(port, peers.by_role[PeerRole.GATEWAY]) as (reader, _):
                (tmp_path / "revoked").write_text("thief-gateway\n")

                async def is_ended() -> bool:
                    return guard.end_revoked() == 1

                await until(is_ended)
                with suppress(ConnectionError):
                    assert await reader.read() == b""
            assert server.ended["revoked"] == 1
        finally:
            await server.close(0.0)

    scenario()

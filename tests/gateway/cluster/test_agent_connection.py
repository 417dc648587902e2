"""The kept connection to an agent: what becomes of calls while it breaks, stalls, or is not there."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from gateway.cluster.agent_client import AgentClient
from gateway.cluster.agent_connection import CallConnection, PersistentCalls
from gateway.errors import AgentCallFailed
from node.control.call_server import CallServer
from tests.gateway.scripted import Fabric, Script, ScriptedNode
from tests.gateway.worlds import PATIENCE_S, on_both_loops, on_loop, until, world
from tests.node.control.test_call_server import Room, serving
from transport.control.calls import AGENT, CALLER, MAX_CALLS
from transport.control.certificates import Authority
from transport.control.messages import frame
from transport.control.proto import node_pb2 as pb
from transport.peers.name import PeerName, PeerRole
from transport.wire.identity import Identity

PROMPT = "the quick brown fox jumps over the lazy dog " * 6


def reserve(name: str) -> pb.Call:
    return pb.Call(reserve=pb.ReserveRequest(request_id=name))


@asynccontextmanager
async def kept(
    port: int, host: str = "127.0.0.1", identity: Identity | None = None, name: str = ""
) -> AsyncIterator[PersistentCalls]:
    calls = PersistentCalls(f"{host}:1", PATIENCE_S, identity, name)
    calls.offered(port)
    try:
        yield calls
    finally:
        await calls.close()


async def connected(calls: PersistentCalls) -> CallConnection:
    await until(lambda: isinstance(calls.connection(), CallConnection))
    connection = calls.connection()
    assert isinstance(connection, CallConnection)
    return connection


async def failure_of(answer: "asyncio.Future[pb.CallAnswer]") -> str:
    with pytest.raises(AgentCallFailed) as failed:
        await answer
    return failed.value.reason


class Deaf:
    """An agent that greets and says nothing more."""

    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []
        self.heard = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            await reader.readexactly(len(CALLER))
            writer.write(AGENT)
            await reader.readexactly(1)
            self.heard.set()
            await reader.read()
        writer.close()


@asynccontextmanager
async def deaf() -> AsyncIterator[tuple[Deaf, int]]:
    agent = Deaf()
    server = await asyncio.start_server(agent, "127.0.0.1", 0)
    try:
        yield agent, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in agent.writers:
            writer.close()
        await server.wait_closed()


@on_both_loops
async def test_answers_find_their_calls_in_any_order() -> None:
    room = Room()
    async with serving(room) as (_, port), kept(port) as calls:
        connection = await connected(calls)
        late, soon = (connection.ask(reserve(name), PATIENCE_S) for name in ("waits", "soon"))
        assert (await soon).ticket.transfer_id == "t-soon"
        assert not late.done()
        room.gate.set()
        assert (await late).ticket.transfer_id == "t-waits"
        assert len(connection) == 0


@on_both_loops
async def test_an_agent_that_dies_fails_what_is_under_way_and_is_found_when_it_is_back() -> None:
    room = Room()
    async with kept(0) as calls:
        async with serving(room) as (server, port):
            calls.offered(port)
            asked = (await connected(calls)).ask(reserve("waits"), PATIENCE_S)
            await until(lambda: room.waiting)
            await server.close(0.0)
            assert await failure_of(asked) == "unreachable"
        assert calls.connection() == "not_connected"
        again = CallServer(room)
        await again.start("127.0.0.1", port)
        room.gate.set()
        assert (await (await connected(calls)).ask(reserve("waits"), PATIENCE_S)).ticket.transfer_id == "t-waits"
        await again.close(0.0)


@on_both_loops
async def test_a_stalled_connection_fails_all_its_calls_with_the_first_that_is_late() -> None:
    async with deaf() as (_, port), kept(port) as calls:
        connection = await connected(calls)
        patient, late = connection.ask(reserve("a"), PATIENCE_S), connection.ask(reserve("b"), 0.01)
        assert [await failure_of(late), await failure_of(patient)] == ["timeout", "timeout"]
        await until(lambda: calls.connection() is not connection)


@on_both_loops
async def test_an_agent_that_was_stopped_and_goes_on_keeps_nothing_of_what_it_answers_too_late() -> None:
    room = Room()
    async with serving(room) as (server, port), kept(port) as calls:
        connection = await connected(calls)
        late = [connection.ask(reserve("waits"), PATIENCE_S) for _ in range(2)]
        await until(lambda: room.waiting)
        connection.give_up(1, PATIENCE_S)  # nothing has come
        assert [await failure_of(each) for each in late] == ["timeout", "timeout"]
        await until(lambda: calls.connection() not in (connection, "not_connected"))
        room.gate.set()
        await until(lambda: room.aborted == ["t-waits", "t-waits"])
        await until(lambda: len(server) == 1)  # nothing is owed any more


@on_both_loops
async def test_one_late_answer_is_no_stall_and_its_ticket_is_given_back() -> None:
    room = Room()
    async with serving(room) as (_, port), kept(port) as calls:
        connection = await connected(calls)
        late = connection.ask(reserve("waits"), PATIENCE_S)
        await connection.ask(reserve("soon"), PATIENCE_S)
        connection.give_up(1, PATIENCE_S)
        assert await failure_of(late) == "timeout"
        assert connection.is_open
        room.gate.set()
        await until(lambda: room.aborted == ["t-waits"])


@on_both_loops
async def test_who_stops_waiting_gives_back_what_comes() -> None:
    room = Room()
    async with serving(room) as (_, port), kept(port) as calls:
        connection = await connected(calls)
        asked = connection.ask(reserve("waits"), PATIENCE_S)
        await until(lambda: room.waiting)
        asked.cancel()
        room.gate.set()
        await until(lambda: room.aborted == ["t-waits"])


@on_both_loops
async def test_what_is_no_answer_ends_the_connection() -> None:
    async with deaf() as (agent, port), kept(port) as calls:
        asked = (await connected(calls)).ask(reserve("a"), PATIENCE_S)
        await agent.heard.wait()
        agent.writers[0].write(frame(b"\xff\xff"))
        assert await failure_of(asked) == "garbled"


@on_loop
async def test_calls_go_otherwise_while_there_is_no_room_no_agent_or_no_offer() -> None:
    async with kept(0) as calls:
        assert calls.connection() == "not_offered"
        async with deaf() as (_, port):
            calls.offered(port)
            assert calls.connection() == "not_connected"
            connection = await connected(calls)
            asked = [connection.ask(reserve("a"), PATIENCE_S) for _ in range(MAX_CALLS)]
            assert calls.connection() == "full"
        assert {await failure_of(each) for each in asked} == {"unreachable"}


@on_both_loops
async def test_an_agent_that_moves_is_followed_and_what_is_under_way_ends_where_it_began() -> None:
    first, second = Room(), Room()
    async with serving(first) as (old, before), serving(second) as (_, after), kept(before) as calls:
        asked = (await connected(calls)).ask(reserve("waits"), PATIENCE_S)
        await until(lambda: first.waiting)
        calls.offered(after)
        assert (await (await connected(calls)).ask(reserve("b"), PATIENCE_S)).ticket.transfer_id == "t-b"
        first.gate.set()
        assert (await asked).ticket.transfer_id == "t-waits"
        await until(lambda: not len(old))


@on_loop
async def test_a_listener_that_is_no_agent_is_left_alone() -> None:
    async def someone_else(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(someone_else, "127.0.0.1", 0)
    async with kept(server.sockets[0].getsockname()[1]) as calls:
        await until(lambda: calls.failures)
        assert calls.connection() == "not_connected"
    server.close()
    await server.wait_closed()


def test_both_ends_show_certificates_and_the_agents_must_carry_its_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    agent = authority.issue("agent", ["agent.example"], peer=PeerName("prfaas", "west", PeerRole.NODE, "agent"))
    gateway = authority.issue("gateway", peer=PeerName("prfaas", "any", PeerRole.GATEWAY, "gateway"))

    @on_both_loops
    async def scenario() -> None:
        async with serving(Room(), agent) as (_, port):
            async with kept(port, identity=gateway, name="agent.example") as calls:
                answer = await (await connected(calls)).ask(reserve("a"), PATIENCE_S)
                assert answer.ticket.transfer_id == "t-a"
            async with kept(port, identity=gateway) as calls:  # 127.0.0.1 is not among its names
                await until(lambda: calls.failures)
            async with kept(port) as calls:
                await until(lambda: calls.failures)

    scenario()


# The whole way, before a scripted node


@on_loop
async def test_reservations_of_requests_go_over_the_kept_connection() -> None:
    async with world(decode=1) as w:
        (client,) = (node.agent for node in w.gateway.clusters.nodes if node.id == "d0")
        await connected(client.kept)
        assert (await w.complete(PROMPT)).status == 200
        assert w.nodes.decode[0].bodies[-1]["kv_transfer_params"]["transfer_id"] == "d0-t1"
        assert "prfaas_calls_by_grpc_total{" not in await w.metrics()
        assert not w.nodes.decode[0].open_reservations


@on_loop
async def test_an_agent_of_before_is_asked_by_grpc_which_is_counted() -> None:
    ways: Counter[str] = Counter()
    node = ScriptedNode("d0", "west", "pd", "decode", Fabric(), Script(reserve=["RESOURCE_EXHAUSTED"]))
    node.takes_calls = False
    async with node.serving():
        client = AgentClient(node.agent_address, PATIENCE_S, by_grpc=lambda why: ways.update([why]))
        with pytest.raises(AgentCallFailed) as full:
            await client.reserve_prefix("r", (), 16, 60.0)
        ticket = await client.reserve_prefix("r", (), 16, 60.0)
        await client.abort(ticket.transfer_id, "request_ended")
        await client.close()
    assert full.value.reason == "no_capacity"
    assert not node.open_reservations
    assert ways == {"not_offered": 3}

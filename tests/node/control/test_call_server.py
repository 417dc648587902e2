"""Calls over kept connections, as an agent takes them: whatever becomes of a gateway, nothing is left behind."""

import asyncio
import logging
import math
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from node.control.call_server import CallServer
from node.control.holders import ReservationHolders
from node.errors import NodeRefusal
from tests.gateway.worlds import on_both_loops, until
from transport.control.calls import AGENT, CALLER, MAX_CALLS
from transport.control.certificates import Authority
from transport.control.messages import MessageBuffer, frame
from transport.control.proto import node_pb2 as pb
from transport.peers.name import PeerName, PeerRole
from transport.wire.identity import Identity

GATEWAY = PeerName("prfaas", "any", PeerRole.GATEWAY, "gateway")


class Room:
    """Stands for a node: hands out tickets once `gate` is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = 0
        self.given_up = 0
        self.aborted: list[str] = []

    async def reserve(self, request: pb.ReserveRequest) -> pb.Ticket:
        if request.request_id == "draining":
            raise NodeRefusal("draining", "it finishes what it has")
        if request.request_id == "broken":
            raise ZeroDivisionError
        if request.request_id.startswith("wait"):
            self.waiting += 1
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.given_up += 1
                raise
            finally:
                self.waiting -= 1
        return pb.Ticket(transfer_id=f"t-{request.request_id}")

    def abort(self, request: pb.AbortRequest) -> pb.Done:
        self.aborted.append(request.transfer_id)
        return pb.Done(ok=True)


class Caller:
    """The other end of one connection, in as few words as it takes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._frames = MessageBuffer()
        self._answers: list[pb.CallAnswer] = []

    def say(self, *calls: pb.Call) -> None:
        self.writer.write(b"".join(frame(call.SerializeToString()) for call in calls))

    async def answer(self) -> pb.CallAnswer:
        while not self._answers:
            if not (data := await self.reader.read(1 << 16)):
                raise ConnectionError("the agent hung up")
            self._answers += [pb.CallAnswer.FromString(body) for body in self._frames.feed(data)]
        return self._answers.pop(0)


def reserve(number: int, name: str, timeout_s: float = 60.0) -> pb.Call:
    return pb.Call(id=number, timeout_s=timeout_s, reserve=pb.ReserveRequest(request_id=name))


@asynccontextmanager
async def serving(
    room: Room, identity: Identity | None = None, handshake_s: float = 60.0, holders: ReservationHolders | None = None
) -> AsyncIterator[tuple[CallServer, int]]:
    server = CallServer(room, holders, handshake_s=handshake_s)
    port = await server.start("127.0.0.1", 0, identity)
    try:
        yield server, port
    finally:
        await server.close(0.0)


@asynccontextmanager
async def calling(port: int, secure: ssl.SSLContext | None = None) -> AsyncIterator[Caller]:
    name = "localhost" if secure is not None else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=secure, server_hostname=name)
    try:
        writer.write(CALLER)
        assert await reader.readexactly(len(AGENT)) == AGENT
        yield Caller(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@on_both_loops
async def test_calls_are_answered_as_they_are_done_and_refused_with_their_label() -> None:
    room = Room()
    async with serving(room) as (_, port), calling(port) as caller:
        caller.say(reserve(1, "waits"), reserve(2, "draining"), pb.Call(id=3, abort=pb.AbortRequest(transfer_id="x")))
        done, refused = await caller.answer(), await caller.answer()
        assert (done.id, done.done.ok, room.aborted) == (3, True, ["x"])
        assert (refused.id, refused.refusal.reason) == (2, "draining")
        room.gate.set()
        ticket = await caller.answer()
        assert (ticket.id, ticket.ticket.transfer_id) == (1, "t-waits")


@on_both_loops
async def test_an_error_of_its_own_and_a_call_of_a_later_version_are_answers_too() -> None:
    logging.getLogger("node.control.call_server").setLevel(logging.CRITICAL)
    try:
        async with serving(Room()) as (_, port), calling(port) as caller:
            caller.say(reserve(1, "broken"))
            assert (await caller.answer()).refusal.reason == "internal"
            caller.say(pb.Call(id=2))
            assert (await caller.answer()).refusal.reason == "unimplemented"
    finally:
        logging.getLogger("node.control.call_server").setLevel(logging.NOTSET)


@on_both_loops
async def test_a_gateway_that_vanishes_takes_with_it_what_it_waited_for() -> None:
    room = Room()
    async with serving(room) as (server, port):
        async with calling(port) as caller:
            caller.say(*(reserve(number, "waits") for number in range(1, 4)))
            await until(lambda: room.waiting == 3)
            caller.writer.transport.abort()
        await until(lambda: not len(server))
        await until(lambda: room.given_up == 3)


@on_both_loops
async def test_a_ticket_that_can_be_told_to_nobody_is_given_back() -> None:
    room = Room()
    async with serving(room) as (_, port), calling(port) as caller:
        caller.writer.write(frame(reserve(1, "soon").SerializeToString()) + frame(b"\xff\xff"))  # and no Call
        await until(lambda: room.aborted == ["t-soon"])


@on_both_loops
async def test_what_nobody_waits_for_any_more_is_given_up() -> None:
    room = Room()
    async with serving(room) as (_, port), calling(port) as caller:
        caller.say(reserve(1, "waits", timeout_s=0.01))
        assert (await caller.answer()).refusal.reason == "timeout"
        assert room.given_up == 1


@on_both_loops
@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf])
async def test_what_is_no_time_is_no_limit(timeout_s: float) -> None:
    async with serving(Room()) as (_, port), calling(port) as caller:
        caller.say(reserve(1, "soon", timeout_s=timeout_s))
        assert (await caller.answer()).ticket.transfer_id == "t-soon"


@on_both_loops
async def test_a_gateway_that_asks_too_much_at_once_is_heard_later_and_loses_nothing() -> None:
    room = Room()
    async with serving(room) as (_, port), calling(port) as caller:
        padding = "wait" + "s" * 4096  # more than one read takes in
        caller.say(*(reserve(number, padding) for number in range(1, 2 * MAX_CALLS + 1)))
        await until(lambda: room.waiting >= MAX_CALLS)
        assert room.waiting < 2 * MAX_CALLS
        room.gate.set()
        assert {(await caller.answer()).id for _ in range(2 * MAX_CALLS)} == set(range(1, 2 * MAX_CALLS + 1))


async def _is_turned_away(port: int, said: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


@on_both_loops
async def test_strangers_who_say_nothing_or_something_else_are_turned_away() -> None:
    async with serving(Room(), handshake_s=0.05) as (server, port):
        await _is_turned_away(port, b"")
        await _is_turned_away(port, CALLER[:4])
        await until(lambda: not len(server))
    async with serving(Room()) as (server, port):
        await _is_turned_away(port, b"GET / HTTP/1.1\r\n\r\n")
        async with calling(port) as caller:
            caller.writer.write(frame(b"\xff\xff"))  # no Call
            with suppress(ConnectionResetError):
                assert await caller.reader.read() == b""
        await until(lambda: not len(server))


@on_both_loops
async def test_what_is_under_way_is_answered_before_a_server_is_closed() -> None:
    room = Room()
    async with serving(room) as (server, port), calling(port) as caller:
        caller.say(reserve(1, "waits"))
        await until(lambda: room.waiting)
        closing = asyncio.create_task(server.close(60.0))
        await asyncio.sleep(0)
        room.gate.set()
        assert (await caller.answer()).ticket.transfer_id == "t-waits"
        await closing
        with pytest.raises(ConnectionError):
            await caller.answer()


def _identity(folder: Path, issue: Callable[..., Identity]) -> Identity:
    made = issue("node", ["localhost"], peer=GATEWAY)
    for name, path in (("c", made.certificate), ("k", made.key), ("a", made.authority)):
        (folder / name).write_bytes(path.read_bytes())
    return Identity(certificate=folder / "c", key=folder / "k", authority=folder / "a", peer_name="localhost")


def test_only_who_shows_a_certificate_is_heard_and_a_new_one_holds_from_the_next_handshake(tmp_path: Path) -> None:
    @on_both_loops
    async def scenario() -> None:
        first, second = (Authority(tmp_path / name) for name in ("first", "second"))
        (tmp_path / "live").mkdir(exist_ok=True)
        live = _identity(tmp_path / "live", first.issue)
        async with serving(Room(), live) as (_, port):
            await _is_turned_away(port, CALLER)  # without TLS
            nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            nobody.load_verify_locations(live.authority)
            await _is_refused(port, nobody)
            before = live.client_context()
            async with calling(port, before) as caller:
                caller.say(reserve(1, "one"))
                assert (await caller.answer()).ticket.transfer_id == "t-one"
                _identity(tmp_path / "live", second.issue)  # other files, of another authority
                async with calling(port, live.client_context()) as another:
                    another.say(reserve(1, "two"))
                    assert (await another.answer()).ticket.transfer_id == "t-two"
                await _is_refused(port, before)
                caller.say(reserve(2, "three"))  # connections go on
                assert (await caller.answer()).ticket.transfer_id == "t-three"

    scenario()


async def _is_refused(port: int, secure: ssl.SSLContext) -> None:
    """In TLS 1.3 a client may think that all is well before the server has looked at its certificate."""
    with pytest.raises((OSError, asyncio.IncompleteReadError)):
        async with calling(port, secure):
            pass

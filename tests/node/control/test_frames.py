"""Frames on kept connections that are begun and not ended: their memory has a budget, their time an end."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from node.control.call_server import CallServer
from node.control.frames import FREE_BYTES, OF_ONE_BYTES, TOTAL_BYTES, Frame, FrameRoom
from tests.gateway.worlds import on_both_loops, on_loop, until
from tests.node.control.test_call_server import Room, calling, reserve
from transport.control.messages import frame
from transport.wire.memory import LentMemory

MB = 1 << 20
BEGUN = (60 * MB).to_bytes(4, "little")  # a frame's length, and nothing after it


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("node.control.call_server").setLevel(logging.ERROR)
    yield
    logging.getLogger("node.control.call_server").setLevel(logging.NOTSET)


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[tuple[CallServer, int]]:
    server = CallServer(Room(), **limits)
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.close(0.0)


class NotingMemory(LentMemory):
    """Knows the most that was ever lent."""

    most_bytes = 0

    def lend(self, peer: str, num_bytes: int, spare_bytes: int = 0) -> bool:
        has_lent = super().lend(peer, num_bytes, spare_bytes)
        self.most_bytes = max(self.most_bytes, self.lent_bytes)
        return has_lent


def test_memory_is_lent_up_to_its_bounds_and_comes_back() -> None:
    memory = LentMemory(100, 60)
    assert memory.lend("a", 60)
    assert not memory.lend("a", 1)
    assert memory.lend("b", 40)
    assert not memory.lend("c", 1)
    memory.give_back("a", 60)
    assert memory.lend("c", 60)
    assert memory.lent_bytes == 100


@on_loop
async def test_who_waits_longest_has_room_first_unless_its_address_has_enough() -> None:
    room, told = FrameRoom(), list[str]()

    def begun(name: str, peer: str) -> Frame:
        return Frame(room, peer, OF_ONE_BYTES, lambda: told.append(name), lambda: None)

    first, second, other, third = (begun(*names) for names in (("1", "a"), ("2", "a"), ("o", "b"), ("3", "c")))
    assert [each.has_room for each in (first, second, other, third)] == [True, False, True, False]
    other.end()
    assert told == ["3"]  # "2" is of an address that has its share
    first.end()
    assert told == ["3", "2"]
    for each in (second, third):
        each.end()
    assert room.memory.lent_bytes == 0


@on_both_loops
async def test_frames_that_are_begun_and_not_ended_have_a_bounded_memory_and_go() -> None:
    async with serving(frame_s=0.5) as (server, port):
        server.room.memory = lent = NotingMemory(TOTAL_BYTES, OF_ONE_BYTES)
        callers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        for _, writer in callers:
            writer.write(b"prfaas caller 1\n" + BEGUN + bytes(FREE_BYTES))
        await until(lambda: server.ended["stalled"] + server.ended["no_room"] == len(callers))
        assert server.ended["stalled"] >= 1
        await until(lambda: not len(server))
        assert 0 < lent.most_bytes <= OF_ONE_BYTES
        assert lent.lent_bytes == 0
        for _, writer in callers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@on_both_loops
async def test_a_long_frame_that_comes_whole_is_answered_and_gives_its_memory_back() -> None:
    async with serving() as (server, port), calling(port) as caller:
        call = reserve(1, "soon")
        call.reserve.block_hashes = bytes(8 * MB)
        said = frame(call.SerializeToString())
        caller.writer.write(said[:2])  # not even its length
        await caller.writer.drain()
        caller.writer.write(said[2:] + frame(reserve(2, "soon").SerializeToString()))
        assert {(await caller.answer()).id for _ in range(2)} == {1, 2}
        await until(lambda: not server.room.memory.lent_bytes)


@on_both_loops
async def test_who_waits_for_room_is_heard_once_there_is_some() -> None:
    async with serving() as (server, port), calling(port) as caller:
        assert server.room.memory.lend("elsewhere", OF_ONE_BYTES)
        assert server.room.memory.lend("127.0.0.1", OF_ONE_BYTES)
        call = reserve(1, "soon")
        call.reserve.block_hashes = bytes(8 * MB)
        caller.writer.write(frame(call.SerializeToString()))
        await until(lambda: server.room.num_waiting)
        blocker = Frame(server.room, "c", 0, lambda: None, lambda: None)
        server.room.memory.give_back("127.0.0.1", OF_ONE_BYTES)
        blocker.end()  # as any other frame that ends
        assert (await caller.answer()).ticket.transfer_id == "t-soon"
        server.room.memory.give_back("elsewhere", OF_ONE_BYTES)
    assert OF_ONE_BYTES * 2 == TOTAL_BYTES


@on_both_loops
async def test_a_frame_that_has_waited_for_room_has_all_of_its_time_then() -> None:
    """A test that is itself too late for a frame's time says nothing of it, and has the next one take longer."""
    now = asyncio.get_running_loop().time
    for frame_s in (1.0, 4.0, 16.0):
        async with serving(frame_s=frame_s) as (server, port), calling(port) as caller:
            blocker = Frame(server.room, "127.0.0.1", OF_ONE_BYTES, lambda: None, lambda: None)
            call = reserve(1, "soon")
            call.reserve.block_hashes = bytes(8 * MB)
            said = frame(call.SerializeToString())
            begun_at = now()
            caller.writer.write(said[: -4 * MB])
            await until(lambda server=server: server.room.num_waiting)
            await asyncio.sleep(0.6 * frame_s)
            blocker.end()
            room_at = now()
            await asyncio.sleep(0.5 * frame_s)  # more than a frame has, with what it waited
            try:
                caller.writer.write(said[-4 * MB :])
                assert (await caller.answer()).ticket.transfer_id == "t-soon"
                return
            except (ConnectionError, RuntimeError):  # uvloop's, of what is closed
                assert room_at > begun_at + frame_s or now() > room_at + frame_s, "it had its time"
    raise AssertionError("this machine is late by seconds")


@on_both_loops
async def test_a_frame_that_gets_no_room_is_not_called_stalled() -> None:
    async with serving(frame_s=0.3) as (server, port):
        assert server.room.memory.lend("127.0.0.1", OF_ONE_BYTES)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"prfaas caller 1\n" + BEGUN)
        await until(lambda: server.ended["no_room"] == 1)
        await until(lambda: not len(server))
        assert not server.ended["stalled"]
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@on_both_loops
async def test_a_caller_that_never_reads_its_answers_is_ended() -> None:
    async with serving(unread_s=0.2) as (server, port):
        _, writer = await asyncio.open_connection(sock=_narrow(port), limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"prfaas caller 1\n")
        answered = frame(reserve(1, "x" * 50_000).SerializeToString()) * 16  # each by a ticket of that length
        try:
            with suppress(ConnectionError):
                while not server.ended["unread"]:
                    writer.write(answered)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.5):
                            await writer.drain()
            await until(lambda: server.ended["unread"] == 1)
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()


def _narrow(port: int) -> socket.socket:
    """Connected; the kernel keeps little of what is not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


@on_both_loops
async def test_one_address_does_not_take_all_connections() -> None:
    async with serving(of_address=2) as (server, port), calling(port), calling(port):
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            async with calling(port):
                pass
        await until(lambda: server.ended["crowded_address"] == 1)
        assert len(server) == 2

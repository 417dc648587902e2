"""Handshakes of callers: each that fails has its reason and its address, and there are only so many at once."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from node.control.call_listener import CallListener
from tests.gateway.worlds import on_both_loops, until
from tests.node.control.test_call_server import GATEWAY, Room, calling, serving
from transport.control.certificates import Authority
from transport.path.handshakes import HandshakePlaces
from transport.receive.few_lines import EVERY_S, MAX_LINES

HOST = "127.0.0.1"


class Heard(asyncio.Protocol):
    """A connection that says its first bytes back."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport) or hasattr(transport, "write")
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


@asynccontextmanager
async def listening(
    secure: ssl.SSLContext | None,
    refusals: list[tuple[str, str, str]],
    handshake_s: float = 60.0,
    places: "HandshakePlaces[asyncio.Task[None]] | None" = None,
    host: str = HOST,
) -> AsyncIterator[tuple[CallListener, int]]:
    def refused(*told: str) -> None:
        refusals.append((told[0], told[1], told[2]))

    listener = CallListener(Heard, refused, lambda site: False, handshake_s, places)
    port = listener.start(host, 0, secure)
    try:
        yield listener, port
    finally:
        await listener.close()
        assert not len(listener)


async def said_back(port: int, secure: ssl.SSLContext | None) -> bytes:
    name = "localhost" if secure is not None else None
    reader, writer = await asyncio.open_connection(HOST, port, ssl=secure, server_hostname=name)
    try:
        writer.write(b"x")
        return await reader.read(1)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def hung_up(caller: socket.socket) -> bool:
    caller.setblocking(False)
    try:
        return caller.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


async def fails(port: int, secure: ssl.SSLContext) -> None:
    with suppress(OSError):
        assert await said_back(port, secure) == b""


def asking(authority: Authority) -> ssl.SSLContext:
    """A caller's context without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.issue("other", ["localhost"], peer=GATEWAY).authority)
    return context


def refused_callers(authority: Authority, stranger: Authority) -> list[Callable[[int], "asyncio.Future[None]"]]:
    """Callers whose handshake fails, each for another reason."""
    nobody, old = asking(authority), asking(authority)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    foreign = asking(authority)
    theirs = stranger.issue("gateway", ["localhost"], peer=GATEWAY)
    foreign.load_cert_chain(theirs.certificate, theirs.key)

    async def plain(port: int) -> None:
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    return [
        lambda port: asyncio.ensure_future(fails(port, nobody)),
        lambda port: asyncio.ensure_future(fails(port, old)),
        lambda port: asyncio.ensure_future(fails(port, foreign)),
        lambda port: asyncio.ensure_future(plain(port)),
    ]


def test_handshakes_that_fail_are_told_with_their_reason_and_address(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    ours = authority.issue("node", ["localhost"], peer=GATEWAY)

    @on_both_loops
    async def scenario() -> None:
        told: list[tuple[str, str, str]] = []
        async with listening(ours.mutual_context(), told) as (listener, port):
            for number, call in enumerate(refused_callers(authority, stranger), start=1):
                await call(port)
                await until(lambda number=number: len(told) == number)
            assert await said_back(port, ours.client_context()) == b"x"
            await until(lambda: not len(listener))
        assert {(reason, address) for reason, address, _ in told} == {("handshake", HOST)}
        details = [detail for _, _, detail in told]
        assert all(details)
        for part, detail in zip(("certificate", "protocol", "", "http"), details, strict=True):
            assert part in detail.lower(), details

    scenario()


def test_one_that_says_nothing_has_so_long(tmp_path: Path) -> None:
    ours = Authority(tmp_path).issue("node", ["localhost"], peer=GATEWAY)

    @on_both_loops
    async def scenario() -> None:
        told: list[tuple[str, str, str]] = []
        async with listening(ours.mutual_context(), told, handshake_s=0.05) as (listener, port):
            with socket.create_connection((HOST, port)):
                await until(lambda: told)
                await until(lambda: not len(listener))
        assert [each[:2] for each in told] == [("handshake", HOST)]

    scenario()


def test_so_many_shake_hands_at_once_and_the_others_are_turned_away(tmp_path: Path) -> None:
    ours = Authority(tmp_path).issue("node", ["localhost"], peer=GATEWAY)

    @on_both_loops
    async def scenario() -> None:
        told: list[tuple[str, str, str]] = []
        places = HandshakePlaces[asyncio.Task[None]](in_all=8, of_network=4)
        async with listening(ours.mutual_context(), told, places=places) as (listener, port):
            callers = [socket.create_connection((HOST, port)) for _ in range(12)]
            await until(lambda: len(told) == 8)
            await until(lambda: len(listener) == 4)
            for caller in callers:
                caller.close()
            await until(lambda: not len(listener) and not len(places))
            assert await said_back(port, ours.client_context()) == b"x"
        assert [each[0] for each in told] == ["crowded"] * 8 + ["handshake"] * 4

    scenario()


def test_the_line_names_who_lost_its_place_and_it_is_hung_up(tmp_path: Path) -> None:
    ours = Authority(tmp_path).issue("node", ["localhost"], peer=GATEWAY)

    @on_both_loops
    async def scenario() -> None:
        told: list[tuple[str, str, str]] = []
        places = HandshakePlaces[asyncio.Task[None]](in_all=1)
        async with listening(ours.mutual_context(), told, places=places, host="0.0.0.0") as (listener, port):
            first = socket.create_connection((HOST, port), source_address=("127.0.0.2", 0))
            await until(lambda: len(listener) == 1)
            with first, socket.create_connection((HOST, port), source_address=("127.0.0.3", 0)):
                await until(lambda: told)
                assert told == [("crowded", "127.0.0.2", "too many shake hands")]
                await until(lambda: hung_up(first))

    scenario()


@pytest.mark.filterwarnings("error")
def test_no_socket_is_left_of_callers_whose_handshake_has_not_begun(tmp_path: Path) -> None:
    ours = Authority(tmp_path).issue("node", ["localhost"], peer=GATEWAY)

    @on_both_loops
    async def scenario() -> None:
        told: list[tuple[str, str, str]] = []
        places = HandshakePlaces[asyncio.Task[None]](in_all=2)
        with ExitStack() as callers:
            async with listening(ours.mutual_context(), told, places=places) as (listener, port):
                all_callers = [callers.enter_context(socket.create_connection((HOST, port))) for _ in range(5)]
                await until(lambda: len(told) == 3)
                await until(lambda: sum(map(hung_up, all_callers)) == 3)
            # It stops in the moment in which it has accepted them.
            async with listening(ours.mutual_context(), told, places=places) as (listener, port):
                stopped = [callers.enter_context(socket.create_connection((HOST, port))) for _ in range(2)]
                asyncio.get_running_loop().call_soon(listener.stop)
                await until(lambda: all(map(hung_up, stopped)))
        assert len(told) == 3

    scenario()


@on_both_loops
async def test_without_certificates_there_are_no_handshakes_and_none_is_told() -> None:
    told: list[tuple[str, str, str]] = []
    async with listening(None, told) as (_, port):
        for _ in range(20):
            assert await said_back(port, None) == b"x"
        socket.create_connection((HOST, port)).close()
        await asyncio.sleep(0.02)
    assert told == []


def test_a_node_counts_them_and_its_log_stays_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    ours = authority.issue("node", ["localhost"], peer=GATEWAY)
    nobody = asking(authority)
    caplog.set_level(logging.WARNING)

    @on_both_loops
    async def scenario() -> None:
        caplog.clear()
        began = asyncio.get_running_loop().time()
        async with serving(Room(), ours) as (server, port):
            for _ in range(3 * MAX_LINES):
                await fails(port, nobody)
            await until(lambda: server.ended["handshake"] == 3 * MAX_LINES)
            async with calling(port, ours.client_context()):
                assert len(server) == 1
        took_s = asyncio.get_running_loop().time() - began
        said = [each.getMessage() for each in caplog.records if each.name == "node.control.call_server"]
        lines = [line for line in said if "were left out" not in line]
        assert MAX_LINES <= len(lines) <= MAX_LINES * (1 + took_s // EVERY_S)
        assert all(line.startswith(f"a kept connection of {HOST} ended (handshake): ") for line in lines)

    scenario()

"""The engine's door: mutual TLS outside, the engine's bytes inside, and nothing left behind."""

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.errors import NodeConfigError
from node.process.ports import ListenPort
from node.process.tls_front import PeerCertificate, TlsFront
from tests.gateway.worlds import on_both_loops, until
from tests.node.process.callers import (
    ANY,
    HOST,
    calling,
    echo,
    engine_running,
    fronted,
    is_hung_up_on,
    is_refused,
)
from transport.control.certificates import Authority
from transport.path.handshakes import HandshakePlaces
from transport.wire.identity import Identity


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def node(authority: Authority) -> Identity:
    return authority.issue("node")


@pytest.fixture
def gateway(authority: Authority) -> Identity:
    return authority.issue("gateway")


def test_it_carries_both_ways_and_a_request_may_come_with_the_handshakes_last_bytes(
    node: Identity, gateway: Identity
) -> None:
    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            assert front.url == f"https://{HOST}:{port}"
            async with calling(port, gateway) as (reader, writer):
                writer.write(b"at once")
                assert await reader.readexactly(7) == b"at once"
                big = bytes(range(256)) * 40_000
                writer.write(big)
                assert await reader.readexactly(len(big)) == big
                assert (len(front), engine.open) == (1, 1)
            await until(lambda: (len(front), engine.open) == (0, 0))
            assert front.ended == {}

    scenario()


def test_only_one_end_reading_bounds_what_is_kept(node: Identity, gateway: Identity) -> None:
    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            engine.is_deaf = True
            async with calling(port, gateway) as (_, writer):
                written = 0
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        while written < 64 << 20:
                            writer.write(bytes(1 << 16))
                            written += 1 << 16
                            await writer.drain()
                assert written < 24 << 20  # sockets' buffers, and a little of ours
                writer.transport.abort()
                engine.woken.set()

    scenario()


def test_an_end_on_either_side_ends_both(node: Identity, gateway: Identity) -> None:
    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            engine.hangs_up = True
            async with calling(port, gateway) as (reader, writer):
                writer.write(b"bye")
                assert await reader.read() == b"bye"
            await until(lambda: len(front) == 0)
            engine.hangs_up = False
            async with calling(port, gateway) as (reader, writer):
                writer.write(b"x")
                await reader.readexactly(1)
                writer.transport.abort()
                await until(lambda: (len(front), engine.open) == (0, 0))

    scenario()


def test_a_caller_that_takes_nothing_keeps_its_connection_for_a_while_only(node: Identity, gateway: Identity) -> None:
    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node, stalled_s=0.2)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            async with calling(port, gateway) as (_, writer):
                writer.transport.pause_reading()
                writer.write(bytes(16 << 20))  # the echo fills the sockets' buffers, and then the front's piece
                await until(lambda: front.ended == {"unread": 1}, lambda: front.ended)
                await until(lambda: len(front) == 0)
                writer.transport.abort()

    scenario()


def test_without_an_engine_callers_are_reset_before_their_handshake(node: Identity, gateway: Identity) -> None:
    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node)
        async with fronted(front) as port:
            for _ in range(2):
                with pytest.raises(ConnectionResetError):
                    await asyncio.open_connection(HOST, port, ssl=gateway.client_context(), server_hostname="node")
            assert front.ended == {"no_engine": 2}
            front.open("http://127.0.0.1:9")  # one that is gone
            assert await is_refused(port, gateway)
            front.shut()
            assert front.ended == {"no_engine": 3}

    scenario()


def test_strangers_and_callers_without_the_right_are_refused_and_counted(
    node: Identity, gateway: Identity, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger").issue("gateway")

    def complaint(certificate: PeerCertificate) -> str:
        names = [value for entry in certificate["subject"] for key, value in entry if key == "commonName"]
        return "" if names == ["gateway"] else f"{names} is no gateway"

    @on_both_loops
    async def scenario() -> None:
        front, hasty = TlsFront(node, complaint, handshake_s=60.0), TlsFront(node, complaint, handshake_s=0.05)
        async with engine_running() as engine, fronted(front) as port, fronted(hasty) as impatient:
            front.open(engine.url)
            hasty.open(engine.url)
            for each in (replace(stranger, authority=node.authority), node):
                assert await is_refused(port, each)
            assert await is_hung_up_on(port, b"GET /v1/models HTTP/1.1\r\n\r\n")
            assert await is_hung_up_on(impatient, b"")
            nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            nobody.load_verify_locations(node.authority)
            reader, writer = await asyncio.open_connection(HOST, port, ssl=nobody, server_hostname="node")
            with suppress(OSError):
                assert not await reader.read()
            writer.close()
            await until(lambda: len(front) == 0)
            assert front.ended == {"handshake": 3, "no_right": 1}
            assert hasty.ended == {"handshake": 1}
            assert engine.read == 0
            assert await echo(port, gateway) == b"x"

    scenario()


def test_a_stranger_does_not_keep_others_from_their_handshakes(node: Identity, gateway: Identity) -> None:
    """Its own address has some places, however many it asks for; and a caller that hangs up gives its place back."""

    @on_both_loops
    async def scenario() -> None:
        places: HandshakePlaces[Any] = HandshakePlaces(in_all=3, of_network=2)
        front = TlsFront(node, handshakes=places, handshake_s=30.0)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            silent = [await asyncio.open_connection(HOST, port, local_addr=("127.0.0.9", 0)) for _ in range(20)]
            await until(lambda: front.ended["crowded"] == 18)
            assert len(front) == len(places) == 2
            async with asyncio.timeout(10.0):
                assert await echo(port, gateway) == b"x"
            for _, writer in silent:
                writer.transport.abort()
            await until(lambda: len(front) == len(places) == 0)

    scenario()


def test_a_gateway_that_connects_for_many_requests_at_once_finds_places_for_all(
    node: Identity, gateway: Identity
) -> None:
    @on_both_loops
    async def scenario() -> None:
        places: HandshakePlaces[Any] = HandshakePlaces(in_all=40, of_network=2)
        front = TlsFront(node, handshakes=places)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            assert await echo(port, gateway) == b"x"
            await until(lambda: len(front) == 0)
            assert await asyncio.gather(*(echo(port, gateway) for _ in range(30))) == [b"x"] * 30
            assert front.ended == {}

    scenario()


def test_strangers_from_everywhere_keep_no_caller_waiting(node: Identity, gateway: Identity) -> None:
    """With all places taken by silent ones of many addresses, new callers get through, and those there are not disturbed."""

    @on_both_loops
    async def scenario() -> None:
        places: HandshakePlaces[Any] = HandshakePlaces(in_all=8, of_network=2)
        front = TlsFront(node, handshakes=places, handshake_s=30.0, of_address=4)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            async with calling(port, gateway) as (reader, writer):
                writer.write(b"x")
                await reader.readexactly(1)
                silent = [
                    await asyncio.open_connection(HOST, port, local_addr=(f"127.0.1.{number}", 0))
                    for number in range(1, 33)
                ]
                await until(lambda: front.ended["crowded"] == 24)
                async with asyncio.timeout(10.0):
                    for _ in range(3):
                        assert await echo(port, gateway) == b"x"
                writer.write(b"y")
                assert await reader.readexactly(1) == b"y"
                assert front.ended.keys() == {"crowded"}
            for _, stranger in silent:
                stranger.transport.abort()
            await until(lambda: len(front) == 0)

    scenario()


def test_a_handshake_is_over_in_seconds(node: Identity) -> None:
    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node, handshake_s=0.05)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            reader, writer = await asyncio.open_connection(HOST, port)
            assert not await reader.read()
            assert front.ended == {"handshake": 1}
            writer.close()

    scenario()


def test_an_address_has_a_bounded_number_of_connections(node: Identity, gateway: Identity) -> None:
    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node, of_address=1)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            async with calling(port, gateway) as (reader, writer):
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
                with pytest.raises(ConnectionResetError):
                    await asyncio.open_connection(HOST, port, ssl=gateway.client_context(), server_hostname="node")
                writer.write(b"y")
                assert await reader.readexactly(1) == b"y"
            assert front.ended == {"crowded": 1}

    scenario()


def test_closing_ends_what_is_under_way_and_a_port_that_is_taken_is_named(node: Identity, gateway: Identity) -> None:
    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            with pytest.raises(NodeConfigError, match="engine_port"):
                await TlsFront(node).start(ListenPort("engine_port", HOST, port))
            half = await asyncio.open_connection(HOST, port)
            async with calling(port, gateway) as (reader, writer):
                writer.write(b"x")
                await reader.readexactly(1)
                await front.close()
                assert not await reader.read()
            assert not await half[0].read()
            half[1].close()

    scenario()


def test_a_caller_that_has_just_come_does_not_keep_a_front_from_ending(node: Identity, gateway: Identity) -> None:
    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node)
        async with engine_running() as engine:
            await front.start(ANY)
            front.open(engine.url)
            host, port = HOST, int(front.url.rpartition(":")[2])
            with socket.create_connection((host, port)):
                async with asyncio.timeout(10.0):
                    for _ in range(50):
                        if len(front):
                            break
                        await asyncio.sleep(0)
                    await front.close()
            assert len(front) == 0

    scenario()


def test_an_error_in_judging_a_certificate_ends_the_connection_and_is_counted(
    node: Identity, gateway: Identity
) -> None:
    def complaint(certificate: PeerCertificate) -> str:
        raise ZeroDivisionError

    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node, complaint)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            assert await is_refused(port, gateway)
            await until(lambda: len(front) == 0)
            assert front.ended == {"internal": 1}

    scenario()


def test_a_caller_for_whom_no_descriptor_is_left_gives_its_own_back(node: Identity, gateway: Identity) -> None:
    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            assert await echo(port, gateway) == b"x"
            await until(lambda: len(front) == 0)
            secure, outside = gateway.client_context(), socket.create_connection((HOST, port))
            with last_descriptor():
                with suppress(OSError):  # whether its own handshake has ended by then
                    reader, writer = await asyncio.open_connection(sock=outside, ssl=secure, server_hostname="node")
                    assert not await reader.read()
                    writer.close()
                await until(lambda: len(front) == 0 and front.ended == {"no_engine": 1}, lambda: front.ended)
            assert await echo(port, gateway) == b"x"

    scenario()


@contextmanager
def last_descriptor() -> Iterator[None]:
    """The process can open one more inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = os.dup(0)
    highest = max(int(each) for each in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    fillers: list[int] = []
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.dup(last))
        os.close(last)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in fillers:
            os.close(each)


def test_strangers_do_not_fill_the_log(node: Identity, caplog: pytest.LogCaptureFixture) -> None:
    @on_both_loops
    async def scenario() -> None:
        caplog.clear()
        front = TlsFront(node)
        async with engine_running() as engine, fronted(front) as port:
            front.open(engine.url)
            for _ in range(100):
                assert await is_hung_up_on(port, b"GET / HTTP/1.1\r\n\r\n")
            assert front.ended == {"handshake": 100}
            assert 0 < len(caplog.records) <= 20

    scenario()


def test_a_caller_is_known_to_the_server_until_it_leaves_and_then_to_have_left(
    node: Identity, gateway: Identity
) -> None:
    seen: list[str] = []

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append("{}:{}".format(*writer.get_extra_info("peername")))
        writer.write(await reader.read(1))
        await reader.read()
        writer.close()

    @on_both_loops
    async def scenario() -> None:
        seen.clear()
        front = TlsFront(node)
        async with await asyncio.start_server(serve_one, HOST, 0) as server, fronted(front) as port:
            front.open(f"http://{HOST}:{server.sockets[0].getsockname()[1]}")
            async with calling(port, gateway) as (reader, writer):
                writer.write(b"x")
                await reader.readexactly(1)
                caller = front.caller_at(seen[0])
                assert caller is not None
                assert caller.address == HOST
                assert not front.has_left(seen[0])
            await until(lambda: len(front) == 0)
            assert front.caller_at(seen[0]) is None
            assert front.has_left(seen[0])
            assert not front.has_left("127.0.0.1:1")

    scenario()


def test_any_address_of_ipv6_is_any_of_ipv4_too(node: Identity, gateway: Identity) -> None:
    @on_both_loops
    async def scenario() -> None:
        front = TlsFront(node)
        async with engine_running() as engine:
            port = await front.start(ListenPort("engine_port", "::", 0))
            front.open(engine.url)
            try:
                for host in (HOST, "::1"):
                    reader, writer = await asyncio.open_connection(
                        host, port, ssl=replace(gateway, peer_name="node").client_context(), server_hostname="node"
                    )
                    writer.write(b"x")
                    assert await reader.readexactly(1) == b"x"
                    writer.close()
                assert await is_hung_up_on(port, b"GET / HTTP/1.1\r\n\r\n")
                assert front.ended == {"handshake": 1}
            finally:
                await front.close()

    scenario()

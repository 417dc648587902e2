"""A port with few places: strangers take neither memory without bound, nor places from callers that are known."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import uvloop

from prfaas.system.certificates import CertificateHolder, issue
from transport.control.asking import trusting
from transport.path.guarded_port import GuardedPort
from transport.path.handshakes import HandshakePlaces
from transport.path.holders import HolderPlaces
from transport.peers.name import PeerName, PeerRole

WITHIN_S = 60.0
LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
uvloop.new_event_loop().close()  # the first one opens a pipe that its process keeps
NewLoop = Callable[[], asyncio.AbstractEventLoop]


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop's are not so by class

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


def authority_and_server(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What a client trusts, and what a server shows."""
    issue(folder, [CertificateHolder(PeerName("prfaas", "any", PeerRole.GATEWAY, "it"), ("127.0.0.1",))], days=30)
    shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.load_cert_chain(folder / "it.pem", folder / "it.key")
    return trusting(folder / "authority.pem"), shown


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110 no event tells
            await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(port: GuardedPort) -> AsyncIterator[tuple[str, int]]:
    bound = port.start("127.0.0.1", 0, "a test")
    try:
        yield "127.0.0.1", bound
    finally:
        await port.close()


def connected(address: tuple[str, int], source: str) -> socket.socket:
    made = socket.socket()
    made.settimeout(WITHIN_S)
    made.bind((source, 0))
    made.connect(address)
    return made


def run(scenario: Callable[[], object], new_loop: NewLoop) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())  # type: ignore[arg-type]


@LOOPS
def test_strangers_have_few_places_and_lose_them_to_callers_that_are_known(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        port = GuardedPort(Echo, places=HandshakePlaces(in_all=4, of_network=2))
        async with listening(port) as address:
            with ExitStack() as held:
                for number in range(12):
                    held.enter_context(connected(address, f"127.0.9.{1 + number % 3}"))
                await until(lambda: port.ended["crowded"] >= 8)
                assert len(port) <= 4
                port.knows("127.0.9.9")
                known = held.enter_context(connected(address, "127.0.9.9"))
                known.sendall(b"hello")
                assert await asyncio.to_thread(known.recv, 5) == b"hello"
            await until(lambda: len(port) == 0)

    run(scenario, new_loop)


@LOOPS
def test_a_caller_gives_its_place_back_when_it_leaves(new_loop: NewLoop) -> None:
    async def scenario() -> None:
        port = GuardedPort(Echo, places=HandshakePlaces(in_all=1, of_network=1))
        async with listening(port) as address:
            for _ in range(5):
                with connected(address, "127.0.9.1") as caller:
                    caller.sendall(b"x")
                    assert await asyncio.to_thread(caller.recv, 1) == b"x"
                await until(lambda: len(port) == 0)
            assert not port.ended

    run(scenario, new_loop)


@LOOPS
def test_a_handshake_that_takes_too_long_or_goes_wrong_ends(new_loop: NewLoop, tmp_path: Path) -> None:
    trust, context = authority_and_server(tmp_path)

    async def scenario() -> None:
        hasty, port = GuardedPort(Echo, context, handshake_s=0.2), GuardedPort(Echo, context)
        async with listening(hasty) as impatient, listening(port) as address:
            with connected(impatient, "127.0.9.1") as silent, connected(address, "127.0.9.1") as wrong:
                wrong.sendall(b"GET / HTTP/1.1\r\n\r\n")
                await until(lambda: hasty.ended["handshake"] == port.ended["handshake"] == 1)
                assert await asyncio.to_thread(silent.recv, 1) == b""
            assert len(hasty) == len(port) == 0
            reader, writer = await asyncio.open_connection(*address, ssl=trust, server_hostname="127.0.0.1")
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            assert len(port) == 1
            writer.close()
            await until(lambda: len(port) == 0)

    run(scenario, new_loop)


@LOOPS
def test_a_certificate_admits_for_good_where_the_server_says_so(new_loop: NewLoop, tmp_path: Path) -> None:
    trust, context = authority_and_server(tmp_path)

    async def scenario() -> None:
        port = GuardedPort(Echo, context, holder_of=lambda _: "one", places=HandshakePlaces(in_all=1, of_network=1))
        async with listening(port) as address:
            held = []
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*address, ssl=trust, server_hostname="127.0.0.1")
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
                held.append(writer)
            assert len(port) == 0
            for writer in held:
                writer.close()
            assert not port.ended

    run(scenario, new_loop)


@LOOPS
def test_holders_have_places_of_their_own_and_the_oldest_connection_makes_room(
    new_loop: NewLoop, tmp_path: Path
) -> None:
    trust, context = authority_and_server(tmp_path)
    names = iter(["busy", "busy", "operator", "busy"])

    async def scenario() -> None:
        port = GuardedPort(Echo, context, holder_of=lambda _: next(names), holders=HolderPlaces(3, 2))
        async with listening(port) as address:
            held = []
            for _ in range(4):
                reader, writer = await asyncio.open_connection(*address, ssl=trust, server_hostname="127.0.0.1")
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
                held.append((reader, writer))
            assert await held[0][0].read() == b""  # the first one of "busy"
            assert port.ended == {"crowded_holder": 1}
            for reader, writer in held[1:]:
                writer.write(b"y")
                assert await reader.readexactly(1) == b"y"
            for _, writer in held:
                writer.close()

    run(scenario, new_loop)


@LOOPS
def test_closing_ends_handshakes(new_loop: NewLoop, tmp_path: Path) -> None:
    _, context = authority_and_server(tmp_path)

    async def scenario() -> None:
        port = GuardedPort(Echo, context)
        async with listening(port) as address:
            silent = connected(address, "127.0.9.1")
            await until(lambda: len(port) == 1)
        with silent:
            assert await asyncio.to_thread(silent.recv, 1) == b""
        assert "caller" not in {each.get_name() for each in asyncio.all_tasks()}

    run(scenario, new_loop)


class Generous(asyncio.Protocol):
    """Says more than fits into the buffers of any kernel, and closes: most of it waits in this process."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast(asyncio.WriteTransport, transport)
        wire.write(bytes(16 << 20))
        wire.close()


@LOOPS
@pytest.mark.parametrize("secure", [False, True], ids=["clear", "tls"])
def test_a_caller_that_does_not_read_keeps_its_place_until_it_is_gone(
    new_loop: NewLoop, secure: bool, tmp_path: Path
) -> None:
    trust, context = authority_and_server(tmp_path)

    async def scenario() -> None:
        port = GuardedPort(
            Generous, context if secure else None, places=HandshakePlaces(in_all=2, of_network=2), handshake_s=WITHIN_S
        )
        async with listening(port) as address:
            with ExitStack() as held:
                for number in range(6):
                    caller = held.enter_context(connected(address, f"127.0.9.{1 + number}"))
                    if secure:
                        shaken = await asyncio.to_thread(trust.wrap_socket, caller, server_hostname="127.0.0.1")
                        held.enter_context(shaken)
                await until(lambda: port.ended["crowded"] == 4)
                assert len(port) == 2
            await until(lambda: len(port) == 0)

    run(scenario, new_loop)

"""An engine behind a front, and callers of all kinds before it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from node.process.ports import ListenPort
from node.process.tls_front import TlsFront
from tests.gateway.worlds import until
from transport.wire.identity import Identity

HOST = "127.0.0.1"
ANY = ListenPort("engine_port", HOST, 0)


class Engine:
    """Answers every line with the same line; one that is told so says nothing, or hangs up after its answer."""

    def __init__(self) -> None:
        self.url = ""
        self.open = 0
        self.is_deaf = False
        self.hangs_up = False
        self.read = 0
        self.woken = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while not self.is_deaf and (data := await reader.read(1 << 16)):
                self.read += len(data)
                writer.write(data)
                await writer.drain()
                if self.hangs_up:
                    break
            if self.is_deaf:
                await self.woken.wait()
        except ConnectionError:
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def engine_running() -> AsyncIterator[Engine]:
    engine = Engine()
    server = await asyncio.start_server(engine, HOST, 0)
    engine.url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()


@asynccontextmanager
async def fronted(front: TlsFront) -> AsyncIterator[int]:
    await front.start(ANY)
    try:
        yield int(front.url.rpartition(":")[2])
    finally:
        await front.close()
        await until(lambda: len(front) == 0)


@asynccontextmanager
async def calling(port: int, identity: Identity) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(
        HOST, port, ssl=replace(identity, peer_name="node").client_context(), server_hostname="node"
    )
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def echo(port: int, identity: Identity, said: bytes = b"x") -> bytes:
    """What the engine answers. Raises OSError, IncompleteReadError."""
    async with calling(port, identity) as (reader, writer):
        writer.write(said)
        return await reader.readexactly(len(said))


async def is_refused(port: int, identity: Identity) -> bool:
    """In TLS 1.3 a client may think that all is well before the server has looked at its certificate."""
    try:
        await echo(port, identity)
    except (OSError, asyncio.IncompleteReadError):
        return True
    return False


async def is_hung_up_on(port: int, said: bytes) -> bool:
    """For who speaks no TLS."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(said)
    try:
        return not await reader.read()
    except ConnectionResetError:
        return True
    finally:
        writer.close()

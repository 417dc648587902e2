"""Who hangs up on whom, and when: pages are free only after the engine has let go of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from node.engine.socket import HANG_UP_S, EngineConnection, EngineSocket
from tests.pd_cluster.handover import run
from transport.control import messages as m

HELLO = m.Hello(engine_pid=1, model_id="m", layout_json="{}", max_model_len=1, http_url="")
WELCOME = m.Welcome(arena_path="", page_bytes=1, num_pages=1, chunk_tokens=1)


class Listener:
    """Notes what it hears; fails on a PrefillDone like code with a bug."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[str] = asyncio.Queue()

    def on_hello(self, hello: m.Hello, engine: EngineConnection) -> None:
        engine.send(WELCOME)
        self.heard.put_nowait("hello")

    def on_message(self, message: m.EngineMessage, engine: EngineConnection) -> None:
        if isinstance(message, m.PrefillDone):
            raise ZeroDivisionError
        self.heard.put_nowait(type(message).__name__)

    def on_deaf(self, engine: EngineConnection) -> None:
        self.heard.put_nowait("deaf")

    def on_gone(self, engine: EngineConnection) -> None:
        engine.send(WELCOME)  # comes to nothing
        self.heard.put_nowait("gone")


@asynccontextmanager
async def listening(tmp_path: Path, hang_up_s: float = HANG_UP_S) -> AsyncIterator[tuple[Listener, EngineSocket]]:
    listener = Listener()
    socket = EngineSocket(tmp_path / "s", listener, hang_up_s=hang_up_s)
    await socket.start()
    try:
        yield listener, socket
    finally:
        await socket.close()


@asynccontextmanager
async def engine(socket: EngineSocket, said: bytes) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(socket.path)
    try:
        writer.write(said)
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    "said", [b"\xff\xff\xff\xff", m.encode(m.PrefillDone(job="j", num_tokens=1))], ids=["garbage", "a bug of ours"]
)
def test_jobs_end_only_when_the_engine_has_hung_up_too(tmp_path: Path, said: bytes) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as (listener, socket):
            async with engine(socket, m.encode(HELLO)) as (reader, writer):
                assert await listener.heard.get() == "hello"
                writer.write(said)
                assert await reader.read() == m.encode(WELCOME)
                writer.write(m.encode(m.EndJob(job="j")))  # what was under way is read, and no longer listened to
                for _ in range(20):  # turns of the loop
                    await asyncio.sleep(0)
                assert listener.heard.empty()
            assert await listener.heard.get() == "gone"

    run(scenario())


def test_an_engine_that_does_not_let_go_is_reported(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path, hang_up_s=0.05) as (listener, socket), engine(socket, b"\xff\xff\xff\xff"):
            assert await listener.heard.get() == "deaf"
            assert listener.heard.empty()
            await socket.close()
            assert await listener.heard.get() == "gone"

    run(scenario())


def test_close_waits_until_everybody_knows(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with listening(tmp_path) as (listener, socket), engine(socket, m.encode(HELLO)):
            assert await listener.heard.get() == "hello"
            await socket.close()
            assert listener.heard.get_nowait() == "gone"
            assert not socket.path.exists()

    run(scenario())

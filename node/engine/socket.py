"""The agent's end of the Unix socket: one engine at a time, frames of transport.control.messages."""

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Protocol

from node.errors import EngineFailure
from transport.control import messages as m

log = logging.getLogger(__name__)

READ_BYTES = 1 << 18
HANG_UP_S = 5.0


class EngineConnection:
    """One connected engine; `send` never blocks (frames are small, the engine reads them at once)."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._over = False

    def send(self, message: m.ControlMessage) -> None:
        """Queues a frame. After the engine left it does nothing: the reader's end tells the jobs."""
        if not self._over and not self._writer.is_closing():
            self._writer.write(m.encode(message))

    def end(self) -> None:
        """Nothing more will be said; what the engine says can still be read."""
        self._over = True
        with contextlib.suppress(OSError):
            self._writer.write_eof()


class EngineListener(Protocol):
    """Who hears what engines say. `on_deaf`: an engine that broke the protocol does not let go of its pages."""

    def on_hello(self, hello: m.Hello, engine: EngineConnection) -> None: ...
    def on_message(self, message: m.EngineMessage, engine: EngineConnection) -> None: ...
    def on_deaf(self, engine: EngineConnection) -> None: ...
    def on_gone(self, engine: EngineConnection) -> None: ...


class EngineSocket:
    """Listens on a Unix socket and hands an engine's messages to the listener."""

    def __init__(self, path: Path, listener: EngineListener, *, hang_up_s: float = HANG_UP_S) -> None:
        """`hang_up_s`: how long an engine that was hung up on may take to do the same, before it is deaf."""
        self.path = path
        self._hang_up_s = hang_up_s
        self._listener = listener
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}

    async def start(self) -> None:
        """Binds the socket; a stale file of a dead agent is replaced. Raises OSError."""
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        self.path.chmod(0o600)

    async def close(self) -> None:
        """Stops listening, hangs up, and waits until the listener has heard that its engines are gone."""
        if self._server is None:
            return
        self._server.close()
        for writer in self._connections:
            writer.close()
        serving = [task for task in self._connections.values() if task is not None]
        await asyncio.gather(*serving, return_exceptions=True)
        await self._server.wait_closed()
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = asyncio.current_task()
        engine = EngineConnection(writer)
        try:
            await self._listen(reader, engine)
        finally:
            self._listener.on_gone(engine)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()
            del self._connections[writer]

    async def _listen(self, reader: asyncio.StreamReader, engine: EngineConnection) -> None:
        try:
            await self._read(reader, engine)
        except OSError as exc:
            log.error("engine connection lost: %s", exc)
        except (m.MessageError, EngineFailure) as exc:
            log.error("engine hung up on: %s", exc)
            await self._hang_up(reader, engine)
        except Exception:
            log.exception("engine hung up on")
            await self._hang_up(reader, engine)

    async def _read(self, reader: asyncio.StreamReader, engine: EngineConnection) -> None:
        buffer = m.MessageBuffer()
        while data := await reader.read(READ_BYTES):
            for body in buffer.feed(data):
                message = m.decode_from_engine(body)
                if isinstance(message, m.Hello):
                    self._listener.on_hello(message, engine)
                else:
                    self._listener.on_message(message, engine)

    async def _hang_up(self, reader: asyncio.StreamReader, engine: EngineConnection) -> None:
        """Waits for the engine to do the same: until then its model may be writing into pages that we lent."""
        engine.end()
        with contextlib.suppress(OSError):
            try:
                async with asyncio.timeout(self._hang_up_s):
                    await _read_past(reader)
            except TimeoutError:
                self._listener.on_deaf(engine)
                await _read_past(reader)


async def _read_past(reader: asyncio.StreamReader) -> None:
    while await reader.read(READ_BYTES):
        pass

"""An event loop whose connections are in memory and whose time passes at once while everything waits.

Servers and connections are those of the loop's interface, so that what runs on it is what runs on sockets.
"""

import asyncio
import itertools
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple, cast

BEGINS_S: Final = 1_000.0
HIGH_BYTES: Final = 64 * 1024  # asyncio's own
TCP_ESTABLISHED, TCP_CLOSE = 1, 7  # include/net/tcp_states.h
HOST: Final = "127.0.0.1"

if TYPE_CHECKING:
    Bytes = bytes | bytearray | memoryview[Any]

Protocols = Callable[[], asyncio.BaseProtocol]
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class VirtualTime(selectors.DefaultSelector):
    """The loop's wait for events. While no thread works for the loop, `now_s` jumps to the next timer instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = BEGINS_S
        self.num_working = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready within `timeout` seconds of virtual time."""
        if timeout is None or timeout <= 0 or self.num_working:
            began_s = time.monotonic()
            ready = super().select(timeout)
            self.now_s += time.monotonic() - began_s
            return ready
        ready = super().select(0)
        if not ready:
            self.now_s += timeout
        return ready


class MemorySocket:
    """What protocols ask of their socket: its name, and whether the other end is gone."""

    family = socket.AF_UNIX

    def __init__(self, port: int) -> None:
        self.port = port
        self.is_reset = False

    def getsockname(self) -> tuple[str, int]:
        return HOST, self.port

    def setsockopt(self, *option: object) -> None:
        """No option changes a connection in memory."""

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """A struct tcp_info that says in which state the connection is."""
        return bytes([TCP_CLOSE if self.is_reset else TCP_ESTABLISHED]).ljust(size, b"\0")


class MemoryTransport(asyncio.Transport):
    """One end of a connection. What is written arrives in order, a step of the loop later, while the other end reads."""

    peer: "MemoryTransport"

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, port: int, peer_port: int) -> None:
        self.socket = MemorySocket(port)
        names = {"sockname": (HOST, port), "peername": (HOST, peer_port), "socket": self.socket}
        super().__init__(names)
        self._loop = loop
        self._protocol = protocol
        self._written: list[bytes] = []
        self._high_bytes = HIGH_BYTES
        self._is_reading = True
        self._is_closing = False
        self.is_lost = False
        self._has_said_all = False  # and the other end has been told so
        self._is_paused = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.Protocol:
        return self._protocol

    # Writing

    def write(self, data: "Bytes") -> None:
        if self._is_closing:
            return
        if self.peer.is_lost:
            self.socket.is_reset = True
            self._lose(ConnectionResetError("the other end is gone"))
            return
        self._written.append(bytes(data))
        if self.get_write_buffer_size() > self._high_bytes and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()
        self._loop.call_soon(self.deliver)

    def writelines(self, list_of_data: "Iterable[Bytes]") -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        raise NotImplementedError("no test closes half of a connection in memory")

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._written))

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._high_bytes // 4, self._high_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = HIGH_BYTES if high is None else high

    def deliver(self) -> None:
        """Has the other end take what has been written, if it reads."""
        peer = self.peer
        if self._has_said_all or not peer.is_reading():
            return
        data = b"".join(self._written)
        self._written.clear()
        if data and not peer.is_closing():
            peer.get_protocol().data_received(data)
        if self._is_paused and not self.is_lost:
            self._is_paused = False
            self._protocol.resume_writing()
        if self._is_closing:
            self._has_said_all = True
            peer.hear_end()
            self._lose(None)

    # Reading

    def is_reading(self) -> bool:
        return self._is_reading

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._loop.call_soon(self.peer.deliver)

    def hear_end(self) -> None:
        """The other end says nothing more."""
        if not self._is_closing and not self._protocol.eof_received():
            self.close()

    # The end

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self.deliver)

    def abort(self) -> None:
        """What has been written still arrives, as it would where the kernel has taken it."""
        self.close()
        self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        self._is_closing = True
        if not self.is_lost:
            self.is_lost = True
            self._loop.call_soon(self._protocol.connection_lost, error)


class MemoryServer(asyncio.AbstractServer):
    """What listens on a port of the loop's."""

    def __init__(self, loop: "MemoryLoop", factory: Protocols, port: int) -> None:
        self.factory = factory
        self.port = port
        self.sockets = (MemorySocket(port),)
        self._loop = loop

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def is_serving(self) -> bool:
        return self._loop.servers.get(self.port) is self

    def close(self) -> None:
        if self.is_serving():
            del self._loop.servers[self.port]

    async def start_serving(self) -> None:
        """It serves from the beginning."""

    async def serve_forever(self) -> None:
        raise NotImplementedError("servers in memory serve until they are closed")

    async def wait_closed(self) -> None:
        """Those that have connected go on."""


class MemoryLoop(asyncio.SelectorEventLoop):
    """The loop. Its ports are those of this loop alone; a path of Unix sockets is a port's number."""

    def __init__(self) -> None:
        self._virtual_time = VirtualTime()
        super().__init__(self._virtual_time)
        self.servers: dict[int, MemoryServer] = {}
        self.agents: dict[str, object] = {}  # by address
        self._ports = itertools.count(1)

    def time(self) -> float:
        return self._virtual_time.now_s

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Protocols, host: str | None = None, port: int = 0, **options: Any
    ) -> MemoryServer:
        """Listens on `port` (0: one of its own)."""
        port = port or next(self._ports)
        if port in self.servers:
            raise OSError(f"port {port} is in use")
        self.servers[port] = MemoryServer(self, protocol_factory, port)
        return self.servers[port]

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Protocols, host: str | None = None, port: int = 0, **options: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """Connects to what listens on `port`. Raises ConnectionRefusedError."""
        await asyncio.sleep(0)
        server = self.servers.get(port)
        if server is None:
            raise ConnectionRefusedError(f"nothing listens on port {port}")
        own = next(self._ports)
        ours, theirs = (cast(asyncio.Protocol, factory()) for factory in (protocol_factory, server.factory))
        here, there = MemoryTransport(self, ours, own, port), MemoryTransport(self, theirs, port, own)
        here.peer, there.peer = there, here
        theirs.connection_made(there)
        ours.connection_made(here)
        return here, ours

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Protocols, path: str, **options: Any
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        """The same for clients that make no connection but by socket or path."""
        return await self.create_connection(protocol_factory, HOST, int(path))

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], Result], *args: *Arguments
    ) -> asyncio.Future[Result]:
        self._virtual_time.num_working += 1
        done = super().run_in_executor(executor, func, *args)
        done.add_done_callback(self._rested)
        return done

    @contextmanager
    def working(self) -> Iterator[None]:
        """While a thread works for the block, time passes as it does outside."""
        self._virtual_time.num_working += 1
        try:
            yield
        finally:
            self._virtual_time.num_working -= 1

    def _rested(self, done: asyncio.Future[Any]) -> None:
        self._virtual_time.num_working -= 1


def memory_loop() -> MemoryLoop:
    """The loop that runs, which is such a one."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MemoryLoop), "tests in memory run by `in_memory`"
    return loop

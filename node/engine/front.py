"""The engine's door to the network: mutual TLS outside, plain HTTP on loopback inside.

    gateway ══ TLS 1.3 ══ EngineFront ── loopback ── engine

A node with certificates opens no port of its engine to the network. The front takes the connections of gateways instead, checks
who calls, and carries bytes both ways. It reads no HTTP: one connection outside is one connection inside, from its first byte
to its last. While there is no engine, the front resets callers before their handshake, as a port does where nothing listens.
"""

import asyncio
import logging
import socket
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Protocol, cast
from urllib.parse import urlsplit

from node.process.ports import ListenPort
from transport.control.calls import keep_alive
from transport.path.tcp import family_of, format_address
from transport.peers.guard import Guard
from transport.peers.name import of_tls
from transport.peers.rights import ASK_ENGINE
from transport.receive.few_lines import FewLines
from transport.wire.identity import Identity

log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 20.0  # as for control and calls
CONNECT_S: Final = 5.0  # to an engine on the same machine, whose loop may be busy
MAX_CONNECTIONS: Final = 16_384
MAX_OF_ADDRESS: Final = 4_096
HANDSHAKES: Final = 1_024  # at once; each takes some 100 KiB until it ends
HANDSHAKES_OF_ADDRESS: Final = 64
BACKLOG: Final = 128
ACCEPT_PAUSE_S: Final = 0.5  # while the process can open no more
MAX_UNSENT_BYTES: Final = 256 * 1024  # of one way of a connection; the other end then waits

PeerCertificate = Mapping[str, Any]  # as ssl.SSLSocket.getpeercert() gives it
Complaint = Callable[[PeerCertificate], str]


def no_complaint(certificate: PeerCertificate) -> str:
    """Admits every caller with a certificate of the authority."""
    return ""


class HandshakeTurns:
    """Bounds the handshakes under way, of one address and in all. Others wait for their turn."""

    def __init__(self, in_all: int = HANDSHAKES, of_address: int = HANDSHAKES_OF_ADDRESS) -> None:
        self._all = asyncio.Semaphore(in_all)
        self._of_address = of_address
        self._by_address: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}

    @asynccontextmanager
    async def turn(self, address: str) -> AsyncIterator[None]:
        """Holds a turn of `address` while the block runs."""
        mine, users = self._by_address.setdefault(address, (asyncio.Semaphore(self._of_address), []))
        users.append(None)
        try:
            async with mine, self._all:
                yield
        finally:
            users.pop()
            if not users:
                del self._by_address[address]


class EngineDoor(Protocol):
    """Where the engine is reached: at `url` by gateways, at `engine_url` from its own machine; "" before the first engine."""

    url: str
    engine_url: str
    ended: Counter[str]

    async def start(self, port: ListenPort) -> None: ...

    def open(self, engine_url: str) -> None: ...

    def shut(self) -> None: ...

    async def close(self) -> None: ...


class OpenDoor:
    """Without certificates the engine itself faces the network."""

    def __init__(self) -> None:
        self.url = self.engine_url = ""
        self.ended: Counter[str] = Counter()

    async def start(self, port: ListenPort) -> None:
        """The engine will listen."""

    def open(self, engine_url: str) -> None:
        self.url = self.engine_url = engine_url

    def shut(self) -> None:
        """Nothing listens where the engine was."""

    async def close(self) -> None:
        """The engine's port went with it."""


class EngineFront:
    """Listens for gateways, and carries what they say to the engine."""

    def __init__(
        self,
        identity: Identity,
        complaint: Complaint = no_complaint,
        *,
        handshake_s: float = HANDSHAKE_S,
        turns: HandshakeTurns | None = None,
        of_address: int = MAX_OF_ADDRESS,
    ) -> None:
        """`complaint` says why the holder of a certificate may not ask the engine, or "" if it may."""
        self.ended: Counter[str] = Counter()  # connections that the front ended, by reason
        self.url = self.engine_url = ""
        self._engine: tuple[str, int] | None = None  # that takes connections
        self._outsides: set[_Outside] = set()
        self._identity = identity
        self._complaint = complaint
        self._handshake_s = handshake_s
        self._turns = turns or HandshakeTurns()
        self._of_address = of_address
        self._addresses: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._listener: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()  # of a front that has ended
        self._lines = FewLines(log)

    def __len__(self) -> int:
        return len(self._outsides)

    async def start(self, port: ListenPort) -> None:
        """Listens; `url` says where. Raises NodeConfigError."""
        try:
            listener = socket.create_server((port.host, port.number), family=family_of(port.host), backlog=BACKLOG)
        except OSError as exc:
            raise port.refused(exc) from exc
        listener.setblocking(False)
        self.url = f"https://{format_address(port.host, listener.getsockname()[1])}"
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._listen()

    def open(self, engine_url: str) -> None:
        """Carries callers to the engine at `engine_url` from now on."""
        parts = urlsplit(engine_url)
        self.engine_url = engine_url
        self._engine = (parts.hostname or "", parts.port or 80)

    def shut(self) -> None:
        """Turns callers away: there is no engine. Connections to the one that was there end with it."""
        self._engine = None

    def check_again(self) -> None:
        """Ends the connections of callers that may not ask any more."""
        for outside in [each for each in self._outsides if each.is_open]:
            if complaint := self._complaint(outside.certificate()):
                self._end(outside, "no_right", complaint)

    async def close(self) -> None:
        """Listens no more, and ends all connections."""
        if self._listener is None:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for outside in list(self._outsides):
            outside.abort()
        await asyncio.sleep(0)  # tasks' callbacks
        if self._outsides:
            await self._emptied.wait()

    def forget(self, outside: "_Outside") -> None:
        """For a caller that has gone."""
        if outside not in self._outsides:
            return
        self._outsides.discard(outside)
        self._addresses[outside.address] -= 1
        if not self._addresses[outside.address]:
            del self._addresses[outside.address]
        if self._listener is None and not self._outsides:
            self._emptied.set()

    def _listen(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(BACKLOG):
            try:
                caller, peer = listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as exc:  # no descriptor, no memory: others may give theirs back
                log.error("callers of the engine wait for %g s: %s", ACCEPT_PAUSE_S, exc)
                self._loop.remove_reader(listener)
                self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._listen)
                return
            if reason := self._reason_against(peer[0]):
                self.ended[reason] += 1  # without a line in the log: there may be many
                _reset(caller)
                continue
            outside = _Outside(self, peer[0])
            self._outsides.add(outside)
            self._addresses[outside.address] += 1
            task = self._loop.create_task(self._welcome(outside, caller), name="engine front")
            self._tasks.add(task)
            task.add_done_callback(partial(self._welcomed, outside, caller))

    def _reason_against(self, address: str) -> str:
        if self._engine is None:
            return "no_engine"
        is_crowded = len(self) >= MAX_CONNECTIONS or self._addresses[address] >= self._of_address
        return "crowded" if is_crowded else ""

    async def _welcome(self, outside: "_Outside", caller: socket.socket) -> None:
        """Shakes hands, checks the caller's rights, and connects it with the engine."""
        try:
            caller.setblocking(False)
            keep_alive(caller)
            async with asyncio.timeout(self._handshake_s), self._turns.turn(outside.address):
                await self._loop.connect_accepted_socket(lambda: outside, caller, ssl=self._identity.server_context())
        except (OSError, TimeoutError) as exc:  # ssl.SSLError, too
            self._end(outside, "handshake", _detail(exc))
        if not outside.is_open:
            return
        if complaint := self._complaint(outside.certificate()):
            self._end(outside, "no_right", complaint)
            return
        await self._connect(outside)

    def _welcomed(self, outside: "_Outside", caller: socket.socket, task: "asyncio.Task[None]") -> None:
        """Whatever became of the handshake, also if it was cancelled before its first step."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # an error of ours keeps no place
            self._end(outside, "internal", repr(error))
        if not outside.is_open:
            caller.close()
            self.forget(outside)

    async def _connect(self, outside: "_Outside") -> None:
        if self._engine is None:
            outside.abort()
            return
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._loop.create_connection(lambda: _Inside(outside), *self._engine)
        except (OSError, TimeoutError) as exc:
            self._end(outside, "no_engine", _detail(exc))

    def _end(self, outside: "_Outside", reason: str, detail: str) -> None:
        self.ended[reason] += 1
        told = "a connection of %s to the engine ended (%s): %s"
        self._lines.warning(self._loop.time(), told, outside.address, reason, detail)
        outside.abort()


def door_of(identity: Identity | None, guard: Guard | None) -> EngineDoor:
    """The front of a node with certificates, where `guard` knows which callers may ask; without, the engine's own port."""
    if identity is None or guard is None:
        return OpenDoor()
    rights = guard
    front = EngineFront(identity, lambda shown: rights.refusal(ASK_ENGINE, of_tls(shown), "engine_port"))
    rights.followers.append(front.check_again)
    return front


def _reset(caller: socket.socket) -> None:
    """Ends a connection as a port does where nothing listens."""
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()


def _detail(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLError) and exc.reason:
        return str(exc.reason).lower().replace("_", " ")
    return str(exc) or type(exc).__name__


class _Side(asyncio.Protocol):
    """One of the two connections: the other one writes what this one reads."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def hold(self) -> None:
        if self.transport is not None:
            self.transport.pause_reading()

    def go_on(self) -> None:
        if self.transport is not None:
            self.transport.resume_reading()

    def finish(self, *, is_broken: bool) -> None:
        """The other side has ended: what it said is still sent, unless it broke off."""
        self.other = None
        if self.transport is not None and is_broken:
            self.transport.abort()
        elif self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.hold()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.go_on()

    def eof_received(self) -> bool:
        return False  # the transport closes: neither half of a connection outlives the other

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        other, self.other = self.other, None
        if other is not None:
            other.finish(is_broken=exc is not None)


class _Outside(_Side):
    """A caller's connection, from its handshake on."""

    def __init__(self, front: EngineFront, address: str) -> None:
        super().__init__()
        self.address = address
        self._front = front
        self._early: list[
            bytes
        ] = []  # came with the handshake's last bytes, before the engine had taken the connection

    @property
    def is_open(self) -> bool:
        return self.transport is not None

    def certificate(self) -> PeerCertificate:
        """What the caller has shown."""
        return (self.transport and self.transport.get_extra_info("peercert")) or {}

    def joined(self, inside: "_Inside") -> None:
        """The engine has taken the connection."""
        self.other = inside
        early, self._early = self._early, []
        for data in early:
            inside.write(data)
        self.go_on()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transports are not so by class
        self.transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self.hold()  # until the engine has taken the connection

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        else:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.forget(self)
        self._early.clear()
        super().connection_lost(exc)


class _Inside(_Side):
    """The engine's end."""

    def __init__(self, outside: _Outside) -> None:
        super().__init__()
        self._outside = outside

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if self._outside.transport is None:  # the caller has hung up meanwhile
            self.transport.abort()
            return
        self.other = self._outside
        self._outside.joined(self)

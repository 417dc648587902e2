"""Kept connections to engines: how many, for how long, and to which engines."""

import asyncio
import ssl
from collections import deque
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from gateway.api.bodies import Body
from gateway.errors import LegFailed
from gateway.upstream.http1 import JSON, EngineAnswer, UpstreamConnection
from transport.path.tcp import is_loopback
from transport.peers.guard import Guard
from transport.peers.name import PeerCertificate, of_tls, said_by
from transport.peers.rights import SERVE
from transport.wire.identity import Identity

AGENT: Final = "prfaas"
RENEW_S: Final = 1800.0  # a secure connection that is older is used no more: certificates may have been replaced since


def is_in_clear(url: str) -> bool:
    """Whether what is said to an engine there can be read on its way."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


class UpstreamEngine:
    """Where an engine listens, and the idle connections to it: since when, the latest last."""

    def __init__(self, url: str, identity: Identity | None = None, name: str = "", place: str = "") -> None:
        """With an `identity`, https is mutual TLS, and the engine's certificate must carry `name`, or else the URL's host.

        `place` is the node whose engine it is, as its certificate has it; empty: any node.

        Raises LegFailed for what is no URL of HTTP, and with an `identity` for an engine of another machine in clear.
        """
        try:
            parts = urlsplit(url)
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise LegFailed("unreachable", f"{url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable():
            raise LegFailed("unreachable", f"{url!r} is no URL of HTTP")
        if identity is not None and is_in_clear(url):
            raise LegFailed("unreachable", f"{url!r} is in clear, and this gateway has certificates")
        self.url = url
        self.key = url, name, place
        self.place = place
        self.host = parts.hostname
        self.is_secure = parts.scheme == "https"
        self.name = name if self.is_secure and name else parts.hostname
        self._identity = replace(identity, peer_name=self.name) if self.is_secure and identity is not None else None
        self.idle: dict[UpstreamConnection, float] = {}
        self.num_open = 0
        self._path = parts.path.rstrip("/")
        authority = parts.netloc.rpartition("@")[2]
        self._headers = f"Host: {authority}\r\nAccept: */*\r\nUser-Agent: {AGENT}\r\nContent-Type: {JSON}\r\n"

    def context(self) -> ssl.SSLContext | None:
        """What the next handshake shows and accepts, as the files are now; None: none is made. Raises OSError."""
        if self._identity is not None:
            return self._identity.client_context()
        return ssl.create_default_context() if self.is_secure else None

    def head(self, path: str, headers: str, length: int) -> bytes:
        """The head of a POST; `headers` are lines that end in CRLF."""
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {length}\r\n{headers}\r\n"
        return head.encode("utf-8", "surrogateescape")


class EnginePool:
    """Connections to engines, `limit` of them at most, used and idle ones together; those idle for `keep_alive_s` are closed."""

    renew_s: float = RENEW_S

    def __init__(
        self,
        limit: int,
        connect_s: float,
        keep_alive_s: float,
        identity: Identity | None = None,
        guard: Guard | None = None,
    ) -> None:
        """`guard` knows which certificates engines behind mutual TLS may have; None: all that the authority has signed."""
        self.limit = limit
        self._guard = guard
        self._tickets: dict[UpstreamConnection, object] = {}  # of connections that end when the engine is revoked
        self._secured: dict[UpstreamConnection, float] = {}  # since when
        self._identity = identity
        self._connect_s = connect_s
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._engines: dict[tuple[str, str, str], UpstreamEngine] = {}  # by URL, certified name and place
        self._connections: dict[UpstreamConnection, UpstreamEngine] = {}  # also those that are being made
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    async def post(
        self,
        url: str,
        path: str,
        headers: str,
        body: Body | bytes,
        within_s: float,
        *,
        name: str = "",
        place: str = "",
    ) -> EngineAnswer:
        """The answer to `body` of the engine at `url`, to be closed, once it has begun. Raises LegFailed.

        `headers` are lines that end in CRLF. `name` is what the engine's certificate must carry over TLS, and `place` the node
        that it must belong to. `within_s` bounds all of the exchange, or what it takes until its answer's `bound_silence` is
        called.
        """
        now = self._loop.time()
        engine = self._engines.get((url, name, place)) or UpstreamEngine(url, self._identity, name, place)
        connection = self._idle_one(engine, now) or await self._connected(engine, min(self._connect_s, within_s))
        return await connection.ask(engine.head(path, headers, len(body)), body, now + within_s)

    def resize(self, limit: int) -> None:
        """As many connections from now on; more than that, which are in use, go on."""
        self.limit = limit
        for _ in range(len(self._waiting)):  # there may be room for all of them
            self._tell_one()

    def close(self) -> None:
        """Closes everything, whatever is under way."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._connections):
            connection.abort()

    def give_up(self, url: str, quiet_s: float) -> None:
        """Closes connections to the engine at `url` on which an answer is due, and nothing has come for `quiet_s`."""
        for connection, engine in list(self._connections.items()):
            if engine.url == url:
                connection.give_up(quiet_s)

    def unused(self, connection: UpstreamConnection) -> None:
        """A connection may be used again."""
        now = self._loop.time()
        if now - self._secured.get(connection, now) > self.renew_s:
            connection.abort()
            return
        self._connections[connection].idle[connection] = now
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(self._keep_alive_s, self._sweep)
        self._tell_one()

    def closed(self, connection: UpstreamConnection) -> None:
        """A connection is no more."""
        engine = self._connections.pop(connection, None)
        if engine is None:
            return
        self._secured.pop(connection, None)
        if self._guard is not None:
            self._guard.leave(self._tickets.pop(connection, None))
        engine.idle.pop(connection, None)
        engine.num_open -= 1
        if not engine.num_open and self._engines.get(engine.key) is engine:
            del self._engines[engine.key]
        self._tell_one()

    def _idle_one(self, engine: UpstreamEngine, now: float) -> UpstreamConnection | None:
        while engine.idle:
            connection, since = engine.idle.popitem()
            if now - since < self._keep_alive_s:
                return connection
            connection.abort()
        return None

    async def _connected(self, engine: UpstreamEngine, within_s: float) -> UpstreamConnection:
        try:
            async with asyncio.timeout(within_s):
                return await self._room(engine) or await self._connect(engine)
        except TimeoutError as error:
            raise LegFailed("timeout", f"no connection within {within_s} s") from error
        except OSError as error:
            raise LegFailed("unreachable", str(error)) from error

    async def _connect(self, engine: UpstreamEngine) -> UpstreamConnection:
        connection = UpstreamConnection(self)
        engine = self._engines.setdefault(engine.key, engine)  # others may have waited for room, too
        self._connections[connection] = engine
        engine.num_open += 1
        try:
            transport, _ = await self._loop.create_connection(
                lambda: connection,
                engine.host,
                engine.port,
                ssl=engine.context(),
                server_hostname=engine.name if engine.is_secure else None,
            )
            if engine.is_secure and connection in self._connections:
                self._secured[connection] = self._loop.time()
            if self._guard is not None and engine.is_secure:
                self._admit(engine, connection, of_tls(said_by(transport.get_extra_info("ssl_object"))), self._guard)
        except BaseException:
            connection.abort()
            self.closed(connection)
            raise
        return connection

    def _admit(
        self, engine: UpstreamEngine, connection: UpstreamConnection, shown: PeerCertificate, guard: Guard
    ) -> None:
        """Before it is told anything: the host's name in a certificate gives no right. Raises LegFailed."""
        if why := guard.refusal(SERVE, shown, engine.url, engine.place):
            raise LegFailed("unreachable", why)
        if connection in self._connections:  # else it is closed again
            self._tickets[connection] = guard.enter(shown, lambda _: connection.abort())

    async def _room(self, engine: UpstreamEngine) -> UpstreamConnection | None:
        """Waits until one more may be opened, or one of this engine's is idle."""
        while len(self) >= self.limit:
            if self._close_longest_idle():
                break
            told = self._loop.create_future()
            self._waiting.append(told)
            try:
                await told
            except asyncio.CancelledError:
                if told.done() and not told.cancelled():
                    self._tell_one()  # it was for a waiting request
                raise
            known = self._engines.get(engine.key, engine)
            if (connection := self._idle_one(known, self._loop.time())) is not None:
                return connection
        return None

    def _tell_one(self) -> None:
        while self._waiting:
            told = self._waiting.popleft()
            if not told.done():
                told.set_result(None)
                return

    def _longest_idle(self) -> tuple[UpstreamConnection, float] | None:
        fronts = [next(iter(engine.idle.items())) for engine in self._engines.values() if engine.idle]
        return min(fronts, key=lambda front: front[1], default=None)

    def _close_longest_idle(self) -> bool:
        front = self._longest_idle()
        if front is not None:
            front[0].abort()
        return front is not None

    def _sweep(self) -> None:
        self._sweeping = None
        now = self._loop.time()
        while (front := self._longest_idle()) is not None:
            connection, since = front
            if now < since + self._keep_alive_s:
                self._sweeping = self._loop.call_at(since + self._keep_alive_s, self._sweep)
                return
            connection.abort()

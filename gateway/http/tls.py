"""HTTPS: the certificate, read again when its files change, and connections that become secure before a request is read.

    connected ── TLS handshake, within `header_s` ──► as any other connection (`gateway.http.connections`)

A connection counts from the first moment on: strangers that begin no handshake have places as any others, and lose them so.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

from aiohttp import web

from gateway.config.gateway import GatewayConfig
from gateway.errors import GatewayConfigError
from gateway.http.connections import ClientConnection, Gate
from transport.path.handshakes import IN_ALL, HandshakePlaces, KnownSites
from transport.path.site import site_of

log = logging.getLogger("prfaas.gateway.tls")

# TLS 1.3 has its own; of TLS 1.2 those with forward secrecy and authenticated encryption (RFC 9325).
CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
LOOK_S: Final = 1.0  # between two looks at the files
MAX_KNOWN: Final = 4_096
FOR_KNOWN: Final = IN_ALL // 2  # places; one handshake makes anybody known


@runtime_checkable
class _Buffered(Protocol):
    """The protocol of TLS, in both loops."""

    def get_buffer(self, sizehint: int) -> "bytearray | memoryview": ...
    def buffer_updated(self, nbytes: int) -> None: ...


Stamp = tuple[tuple[int, int, int], ...]


class ServerCertificate:
    """What a listener shows. New connections get the files as they are; those there keep what they have."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises GatewayConfigError for files that are no certificate with its key."""
        self._files = (certificate, key)
        self._seen: Stamp | None = None
        try:
            self._seen = self._stamp()
            self.context = self._good = self._loaded()
        except (OSError, ssl.SSLError) as error:
            raise GatewayConfigError(f"tls_certificate = {str(certificate)!r}, tls_key: {_why(error)}") from error
        # A context that is in use cannot take another pair: for a moment it would have half of it, and handshakes would fail.
        self.context.sni_callback = self._present

    def refresh(self) -> None:
        """Takes up files that have changed; wrong ones change nothing, which the log says once."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._seen = stamp
            self._good = self._loaded()
        except (OSError, ssl.SSLError) as error:
            log.error("the certificate stays as it was: %s", _why(error))
        else:
            log.info("certificate %s is taken up", self._files[0])

    def _loaded(self) -> ssl.SSLContext:
        context = new_context()
        context.load_cert_chain(*self._files)
        return context

    def _present(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._good

    def _stamp(self) -> Stamp:
        found = [os.stat(file) for file in self._files]
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)


def server_certificate(config: GatewayConfig) -> ServerCertificate | None:
    """What the listeners of a gateway show; None: they speak HTTP. Raises GatewayConfigError."""
    if config.tls_certificate is None or config.tls_key is None:
        return None
    return ServerCertificate(config.tls_certificate, config.tls_key)


async def keep_current(certificate: ServerCertificate) -> None:
    """Looks at its files for ever."""
    while True:
        await asyncio.sleep(LOOK_S)
        await asyncio.to_thread(certificate.refresh)


def new_context() -> ssl.SSLContext:
    """TLS 1.3, and 1.2 for clients that have nothing newer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    return context


def _feed(raw: asyncio.Transport, data: bytes) -> None:
    """Has TLS read what came before it listened: uvloop reads at once, before any task of ours can run."""
    protocol = raw.get_protocol()
    while data and isinstance(protocol, _Buffered):  # a connection that is gone meanwhile has no protocol
        buffer = protocol.get_buffer(len(data))
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        protocol.buffer_updated(size)
        data = data[size:]


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"no certificate with its key, in PEM ({error.reason or error})"
    return str(error)


class Handshaking:
    """Connections whose TLS handshake is under way. Each takes some 60 KiB, so their number is bounded."""

    def __init__(self, gate: Gate, now: Callable[[], float]) -> None:
        """`now` is the event loop's clock."""
        self._gate = gate
        self._now = now
        self._connections: set[SecureConnection] = set()
        self._places: HandshakePlaces[SecureConnection] = HandshakePlaces()
        self._known = KnownSites(MAX_KNOWN)  # from which a connection became secure
        self._as_known: set[SecureConnection] = set()  # those that have places for that

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> "Iterator[SecureConnection]":
        return iter(list(self._connections))

    def begun(self, connection: "SecureConnection") -> None:
        """Another one may have to end for it, or it for others."""
        site, now = site_of(connection.address), self._now()
        self._connections.add(connection)
        is_trusted = self._gate.trusts(connection.address)
        if not is_trusted and len(self._as_known) < FOR_KNOWN and self._known.is_known(site, now):
            self._as_known.add(connection)
        is_known = is_trusted or connection in self._as_known
        lost = self._places.enter(connection, site, now, is_known=is_known)
        if lost is not None:
            self._gate.turn_away(lost, "handshakes")

    def over(self, connection: "SecureConnection", *, is_secure: bool) -> None:
        """It has come to its end, well or not."""
        self._connections.discard(connection)
        self._as_known.discard(connection)
        self._places.leave(connection)
        if is_secure:
            self._known.remember(site_of(connection.address), self._now())


class SecureConnection(ClientConnection):
    """A connection of a client that speaks TLS."""

    def __init__(
        self,
        gate: Gate,
        server: web.Server,
        context: ssl.SSLContext,
        handshake_s: float,
        handshaking: "Handshaking",
        **options: Any,
    ) -> None:
        """It is one of `handshaking` until it is secure, or gone."""
        super().__init__(gate, server, **options)
        self._handshaking = handshaking
        self._context = context
        self._handshake_s = handshake_s
        self._handshake: asyncio.Task[None] | None = None
        self._raw: asyncio.Transport | None = None
        self._early: list[bytes] | None = []  # what came before we knew that the handshake had ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        self._handshake = self._loop.create_task(self._secure(self._raw), name="TLS handshake")
        self.joined(self._raw)
        if self._raw is not None:  # it may have been one too many already
            self._handshaking.begun(self)

    async def _secure(self, raw: asyncio.Transport) -> None:
        starting = self._loop.create_task(
            self._loop.start_tls(raw, self, self._context, server_side=True, ssl_handshake_timeout=self._handshake_s)
        )
        try:
            await asyncio.sleep(0)  # from now on `raw` belongs to TLS
            hello, self._early = self._early or [], []
            await asyncio.sleep(0)  # which has begun to listen, and has read nothing yet
            _feed(raw, b"".join(hello))
            secured = await starting
        except (OSError, TimeoutError) as error:  # SSLError, too
            self._gave_up(type(error).__name__ if not isinstance(error, ssl.SSLError) else error.reason or "SSLError")
            return
        finally:
            if not starting.cancel() and not starting.cancelled():
                starting.exception()  # is known, or of a connection that is gone
        if secured is None or secured.is_closing():
            self._gave_up("")
            return
        self._raw = None
        self._handshaking.over(self, is_secure=True)
        self.begun(secured)
        early, self._early = self._early or [], None
        for data in early:
            super().data_received(data)

    def _gave_up(self, why: str) -> None:
        raw, self._raw = self._raw, None
        if raw is None:
            return
        self._handshaking.over(self, is_secure=False)
        raw.abort()
        self.parted()
        if why:
            self.gate.noted("tls", self.address, why)

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early.append(data)
        else:
            super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._early is None:
            super().connection_lost(exc)
        elif self._raw is not None and self._raw.get_protocol() is self:
            self._break_off()  # TLS had no part in it yet, and would never hear of this: uvloop waits for ever

    def end(self) -> None:
        """Closes now, whether it is secure yet or not."""
        if self._handshake is not None and not self._handshake.done():
            self._break_off()
        else:
            super().end()

    def _break_off(self) -> None:
        """Ends the handshake, if there is one still."""
        if self._handshake is not None:
            self._handshake.cancel()
        self._gave_up("")

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has ended its half of TLS has ended the connection."""
        return False

"""Who is there, and what only they can read: mutual TLS for the control connection, AES-128-GCM for everything else.

    sender                                   receiver
      | TLS 1.3, both certificates ----------->  |   the same port: a TLS record begins with 0x16, a Hello with 0x01
      |  <------------ session id, secret, life  |
      | Hello(session id, nonce) ------------->  |   any number of data connections, until the session ends
      |  <--------------------- Welcome(nonce)   |

    connection key = HMAC(session secret, direction, nonces)                     seals all frames but Chunk
    chunk key      = HMAC(session secret, transfer secret, transfer id, nonces)  seals the payloads, header as
    associated data

The nonce of a frame is its number in its direction: under one key no number comes twice, a resent chunk takes a new
one, and a frame that was replayed, reordered or dropped does not open. ssl sockets for the data would cost a CPU second
per GB more.
"""

import hmac
import logging
import os
import socket
import ssl
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from transport.errors import ConnectionRefused, RemoteProtocolError
from transport.frames import Code
from transport.tcp import hang_up

log = logging.getLogger(__name__)

TAG_BYTES: Final = 16
KEY_BYTES: Final = 16
# Sealed and sent, or received and opened, in one go: small enough for the processor's cache and the socket's buffer.
SEALED_PART_BYTES: Final = 512 << 10
# A call for each smaller view would cost more than copying such views together.
SMALL_VIEW_BYTES: Final = 32 << 10
SESSION_ID_BYTES: Final = 16
SESSION_SECRET_BYTES: Final = 32
TLS_RECORD: Final = 0x16
MAX_SESSIONS: Final = 4096
_TLS_ACCESS_DENIED: Final = bytes.fromhex("15 0303 0002 0231")  # a fatal alert, RFC 8446 §6.2
_GRANT: Final = struct.Struct(f"<{SESSION_ID_BYTES}s{SESSION_SECRET_BYTES}sd")


Version: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """PEM files: our certificate and key, and the authority that signs those of our peers.

    They are read again when they change; while a new certificate is there and its key is not yet, the old pair serves.
    """

    certificate: Path
    key: Path
    authority: Path
    peer_name: str = ""  # the name that a server's certificate must carry; empty: any that the authority signed
    _good: dict[int, tuple[Version, ssl.SSLContext]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def version(self) -> Version:
        """Changes whenever one of the files does. Raises OSError."""
        stats = [os.stat(path) for path in (self.certificate, self.key, self.authority)]
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stats)

    def check(self) -> None:
        """Raises OSError that says which of the files is wrong."""
        self._load(ssl.PROTOCOL_TLS_SERVER)

    def server_context(self) -> ssl.SSLContext:
        return self._present(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        return self._present(ssl.PROTOCOL_TLS_CLIENT)

    def _present(self, protocol: int) -> ssl.SSLContext:
        known = self._good.get(protocol)
        try:
            version = self.version()
            if known is None or known[0] != version:
                known = self._good[protocol] = (version, self._load(protocol))
        except OSError as exc:
            if known is None:
                raise
            log.warning("the certificate read before serves on: %s", exc)
        return known[1]

    def _load(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = protocol == ssl.PROTOCOL_TLS_CLIENT and bool(self.peer_name)
        context.verify_mode = ssl.CERT_REQUIRED
        with _named(f"certificate {self.certificate} with key {self.key}"):
            context.load_cert_chain(self.certificate, self.key)
        with _named(f"authority {self.authority}"):
            context.load_verify_locations(self.authority)
        return context


@contextmanager
def _named(what: str) -> Iterator[None]:
    """ssl does not say which file it could not read."""
    try:
        yield
    except OSError as exc:
        reason = exc.reason if isinstance(exc, ssl.SSLError) and exc.reason else exc.strerror or exc
        raise OSError(f"{what}: {str(reason).lower().replace('_', ' ')}") from exc


@dataclass(frozen=True, slots=True)
class Session:
    """What a control connection agreed on."""

    id: bytes
    secret: bytes
    ends_at: float


class Sessions:
    """The sessions that a listener has granted; the oldest go first."""

    def __init__(self, life_s: float) -> None:
        self._life_s = life_s
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def grant(self, now: float) -> Session:
        session = Session(os.urandom(SESSION_ID_BYTES), os.urandom(SESSION_SECRET_BYTES), now + self._life_s)
        self._sessions[session.id] = session
        while len(self._sessions) > MAX_SESSIONS or next(iter(self._sessions.values())).ends_at <= now:
            self._sessions.popitem(last=False)
        return session

    def secret_of(self, session_id: bytes, now: float) -> bytes | None:
        session = self._sessions.get(session_id)
        return session.secret if session is not None and now < session.ends_at else None


def request_session(sock: socket.socket, identity: Identity, timeout_s: float, now: float) -> Session:
    """Over a fresh connection, which is used up. Raises ConnectionRefused when either end does not accept the other's
    certificate, OSError for whatever else goes wrong: that may pass.
    """
    try:
        context = identity.client_context()
        sock.settimeout(timeout_s)
        grant = b""
        with context.wrap_socket(sock, server_hostname=identity.peer_name or None) as tls:
            while len(grant) < _GRANT.size and (part := tls.recv(_GRANT.size - len(grant))):
                grant += part
    except ssl.SSLError as exc:
        if _is_verdict(exc):
            raise ConnectionRefused(Code.IDENTITY, str(exc)) from exc
        raise
    finally:
        sock.close()
    if len(grant) < _GRANT.size:
        raise ConnectionError("the receiver granted no session")
    session_id, secret, life_s = _GRANT.unpack(grant)
    return Session(session_id, secret, now + life_s)


def _is_verdict(exc: ssl.SSLError) -> bool:
    """One of the ends has judged the other, and would do so again; anything else may be a connection that broke."""
    return isinstance(exc, ssl.SSLCertVerificationError) or "_ALERT_" in (exc.reason or "")


def grant_session(
    sock: socket.socket, identity: Identity, grant: Callable[[], Session], timeout_s: float, now: float
) -> None:
    """The other end of request_session(); `grant` is called for a peer whose certificate was accepted.

    Raises OSError (ssl.SSLError when the certificate is not accepted).
    """
    context = identity.server_context()
    with _wrap(context, sock, timeout_s) as tls:
        try:
            tls.do_handshake()
        except ssl.SSLError:
            hang_up(tls)
            raise
        session = grant()
        tls.sendall(_GRANT.pack(session.id, session.secret, session.ends_at - now))
        tls.recv(1)  # until the sender hangs up: closing first might lose what it has not read


def _wrap(context: ssl.SSLContext, sock: socket.socket, timeout_s: float) -> ssl.SSLSocket:
    try:
        sock.settimeout(timeout_s)
        return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    except ValueError as exc:  # what ssl makes of a socket that is no longer connected
        raise ConnectionError(str(exc)) from exc


def refuse_tls(sock: socket.socket) -> None:
    """Tells a peer that wants a session that there are none here."""
    with suppress(OSError):
        sock.sendall(_TLS_ACCESS_DENIED)
    hang_up(sock)


class Seal:
    """AES-128-GCM under one key; the caller never uses a number twice."""

    __slots__ = ("_aead", "_key")

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._key = AES(key)

    def seal(self, number: int, plain: bytes, header: bytes) -> bytes:
        return self._aead.encrypt(_nonce(number), plain, header)

    def open(self, number: int, sealed: bytes, header: bytes) -> bytes:
        try:
            return self._aead.decrypt(_nonce(number), sealed, header)
        except InvalidTag as exc:
            raise RemoteProtocolError(f"frame {number} is not authentic", Code.SEAL) from exc

    def sealing(self, number: int, header: bytes) -> "Sealing":
        return Sealing(self._key, number, header)

    def opening(self, number: int, header: bytes) -> "Opening":
        return Opening(self._key, number, header)


class Sealing:
    """One payload on its way out, part by part: what was sealed is sent while it is still in the processor's cache."""

    __slots__ = ("_stream",)

    def __init__(self, key: AES, number: int, header: bytes) -> None:
        self._stream = Cipher(key, GCM(_nonce(number))).encryptor()
        self._stream.authenticate_additional_data(header)

    def update(self, plain: memoryview, out: memoryview) -> None:
        """`out` is as long as `plain`."""
        self._stream.update_into(plain, out)

    def tag(self) -> bytes:
        """What follows the last part."""
        self._stream.finalize()
        return self._stream.tag


class Opening:
    """The reverse of Sealing. Until verify() has returned, nobody vouches for what update() gave."""

    __slots__ = ("_number", "_stream")

    def __init__(self, key: AES, number: int, header: bytes) -> None:
        self._number = number
        self._stream = Cipher(key, GCM(_nonce(number))).decryptor()
        self._stream.authenticate_additional_data(header)

    def update(self, sealed: memoryview, out: memoryview) -> None:
        """`out` is as long as `sealed`."""
        self._stream.update_into(sealed, out)

    def verify(self, tag: bytes) -> None:
        """Raises RemoteProtocolError."""
        try:
            self._stream.finalize_with_tag(tag)
        except InvalidTag as exc:
            raise RemoteProtocolError(f"chunk in frame {self._number} is not authentic", Code.SEAL) from exc


def connection_seal(session_secret: bytes, nonces: bytes, direction: str) -> Seal:
    return Seal(_derive(session_secret, b"connection", direction.encode(), nonces))


def chunk_seal(session_secret: bytes, nonces: bytes, transfer_id: str, transfer_secret: bytes) -> Seal:
    return Seal(_derive(session_secret, b"chunk", transfer_secret, transfer_id.encode(), nonces))


def _derive(secret: bytes, *parts: bytes) -> bytes:
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(secret, message, "sha256")[:KEY_BYTES]


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")

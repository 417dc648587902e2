"""Sessions: mutual TLS on a control connection grants a secret; data connections derive their keys from it (see seal).

sender                                   receiver
  | TLS 1.3, both certificates ----------->  |   the same port: a TLS record begins with 0x16, a Hello with 0x01
  |  <------------ session id, secret, life  |   a secret of zeros: no session, and why
  | Hello(session id, nonce) ------------->  |   any number of data connections, until the session ends
  |  <--------------------- Welcome(nonce)   |
"""

import os
import socket
import ssl
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from transport.errors import ConnectionRefused
from transport.peers.name import PeerCertificate, of_tls, said_by
from transport.wire.frames import Code
from transport.wire.identity import Identity

SESSION_ID_BYTES: Final = 16
SESSION_SECRET_BYTES: Final = 32
TLS_RECORD: Final = 0x16
SESSION_LIFE_S: Final = 3600.0  # no receiver's keys live longer, whatever it says
MAX_SESSIONS: Final = 4096
TLS_ACCESS_DENIED: Final = bytes.fromhex("15 0303 0002 0231")  # a fatal alert, RFC 8446 §6.2
NO_SECRET: Final = bytes(SESSION_SECRET_BYTES)
MAX_WHY_BYTES: Final = 1024
_GRANT: Final = struct.Struct(f"<{SESSION_ID_BYTES}s{SESSION_SECRET_BYTES}sd")


@dataclass(frozen=True, slots=True)
class Session:
    """The result of a control connection."""

    id: bytes
    secret: bytes
    ends_at: float
    peer: PeerCertificate | None = None  # of the other end


class Sessions:
    """The sessions that a listener has granted; the oldest go first."""

    def __init__(self, life_s: float) -> None:
        self._life_s = life_s
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def grant(self, now: float, peer: PeerCertificate | None = None) -> Session:
        session = Session(os.urandom(SESSION_ID_BYTES), os.urandom(SESSION_SECRET_BYTES), now + self._life_s, peer)
        self._sessions[session.id] = session
        while len(self._sessions) > MAX_SESSIONS or next(iter(self._sessions.values())).ends_at <= now:
            self._sessions.popitem(last=False)
        return session

    def secret_of(self, session_id: bytes, now: float) -> bytes | None:
        session = self._sessions.get(session_id)
        return session.secret if session is not None and now < session.ends_at else None

    def peer_of(self, session_id: bytes) -> PeerCertificate | None:
        """Whom it was granted to."""
        session = self._sessions.get(session_id)
        return session.peer if session is not None else None


def request_session(
    sock: socket.socket,
    identity: Identity,
    timeout_s: float,
    now: float,
    refusal: Callable[[PeerCertificate], str] = lambda peer: "",
) -> Session:
    """Over a fresh connection, which is used up. Raises ConnectionRefused when either end does not accept the other's
    certificate, OSError for whatever else goes wrong: that may pass. `refusal` says why we do not.
    """
    try:
        context = identity.client_context()
        sock.settimeout(timeout_s)
        grant = b""
        with context.wrap_socket(sock, server_hostname=identity.peer_name or None) as tls:
            peer = of_tls(said_by(tls))
            if why := refusal(peer):
                raise ConnectionRefused(Code.IDENTITY, why)
            while len(grant) < _GRANT.size and (part := tls.recv(_GRANT.size - len(grant))):
                grant += part
            if grant[SESSION_ID_BYTES:-8] == NO_SECRET:
                raise ConnectionRefused(Code.IDENTITY, _read_text(tls))
    except ssl.SSLError as exc:
        if _is_verdict(exc):
            raise ConnectionRefused(Code.IDENTITY, str(exc)) from exc
        raise
    finally:
        sock.close()
    if len(grant) < _GRANT.size:
        raise ConnectionError("the receiver granted no session")
    session_id, secret, life_s = _GRANT.unpack(grant)
    if not life_s > 0:  # nor is it no number
        raise ConnectionError(f"the receiver granted a session of {life_s} s")
    return Session(session_id, secret, now + min(life_s, SESSION_LIFE_S), peer)


def _read_text(tls: ssl.SSLSocket) -> str:
    said = b""
    while len(said) < MAX_WHY_BYTES and (part := tls.recv(MAX_WHY_BYTES - len(said))):
        said += part
    return said.decode(errors="replace")


def _is_verdict(exc: ssl.SSLError) -> bool:
    """One of the ends has judged the other, and would do so again; anything else may be a connection that broke."""
    return isinstance(exc, ssl.SSLCertVerificationError) or "_ALERT_" in (exc.reason or "")


def begin_tls(sock: socket.socket, identity: Identity) -> ssl.SSLSocket:
    """The receiver's end of a control connection, before its handshake. Raises OSError."""
    try:
        return identity.server_context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    except ValueError as exc:  # what ssl makes of a socket that is no longer connected
        raise ConnectionError(str(exc)) from exc


def grant_bytes(session: Session, now: float) -> bytes:
    """The message to a peer whose certificate was accepted."""
    return _GRANT.pack(session.id, session.secret, session.ends_at - now)


def refusal_bytes(why: str) -> bytes:
    """What a peer is told whose certificate was accepted and gives no right to send."""
    return _GRANT.pack(bytes(SESSION_ID_BYTES), NO_SECRET, 0.0) + why.encode()[:MAX_WHY_BYTES]

"""The keys of one peer, which all connections to it share."""

import logging
import threading
from typing import Final

from transport.errors import ConnectionRefused
from transport.path.tcp import dial
from transport.peers.name import PeerCertificate
from transport.peers.rights import RECEIVE
from transport.send.options import ClientOptions
from transport.wire.checksum import Integrity
from transport.wire.frames import Code
from transport.wire.identity import Identity
from transport.wire.session import Session, request_session

log = logging.getLogger(__name__)

RENEW_AGAIN_S: Final = 5.0  # after keys could not be renewed


class SessionKeys:
    """Agreed on when first needed, and again when half their life is over. May be used from any thread."""

    def __init__(self, address: str, options: ClientOptions, receiver: str = "") -> None:
        """`receiver` is the node that must give them, as CLUSTER/NAME; empty: any."""
        self._address = address
        self._receiver = receiver
        self._options = options
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._renew_at = 0.0

    def session(self, now: float) -> Session | None:
        """The present keys; None where nothing is sealed. Dials, at times. Raises OSError."""
        if self._options.integrity is not Integrity.AEAD or self._options.identity is None:
            return None
        with self._lock:
            if self._session is not None and self._is_shut_out(self._session):
                self._session = None  # before others are asked for: a revoked peer may keep others from coming
            if self._session is None or now >= self._renew_at:
                self._session = self._new(self._options.identity, now)
            return self._session

    def forget(self) -> None:
        """The receiver was restarted, or has forgotten us."""
        with self._lock:
            self._session = None

    def unless_revoked(self, session: Session | None) -> None:
        """Raises ConnectionRefused once the receiver that gave these keys counts no more."""
        if session is not None and session.peer is not None and self._is_shut_out(session):
            raise ConnectionRefused(Code.IDENTITY, self._refusal(session.peer))

    def _is_shut_out(self, session: Session) -> bool:
        guard = self._options.guard
        return guard is not None and session.peer is not None and bool(guard.shut_out(session.peer))

    def _refusal(self, peer: PeerCertificate) -> str:
        guard = self._options.guard
        return guard.refusal(RECEIVE, peer, self._address, self._receiver) if guard is not None else ""

    def _new(self, identity: Identity, now: float) -> Session:
        """Or the present ones, when there are no others to be had and they have not ended. A refusal ends them."""
        try:
            sock = dial(self._address, self._options.tcp)
            session = request_session(sock, identity, self._options.tcp.connect_timeout_s, now, self._refusal)
        except ConnectionRefused:
            self._session = None
            raise
        except OSError as exc:
            if self._session is None or now >= self._session.ends_at:
                raise
            log.warning("%s gives no new keys, the present ones stay in use: %s", self._address, exc)
            self._renew_at = now + RENEW_AGAIN_S
            return self._session
        self._renew_at = now + min(self._options.rotate_keys_s, (session.ends_at - now) / 2)
        return session

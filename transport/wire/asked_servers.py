"""Servers that are asked over HTTPS, by the name of their host. One of ours shows who it is before it is told a word.

handshake ── a name, or an authority of ours in its chain? ── yes ──► it has the right to answer, or the handshake fails
                                                         └── no ───► this host trusts it, as it may trust a proxy's

A chain that cannot be looked at counts as ours.
"""

import logging
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from transport.peers.authorities import Authorities
from transport.peers.guard import Guard
from transport.peers.name import of_der
from transport.wire.identity import Identity, Version

log = logging.getLogger(__name__)

NEWEST: Final = "TLSv1.3"  # which servers of ours speak; a proxy may be older
NOT_VERIFIED: Final = 1  # as OpenSSL numbers its errors
MAX_PLACES: Final = 64  # nodes whose connections are kept
RENEW_S: Final = 3600.0  # a connection that is older is used no more: certificates end


class AskedServers:
    """Those whose answers take the right `operation`, as `identity` asks them."""

    def __init__(self, identity: Identity, operation: str, now: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError."""
        self._identity = identity
        self._operation = operation
        self._guard = identity.guard(now)
        self._now = now
        self._good: _GoodContext | None = None

    def context(self) -> ssl.SSLContext:
        """What the next handshake shows and accepts, as the files are now. Raises OSError.

        Who keeps connections keeps them by context: a server that is revoked is asked no more over one that is open.
        """
        known, now, lists = self._good, self._now(), self._guard.lists()
        try:
            version = self._identity.version()
            if known is None or (known.version, known.lists) != (version, lists) or now >= known.since + RENEW_S:
                known = self._good = _GoodContext(version, lists, now, self._loaded())
        except OSError as error:
            if known is None or known.lists != lists:
                raise
            log.warning("the certificate read before stays in use: %s", error)
        return known.context

    def _loaded(self) -> "_AskingContext":
        context = _AskingContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_default_certs()
        self._identity.load_into(context)
        context.judged_by(self._guard, self._operation, self._identity.authorities())
        return context


class AskedNodes(AskedServers):
    """Nodes that are asked at any address: only their certificates say who they are, and only our authority signs those."""

    def __init__(
        self, identity: Identity, operation: str, now: Callable[[], float] = time.monotonic, place: str = ""
    ) -> None:
        """`place` is the node that is meant, as CLUSTER/NAME; "": any. Raises OSError."""
        super().__init__(identity, operation, now)
        self._place = place
        self._placed: OrderedDict[str, AskedNodes] = OrderedDict()  # the latest last

    def at(self, place: str) -> "AskedNodes":
        """The same for the node `place` alone: another one is told nothing. Raises OSError."""
        found = self._placed.pop(place, None) or AskedNodes(self._identity, self._operation, self._now, place)
        self._placed[place] = found
        if len(self._placed) > MAX_PLACES:
            self._placed.popitem(last=False)
        return found

    def _loaded(self) -> "_AskingContext":
        context = _AskingContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        self._identity.load_into(context)
        context.judged_by(self._guard, self._operation, self._identity.authorities(), self._place)
        return context


@dataclass(frozen=True, slots=True)
class _GoodContext:
    """A context, what it was made of, and since when it is in use."""

    version: Version
    lists: object
    since: float
    context: ssl.SSLContext


def trust_of(asked: AskedServers | None, url: str) -> ssl.SSLContext | bool:
    """What aiohttp is told of a request for `url`: True has it trust whom this host trusts. Raises OSError."""
    return asked.context() if asked is not None and url.startswith("https://") else True


class _AskingContext(ssl.SSLContext):
    """A context whose handshakes end with a look at the server."""

    def judged_by(self, guard: Guard, operation: str, authorities: Authorities, place: str = "") -> None:
        self._place = place
        self._guard = guard
        self._operation = operation
        self._authorities = authorities

    def judge(self, connection: "_JudgedObject | _JudgedSocket") -> None:
        """Raises SSLCertVerificationError."""
        der, chain = connection.getpeercert(binary_form=True), _verified_chain(connection)
        assert der is not None  # the handshake has asked for one
        peer = of_der(der)
        if peer.name is None and chain and not self._authorities.are_in(chain):
            return
        why = self._guard.refusal(self._operation, peer, connection.server_hostname or "its address", self._place)
        if not why and connection.version() != NEWEST:
            why = f"{peer} speaks {connection.version()} alone, and must speak {NEWEST}"
        if why:
            raise ssl.SSLCertVerificationError(NOT_VERIFIED, why)


class _JudgedObject(ssl.SSLObject):
    """As asyncio speaks TLS."""

    def do_handshake(self) -> None:
        super().do_handshake()
        _judge(self)


class _JudgedSocket(ssl.SSLSocket):
    """As urllib does."""

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        _judge(self)


def _judge(connection: _JudgedObject | _JudgedSocket) -> None:
    context: Any = connection.context
    assert isinstance(context, _AskingContext)
    context.judge(connection)


def _verified_chain(connection: Any) -> list[bytes]:
    """What the handshake has verified, down to a certificate that it trusts; nothing where this Python does not tell."""
    if hasattr(connection, "get_verified_chain"):  # from Python 3.13 on
        return list(connection.get_verified_chain())
    told = getattr(getattr(connection, "_sslobj", None), "get_verified_chain", None)
    return [ssl.PEM_cert_to_DER_cert(each.public_bytes()) for each in told()] if told is not None else []


_AskingContext.sslobject_class = _JudgedObject
_AskingContext.sslsocket_class = _JudgedSocket

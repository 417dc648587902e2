"""The identity of an end of a link: a certificate, its key, and the authority of its peers' certificates."""

import logging
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from transport.peers.authorities import Authorities, AuthorityFile
from transport.peers.guard import Guard, nameless
from transport.peers.name import PeerName, of_pem
from transport.peers.revocation import RevocationList

log = logging.getLogger(__name__)

Version: TypeAlias = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """PEM files: our certificate and key, and the authority that signs those of our peers, or a list of authorities.

    They are read again when they change; while a new certificate is there and its key is not yet, the old pair serves.
    `revoked` lists certificates that count no more.
    """

    certificate: Path
    key: Path
    authority: Path
    revoked: Path | None = None
    peer_name: str = ""  # the name that a server's certificate must carry; empty: any that the authority signed
    _good: dict[tuple[int, bool, str], tuple[Version, ssl.SSLContext]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _authorities: AuthorityFile = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_authorities", AuthorityFile(self.authority))

    def version(self) -> Version:
        """Changes whenever one of the files does. Raises OSError."""
        stats = [os.stat(path) for path in (self.certificate, self.key)]
        own = tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stats)
        return own + self._authorities.version()

    def check(self) -> None:
        """Raises OSError that says which of the files is wrong."""
        self._load(ssl.PROTOCOL_TLS_SERVER)

    def own_name(self) -> PeerName:
        """Who we are to our peers. Raises OSError, also for a certificate without such a name."""
        with _named(f"certificate {self.certificate}"):
            pem = self.certificate.read_bytes()
        try:
            own = of_pem(pem)
        except ValueError as exc:
            raise OSError(f"certificate {self.certificate}: {exc}") from exc
        if own.name is None:
            raise OSError(nameless(f"certificate {self.certificate}: {own.problem}"))
        return own.name

    def guard(self, now: Callable[[], float] = time.monotonic) -> Guard:
        """What knows our peers' rights. Raises OSError."""
        revoked, authorities = RevocationList(self.revoked), AuthorityFile(self.authority)
        try:
            revoked.load()
        except ValueError as exc:
            raise OSError(str(exc)) from exc
        own = self.own_name()
        if why := _read(authorities).refusal(of_pem(self.certificate.read_bytes())):
            raise OSError(f"certificate {self.certificate}: {why}")
        return Guard(own, revoked, now, authorities=authorities)

    def server_context(self, protocol: str = "") -> ssl.SSLContext:
        """For a server that speaks `protocol`, by its name in ALPN (RFC 7301); "": callers' names are not looked at."""
        return self._present(ssl.PROTOCOL_TLS_SERVER, speaks=protocol)

    def client_context(self) -> ssl.SSLContext:
        return self._present(ssl.PROTOCOL_TLS_CLIENT)

    def old_client_context(self) -> ssl.SSLContext:
        """For a caller that wants to know whether a server takes TLS 1.2. Raises OSError."""
        context = self._load(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        return context

    def page_context(self) -> ssl.SSLContext:
        """For a server that its callers know by its certificate, and that knows them by a key: it asks them for none.

        It may be kept for as long as the server listens: a handshake begins with the files as they are then.
        """
        return self._standing(asks=False)

    def mutual_context(self) -> ssl.SSLContext:
        """The same for a server that asks its callers for their certificate."""
        return self._standing(asks=True)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Has `context` show our certificate, and trust our authority beside those it trusts already. Raises OSError."""
        with _named(f"certificate {self.certificate} with key {self.key}"):
            context.load_cert_chain(self.certificate, self.key)
        authorities = self.authorities()
        with _named(f"authority {self.authority}"):
            if authorities.sites is None:
                context.load_verify_locations(self.authority)
            else:
                context.load_verify_locations(cadata=authorities.pem.decode("ascii"))

    def authorities(self) -> Authorities:
        """Who signs for our peers, as the files are now. Raises OSError."""
        return _read(self._authorities)

    def _standing(self, *, asks: bool) -> ssl.SSLContext:
        # A context of its own: one that hands over to itself would be in force whatever the files say.
        context = self._load(ssl.PROTOCOL_TLS_SERVER, asks=asks)
        # It serves if files are being replaced when the first caller comes.
        self._present(ssl.PROTOCOL_TLS_SERVER, asks=asks)

        def present(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._present(ssl.PROTOCOL_TLS_SERVER, asks=asks)

        context.sni_callback = present
        return context

    def _present(self, protocol: int, *, asks: bool = True, speaks: str = "") -> ssl.SSLContext:
        kind = (protocol, asks, speaks)
        known = self._good.get(kind)
        try:
            version = self.version()
            if known is None or known[0] != version:
                known = self._good[kind] = (version, self._load(protocol, asks=asks))
                if speaks:
                    known[1].set_alpn_protocols([speaks])
        except OSError as exc:
            if known is None:
                raise
            log.warning("the certificate read before stays in use: %s", exc)
        return known[1]

    def _load(self, protocol: int, *, asks: bool = True) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = protocol == ssl.PROTOCOL_TLS_CLIENT and bool(self.peer_name)
        context.verify_mode = ssl.CERT_REQUIRED if asks else ssl.CERT_NONE
        if protocol == ssl.PROTOCOL_TLS_SERVER and asks:
            context.num_tickets = 0  # who resumes is not looked at again, though its authority may be gone
        self.load_into(context)
        return context


def _read(authorities: AuthorityFile) -> Authorities:
    """Raises OSError."""
    try:
        with _named(f"authority {authorities.path}"):
            return authorities.load()
    except ValueError as exc:
        raise OSError(f"authority {authorities.path}: {exc}") from exc


@contextmanager
def _named(what: str) -> Iterator[None]:
    """ssl does not say which file it could not read."""
    try:
        yield
    except OSError as exc:
        reason = exc.reason if isinstance(exc, ssl.SSLError) and exc.reason else exc.strerror or exc
        raise OSError(f"{what}: {str(reason).lower().replace('_', ' ')}") from exc

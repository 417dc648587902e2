"""Whose certificates count, and for whom each authority may sign: a PEM file, or a list of authorities.

# a list: an authority's PEM file, relative to the list      the names that it signs: CLUSTER/ROLE, * is any
home/authority.pem       home/node
remote/authority.pem     remote/prefill
any/authority.pem        any/gateway any/planner any/operator

The key of one site's authority then gives no more than that site's names. In a PEM file without such a list,
every authority signs for all. A file is a PEM file if its first line begins a certificate, blank ones and comments aside.
"""

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, Self, TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from transport.peers.name import SEGMENT, PeerCertificate, PeerName, PeerRole

log = logging.getLogger(__name__)

BEGINS_PEM: Final = "-----BEGIN"
ANY: Final = "*"
LOOK_EVERY_S: Final = 1.0

FileStamp: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class AuthorityScope:
    """Names that an authority may sign."""

    cluster: str
    role: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        cluster, slash, role = text.partition("/")
        if not slash or role not in {ANY, *PeerRole} or not (cluster == ANY or SEGMENT.fullmatch(cluster)):
            raise ValueError(
                f"{text!r}: must be CLUSTER/ROLE, as east/prefill; * is any; roles are {', '.join(PeerRole)}"
            )
        return cls(cluster, role)

    def has(self, name: PeerName) -> bool:
        return self.cluster in (ANY, name.cluster) and self.role in (ANY, name.role)

    def __str__(self) -> str:
        return f"{self.cluster}/{self.role}"


@dataclass(frozen=True, slots=True)
class SiteAuthority:
    """One line: the file as the list names it, the certificates in it, and what they may sign."""

    file: str
    certificates: tuple[x509.Certificate, ...]
    scopes: tuple[AuthorityScope, ...]

    def has_signed(self, der: bytes) -> bool:
        """Itself: what an authority below it has signed is that one's."""
        return any(_has_signed(der, certificate) for certificate in self.certificates)

    def signs_for(self, name: PeerName) -> bool:
        return any(scope.has(name) for scope in self.scopes)


@dataclass(frozen=True, slots=True)
class Authorities:
    """What such a file says; `sites` is None of a PEM file."""

    pem: bytes
    sites: tuple[SiteAuthority, ...] | None = None

    def refusal(self, peer: PeerCertificate) -> str:
        """Why its authority may not have signed that name, in a sentence; "": it may."""
        if self.sites is None or peer.name is None:
            return ""
        signers = [site for site in self.sites if site.has_signed(peer.der)]
        if not signers:
            return f"no authority of the list has signed {peer.name} itself"
        if any(site.signs_for(peer.name) for site in signers):
            return ""
        scopes = " and ".join(str(scope) for site in signers for scope in site.scopes)
        return f"{peer.name} is signed by {signers[0].file}, which signs for {scopes} alone"

    def are_in(self, chain: Iterable[bytes]) -> bool:
        """Whether the key of one of them is in a chain of certificates, under whatever name. One that cannot be read may be."""
        try:
            ours = {_key_of(certificate) for certificate in _certificates(self.pem)}
            return any(_key_of(x509.load_der_x509_certificate(der)) in ours for der in chain)
        except (ValueError, UnsupportedAlgorithm):
            return True


def read_list(folder: Path, text: str, read: Callable[[Path], bytes] = Path.read_bytes) -> tuple[SiteAuthority, ...]:
    """The lines of a list that lies in `folder`; `read` reads the files that it names.

    Raises OSError, and ValueError that names the line.
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        file, *scopes = words
        try:
            if file.startswith(BEGINS_PEM):
                raise ValueError("a certificate has no place in a list: it belongs into a file that the list names")
            if not scopes:
                raise ValueError(f"{file} signs for none: CLUSTER/ROLE must follow")
            certificates = _certificates(read(folder / file))
            found.append(SiteAuthority(file, certificates, tuple(map(AuthorityScope.parse, scopes))))
        except ValueError as exc:
            raise ValueError(f"line {number}: {exc}") from exc
    if not found:
        raise ValueError("it names no authority")
    return tuple(found)


class AuthorityFile:
    """One such file, read again when it changes, or one that it names. While it cannot be read, what it said before holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_last: _Reading | None = None
        self._looked_at = float("-inf")

    def version(self) -> tuple[FileStamp, ...]:
        """Changes whenever one of the files does. Raises OSError."""
        if self._read_last is None:
            with suppress(ValueError):  # `load` tells
                self.load()
        listed = self._read_last.listed if self._read_last is not None else ()
        return (_stamp(self.path), *map(_stamp_if_there, listed))

    def load(self) -> Authorities:
        """What it says now. Raises OSError, ValueError."""
        known = self._read_last
        if known is None or self.version() != known.version:
            known = self._read_last = _reading(self.path)
        return known.authorities

    def now(self, now: float) -> Authorities:
        """The same after a first `load`; looks at the files at most once in LOOK_EVERY_S."""
        known = self._read_last
        if known is None or now >= self._looked_at + LOOK_EVERY_S:
            self._looked_at = now
            try:
                return self.load()
            except (OSError, ValueError) as exc:
                if known is None:
                    raise
                log.error("authorities of %s stay as they were: %s", self.path, exc)
        return known.authorities


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the files said, and their stamps from before each was read: one that changes meanwhile is read again."""

    authorities: Authorities
    listed: tuple[Path, ...]
    version: tuple[FileStamp, ...]


def _reading(path: Path) -> _Reading:
    """Raises OSError, ValueError."""
    stamp, stamps = _stamp(path), dict[Path, FileStamp]()
    data = path.read_bytes()
    if _is_pem(data):
        return _Reading(Authorities(data), (), (stamp,))

    def read(file: Path) -> bytes:
        stamps.setdefault(file, _stamp(file))
        return file.read_bytes()

    sites = read_list(path.parent, data.decode(), read)
    pem = [each.public_bytes(Encoding.PEM) for site in sites for each in site.certificates]
    return _Reading(Authorities(b"".join(pem), sites), tuple(stamps), (stamp, *stamps.values()))


def _is_pem(data: bytes) -> bool:
    lines = (line.strip() for line in data.splitlines())
    first = next((line for line in lines if line and not line.startswith(b"#")), b"")
    return first.startswith(BEGINS_PEM.encode())


def _stamp(file: Path) -> FileStamp:
    stat = os.stat(file)
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _stamp_if_there(file: Path) -> FileStamp:
    """The list may have changed since, and the file be gone."""
    try:
        return _stamp(file)
    except OSError:
        return 0, 0, 0


@lru_cache(maxsize=64)
def _certificates(pem: bytes) -> tuple[x509.Certificate, ...]:
    return tuple(x509.load_pem_x509_certificates(pem))


def _key_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


@lru_cache(maxsize=4096)
def _has_signed(der: bytes, authority: x509.Certificate) -> bool:
    try:
        x509.load_der_x509_certificate(der).verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):  # OpenSSL knows more algorithms
        return False
    return True

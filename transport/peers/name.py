"""The name in a certificate: the cluster, the role and the name of its holder.

spiffe://TRUST/CLUSTER/ROLE/NAME      one URI among the alternative names of the subject, as in an X.509 SVID
"""

import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import Any, Final, Self

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

SCHEME: Final = "spiffe://"
SHAPE: Final = f"{SCHEME}TRUST/CLUSTER/ROLE/NAME"
DEFAULT_TRUST: Final = "prfaas"
NO_CLUSTER: Final = "any"  # of those who belong to no cluster: gateways, planners, operators
MAX_BYTES: Final = 2048  # of the whole name, by the standard
TRUST: Final = re.compile(r"[a-z0-9._-]{1,255}")
SEGMENT: Final = re.compile(r"[A-Za-z0-9._-]{1,255}")
DER: Final = "der"  # beside the keys of `ssl`
HOW_TO_ISSUE: Final = "`prfaas certificates` issues one: CLUSTER/ROLE/NAME"


class PeerRole(StrEnum):
    """What the holder of a certificate is."""

    GATEWAY = "gateway"
    PREFILL = "prefill"  # a node of a PrfaaS cluster
    NODE = "node"  # a node of a PD cluster: it may prefill and decode, and changes its role
    PLANNER = "planner"
    OPERATOR = "operator"


class NamelessPeer(ValueError):
    """A certificate, or a text, that carries no name of ours."""


@dataclass(frozen=True, slots=True)
class PeerName:
    """Whose a certificate is."""

    trust: str
    cluster: str
    role: PeerRole
    name: str

    def __post_init__(self) -> None:
        for pattern, part in ((TRUST, self.trust), (SEGMENT, self.cluster), (SEGMENT, self.name)):
            # A URI's "." and ".." are no names: who resolves it would find another one.
            if not pattern.fullmatch(part) or part in (".", ".."):
                raise NamelessPeer(f"{str(self)!r}: {part!r} must be letters, digits, '.', '_' and '-'")
        if len(str(self)) > MAX_BYTES:
            raise NamelessPeer(f"a name is at most {MAX_BYTES} bytes")

    def __str__(self) -> str:
        return f"{SCHEME}{self.trust}/{self.cluster}/{self.role}/{self.name}"

    @property
    def place(self) -> str:
        """As tickets name a sender: the cluster and the name in it."""
        return f"{self.cluster}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises NamelessPeer for anything else."""
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 4:
            raise NamelessPeer(f"{text[:MAX_BYTES]!r}: must be {SHAPE}")
        trust, cluster, role, name = parts
        if role not in {*PeerRole}:
            raise NamelessPeer(f"{text[:MAX_BYTES]!r}: the role {role!r} must be one of {', '.join(PeerRole)}")
        return cls(trust, cluster, PeerRole(role), name)

    @classmethod
    def among(cls, uris: Iterable[str]) -> Self:
        """The name among the URIs of a certificate, which has exactly one. Raises NamelessPeer."""
        found = list(uris)
        if len(found) != 1:
            raise NamelessPeer(f"{len(found) or 'no'} URIs, where one must be {SHAPE}")
        return cls.parse(found[0])


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """A certificate as far as rights go. Without a name, `problem` says why. `ends_at` is in seconds since 1970.

    `der` is all of it, in its binary form.
    """

    name: PeerName | None
    serial: int
    problem: str = ""
    ends_at: float = field(default=inf, compare=False)
    der: bytes = field(default=b"", compare=False, repr=False)

    @property
    def role(self) -> str:
        """A label to count under."""
        return self.name.role if self.name is not None else "none"

    def __str__(self) -> str:
        return str(self.name) if self.name is not None else f"serial {self.serial:x}"


def certified(uris: Iterable[str], serial: int, ends_at: float = inf, der: bytes = b"") -> PeerCertificate:
    """A certificate by what it says."""
    try:
        return PeerCertificate(PeerName.among(uris), serial, ends_at=ends_at, der=der)
    except NamelessPeer as exc:
        return PeerCertificate(None, serial, str(exc), ends_at, der)


def said_by(connection: ssl.SSLObject | ssl.SSLSocket | None) -> Mapping[str, Any]:
    """What `ssl` makes of a peer's certificate, and the certificate; nothing where none was shown."""
    said = connection.getpeercert() if connection is not None else None
    if connection is None or not said:
        return {}
    return {**said, DER: connection.getpeercert(binary_form=True)}


def of_tls(said: Mapping[str, Any]) -> PeerCertificate:
    """Of what `said_by` gives."""
    names: Sequence[tuple[str, str]] = said.get("subjectAltName", ())
    uris = (text for kind, text in names if kind == "URI")
    ends_at = ssl.cert_time_to_seconds(said["notAfter"]) if "notAfter" in said else inf
    return certified(uris, int(said.get("serialNumber", "0"), 16), ends_at, said.get(DER, b""))


def of_grpc(context: Mapping[str, Iterable[bytes]]) -> PeerCertificate | None:
    """Of a call's auth_context(); None where the caller has shown no certificate."""
    pem = b"".join(context.get("x509_pem_cert", ()))
    return of_pem(pem) if pem else None


@lru_cache(maxsize=256)
def of_pem(pem: bytes) -> PeerCertificate:
    """Of the first certificate of a PEM text. Raises ValueError."""
    return _of(x509.load_pem_x509_certificate(pem))


def of_der(der: bytes) -> PeerCertificate:
    """Of a certificate in its binary form. Raises ValueError."""
    return of_pem(ssl.DER_cert_to_PEM_cert(der).encode())


def _of(certificate: x509.Certificate) -> PeerCertificate:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    ends_at, der = certificate.not_valid_after_utc.timestamp(), certificate.public_bytes(Encoding.DER)
    return certified(uris, certificate.serial_number, ends_at, der)

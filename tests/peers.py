"""Certificates of every role by one authority, and of those who should get nowhere."""

import ssl
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from transport.control.certificates import Authority
from transport.peers.guard import Guard
from transport.peers.name import PeerName, PeerRole
from transport.wire.identity import Identity

HOST: Final = "node.example"  # that every one of them is good for
OWN: Final = PeerName("prfaas", "west", PeerRole.NODE, "d0")


class Peers:
    """Made once; no test may change the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = Authority(folder)
        self.by_role: dict[PeerRole, Identity] = {}
        for role in PeerRole:
            self.by_role[role] = self.issue(PeerName("prfaas", "east", role, f"thief-{role}"))
        self.server = self.issue(OWN)
        self.nameless = self._authority.issue("nameless", [HOST, "node"])
        names = [PeerName("prfaas", "east", role, "twofold") for role in (PeerRole.GATEWAY, PeerRole.NODE)]
        self.twofold = _renamed(self.issue(names[0]), folder / "authority.key", names)
        self.abroad = self.issue(PeerName("elsewhere", "east", PeerRole.GATEWAY, "abroad"))
        self.expired = self.issue(PeerName("prfaas", "any", PeerRole.GATEWAY, "expired"), days=-0.5)
        elsewhere = Authority(folder / "other", "other").issue(
            "stranger", [HOST, "node"], peer=PeerName("prfaas", "any", PeerRole.GATEWAY, "stranger")
        )
        self.stranger = replace(elsewhere, authority=self.server.authority)  # it believes in ours

    def issue(self, peer: PeerName, *, days: float = 365) -> Identity:
        return self._authority.issue(peer.name, [HOST, "node"], days=days, peer=peer)

    def guarded(self, revoked: Path) -> tuple[Identity, Guard]:
        """A server, and what it knows of rights; `revoked` is made unless it is there."""
        revoked.touch()
        identity = replace(self.server, revoked=revoked)
        return identity, identity.guard()


def _renamed(identity: Identity, authority_key: Path, names: Sequence[PeerName]) -> Identity:
    """The same certificate with other names for its holder: as an authority may sign that looks at none of them."""
    had = x509.load_pem_x509_certificate(identity.certificate.read_bytes())
    said = [x509.DNSName(HOST), *(x509.UniformResourceIdentifier(str(name)) for name in names)]
    made = (
        x509.CertificateBuilder(had.issuer, had.subject, had.public_key(), had.serial_number)
        .not_valid_before(had.not_valid_before_utc)
        .not_valid_after(had.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName(said), critical=False)
    )
    key = cast(ec.EllipticCurvePrivateKey, serialization.load_pem_private_key(authority_key.read_bytes(), None))
    identity.certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return identity


def handshake(client: Identity, server: Identity) -> ssl.SSLObject:
    """The server's end of a connection in memory, after the handshake."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.client_context().wrap_bio(back, there),
        server.server_context().wrap_bio(there, back, server_side=True),
    )
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return ends[1]

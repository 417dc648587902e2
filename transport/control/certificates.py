"""A private authority and certificates signed by it: for a cluster that has no other, for tests and benchmarks."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from transport.peers.name import PeerName
from transport.wire.identity import Identity

_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates. It lives in a folder, as `authority.pem` and `authority.key`, and is made if it is not there.

    Raises OSError, and ValueError when the files are no authority.
    """

    def __init__(self, folder: Path, name: str = "prfaas") -> None:
        self._folder = folder
        self.path, key_path = folder / "authority.pem", folder / "authority.key"
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and key_path.exists():
            self._key = _read_private(key_path)
            self._name = x509.load_pem_x509_certificate(self.path.read_bytes()).subject
            return
        self._key = ec.generate_private_key(ec.SECP256R1())
        # Two authorities must not bear the same name: a stranger's certificate would be called forged, not unknown.
        self._name = _name(f"{name} authority {os.urandom(4).hex()}")
        certificate = self._sign(self._name, self._key, days=3650, is_authority=True, hosts=())
        _write_private(key_path, self._key)
        _replace(self.path, certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        hosts: Sequence[str] = (),
        *,
        days: float = 365,
        peer: PeerName | None = None,
        folder: Path | None = None,
    ) -> Identity:
        """A certificate for `name`, good for `hosts` (names or addresses), too; in the files NAME.pem and NAME.key.

        `peer` says who its holder is to others: without it has no rights. The files lie in `folder`, by default beside the
        authority's. Replaces an earlier one.
        """
        folder = folder or self._folder
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_name(name), key, days=days, is_authority=False, hosts=(name, *hosts), peer=peer)
        identity = Identity(certificate=folder / f"{name}.pem", key=folder / f"{name}.key", authority=self.path)
        _write_private(identity.key, key)
        _replace(identity.certificate, certificate.public_bytes(serialization.Encoding.PEM))
        return identity

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        days: float,
        is_authority: bool,
        hosts: Sequence[str],
        peer: PeerName | None = None,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + days * _DAY)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if hosts:
            names = [_general_name(host) for host in hosts]
            names += [x509.UniformResourceIdentifier(str(peer))] if peer is not None else []
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def expires_at(certificate: Path) -> float:
    """When the certificate in a PEM file ends, in seconds since 1970. Raises OSError, ValueError."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc.timestamp()


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _read_private(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path}: not a key on an elliptic curve")
    return key


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _replace(path, data, mode=0o600)


def _replace(path: Path, data: bytes, mode: int = 0o644) -> None:
    """In one step: a reader finds the old file or the new one."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    fresh.replace(path)

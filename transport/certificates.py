"""A private authority and certificates signed by it: for a cluster that has no other, for tests and benchmarks."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from transport.crypto import Identity

_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates; its own is `authority.pem` in the folder."""

    def __init__(self, folder: Path, name: str = "prfaas") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(f"{name} authority")
        folder.mkdir(parents=True, exist_ok=True)
        certificate = self._sign(self._name, self._key, days=3650, is_authority=True, dns=None)
        self.path = folder / "authority.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, days: int = 365) -> Identity:
        """A certificate for `name`, in the files NAME.pem and NAME.key; replaces an earlier one."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(_name(name), key, days=days, is_authority=False, dns=name)
        identity = Identity(
            certificate=self._folder / f"{name}.pem", key=self._folder / f"{name}.key", authority=self.path
        )
        _write_private(identity.key, key)
        identity.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return identity

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: int, is_authority: bool, dns: str | None
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
        if dns is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(dns)]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.touch(mode=0o600)
    path.write_bytes(data)

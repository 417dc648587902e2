"""TLS at the port that proxies ask: files that are read anew, and an authority of proxies' certificates.

handshake ── have the files changed? ── no ──────────────────────────► as before
                                     └─ they are a pair ─────────────► the new one
                                     └─ they are not, or unreadable ─► as before; counted, and logged once
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from gateway.errors import GatewayConfigError

log = logging.getLogger("prfaas.picker")

CERTIFICATE: Final = "tls.crt"  # as a Secret of type kubernetes.io/tls has them
KEY: Final = "tls.key"
MAX_FILE_BYTES: Final = 1 << 20
UNUSABLE: Final = (OSError, ValueError, TypeError, UnsupportedAlgorithm)

T = TypeVar("T")

GONE: Final = (0, 0, 0)

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A folder with a certificate and its key. With a `client_authority`, proxies show a certificate that it has signed."""

    folder: Path
    client_authority: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        pair = (self.folder / CERTIFICATE, self.folder / KEY)
        return pair if self.client_authority is None else (*pair, self.client_authority)


class FollowedCertificate:
    """What the port shows and asks for. Connections that are there keep what they have."""

    def __init__(self, files: TlsFiles, on_failure: Callable[[str], None]) -> None:
        """`on_failure` hears why changed files cannot be used. Raises GatewayConfigError for files that are wrong now."""
        self._files = files
        self._on_failure = on_failure
        self._lock = threading.Lock()  # handshakes come on gRPC's threads
        self._loop: asyncio.AbstractEventLoop | None = None  # where changes are told
        self._seen = _stamp(files)
        try:
            self._first = _loaded(files)
        except UNUSABLE as error:
            raise GatewayConfigError(_told(files, error)) from error

    def credentials(self) -> grpc.ServerCredentials:
        """For a server, which asks anew at each handshake. Inside an event loop."""
        self._loop = asyncio.get_running_loop()
        must_show = self._files.client_authority is not None
        return grpc.dynamic_ssl_server_credentials(self._first, self.changed, must_show)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What the files are now; None where nothing is to change."""
        with self._lock:
            stamp = _stamp(self._files)
            if stamp == self._seen:
                return None
            self._seen = stamp
            try:
                found = _loaded(self._files)
            except UNUSABLE as error:
                self._tell(self._failed, error)
                return None
            self._tell(log.info, f"the certificate in {self._files.folder} is taken up")
            return found

    def _failed(self, error: Exception) -> None:
        log.error("the certificate stays as it was: %s", _told(self._files, error))
        self._on_failure("unreadable" if isinstance(error, OSError) else "unusable")

    def _tell(self, tell: Callable[[T], None], what: T) -> None:
        """On the loop: a thread of gRPC's that logs is one of Python's ever after."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(tell, what)


def _stamp(files: TlsFiles) -> Stamp:
    """Changes whenever one of the files does; one that is not there counts, too."""
    return tuple(map(_version, files.paths))


def _version(path: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return GONE
    return found.st_mtime_ns, found.st_size, found.st_ino


def _loaded(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """Raises one of UNUSABLE."""
    chain, key, *authorities = [_read(path) for path in files.paths]
    certificate = x509.load_pem_x509_certificates(chain)[0]
    own, wanted = (
        each.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        for each in (load_pem_private_key(key, None).public_key(), certificate.public_key())
    )
    if own != wanted:
        raise ValueError(f"{KEY} is not the key of {CERTIFICATE}")
    for authority in authorities:
        x509.load_pem_x509_certificates(authority)
    return grpc.ssl_server_certificate_configuration([(key, chain)], next(iter(authorities), None))


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: at most {MAX_FILE_BYTES} bytes")
    return data


def _told(files: TlsFiles, error: BaseException) -> str:
    return f"{', '.join(map(str, files.paths))}: {error}"

"""gRPC's own TLS for stand-ins of a node: a real one has a front (`node.process.tls_front`)."""

import logging
from collections.abc import Callable

import grpc

from transport.wire.identity import Identity

log = logging.getLogger(__name__)


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """For add_secure_port(). Raises OSError."""
    present = identity.version()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal present
        try:
            version = identity.version()
            if version == present:
                return None
            identity.check()  # a certificate whose key is not there yet waits for the next handshake
            present = version
            return _server_files(identity)
        except OSError as exc:
            log.warning("the certificate read before stays in use: %s", exc)
            return None

    fetch: Callable[[], grpc.ServerCertificateConfiguration | None] = changed
    return grpc.dynamic_ssl_server_credentials(_server_files(identity), fetch, require_client_authentication=True)


def _server_files(identity: Identity) -> grpc.ServerCertificateConfiguration:
    pair = (identity.key.read_bytes(), identity.certificate.read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], identity.authorities().pem)

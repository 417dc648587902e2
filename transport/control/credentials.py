"""Mutual TLS for the control service, from the same files as for transfers.

Both sides must show a certificate of the authority. A client reads files that have changed when it asks for new credentials.
"""

import asyncio
import ssl
from dataclasses import dataclass

import grpc

from transport.peers.name import PeerCertificate, of_tls, said_by
from transport.wire.identity import Identity


def channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    """For secure_channel(), as the files are now. Raises OSError."""
    return grpc.ssl_channel_credentials(
        identity.authorities().pem, identity.key.read_bytes(), identity.certificate.read_bytes()
    )


def channel_options(name: str) -> list[tuple[str, str]]:
    """`name` is what the server's certificate must carry, where that is not the host of its address."""
    return [("grpc.ssl_target_name_override", name)] if name else []


async def takes_old_tls(address: str, identity: Identity, timeout_s: float) -> bool:
    """Whether the server at `address` speaks TLS 1.2 where a caller has nothing newer. Raises OSError where nothing answers."""
    host, _, port = address.rpartition(":")
    context = identity.old_client_context()
    async with asyncio.timeout(timeout_s):
        try:
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
        except (ssl.SSLError, ConnectionResetError):
            return False
    writer.transport.abort()
    return True


@dataclass(frozen=True, slots=True)
class ShownCertificate:
    """What a server has shown, and until when (seconds since 1970) it is good."""

    peer: PeerCertificate
    ends_at: float


async def server_certificate(address: str, identity: Identity, timeout_s: float) -> ShownCertificate:
    """What the server at `address` shows, over a connection of its own: gRPC's clients do not tell. Raises OSError."""
    host, _, port = address.rpartition(":")
    context = identity.client_context()
    name = host.strip("[]")
    async with asyncio.timeout(timeout_s):
        _, writer = await asyncio.open_connection(name, int(port), ssl=context, server_hostname=name)
    shown = said_by(writer.get_extra_info("ssl_object"))
    writer.transport.abort()
    return ShownCertificate(of_tls(shown), ssl.cert_time_to_seconds(shown["notAfter"]))

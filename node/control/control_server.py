"""The gRPC server of the control port, behind the front that speaks TLS for it where the node has certificates.

    gateway ══ TLS ══ TlsFront ── HTTP/2 on loopback ── gRPC ── RightsInterceptor ── NodeService

gRPC shows callers after their handshake only. The front shows all: those that fail are counted and logged with an address.
gRPC then knows a caller by the address of this machine from which the front has called it, which no other caller has. A
process of this machine that calls gRPC by itself has no certificate there, and so no right.
"""

from collections import Counter

import grpc.aio

from node.process.tls_front import TlsFront
from transport.peers.name import PeerCertificate, of_tls

HTTP_2 = "h2"


class FrontCallers:
    """The caller behind a connection of gRPC, by gRPC's name of it."""

    def __init__(self, front: TlsFront) -> None:
        self._front = front

    def __call__(self, peer: str) -> tuple[PeerCertificate, str] | None:
        """A certificate and an address; None: the front has not called from there, or not any more."""
        family, _, inner = peer.partition(":")
        caller = self._front.caller_at(inner) if family == "ipv4" else None
        if caller is None or caller.certificate is None:
            return None
        return of_tls(caller.certificate), caller.address

    def has_left(self, peer: str) -> bool:
        """Whether the front had called from there, and its caller's connection has ended since."""
        return self._front.has_left(peer.partition(":")[2])


def uncertified(peer: str) -> tuple[PeerCertificate, str] | None:
    """Callers of a node without certificates have shown none."""
    return None


class ControlServer:
    """Both, started: what it takes to end them."""

    def __init__(self, server: grpc.aio.Server, front: TlsFront | None) -> None:
        self.inside = front.engine_url if front is not None else ""  # where gRPC itself listens, behind a front
        self._server = server
        self._front = front

    @property
    def ended(self) -> Counter[str]:
        """Connections that the front ended or turned away, by why; none where there is no front."""
        return self._front.ended if self._front is not None else Counter()

    async def stop(self, grace_s: float | None) -> None:
        """Calls that run have `grace_s` to end; then their connections are closed.

        No caller is let in meanwhile: another process may have gRPC's port by then.
        """
        if self._front is not None:
            self._front.shut()
        try:
            await self._server.stop(grace_s)
        finally:
            if self._front is not None:
                await self._front.close()

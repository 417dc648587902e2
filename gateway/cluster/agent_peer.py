"""Whether the peer at an agent's address may be an agent, by its certificate's name and the list of revoked ones."""

import ssl

from gateway.errors import AgentCallFailed
from transport.control.credentials import server_certificate
from transport.peers.guard import Guard
from transport.peers.name import PeerCertificate
from transport.peers.rights import SERVE
from transport.wire.identity import Identity


class AgentPeer:
    """One agent's address. Without a guard, every holder of a certificate is an agent."""

    def __init__(self, address: str, timeout_s: float, identity: Identity | None, guard: Guard | None) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._identity = identity
        self._guard = guard
        self._shown: PeerCertificate | None = None  # when it was last looked at
        self._place = ""  # whose agent it says that it is; empty before it has

    async def look(self) -> None:
        """Looks at its certificate, which gRPC only compares with a host's name. Raises AgentCallFailed.

        A look that fails is no permission: a peer without the right may reset it.
        """
        if self._identity is None or self._guard is None:
            return
        try:
            self._shown = (await server_certificate(self._address, self._identity, self._timeout_s)).peer
        except (OSError, ValueError) as error:
            self._shown = None
            reason = "identity" if isinstance(error, ssl.SSLError) else "unreachable"
            raise AgentCallFailed(self._address, reason, f"no look at its certificate: {error!r}") from error
        # The node is not compared with the former one: another one may listen at this address now. It says which one it is.
        if why := self._guard.refusal(SERVE, self._shown, self._address):
            raise AgentCallFailed(self._address, "identity", why)

    def says(self, cluster: str, node_id: str) -> None:
        """The agent has said which node it is. Raises AgentCallFailed where that is not the one of its certificate."""
        self._place = f"{cluster}/{node_id}"
        if self._shown is not None and (why := self.refusal(self._shown)):
            raise AgentCallFailed(self._address, "identity", why)

    def refusal(self, shown: PeerCertificate) -> str:
        """Why the holder of that certificate is no agent; "": it is one."""
        return self._guard.refusal(SERVE, shown, self._address, self._place) if self._guard is not None else ""

    @property
    def has_expired(self) -> bool:
        """Whether the certificate last looked at ended long ago: another look tells whether it was replaced."""
        return self._guard is not None and self._shown is not None and self._guard.has_expired(self._shown)

    def unless_revoked(self) -> None:
        """Raises AgentCallFailed once the certificate last looked at is revoked, or its authority may not sign it any more."""
        if self._guard is None or self._shown is None:
            return
        if reason := self._guard.shut_out(self._shown):
            raise AgentCallFailed(self._address, "identity", f"{self._shown} is {reason}")

"""Habits of a sender."""

from dataclasses import dataclass, field, replace

from transport.path.pacing import Budget
from transport.path.tcp import TcpOptions
from transport.peers.guard import Guard
from transport.rdma.device import RdmaDevices
from transport.wire.checksum import Integrity
from transport.wire.frames import MAX_CHUNK_BYTES
from transport.wire.identity import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """`connections` is per peer; over shared memory two suffice.

    With `adaptive`, a long link gets up to `max_connections`, and is paced to what it carries (see governor).
    """

    connections: int = 4
    max_connections: int = 64
    adaptive: bool = True
    chunk_bytes: int = 4 << 20  # at most; within a host 16 MiB are faster
    window_bytes: int = 64 << 20
    integrity: Integrity = Integrity.CHECKSUM
    identity: Identity | None = None  # needed for Integrity.AEAD
    plain_to: frozenset[str] = frozenset()  # links that take checksums instead
    guard: Guard | None = None  # which certificates may be sent to; None: all that the authority has signed
    rotate_keys_s: float = 600.0  # a connection is replaced, with new keys, after this time
    egress_bytes_per_s: Budget = None  # of every link that has no budget of its own; None = as fast as it goes
    coding_cores: float | None = None  # that coding takes at most, over all peers; None: a quarter of the usable ones
    max_peers: int = 256  # with connections; more only while all of them are busy
    idle_timeout_s: float = 300.0  # after which an unused peer's connections are closed
    peer_timeout_s: float = 5.0  # transfers fail when for this long there was no connection, or nothing got through
    rdma: RdmaDevices | None = None  # NICs for transfers over RDMA
    tcp: TcpOptions = field(default_factory=TcpOptions)

    def __post_init__(self) -> None:
        if self.connections < 1:
            raise ValueError(f"connections {self.connections}: at least 1")
        if not 0 < self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes {self.chunk_bytes}: 1 to {MAX_CHUNK_BYTES}")
        if self.coding_cores is not None and not 0 < self.coding_cores < float("inf"):
            raise ValueError(f"coding_cores {self.coding_cores}: must be above 0 and finite")
        if self.integrity is Integrity.AEAD and self.identity is None:
            raise ValueError(f"integrity {self.integrity} needs an identity")

    def on(self, link: str) -> "ClientOptions":
        """What holds on a link."""
        return replace(self, integrity=Integrity.CHECKSUM) if link in self.plain_to else self

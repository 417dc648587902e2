"""Limits and habits of a listener."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from transport.coding.codec import Codec, decodable
from transport.path.shm import DEFAULT_ARENA_DIRS
from transport.path.tcp import TcpOptions
from transport.peers.guard import Guard
from transport.rdma.device import RdmaDevices
from transport.wire.checksum import Integrity
from transport.wire.frames import LEAST_CHUNK_LIMIT, MAX_CHUNK_BYTES
from transport.wire.identity import Identity

CHUNKS_OF_BUFFERS: Final = 8  # a coded chunk may need four times its length, of half of them
PART_OF_CHUNKS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A listener's limits for unknown peers, and for one peer."""

    max_visitors: int = 512  # strangers at once
    # In a row that had no place here: each is answered, and a stranger lands none.
    max_passed_chunks: int = 1 << 16
    # For a chunk to come whole, and as long again as its bytes take at that rate.
    payload_s: float = 60.0
    least_bytes_per_s: float = 8 << 10


LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Limits and habits of a listener."""

    integrity: Integrity = Integrity.CHECKSUM
    identity: Identity | None = None  # needed for Integrity.AEAD
    # Clusters whose nodes may send with checksums only, where others must seal; their landings name a sender.
    plain_from: frozenset[str] = frozenset()
    guard: Guard | None = None  # which certificates may send; None: all that the authority has signed
    max_chunk_bytes: int = 16 << 20
    max_connections: int = 4096
    buffer_bytes: int = 1 << 30  # for sealed, coded, repeated and RDMA's bytes of all; one address has a half
    codecs: Codec = field(default_factory=lambda: decodable(lossy=False))  # that senders may use; RAW = none
    rdma: RdmaDevices | None = None  # NICs that senders may write to by RDMA: into buffers, or directly
    arena_dirs: Sequence[str] = DEFAULT_ARENA_DIRS  # where arenas of senders on this host may lie; () = TCP only
    tcp: TcpOptions = field(default_factory=TcpOptions)
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        if not LEAST_CHUNK_LIMIT <= self.max_chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"max_chunk_bytes {self.max_chunk_bytes}: {LEAST_CHUNK_LIMIT} to {MAX_CHUNK_BYTES}")
        if self.buffer_bytes < (least := self._least_buffer_bytes):
            raise ValueError(
                f"buffer_bytes {self.buffer_bytes}: at least {least}, for max_chunk_bytes {self.max_chunk_bytes}"
            )
        if self.integrity is Integrity.AEAD and self.identity is None:
            raise ValueError(f"integrity {self.integrity} needs an identity")
        if self.plain_from and self.integrity is not Integrity.AEAD:
            raise ValueError(f"plain_from: only with integrity {Integrity.AEAD}")

    @property
    def weaker(self) -> Integrity | None:
        """What some senders may use instead of `integrity`."""
        return Integrity.CHECKSUM if self.plain_from else None

    @property
    def spare_buffer_bytes(self) -> int:
        """The part of `buffer_bytes` that rails leave to chunks: those come and go, rails stay."""
        return max(self.buffer_bytes // PART_OF_CHUNKS, self._least_buffer_bytes)

    @property
    def _least_buffer_bytes(self) -> int:
        return CHUNKS_OF_BUFFERS * self.max_chunk_bytes

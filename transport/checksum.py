"""xxh3_64 over a chunk: cheap enough (28 GB/s a core) to be on by default.

The seed binds the digest to the transfer and to the place inside it, so that a stale chunk, one of another transfer or
one put in the wrong place does not pass for the right one.
"""

from collections.abc import Iterable
from enum import StrEnum

import xxhash


class Integrity(StrEnum):
    """How chunks are protected on the way."""

    NONE = "none"  # TCP's own checksum only
    CHECKSUM = "xxh3"  # against faults, not against people
    AEAD = "aes-128-gcm"  # encrypted and authenticated


def transfer_seed(transfer_id: str, nonce: bytes) -> int:
    """What a chunk's digest is bound to besides its bytes and its offset."""
    return xxhash.xxh3_64_intdigest(nonce + transfer_id.encode())


def digest(views: Iterable[memoryview], seed: int, offset: int) -> int:
    """The checksum of a chunk that lies in `views` and belongs at `offset`."""
    views = list(views)
    bound = (seed + offset * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0], bound)
    state = xxhash.xxh3_64(seed=bound)
    for view in views:
        state.update(view)
    return state.intdigest()

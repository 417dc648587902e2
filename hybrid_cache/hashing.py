"""Identity of cached blocks: a SHA-256 chain over tokens, equal in every process and datacenter.

    root = SHA256("prfaas.blocks" | salt)
    h[0] = SHA256(root | tokens of block 0),  h[i] = SHA256(h[i-1] | tokens of block i)

A token is a little-endian uint32. The salt carries model fingerprint and namespace: equal prompts of two namespaces have
unrelated chains. There is no seed; finding a collision means breaking SHA-256.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

import numpy as np
from numpy.typing import NDArray

HASH_BYTES: Final = 32
MAX_TOKEN: Final = 2**32 - 1
NAMESPACE: Final = "prfaas-"
"""What namespaces begin with: a cache salt of an engine that does not is somebody else's."""

Tokens = Sequence[int] | NDArray[np.integer]


def block_hashes(tokens: Tokens, block_size: int, salt: bytes, parent: bytes = b"") -> list[bytes]:
    """Hashes of the full blocks of `tokens`, HASH_BYTES each. `parent` continues the chain of an earlier prefix."""
    if block_size <= 0:
        raise ValueError(f"block_size must be positive, not {block_size}")
    data = token_bytes(tokens)
    step = 4 * block_size
    # Copying an empty hasher is cheaper than looking the algorithm up for each block.
    fresh = sha256().copy
    previous = parent or chain_root(salt)
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        hasher = fresh()
        hasher.update(previous + data[start : start + step])
        previous = hasher.digest()
        hashes.append(previous)
    return hashes


def chain_root(salt: bytes) -> bytes:
    """What the first block's hash is chained to."""
    return sha256(b"prfaas.blocks" + salt).digest()


def tokens_digest(tokens: Tokens, salt: bytes) -> bytes:
    """Identity of a whole token sequence, its length and salt included (32 bytes)."""
    return sha256(digest_root(salt) + token_bytes(tokens)).digest()


def digest_root(salt: bytes) -> bytes:
    """What the digest of a token sequence begins with."""
    return sha256(b"prfaas.tokens" + salt).digest()


def model_salt(fingerprint: str) -> bytes:
    """What block hashes of prompts for a model start from; equal at every gateway and node."""
    return sha256(f"\0{fingerprint}".encode()).digest()


def namespaced(salt: bytes, namespace: str) -> bytes:
    """What those of a namespace start from: no block of it is ever one of another's. That of "" is everybody's, `salt`."""
    return sha256(b"prfaas.namespace" + salt + namespace.encode()).digest() if namespace else salt


def split_hashes(data: bytes) -> list[bytes]:
    """Hashes out of their concatenation, as messages carry them."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are no sequence of {HASH_BYTES}-byte hashes")
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]


def token_bytes(tokens: Tokens) -> bytes:
    """Tokens as they are hashed. Raises ValueError for what are none."""
    values = np.asarray(tokens)
    if values.size == 0:
        return b""
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError("tokens must be a flat sequence of integers")
    if values.dtype != np.dtype("<u4"):
        if int(values.min()) < 0 or int(values.max()) > MAX_TOKEN:
            raise ValueError("tokens must fit into 32 bits")
        values = values.astype("<u4")
    return values.tobytes()

"""Identity of cached blocks: a SHA-256 chain over tokens, equal in every process and datacenter.

    root = SHA256("prfaas.blocks" | salt)
    h[0] = SHA256(root | tokens of block 0 | insets),  h[i] = SHA256(h[i-1] | tokens of block i | insets)

A token is a little-endian uint32. The salt carries model fingerprint and namespace: equal prompts of two namespaces have
unrelated chains. There is no seed; finding a collision means breaking SHA-256.

An inset is a part of a prompt that is not text, such as an image; placeholder tokens hold its place. Equal tokens with
another image are another prompt. A block has the mark of each inset that begins in it, where in the block and what: so
one that has any is longer than every block of text, and all that follow it in the chain are named by it, too. How long
an inset is follows from what it is, as for vLLM's own hashes.
"""

import struct
from bisect import bisect_left
from collections.abc import Sequence
from hashlib import sha256
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

HASH_BYTES: Final = 32
MAX_TOKEN: Final = 2**32 - 1
NAMESPACE: Final = "prfaas-"
"""The prefix of our namespaces: an engine's cache salt without it is not ours."""
MEDIUM: Final = "prfaas-medium-"
"""The prefix of inset names that follow from their contents. A client's own name never has it."""

Tokens = Sequence[int] | NDArray[np.integer]

_PLACE: Final = struct.Struct("<Q")
_BEGINNING: Final = np.dtype("<u8")  # of a hash: two that differ hardly ever begin alike
_HASH: Final = np.dtype((np.void, HASH_BYTES))
_start: Final = itemgetter(0)


class Inset(NamedTuple):
    """An inset: the place of its first placeholder, and its content's name, equal for equal content."""

    start: int
    name: str


def block_hashes(
    tokens: Tokens, block_size: int, salt: bytes, parent: bytes = b"", insets: Sequence[Inset] = ()
) -> list[bytes]:
    """Hashes of the full blocks of `tokens`, HASH_BYTES each. `parent` continues the chain of an earlier prefix.

    `insets` are in the order of their places, which count from the first of `tokens`.
    """
    if block_size <= 0:
        raise ValueError(f"block_size must be positive, not {block_size}")
    data = token_bytes(tokens)
    step = 4 * block_size
    # Copying an empty hasher is cheaper than looking the algorithm up for each block.
    fresh = sha256().copy
    previous = parent or chain_root(salt)
    blocks = {inset.start // block_size for inset in insets}
    marked = {block: marks(insets, block * block_size, block_size) for block in blocks}
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        hasher = fresh()
        hasher.update(previous + data[start : start + step])
        if marked and (mark := marked.get(start // step)):
            hasher.update(mark)
        previous = hasher.digest()
        hashes.append(previous)
    return hashes


def marks(insets: Sequence[Inset], start: int, num_tokens: int) -> bytes:
    """The marks of the insets that begin in [start, start + num_tokens): their places in it and their names."""
    first = bisect_left(insets, start, key=_start)
    within = insets[first : bisect_left(insets, start + num_tokens, first, key=_start)]
    return b"".join(_PLACE.pack(inset.start - start) + sha256(inset.name.encode()).digest() for inset in within)


def chain_root(salt: bytes) -> bytes:
    """The parent of the first block's hash."""
    return sha256(b"prfaas.blocks" + salt).digest()


def tokens_digest(tokens: Tokens, salt: bytes, insets: Sequence[Inset] = ()) -> bytes:
    """Identity of a whole token sequence, its length, salt and insets included (32 bytes)."""
    return with_insets(sha256(digest_root(salt) + token_bytes(tokens)).digest(), insets)


def with_insets(digest: bytes, insets: Sequence[Inset]) -> bytes:
    """The digest of a prompt whose tokens have `digest`, with `insets` among them."""
    if not insets:
        return digest
    return sha256(b"prfaas.insets" + digest + marks(insets, 0, MAX_TOKEN)).digest()


def digest_root(salt: bytes) -> bytes:
    """The start of the digest of a token sequence."""
    return sha256(b"prfaas.tokens" + salt).digest()


def model_salt(fingerprint: str) -> bytes:
    """The root of a model's block hashes; equal at every gateway and node."""
    return sha256(f"\0{fingerprint}".encode()).digest()


def namespaced(salt: bytes, namespace: str) -> bytes:
    """The root of a namespace's block hashes: namespaces never share a block. The namespace "" is common to all:
    `salt`."""
    return sha256(b"prfaas.namespace" + salt + namespace.encode()).digest() if namespace else salt


def namespace_of(key: bytes, group: str, cache_salt: str) -> str:
    """Whose blocks those of a prompt are; "" is everybody's: no group, and no salt of the client's.

    `key` keeps others from guessing it (`hybrid_cache.hashing.name_secrets`). In characters that vLLM takes as a cache's salt,
    and at a length that it takes, whatever a client writes.
    """
    if not (group or cache_salt):
        return ""
    said = f"{group}/{cache_salt}".encode("utf-8", "surrogatepass")
    return NAMESPACE + sha256(key + said).hexdigest()


def split_hashes(data: bytes) -> list[bytes]:
    """Hashes out of their concatenation, as messages carry them."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are not a sequence of {HASH_BYTES}-byte hashes")
    hashes: list[bytes] = np.frombuffer(data, _HASH).tolist() if data else []
    return hashes


def have_repeats(data: bytes) -> bool:
    """Whether any of the hashes in such a concatenation appears twice."""
    beginnings = np.sort(np.frombuffer(data, _BEGINNING)[:: HASH_BYTES // _BEGINNING.itemsize]) if data else np.empty(0)
    if not (beginnings[1:] == beginnings[:-1]).any():
        return False
    return len(set(split_hashes(data))) < len(data) // HASH_BYTES


def token_bytes(tokens: Tokens) -> bytes:
    """Tokens as bytes for hashing. Raises ValueError for values that are no tokens."""
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

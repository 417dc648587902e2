"""Hashes prompts that share a beginning with earlier ones: known hashes are looked up, so cost follows the new part.

Tokens are taken in chunks of whole blocks. The key of a chunk is the chunk before it and a fast hash of its bytes. Then
all bytes are compared, so a collision does no harm.
"""

from collections.abc import Callable, Hashable, Sequence
from hashlib import sha256
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from hybrid_cache.hashing.block_hash import (
    Inset,
    Tokens,
    block_hashes,
    chain_root,
    digest_root,
    marks,
    token_bytes,
    with_insets,
)

CHUNK_BLOCKS: Final = 64
DIGEST_BYTES: Final = 256  # of a digest that can be gone on with
HASH_BYTES: Final = 72  # of a block's hash, as an object in a list
TOKEN_BYTES: Final = 4


class Chain(NamedTuple):
    """The names of a prompt: hashes of the full blocks of all but its last token, and the digest of all its tokens."""

    hashes: list[bytes]
    digest: bytes


class _Chunk(NamedTuple):
    number: int
    data: bytes  # its tokens, and the marks of what begins among them
    hashes: Sequence[bytes]
    digesting: Any  # the digest up to and including this chunk, to be copied


class ChainMemory(Protocol):
    """Keeps values by tenant and key, as long as there is room. Shared by threads."""

    def get(self, tenant: bytes, key: Hashable) -> Any: ...
    def put(self, tenant: bytes, key: Hashable, value: Any, num_bytes: int) -> None: ...


class ChainCache:
    """Chunks of prompts seen before, each tenant's own, in a memory that may hold other things, too.

    `fast_hash` says where to look. Python's own hash of so many bytes takes four times as long as xxh3.
    """

    def __init__(self, memory: ChainMemory, fast_hash: Callable[[bytes], int] = xxh3_64_intdigest) -> None:
        self.hits = 0
        self._fast_hash = fast_hash
        self._memory = memory
        self._numbers = count(1)

    def chain(
        self, tokens: Tokens, block_size: int, salt: bytes, tenant: bytes = b"", insets: Sequence[Inset] = ()
    ) -> Chain:
        """`block_hashes(tokens[:-1], …)` and `tokens_digest(tokens, …)`."""
        data = token_bytes(tokens)
        step = CHUNK_BLOCKS * block_size * TOKEN_BYTES
        before: Any = (block_size, salt)
        parent = chain_root(salt)
        digesting, hashes, start = sha256(digest_root(salt)), list[bytes](), 0
        while start + step < len(data):  # the last token is in no block
            part = data[start : start + step]
            within = _from(insets, start // TOKEN_BYTES)
            whole = part + marks(within, 0, step // TOKEN_BYTES) if within else part
            key = (before, self._fast_hash(whole))
            chunk: _Chunk | None = self._memory.get(tenant, key)
            if chunk is None or chunk.data != whole:
                chunk = self._new(part, whole, parent, digesting, block_size, salt, within)
                self._memory.put(tenant, key, chunk, len(whole) + DIGEST_BYTES + CHUNK_BLOCKS * HASH_BYTES)
            else:
                self.hits += 1
            hashes += chunk.hashes
            before, parent, digesting = chunk.number, chunk.hashes[-1], chunk.digesting
            start += step
        rest = data[start:]
        digesting = digesting.copy()
        digesting.update(rest)
        last = np.frombuffer(rest, np.dtype("<u4"))[:-1]
        hashes += block_hashes(last, block_size, salt, parent, _from(insets, start // TOKEN_BYTES))
        return Chain(hashes, with_insets(digesting.digest(), insets))

    def _new(
        self,
        part: bytes,
        whole: bytes,
        parent: bytes,
        digesting: Any,
        block_size: int,
        salt: bytes,
        insets: Sequence[Inset],
    ) -> _Chunk:
        digesting = digesting.copy()
        digesting.update(part)
        hashes = block_hashes(np.frombuffer(part, np.dtype("<u4")), block_size, salt, parent, insets)
        return _Chunk(next(self._numbers), whole, hashes, digesting)


def _from(insets: Sequence[Inset], start: int) -> list[Inset]:
    """The insets that begin at `start` or later, with places counted from there."""
    return [Inset(inset.start - start, inset.name) for inset in insets if inset.start >= start]

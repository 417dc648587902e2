"""Hashes of prompts that begin as earlier ones did: what was hashed then is looked up, so cost follows what is new.

Tokens are taken in chunks of whole blocks. A chunk is known by the chunk before it and by its own bytes, all of which are
compared: nothing rests on a hash that could collide.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import count
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np

from hybrid_cache.hashing import Tokens, block_hashes, chain_root, digest_root, token_bytes

CHUNK_BLOCKS: Final = 64
MAX_TOKENS: Final = 8_000_000  # remembered; 4.5 bytes each with blocks of 64
TOKEN_BYTES: Final = 4


class Chain(NamedTuple):
    """What names a prompt: hashes of the full blocks of all but its last token, and the digest of all its tokens."""

    hashes: list[bytes]
    digest: bytes


class _Chunk(NamedTuple):
    number: int
    hashes: Sequence[bytes]
    digesting: Any  # the digest up to and including this chunk, to be copied


class ChainCache:
    """Chunks of prompts seen before, least recently used first out. Shared by threads."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self.max_tokens = max_tokens
        self.hits = 0
        self._held_bytes = 0
        self._chunks: OrderedDict[tuple[Any, bytes], _Chunk] = OrderedDict()
        self._numbers = count(1)
        self._lock = Lock()

    def chain(self, tokens: Tokens, block_size: int, salt: bytes) -> Chain:
        """`block_hashes(tokens[:-1], …)` and `tokens_digest(tokens, salt)`."""
        data = token_bytes(tokens)
        step = CHUNK_BLOCKS * block_size * TOKEN_BYTES
        before: Any = (block_size, salt)
        parent = chain_root(salt)
        digesting, hashes, start = sha256(digest_root(salt)), list[bytes](), 0
        while start + step < len(data):  # the last token is in no block
            key = (before, data[start : start + step])
            chunk = self._get(key) or self._put(key, parent, digesting, block_size, salt)
            hashes += chunk.hashes
            before, parent, digesting = chunk.number, chunk.hashes[-1], chunk.digesting
            start += step
        rest = data[start:]
        digesting = digesting.copy()
        digesting.update(rest)
        hashes += block_hashes(np.frombuffer(rest, np.dtype("<u4"))[:-1], block_size, salt, parent)
        return Chain(hashes, digesting.digest())

    def _get(self, key: tuple[Any, bytes]) -> _Chunk | None:
        with self._lock:
            if (chunk := self._chunks.get(key)) is not None:
                self.hits += 1
                self._chunks.move_to_end(key)
            return chunk

    def _put(self, key: tuple[Any, bytes], parent: bytes, digesting: Any, block_size: int, salt: bytes) -> _Chunk:
        digesting = digesting.copy()
        digesting.update(key[1])
        hashes = block_hashes(np.frombuffer(key[1], np.dtype("<u4")), block_size, salt, parent)
        with self._lock:
            chunk = self._chunks[key] = _Chunk(next(self._numbers), hashes, digesting)
            self._held_bytes += len(key[1])
            while self._held_bytes > self.max_tokens * TOKEN_BYTES:
                (_, data), _ = self._chunks.popitem(last=False)
                self._held_bytes -= len(data)
        return chunk

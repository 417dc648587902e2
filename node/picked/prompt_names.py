"""Names of a picked prompt's blocks, out of the tokens that the engine says it stands for: those that a gateway would give it.

Agents have no tokenizer. A wrong reading costs a transfer and never a token: the engine compares the digest of the prompt
that it reads with that of the reservation.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from hybrid_cache.hashing.block_hash import block_hashes, namespace_of, namespaced, tokens_digest
from hybrid_cache.hashing.name_secrets import NameSecrets

LONG_TOKENS: Final = 16_384  # beyond it, hashing leaves the event loop


@dataclass(frozen=True, slots=True)
class PromptNames:
    """A prompt's names: `hashes` of the full blocks of all but its last token, one after the other, and the digest of all."""

    num_tokens: int
    hashes: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """What names start from: `salt` in chains, `namespace` in engines that keep caches of their own ("": everybody's)."""

    salt: bytes
    namespace: str


def owner_of(secrets: NameSecrets, layout_fingerprint: str, cache_salt: str) -> BlockOwner:
    """Of a prompt with a client's `cache_salt`, "" without: as the gateway names those of tenants without a group."""
    namespace = namespace_of(secrets.namespace_keys()[0], "", cache_salt)
    return BlockOwner(namespaced(secrets.model_salts(layout_fingerprint)[0], namespace), namespace)


async def names_of(tokens: list[int], block_size: int, salt: bytes) -> PromptNames:
    """Long prompts are hashed in a thread. Raises ValueError for values that are no tokens."""
    if len(tokens) > LONG_TOKENS:
        return await asyncio.to_thread(_names_of, tokens, block_size, salt)
    return _names_of(tokens, block_size, salt)


def _names_of(tokens: list[int], block_size: int, salt: bytes) -> PromptNames:
    hashes = block_hashes(tokens[:-1], block_size, salt)
    return PromptNames(len(tokens), b"".join(hashes), tokens_digest(tokens, salt))

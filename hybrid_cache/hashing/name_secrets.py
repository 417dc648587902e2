"""The secrets of a deployment that names of blocks follow from: without one, a stranger can neither guess nor check a name.

A file has a secret per line, 64 hexadecimal digits. The first makes new names; the one below it is still looked for, so that
a rotation leaves caches useful. `none` stands for names without a secret, as they were before there was a file:

    9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08    # a comment
    none

A secret enters where a model's chains of hashes begin, and nowhere else: a prompt costs no more with it than without.
"""

import hmac
from dataclasses import dataclass
from typing import Final, Self

from hybrid_cache.hashing.block_hash import model_salt

SECRET_BYTES: Final = 32
MAX_SECRETS: Final = 2  # each has every prompt hashed, and looked up
NONE: Final = "none"


@dataclass(frozen=True, slots=True)
class NameSecrets:
    """The newest first; b"" is that of names without one."""

    secrets: tuple[bytes, ...] = (b"",)

    @classmethod
    def of(cls, text: str) -> Self:
        """Those of a file. Raises ValueError, which tells nothing of them."""
        words = [word for line in text.splitlines() if (word := line.partition("#")[0].strip())]
        if not 0 < len(words) <= MAX_SECRETS:
            raise ValueError(f"it has {len(words)} secrets: one, or a new one and the one before it")
        secrets = tuple(map(_secret, words))
        if len(set(secrets)) < len(secrets):
            raise ValueError("it has the same secret twice")
        return cls(secrets)

    def model_salts(self, layout_fingerprint: str) -> tuple[bytes, ...]:
        """What the chains of a model's blocks start from, by each secret."""
        plain = model_salt(layout_fingerprint)
        return tuple(_derived(secret, b"prfaas.names" + plain) if secret else plain for secret in self.secrets)

    def namespace_keys(self) -> tuple[bytes, ...]:
        """What keys the names of tenants' namespaces, by each secret; b"" without one."""
        return tuple(_derived(secret, b"prfaas.namespaces") if secret else b"" for secret in self.secrets)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """By which two machines find out whether they have the same; of the secrets they tell nothing."""
        return tuple(_derived(secret, b"prfaas.fingerprint").hex()[:16] if secret else NONE for secret in self.secrets)


UNKEYED: Final = NameSecrets()


def _secret(word: str) -> bytes:
    if word == NONE:
        return b""
    try:
        secret = bytes.fromhex(word)
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a line is neither {2 * SECRET_BYTES} hexadecimal digits nor {NONE!r}")
    return secret


def _derived(secret: bytes, what: bytes) -> bytes:
    return hmac.digest(secret, what, "sha256")

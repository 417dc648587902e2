"""How a slot of the disk tier says whose bytes it has, and what finds out that they are not those.

    checked   | magic, group, length, block hash, checksum of the bytes, checksum of the header | bytes |
    sealed    | magic, group, length, block hash, tag, boot, number, checksum of the header | bytes, encrypted |

Sealed bytes are AES-256-GCM under a key that follows from the tier's secret and a random name of this opening of the tier
(`boot`). A nonce is the number of the slot's writing since then, so that none comes twice under one key. The layout, and what
the header says of the block, are authenticated with the bytes: a slot that was moved, swapped or changed does not open.
"""

import hmac
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from hybrid_cache.tiers.files import Buffer

HEADER_BYTES: Final = 128
CHECKED: Final = b"pfKV"
SEALED: Final = b"pfKS"
ABOUT: Final = struct.Struct("<4sIQ32s")  # which block it is, in every kind
CHECK_BYTES: Final = 8
TAG_BYTES: Final = 16
BOOT_BYTES: Final = 16
NUMBER: Final = struct.Struct("<Q")
SECRET_BYTES: Final = 32
PART_BYTES: Final = 512 << 10  # the cipher lets no other thread run meanwhile: some 0.3 ms
CORRUPT, UNAUTHENTIC = "corrupt", "unauthentic"

Put = Callable[[int, Sequence[Buffer]], None]  # bytes to an offset behind the header


class SlotBlock(NamedTuple):
    """Which block a slot has."""

    group: int
    length: int
    block_hash: bytes


class SlotFormat(Protocol):
    """What a slot looks like. Threads may read while one writes."""

    file_part: str
    """In the names of files, so that none is read by another format, or with another secret."""

    def write(self, block: SlotBlock, data: Sequence[memoryview], put: Put) -> bytes:
        """Puts the bytes; returns the header that makes them valid. Raises what `put` raises."""
        ...

    def listed(self, header: Buffer) -> SlotBlock | None:
        """The block that a header names; None: it is not whole, or of another format."""
        ...

    def opened(self, header: Buffer, parts: Sequence[memoryview]) -> str:
        """Makes what was read of a slot whose header is whole what was written. Not "": why that cannot be."""
        ...


class CheckedSlots:
    """Plain bytes, with a checksum that finds faults."""

    file_part: str = ""

    def write(self, block: SlotBlock, data: Sequence[memoryview], put: Put) -> bytes:
        put(0, data)
        return _header(CHECKED, block, checksum(data))

    def listed(self, header: Buffer) -> SlotBlock | None:
        return _listed(CHECKED, header, TAG_BYTES)

    def opened(self, header: Buffer, parts: Sequence[memoryview]) -> str:
        written = bytes(header[ABOUT.size : ABOUT.size + TAG_BYTES])
        return "" if written == checksum(parts) else CORRUPT


class SealedSlots:
    """Encrypted bytes, with a tag that finds faults and forgeries."""

    def __init__(self, secret: bytes, layout_fingerprint: str, boot: bytes | None = None) -> None:
        """Under a secret of SECRET_BYTES, for blocks of one layout. `boot` is random and comes once."""
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
        self.file_part = "." + hmac.digest(secret, b"prfaas.ssd.name", "sha256").hex()[:16]
        self._secret = secret
        self._layout = layout_fingerprint.encode()
        self._boot = secrets.token_bytes(BOOT_BYTES) if boot is None else boot
        self._key = self._key_of(self._boot)
        self._written = 0

    def write(self, block: SlotBlock, data: Sequence[memoryview], put: Put) -> bytes:
        self._written += 1
        cipher = Cipher(self._key, GCM(_nonce(self._written))).encryptor()
        cipher.authenticate_additional_data(self._named(block))
        sealed, at = np.empty(PART_BYTES, np.uint8).data, 0
        for part in _in_parts(data):
            cipher.update_into(part, sealed[: part.nbytes])
            put(at, [sealed[: part.nbytes]])
            at += part.nbytes
        cipher.finalize()
        return _header(SEALED, block, cipher.tag + self._boot + NUMBER.pack(self._written))

    def listed(self, header: Buffer) -> SlotBlock | None:
        return _listed(SEALED, header, TAG_BYTES + BOOT_BYTES + NUMBER.size)

    def opened(self, header: Buffer, parts: Sequence[memoryview]) -> str:
        block = self.listed(header)
        if block is None:
            return CORRUPT
        said = bytes(header[ABOUT.size :])
        tag, boot = said[:TAG_BYTES], said[TAG_BYTES : TAG_BYTES + BOOT_BYTES]
        (number,) = NUMBER.unpack_from(said, TAG_BYTES + BOOT_BYTES)
        cipher = Cipher(self._key_of(boot), GCM(_nonce(number))).decryptor()
        cipher.authenticate_additional_data(self._named(block))
        for part in _in_parts(parts):
            cipher.update_into(part, part)
        try:
            cipher.finalize_with_tag(tag)
        except InvalidTag:
            return UNAUTHENTIC
        return ""

    def _key_of(self, boot: bytes) -> AES:
        return AES(hmac.digest(self._secret, b"prfaas.ssd.key" + boot, "sha256"))

    def _named(self, block: SlotBlock) -> bytes:
        return ABOUT.pack(SEALED, *block) + self._layout


def checksum(parts: Sequence[Buffer]) -> bytes:
    """Of bytes that lie in parts, 16 bytes."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _header(magic: bytes, block: SlotBlock, more: bytes) -> bytes:
    said = ABOUT.pack(magic, *block) + more
    return (said + xxhash.xxh3_64_digest(said)).ljust(HEADER_BYTES, b"\0")


def _listed(magic: bytes, header: Buffer, more: int) -> SlotBlock | None:
    found, *block = ABOUT.unpack_from(header)
    size = ABOUT.size + more
    check = bytes(header[size : size + CHECK_BYTES])
    return SlotBlock(*block) if found == magic and check == xxhash.xxh3_64_digest(bytes(header[:size])) else None


def _in_parts(views: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in views:
        flat = view.cast("B") if view.nbytes else view
        yield from (flat[at : at + PART_BYTES] for at in range(0, flat.nbytes, PART_BYTES))


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")

"""AES-128-GCM over everything that a connection sends after its greeting.

    connection key = HMAC(session secret, direction, transcript)                     seals all frames but Chunk
    chunk key      = HMAC(session secret, transfer secret, transfer id, transcript)  seals the payloads, header as
    associated data

The transcript is a digest of both greetings (see connection): with keys that depend on it, a change of a greeting on
the way has cut the connection. The nonce of a frame is its number in its direction: under one key no number comes
twice, and a resent chunk takes a new one. So a frame that was replayed or reordered does not open, nor does one after a
dropped frame. ssl sockets for the data would cost a CPU second per GB more.
"""

import hmac
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from transport.errors import RemoteProtocolError
from transport.wire.frames import Code

TAG_BYTES: Final = 16
KEY_BYTES: Final = 16
# Sealed and sent, or received and opened, in one go: small enough for the processor's cache and the socket's buffer.
SEALED_PART_BYTES: Final = 512 << 10
# A call for each smaller view would cost more than copying such views together.
SMALL_VIEW_BYTES: Final = 32 << 10


class Seal:
    """AES-128-GCM under one key; the caller never uses a number twice."""

    __slots__ = ("_aead", "_key")

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._key = AES(key)

    def seal(self, number: int, plain: bytes, header: bytes) -> bytes:
        return self._aead.encrypt(_nonce(number), plain, header)

    def open(self, number: int, sealed: bytes, header: bytes) -> bytes:
        try:
            return self._aead.decrypt(_nonce(number), sealed, header)
        except InvalidTag as exc:
            raise RemoteProtocolError(f"frame {number} is not authentic", Code.SEAL) from exc

    def sealing(self, number: int, header: bytes) -> "Sealing":
        return Sealing(self._key, number, header)

    def opening(self, number: int, header: bytes) -> "Opening":
        return Opening(self._key, number, header)


class Sealing:
    """One payload on its way out, part by part: what was sealed is sent while it is still in the processor's cache."""

    __slots__ = ("_stream",)

    def __init__(self, key: AES, number: int, header: bytes) -> None:
        self._stream = Cipher(key, GCM(_nonce(number))).encryptor()
        self._stream.authenticate_additional_data(header)

    def update(self, plain: memoryview, out: memoryview) -> None:
        """`out` is as long as `plain`."""
        self._stream.update_into(plain, out)

    def tag(self) -> bytes:
        """The tag after the last part."""
        self._stream.finalize()
        return self._stream.tag


class Opening:
    """The reverse of Sealing. Bytes from update() are not authentic until verify() has returned."""

    __slots__ = ("_number", "_stream")

    def __init__(self, key: AES, number: int, header: bytes) -> None:
        self._number = number
        self._stream = Cipher(key, GCM(_nonce(number))).decryptor()
        self._stream.authenticate_additional_data(header)

    def update(self, sealed: memoryview, out: memoryview) -> None:
        """`out` is as long as `sealed`."""
        self._stream.update_into(sealed, out)

    def verify(self, tag: bytes) -> None:
        """Raises RemoteProtocolError."""
        try:
            self._stream.finalize_with_tag(tag)
        except InvalidTag as exc:
            raise RemoteProtocolError(f"chunk in frame {self._number} is not authentic", Code.SEAL) from exc


def connection_seal(session_secret: bytes, transcript: bytes, direction: str) -> Seal:
    return Seal(_derive(session_secret, b"connection", direction.encode(), transcript))


def chunk_seal(session_secret: bytes, transcript: bytes, transfer_id: str, transfer_secret: bytes) -> Seal:
    return Seal(_derive(session_secret, b"chunk", transfer_secret, transfer_id.encode(), transcript))


def _derive(secret: bytes, *parts: bytes) -> bytes:
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(secret, message, "sha256")[:KEY_BYTES]


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")

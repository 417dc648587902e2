"""The greeting of both ends and its results: a version, limits, and keys that only they have."""

import hashlib
from collections.abc import Callable
from typing import Final

from transport.errors import GreetingRefused, LocalProtocolError, RemoteProtocolError
from transport.wire.checksum import Integrity
from transport.wire.frames import LEAST_CHUNK_LIMIT, VERSION_MAX, VERSION_MIN, Code, Hello, Welcome
from transport.wire.seal import Seal, connection_seal

NONCE_BYTES: Final = 16
SecretOf = Callable[[bytes], bytes | None]


class Greeting:
    """One end's part of it: what it said and heard, and what both agree on then."""

    def __init__(
        self, integrity: str, nonce: bytes, session: bytes, secret_of: SecretOf | None, weaker: str | None = None
    ) -> None:
        """A receiver lets a sender choose `weaker` instead."""
        self.session = session  # the sender's choice
        self.secret = b""  # of the session, once the other end has named it or agreed to it
        self._integrity = integrity
        self._weaker = weaker
        self._nonce = nonce
        self._secret_of = secret_of
        self._words = hashlib.sha256()

    def note(self, words: bytes | memoryview) -> None:
        """A greeting was said, or heard: in the same order at both ends."""
        self._words.update(words)

    def transcript(self) -> bytes:
        """The digest of both greetings: unique, and the same at both ends or not at all."""
        return self._words.digest()

    def seals(self, mine: str, theirs: str) -> tuple[Seal | None, Seal | None]:
        """Keys for both directions. An end that saw other greetings derives other keys."""
        if self._integrity != Integrity.AEAD:
            return None, None
        transcript = self.transcript()
        return connection_seal(self.secret, transcript, mine), connection_seal(self.secret, transcript, theirs)

    def hello(self) -> Hello:
        return Hello(
            version_min=VERSION_MIN,
            version_max=VERSION_MAX,
            integrity=self._integrity,
            nonce=self._nonce,
            session=self.session,
        )

    def answer(self, hello: Hello, max_chunk_bytes: int, codecs: int) -> Welcome:
        """Raises GreetingRefused."""
        self.session = hello.session
        version = min(hello.version_max, VERSION_MAX)
        if version < max(hello.version_min, VERSION_MIN):
            raise GreetingRefused(Code.VERSION, f"we speak {VERSION_MIN} to {VERSION_MAX}")
        if self._weaker is not None and hello.integrity == self._weaker:
            self._integrity = self._weaker
        if hello.integrity != self._integrity:
            raise GreetingRefused(Code.INTEGRITY_MODE, f"this listener wants {self._integrity}")
        if len(hello.nonce) != NONCE_BYTES:
            raise GreetingRefused(Code.PROTOCOL, "bad nonce")
        if not self._knows_session():
            raise GreetingRefused(Code.SESSION, "no such session")
        return Welcome(
            version=version,
            integrity=self._integrity,
            nonce=self._nonce,
            max_chunk_bytes=max_chunk_bytes,
            codecs=codecs,
        )

    def accept(self, welcome: Welcome) -> None:
        """Raises RemoteProtocolError, LocalProtocolError."""
        if not VERSION_MIN <= welcome.version <= VERSION_MAX or welcome.integrity != self._integrity:
            raise RemoteProtocolError(f"cannot use version {welcome.version}, {welcome.integrity}")
        if len(welcome.nonce) != NONCE_BYTES:
            raise RemoteProtocolError("bad nonce")
        if welcome.max_chunk_bytes < LEAST_CHUNK_LIMIT:
            raise RemoteProtocolError(f"chunks of at most {welcome.max_chunk_bytes} bytes")
        if not self._knows_session():
            raise LocalProtocolError("sealed chunks need a session")

    def _knows_session(self) -> bool:
        """False when it is not known (any more)."""
        if self._integrity != Integrity.AEAD:
            return True
        self.secret = (self._secret_of and self._secret_of(self.session)) or b""
        return bool(self.secret)

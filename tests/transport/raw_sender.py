"""A sender that says whatever a test wants it to say."""

import socket
from typing import Self

from tests.transport.helpers import PATIENCE_S, SECRET
from transport.errors import ConnectionRefused
from transport.path.tcp import parse_address
from transport.wire.checksum import Integrity
from transport.wire.connection import Connection, ConnectionRole
from transport.wire.frames import Accept, Chunk, CodedChunk, Frame, Open, Pong, Refuse, Welcome
from transport.wire.manifest import Manifest, proof_of
from transport.wire.session import Session

MAX_CHUNK_BYTES = 16 << 20


class RawSender:
    """One connection to a listener. Its frames are numbered and sealed as they should be, unless they are given as bytes."""

    def __init__(
        self,
        sock: socket.socket,
        session: Session | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        claimed: bytes = b"",
    ) -> None:
        """`claimed` is a session that it names without its keys."""
        self.sock = sock
        sock.settimeout(PATIENCE_S)
        self.connection = Connection(
            ConnectionRole.SENDER,
            integrity=Integrity.CHECKSUM if session is None else Integrity.AEAD,
            nonce=b"n" * 16,
            now=0.0,
            max_chunk_bytes=max_chunk_bytes,
            session=claimed if session is None else session.id,
            session_secret=None if session is None else lambda _: session.secret,
        )
        self.sock.sendall(self.connection.data_to_send())

    @classmethod
    def to(cls, address: str, session: Session | None = None, claimed: bytes = b"") -> Self:
        sender = cls(socket.create_connection(parse_address(address), timeout=PATIENCE_S), session, claimed=claimed)
        try:
            sender.hear(Welcome)
        except BaseException:
            sender.sock.close()
            raise
        return sender

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()

    def say(self, *parts: Frame | bytes) -> None:
        """All in one write."""
        self.sock.sendall(b"".join(part if isinstance(part, bytes) else self.encoded(part) for part in parts))

    def encoded(self, frame: Frame) -> bytes:
        match frame:
            case Chunk():
                return self.connection.chunk_header(frame.slot, frame.offset, frame.length, sealed=frame.sealed)
            case CodedChunk():
                return self.connection.coded_header(frame)
            case _:
                return self.connection.send(frame)

    def opening(
        self,
        slot: int,
        transfer_id: str,
        sizes: list[int],
        secret: bytes = SECRET,
        arena_path: str = "",
        **more: object,
    ) -> Open:
        manifest = Manifest(sizes)
        return Open(
            slot=slot,
            transfer_id=transfer_id,
            proof=proof_of(secret, transfer_id, manifest.digest, self.connection.transcript),
            total_bytes=manifest.total_bytes,
            num_ranges=len(sizes),
            manifest_digest=manifest.digest,
            arena_path=arena_path,
            **more,  # type: ignore[arg-type]
        )

    def hear(self, *kinds: type[Frame]) -> Frame:
        """The next frame of one of these kinds. Raises ConnectionRefused for a Goodbye, EOFError, OSError."""
        while True:
            while (frame := self.connection.next_event()) is not None:
                if isinstance(frame, kinds):
                    return frame
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self.connection.receive_data(data, 0.0)

    def answer(self) -> Frame:
        return self.hear(Accept, Refuse)

    def told(self) -> ConnectionRefused:
        """Why the receiver ends the connection."""
        try:
            self.hear(Pong)
        except ConnectionRefused as exc:
            return exc
        raise AssertionError("not a Goodbye")

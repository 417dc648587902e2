"""The payload of one chunk after the other: from the socket straight into its place, or past it.

What came in the same read as the frame before it lies in the connection's buffer, and is copied from there. Sealed and
coded payloads pass through a buffer of ours, which is as long as the longest of them so far.
"""

import socket
import time
from enum import Enum, auto
from typing import Final

from transport.errors import PeerLost
from transport.path.shm import advance, copy, parts_of, pour
from transport.path.tcp import receive_some
from transport.receive.buffers import Buffers
from transport.receive.connection.replies import Replies
from transport.receive.options import Limits
from transport.receive.registry.landing import Claim
from transport.wire.checksum import DIGEST_BYTES, HASHED_PART_BYTES, Digest
from transport.wire.connection import BULK_BYTES, Connection
from transport.wire.seal import SEALED_PART_BYTES, SMALL_VIEW_BYTES, TAG_BYTES, Opening

SINK_BYTES: Final = 64 << 10  # what has no place is read past in pieces of this size
MAX_VIEWS: Final = 256  # of one read


class Filled(Enum):
    """The outcome of a chunk."""

    WHOLE = auto()
    WRONG = auto()  # not what was sent
    VOID = auto()  # the landing failed meanwhile: the rest of the payload is still to be read past


class Payload:
    """Reads payloads; used by the thread that reads the connection."""

    def __init__(
        self, sock: socket.socket, connection: Connection, replies: Replies, buffers: Buffers, limits: Limits
    ) -> None:
        self._limits = limits
        self._sock = sock
        self._connection = connection
        self._replies = replies
        self._buffers = buffers
        self._due = float("inf")

    def begins(self) -> None:
        """A payload comes: from now on it has its time."""
        limits = self._limits
        self._due = time.monotonic() + limits.payload_s + self._connection.payload_left / limits.least_bytes_per_s

    def fill(self, claim: Claim) -> Filled:
        """Unchecked."""
        connection, views = self._connection, list(claim.views)
        while connection.payload_buffered:
            advance(views, connection.take_payload(views[0]))
        while connection.payload_left:
            if claim.void:
                return Filled.VOID
            self._read(views)
        return Filled.WHOLE

    def fill_hashed(self, claim: Claim, seed: int, length: int) -> Filled:
        """Part by part into its place, each hashed while the processor's cache has it."""
        running = Digest(seed, claim.start)
        trailer = memoryview(bytearray(DIGEST_BYTES))
        left = length
        for part in parts_of(claim.views, HASHED_PART_BYTES):
            left -= sum(map(len, part))
            if not self._read_part(part if left else [*part, trailer], claim):
                return Filled.VOID
            running.update(part)
        return Filled.WHOLE if running.value() == int.from_bytes(trailer, "little") else Filled.WRONG

    def fill_sealed(self, claim: Claim, opening: Opening) -> Filled:
        """Part by part into a buffer of ours and from there, opened, into its place. Raises RemoteProtocolError when the
        payload is not authentic: its place counts as missing then.
        """
        connection, places = self._connection, list(claim.views)
        buffer = self._buffers.of("carried", SEALED_PART_BYTES + TAG_BYTES)
        while True:
            left = connection.payload_left
            last = left <= SEALED_PART_BYTES + TAG_BYTES
            part = buffer[: left if last else SEALED_PART_BYTES]
            if not self._read_part([part], claim):
                return Filled.VOID
            self._open_into(opening, part[:-TAG_BYTES] if last else part, places)
            if last:
                opening.verify(bytes(part[-TAG_BYTES:]))
                return Filled.WHOLE

    def whole(self) -> memoryview:
        """All that is left of it, in a buffer of ours: valid until the next one is read."""
        size = self._connection.payload_left
        payload = self._buffers.of("carried", size)[:size]
        self._read_past([payload])
        return payload

    def skip(self) -> None:
        """Reads past what is left of it."""
        while left := self._connection.payload_left:
            self._read_past([self._buffers.of("sink", SINK_BYTES)[: min(left, SINK_BYTES)]])

    def plain_of(self, size: int) -> memoryview:
        """Memory for what was opened or decoded. Not the sink: that may be a part of a chunk's place."""
        return self._buffers.of("plain", size)[:size]

    def sink_of(self, size: int) -> memoryview:
        """Memory for bytes that have no other place, at most one chunk long. Never waits: the caller may have a lock."""
        return self._buffers.of("sink", size, wait_s=0.0)

    def _open_into(self, opening: Opening, sealed: memoryview, places: list[memoryview]) -> None:
        """Into the first places, which are taken off the list."""
        if places and len(places[0]) < min(len(sealed), SMALL_VIEW_BYTES):
            plain = self.plain_of(len(sealed))
            opening.update(sealed, plain)
            pour(plain, places, copy)
        else:
            pour(sealed, places, opening.update)

    def _read_past(self, views: list[memoryview]) -> None:
        """Fills the views, whatever becomes of the landing."""
        while views:
            if self._connection.payload_buffered:
                advance(views, self._connection.take_payload(views[0]))
            else:
                self._read(views)

    def _read_part(self, part: list[memoryview], claim: Claim) -> bool:
        """False when the landing failed meanwhile."""
        rest = list(part)
        while rest:
            if claim.void:
                return False
            if self._connection.payload_buffered:
                advance(rest, self._connection.take_payload(rest[0]))
            else:
                self._read(rest)
        return True

    def _read(self, views: list[memoryview]) -> None:
        connection = self._connection
        left = connection.payload_left
        bulk = left > BULK_BYTES
        # Behind a small chunk there is likely another one: take what is there in the same call. Not behind a part of one:
        # what follows that is payload still.
        alone = bulk or len(views) > MAX_VIEWS or sum(map(len, views)) < left
        into = views if alone else [*views, connection.receive_buffer()]
        size = receive_some(self._sock, into, socket.MSG_WAITALL if bulk else 0)
        now = time.monotonic()
        if now > self._due:
            raise PeerLost("a chunk that came too slowly")
        if size is None:
            connection.on_timer(now)
            return
        if size == 0:
            raise PeerLost("the connection ended in mid-chunk")
        connection.payload_received(min(size, left), now)
        advance(views, min(size, left))
        if size > left:
            connection.received(size - left, now)
        if self._replies.are_late(now):
            self._replies.flush()

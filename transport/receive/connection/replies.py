"""The replies of a connection's receiving end, from any thread."""

import socket
import threading
import time
from contextlib import suppress
from typing import Final

from transport.errors import LocalProtocolError, PeerLost, RemoteProtocolError
from transport.path.tcp import hang_up, send_some, shut
from transport.wire.connection import Connection, ProtocolState
from transport.wire.frames import Ack, Frame

MAX_PENDING_ACKS: Final = 1000
ACK_DELAY_S: Final = 0.005  # while more comes in, slowly
# While there is more to read, acknowledgements wait for each other: one wakes the sender, which has enough to do then.
MAX_PENDING_ACK_BYTES: Final = 16 << 20
SEND_TIMEOUT_S: Final = 2.0  # acknowledgements are tiny: a peer that takes none for this long reads nothing


class Replies:
    """Frames at once; acknowledgements gathered, by the thread that reads."""

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        self._sock = sock
        self._connection = connection
        self._lock = threading.Lock()  # of the order on the wire
        self._acks: dict[int, list[tuple[int, int]]] = {}
        self.num_acks = self._ack_bytes = 0
        self._acks_since = 0.0

    def stop(self) -> None:
        """Ends the connection; never blocks."""
        shut(self._sock)

    def say(self, frame: Frame, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Sends a frame; a peer that takes nothing for so long loses its connection."""
        if not self._lock.acquire(timeout=timeout_s):
            self.stop()
            return
        try:
            if self._connection.state is ProtocolState.OPEN:
                self.send_all(self._connection.send(frame), timeout_s)
        except (OSError, PeerLost, LocalProtocolError):  # the last: it was closed by its own thread meanwhile
            self.stop()
        finally:
            self._lock.release()

    def acknowledge(self, slot: int, start: int, stop: int) -> None:
        self._acks.setdefault(slot, []).append((start, stop))
        if not self.num_acks:
            self._acks_since = time.monotonic()
        self.num_acks += 1
        self._ack_bytes += stop - start

    @property
    def are_many(self) -> bool:
        return self.num_acks >= MAX_PENDING_ACKS or self._ack_bytes >= MAX_PENDING_ACK_BYTES

    def are_late(self, now: float) -> bool:
        return self.num_acks > 0 and now >= self._acks_since + ACK_DELAY_S

    def flush(self) -> None:
        """Acknowledges what has landed since the last time, in as few frames as possible."""
        acks, self._acks, self.num_acks, self._ack_bytes = self._acks, {}, 0, 0
        with self._lock:
            data = self._connection.data_to_send()
            for slot, ranges in acks.items():
                data += self._connection.send(Ack(slot=slot, ranges=tuple(ranges)))
            if data:
                self.send_all(data)

    def send_all(self, data: bytes, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Raises PeerLost, OSError."""
        give_up_at = time.monotonic() + timeout_s
        view = memoryview(data)
        while view:
            view = view[send_some(self._sock, [view]) :]
            if view and time.monotonic() > give_up_at:
                raise PeerLost("the peer does not read")

    def farewell(self, exc: RemoteProtocolError) -> None:
        """To a peer that broke the protocol; a sender at work has more on its way, which must not make it a reset."""
        with suppress(OSError, PeerLost), self._lock:  # it may be gone already
            self.send_all(self._connection.farewell(exc))
        hang_up(self._sock)

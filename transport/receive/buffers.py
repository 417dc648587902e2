"""Buffers for bytes that cannot go straight into their place: sealed, coded and repeated ones, and those that come by
RDMA. All of a listener share one budget.

A thread waits a moment for its part; a connection that gets none ends, and its sender sends again over another one. Buffers are
kept for the next chunk as long as less than half of the budget is lent.
"""

import threading
from typing import Final

from transport.errors import PeerLost
from transport.wire.memory import LentMemory

WAIT_S: Final = 5.0  # less than what a sender takes for the end of a silent connection
ADDRESS_PART: Final = 2


class NoBufferRoom(PeerLost):
    """The budget is lent to others."""


class BufferRoom:
    """The budget of one listener. What is kept for long leaves `spare_bytes` of it to chunks."""

    def __init__(self, total_bytes: int, spare_bytes: int = 0) -> None:
        self._memory = LentMemory(total_bytes, total_bytes // ADDRESS_PART)
        self._spare_bytes = spare_bytes
        self._changed = threading.Condition()

    @property
    def lent_bytes(self) -> int:
        return self._memory.lent_bytes

    def lend(self, peer: str, num_bytes: int, wait_s: float) -> None:
        """Raises NoBufferRoom when it is not there in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._memory.lend(peer, num_bytes), wait_s):
                raise NoBufferRoom(f"no {num_bytes} bytes for buffers within {wait_s} s")

    def lend_for_long(self, peer: str, num_bytes: int) -> bool:
        """At once, or not."""
        with self._changed:
            return self._memory.lend(peer, num_bytes, self._spare_bytes)

    def give_back(self, peer: str, num_bytes: int) -> None:
        with self._changed:
            self._memory.give_back(peer, num_bytes)
            self._changed.notify_all()

    def is_tight(self, peer: str) -> bool:
        """Whether others may soon have to wait for what a connection keeps."""
        with self._changed:
            return self._memory.is_tight(peer)


class RoomOfPeer:
    """What one peer may have of the budget, for buffers that it keeps for long."""

    def __init__(self, room: BufferRoom, peer: str) -> None:
        self._room = room
        self._peer = peer

    def lend(self, num_bytes: int) -> bool:
        """At once, or not."""
        return self._room.lend_for_long(self._peer, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        self._room.give_back(self._peer, num_bytes)


class Buffers:
    """The buffers of one connection, by use; used by the thread that reads it."""

    def __init__(self, room: BufferRoom, peer: str) -> None:
        self._room = room
        self._peer = peer
        self._buffers: dict[str, memoryview] = {}

    def prepare(self, sizes: dict[str, int], wait_s: float = WAIT_S) -> None:
        """Makes all of these at least so long, or none: a connection that held some while it waits would block others."""
        more = {use: size for use, size in sizes.items() if size > len(self._buffers.get(use, b""))}
        if not more:
            return
        growth = sum(size - len(self._buffers.get(use, b"")) for use, size in more.items())
        self._room.lend(self._peer, growth, wait_s)
        try:
            self._buffers |= {use: memoryview(bytearray(size)) for use, size in more.items()}
        except MemoryError:
            self._room.give_back(self._peer, growth)
            raise

    def of(self, use: str, size: int, wait_s: float = WAIT_S) -> memoryview:
        """At least `size` bytes, valid until the next of this use. Raises NoBufferRoom."""
        self.prepare({use: size}, wait_s)
        return self._buffers[use]

    def relax(self) -> None:
        """After a chunk: gives all back if others may need it."""
        if self._buffers and self._room.is_tight(self._peer):
            self.close()

    def close(self) -> None:
        held, self._buffers = self._buffers, {}
        if held:
            self._room.give_back(self._peer, sum(map(len, held.values())))

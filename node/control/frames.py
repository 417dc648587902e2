"""Frames on kept connections that have begun and are not whole: each has its memory, out of one budget, and an end in time.

What one read brings is there anyway. A frame that is longer asks for all of its bytes as soon as it has said how many: while
they are not free, its connection is not read. A frame that waits for them too long, or is then not whole in time, takes its
connection with it.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from transport.control.messages import MAX_MESSAGE_BYTES
from transport.wire.memory import LentMemory

FREE_BYTES: Final = 256 << 10  # what a read may bring
OF_ONE_BYTES: Final = MAX_MESSAGE_BYTES + FREE_BYTES  # of one address: another one's longest frame has room beside it
TOTAL_BYTES: Final = 2 * OF_ONE_BYTES
FRAME_S: Final = 20.0  # the longest frame needs 3 MB/s


class FrameRoom:
    """The budget of one server, and the frames that wait for a part of it. The oldest whose bytes are free goes first."""

    def __init__(self, frame_s: float = FRAME_S) -> None:
        self.frame_s = frame_s
        self.memory = LentMemory(TOTAL_BYTES, OF_ONE_BYTES)
        self._waiting: dict[Frame, None] = {}

    @property
    def num_waiting(self) -> int:
        """Frames that have no room yet."""
        return len(self._waiting)

    def ask(self, frame: "Frame") -> bool:
        """Lends a frame its bytes; else it is told when they are there."""
        if self.memory.lend(frame.peer, frame.num_bytes):
            return True
        self._waiting[frame] = None
        return False

    def give_back(self, frame: "Frame") -> None:
        """It needs them no more, or does not wait for them any more."""
        if frame in self._waiting:
            del self._waiting[frame]
            return
        self.memory.give_back(frame.peer, frame.num_bytes)
        for other in list(self._waiting):
            if self.memory.lend(other.peer, other.num_bytes):
                del self._waiting[other]
                other.on_room()


class Frame:
    """One that has begun, of `num_bytes`; `on_late` hears when its time is over."""

    def __init__(
        self, room: FrameRoom, peer: str, num_bytes: int, on_room: Callable[[], None], on_late: Callable[[], None]
    ) -> None:
        self.peer = peer
        self.num_bytes = num_bytes if num_bytes > FREE_BYTES else 0
        self.has_room = False
        self._room = room
        self._on_room = on_room
        self._on_late = on_late
        self._late = asyncio.get_running_loop().call_later(room.frame_s, on_late)
        self.has_room = room.ask(self)

    def needs(self, begun_bytes: int) -> bool:
        """Whether it has turned out to be longer than it seemed: its length had not come whole."""
        return begun_bytes > FREE_BYTES and not self.num_bytes

    def wait_again(self) -> None:
        """Its time begins anew: nothing of it was read."""
        self._late.cancel()
        self._late = asyncio.get_running_loop().call_later(self._room.frame_s, self._on_late)

    def on_room(self) -> None:
        """It may go on, and has all of its time for that."""
        self.has_room = True
        self.wait_again()
        self._on_room()

    def end(self) -> None:
        """It is whole, or its connection is gone."""
        self._late.cancel()
        self._room.give_back(self)

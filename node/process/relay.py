"""Two connections joined: what a gateway says over TLS reaches the engine, and what the engine says the gateway.

    gateway ══ TLS records ══ TlsRelay ── bytes ── engine

A token of a stream is a read and a write, each straight on its socket: no streams, no queues, no buffers of their own. What
a socket does not take at once is kept, and nothing more is read for it until it is gone.
"""

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

READ_BYTES: Final = 64 * 1024
READS: Final = 16  # at once, of one connection; others get their turn in between
STALLED_S: Final = 600.0  # without a byte taken; gateways give up slow clients long before
LINGER_NONE: Final = struct.pack("ii", 1, 0)


class TlsRelay:
    """One caller's connection and the engine's, from the moment when both are there, until `ended` is called."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        outside: ssl.SSLSocket,
        inside: socket.socket,
        scratch: memoryview,
        ended: Callable[[str], None],
        stalled_s: float = STALLED_S,
    ) -> None:
        """`scratch` is where bytes are read to on their way: a loop moves one piece at a time. `ended` hears "unread" where
        one side took nothing for `stalled_s` of what the other had said, and "" otherwise.
        """
        self._loop = loop
        self._outside = outside
        self._inside = inside
        self._view = scratch
        self._ended = ended
        self._stalled_s = stalled_s
        self._stalls: dict[socket.socket, asyncio.TimerHandle] = {}  # by the side that has something to take
        self._to_engine = self._to_caller = memoryview(b"")  # read, and not taken yet
        self._is_closed = False
        for each in (outside, inside):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        """What came with the handshake's last bytes is there already, and no selector says so."""
        self._loop.add_reader(self._inside, self._from_engine)
        self._hear_caller()

    def abort(self, why: str = "") -> None:
        """Closes both now. What was read and not taken is lost."""
        if self._is_closed:
            return
        self._is_closed = True
        for stall in self._stalls.values():
            stall.cancel()
        for each in (self._outside, self._inside):
            self._loop.remove_reader(each)
            self._loop.remove_writer(each)
            each.close()
        self._ended(why)

    # The caller's side

    def _hear_caller(self) -> None:
        self._loop.add_reader(self._outside, self._from_caller)
        self._from_caller()

    def _from_caller(self) -> None:
        """TLS may hold more than the socket: it is read until it says that it wants more."""
        for _ in range(READS):
            if self._is_closed or self._to_engine:
                return
            try:
                size = self._outside.recv_into(self._view)
            except ssl.SSLWantReadError:
                return
            except ssl.SSLWantWriteError:  # an answer of TLS itself, which goes with the next write
                return
            except OSError:  # ssl.SSLError, too
                self.abort()
                return
            if not size:
                self._end()
                return
            self._say_to_engine(self._view[:size])
        self._loop.call_soon(self._from_caller)

    def _say_to_caller(self, data: memoryview) -> None:
        """Raises OSError."""
        while data:
            try:
                data = data[self._outside.send(data) :]
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                self._to_caller = memoryview(bytes(data))
                self._loop.remove_reader(self._inside)
                self._await(self._outside, self._caller_takes)
                return

    def _caller_takes(self) -> None:
        self._takes(self._outside)
        left, self._to_caller = self._to_caller, memoryview(b"")
        try:
            self._say_to_caller(left)
        except OSError:
            self.abort()
            return
        if not self._to_caller:
            self._loop.add_reader(self._inside, self._from_engine)

    # The engine's side

    def _from_engine(self) -> None:
        try:
            size = self._inside.recv_into(self._view)
            if size:
                self._say_to_caller(self._view[:size])
            else:
                self._end()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abort()

    def _say_to_engine(self, data: memoryview) -> None:
        try:
            sent = self._inside.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.abort()
            return
        if sent < len(data):
            self._to_engine = memoryview(bytes(data[sent:]))
            self._loop.remove_reader(self._outside)
            self._await(self._inside, self._engine_takes)

    def _engine_takes(self) -> None:
        self._takes(self._inside)
        left, self._to_engine = self._to_engine, memoryview(b"")
        self._say_to_engine(left)
        if not self._to_engine and not self._is_closed:
            self._hear_caller()

    # What a socket does not take at once

    def _await(self, side: socket.socket, takes: Callable[[], None]) -> None:
        self._loop.add_writer(side, takes)
        self._stalls[side] = self._loop.call_later(self._stalled_s, self.abort, "unread")

    def _takes(self, side: socket.socket) -> None:
        self._loop.remove_writer(side)
        self._stalls.pop(side).cancel()

    # The end

    def _end(self) -> None:
        """One side has ended, and the other one has taken all that it said: a side is not heard before that."""
        with suppress(OSError, ValueError):
            self._outside.unwrap()  # says that nothing follows, as far as the socket takes it
        self.abort()


def reset(connection: socket.socket) -> None:
    """Ends a connection as a port does where nothing listens."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
    connection.close()

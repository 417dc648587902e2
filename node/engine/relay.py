"""Two connections joined: what a gateway says over TLS reaches the engine, and what the engine says the gateway.

    gateway ══ TLS records ══ EngineRelay ── bytes ── engine

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
LINGER_NONE: Final = struct.pack("ii", 1, 0)


class EngineRelay:
    """One caller's connection and the engine's, from the moment when both are there, until `ended` is called."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        outside: ssl.SSLSocket,
        inside: socket.socket,
        scratch: memoryview,
        ended: Callable[[], None],
    ) -> None:
        """`scratch` is where bytes are read to on their way: a loop moves one piece at a time."""
        self._loop = loop
        self._outside = outside
        self._inside = inside
        self._view = scratch
        self._ended = ended
        self._to_engine = self._to_caller = memoryview(b"")  # read, and not taken yet
        self._is_ending = self._is_closed = False
        for each in (outside, inside):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        """What came with the handshake's last bytes is there already, and no selector says so."""
        self._loop.add_reader(self._inside, self._from_engine)
        self._hear_caller()

    def abort(self) -> None:
        """Closes both now. What was read and not taken is lost."""
        if self._is_closed:
            return
        self._is_closed = True
        for each in (self._outside, self._inside):
            self._loop.remove_reader(each)
            self._loop.remove_writer(each)
            each.close()
        self._ended()

    # The caller's side

    def _hear_caller(self) -> None:
        self._loop.add_reader(self._outside, self._from_caller)
        self._from_caller()

    def _from_caller(self) -> None:
        """TLS may hold more than the socket: it is read until it says that it wants more."""
        for _ in range(READS):
            if self._is_ending or self._is_closed or self._to_engine:
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
                self._end(self._outside)
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
                self._loop.add_writer(self._outside, self._caller_takes)
                return

    def _caller_takes(self) -> None:
        self._loop.remove_writer(self._outside)
        left, self._to_caller = self._to_caller, memoryview(b"")
        try:
            self._say_to_caller(left)
        except OSError:
            self.abort()
            return
        if not self._to_caller:
            self._go_on(self._inside, self._from_engine)

    # The engine's side

    def _from_engine(self) -> None:
        try:
            size = self._inside.recv_into(self._view)
            if size:
                self._say_to_caller(self._view[:size])
            else:
                self._end(self._inside)
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
            self._loop.add_writer(self._inside, self._engine_takes)

    def _engine_takes(self) -> None:
        self._loop.remove_writer(self._inside)
        left, self._to_engine = self._to_engine, memoryview(b"")
        self._say_to_engine(left)
        if not self._to_engine and not self._is_closed:
            self._go_on(self._outside, self._hear_caller)

    # The end

    def _end(self, side: socket.socket) -> None:
        """One side has ended: neither half outlives the other, but what that side has said is still sent."""
        self._is_ending = True
        for each in (self._outside, self._inside):
            self._loop.remove_reader(each)
        self._loop.remove_writer(side)
        if side is self._outside:
            self._to_caller = memoryview(b"")
        else:
            self._to_engine = memoryview(b"")
        self._finish()

    def _finish(self) -> None:
        if self._to_engine or self._to_caller:
            return
        with suppress(OSError, ValueError):
            self._outside.unwrap()  # says that nothing follows, as far as the socket takes it
        self.abort()

    def _go_on(self, side: socket.socket, hear: Callable[[], None]) -> None:
        if self._is_ending:
            self._finish()
        elif side is self._outside:
            hear()
        else:
            self._loop.add_reader(side, hear)


def reset(connection: socket.socket) -> None:
    """Ends a connection as a port does where nothing listens."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
    connection.close()

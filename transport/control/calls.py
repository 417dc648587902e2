"""The frames of a kept connection between a gateway and an agent: node.proto's Call and CallAnswer.

    gateway                              agent
      | CALLER --------------------------> |
      |  <-------------------------- AGENT |   only now the gateway believes that it has found an agent
      | Call(id) … ----------------------> |   as many at once as there are requests
      |  <----------------- CallAnswer(id) |   in any order

Frames are those of `transport.control.messages`, bodies protobuf. CPU of a gateway for each call (`python -m
benchmarks.gateway.calls`): by gRPC 160 to 250 µs; over a bidirectional gRPC stream 120 to 170; in these frames 8 to 28,
or 11 to 53 with mutual TLS.
"""

import asyncio
import socket
from typing import Final

from transport.control.messages import MAX_MESSAGE_BYTES, MessageBuffer, MessageError, frame

# A peer that says something else first is a stranger, or has another version. Two greetings: on a loopback a connection to a port
# that is not listened on any more can meet itself (simultaneous open, RFC 9293 §3.5).
CALLER: Final = b"prfaas caller 1\n"
AGENT: Final = b"prfaas agent 1\n"
MAX_CALLS: Final = 1024  # under way on one connection
MAX_ANSWER_BYTES: Final = 1 << 20  # a ticket has some hundred bytes
# A connection between requests is silent: keepalives tell middleboxes that it lives, and us that the other host is gone.
KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class CallBuffer:
    """Splits the peer's bytes into frame bodies, after its greeting. Sans-IO: feed it whatever arrived."""

    def __init__(self, greeting: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.greeted = False
        self._greeting = greeting
        self._first = b""
        self._frames = MessageBuffer(max_bytes)

    @property
    def begun_bytes(self) -> int:
        """The full length of the incomplete frame; see MessageBuffer."""
        return self._frames.begun_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """The complete frame bodies so far. Raises MessageError for a wrong greeting, or for a frame that is too
        long."""
        if self.greeted:
            return self._frames.feed(data)
        self._first += data
        said, more = self._first[: len(self._greeting)], self._first[len(self._greeting) :]
        if not self._greeting.startswith(said):
            raise MessageError(f"not the greeting of this version: {said!r}")
        if said != self._greeting:
            return []
        self.greeted, self._first = True, b""
        return self._frames.feed(more)


class CallOutbox:
    """The sending side: all frames of one turn of the loop leave in one write, and with TLS as one record."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._said: list[bytes] = []

    def say(self, body: bytes) -> None:
        """Queues one frame."""
        if not self._said:
            self._loop.call_soon(self.flush)
        self._said.append(frame(body))

    def flush(self) -> None:
        """Writes the queued frames now, before the caller closes the connection."""
        said, self._said = self._said, []
        if said and not self._transport.is_closing():
            self._transport.write(b"".join(said))


def keep_alive(connection: socket.socket | None) -> None:
    """Has the kernel probe a silent TCP connection."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)

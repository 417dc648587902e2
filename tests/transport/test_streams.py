"""Streams of frames from a peer that reads nothing: whatever it repeats, neither end keeps much of it."""

import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import pytest

from tests.transport.helpers import PATIENCE_S, SECRET, Memory, wait_for
from tests.transport.raw_sender import RawSender
from tests.transport.rdma.worlds import PinnedMemory
from transport.rdma.device import RdmaDevices
from transport.rdma.loopback import LoopbackFabric
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.send.spec import TransferSpec, Via
from transport.wire.checksum import Integrity
from transport.wire.connection import Connection, ConnectionRole
from transport.wire.encoding import encode
from transport.wire.frames import (
    Abort,
    Accept,
    Ack,
    AskRails,
    Cancel,
    Frame,
    Grant,
    Hello,
    LandingBuffers,
    Nack,
    Nics,
    Open,
    Ping,
    Pong,
    RailAnswer,
    RailBuffer,
    RailClosed,
    Reference,
    Refuse,
    Written,
)

REPEATS: Final = 2_500
# A frame that is kept costs a hundred bytes or more: that many of them would be more than this, buffers less.
MAX_GROWTH_BYTES: Final = 200_000
OF_SENDER: Final[dict[str, Frame]] = {
    "Ping": Ping(token=1),
    "Pong": Pong(token=1),
    "AskRails": AskRails(),
    "RailClosed": RailClosed(rail=1, attempt=1),
    "Abort": Abort(slot=7, leave=True),
    "Reference": Reference(slot=0, offset=0, checksum=0, extents=((0, 10),)),
    "Written": Written(slot=0, offset=0, length=10, checksum=0, rail=0, attempt=0, number=1),
}
OF_RECEIVER: Final[dict[str, Frame]] = {
    "Ping": Ping(token=1),
    "Pong": Pong(token=1),
    "Accept": Accept(slot=0, missing=((0, 10),)),
    "Accept of another": Accept(slot=7, missing=((0, 10),)),
    "Refuse": Refuse(slot=7, code="unknown_transfer"),
    "Ack": Ack(slot=0, ranges=((0, 5), (5, 10))),
    "Nack": Nack(slot=7, offset=0, length=10, code="checksum"),
    "Cancel": Cancel(slot=7, code="cancelled"),
    "Nics": Nics(nics=""),
    "Grant": Grant(slot=0, address=0, keys=((0, 1),), extents=((0, 10),)),
    "LandingBuffers": LandingBuffers(places=16, place_bytes=1 << 20),
    "RailBuffer": RailBuffer(rail=0, attempt=0, address=0, key=1),
    "RailAnswer": RailAnswer(rail=0, attempt=0, queue_pair=1, packet_number=0, gid="", mtu=1024, depth=32),
    "RailClosed": RailClosed(rail=1, attempt=1),
}


@contextmanager
def growing_little() -> Iterator[None]:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        assert tracemalloc.get_traced_memory()[1] - before < MAX_GROWTH_BYTES
    finally:
        tracemalloc.stop()


def stream_of(frame: Frame, first: int) -> bytes:
    return b"".join(encode(frame, (first + number) & 0xFFFF) for number in range(REPEATS))


def repeat(sock: socket.socket, stream: bytes) -> None:
    """And hang up; the other end may have had enough before."""
    with suppress(ConnectionError):
        sock.sendall(stream)
    with suppress(OSError):  # it is gone
        sock.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("let_in", [False, True], ids=["stranger", "sender"])
@pytest.mark.parametrize("frame", OF_SENDER.values(), ids=OF_SENDER.keys())
def test_what_is_repeated_without_end_is_not_kept_by_a_listener(frame: Frame, let_in: bool) -> None:
    with TransferServer() as server:
        with RawSender.to(server.address) as peer:
            if let_in:
                server.expect("t", SECRET, [10], Memory([10]))
                peer.say(peer.opening(0, "t", [10]))
                assert isinstance(peer.answer(), Accept)
            stream = stream_of(frame, peer.connection.frames_sent)
            with growing_little():
                repeat(peer.sock, stream)
                wait_for(lambda: not server.num_connections)
        assert not server.counters["internal_errors"]


class Receiver:
    """Greets a sender, hears its Open, and says no more than a test wants it to."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(PATIENCE_S)
        self.connection = Connection(
            ConnectionRole.RECEIVER, integrity=Integrity.CHECKSUM, nonce=b"r" * 16, now=0.0, max_chunk_bytes=1 << 16
        )
        assert isinstance(self._hear(), Hello)
        self.sock.sendall(self.connection.data_to_send())
        while not isinstance(self._hear(), Open):
            pass

    def _hear(self) -> Frame:
        while (frame := self.connection.next_event()) is None:
            data = self.sock.recv(1 << 10)
            assert data
            self.connection.receive_data(data, 0.0)
        return frame

    def read_on(self) -> None:
        """Until the sender hangs up."""
        with suppress(ConnectionError):
            while self.sock.recv(1 << 12):
                pass


@pytest.mark.parametrize("via", [Via.TCP, Via.RDMA])
@pytest.mark.parametrize("frame", OF_RECEIVER.values(), ids=OF_RECEIVER.keys())
def test_what_is_repeated_without_end_is_not_kept_by_a_sender(frame: Frame, via: Via) -> None:
    devices = RdmaDevices([LoopbackFabric().device("n0")])
    source = PinnedMemory([10], fill=True)
    devices.register(memoryview(source.buffer))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        TransferClient(options=ClientOptions(connections=1, rdma=devices)) as client,
    ):
        listener.settimeout(PATIENCE_S)
        address = "{}:{}".format(*listener.getsockname())
        push = client.open(TransferSpec(address, "t", SECRET, [10], via=via), source.source)
        sock, _ = listener.accept()
        with sock:
            receiver = Receiver(sock)
            stream = stream_of(frame, receiver.connection.frames_sent)
            with growing_little():
                repeat(sock, stream)
                receiver.read_on()
        push.abort("the owner gives it up")
        assert push.wait(PATIENCE_S) is not None
        assert not client.internal_errors
    devices.close()

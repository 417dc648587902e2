"""Bytes from strangers: whatever comes, an end answers with a frame or a protocol error, in bounded time and memory."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples
from tests.transport.fuzz import fuzz
from tests.transport.wire.test_frames import ANY_FRAME
from transport.errors import TransportError
from transport.wire.checksum import Integrity
from transport.wire.connection import BUFFER_BYTES, Connection, ConnectionRole, ProtocolState
from transport.wire.encoding import encode
from transport.wire.frames import HEADER, Frame

NUM_INPUTS = 5000


def end(role: ConnectionRole, *, greeted: bool) -> Connection:
    connection = Connection(role, integrity=Integrity.CHECKSUM, nonce=b"n" * 16, now=0.0, max_chunk_bytes=1 << 16)
    if greeted:
        other = ConnectionRole.RECEIVER if role is ConnectionRole.SENDER else ConnectionRole.SENDER
        peer = Connection(other, integrity=Integrity.CHECKSUM, nonce=b"m" * 16, now=0.0, max_chunk_bytes=1 << 16)
        for _ in range(2):
            for here, there in ((peer, connection), (connection, peer)):
                if data := here.data_to_send():
                    there.receive_data(data, 0.0)
                    there.next_event()
        assert connection.state is ProtocolState.OPEN
    return connection


def feed(connection: Connection, data: bytes) -> bool:
    """False when the connection gave up. Takes at most one event a byte: an end cannot be made to spin."""
    view, events, sink = memoryview(data), 0, memoryview(bytearray(1 << 17))
    try:
        while view:
            view = view[connection.receive_data(view, 0.0) :]
            while True:
                while connection.payload_left and connection.payload_buffered:
                    connection.take_payload(sink)
                if connection.payload_left or connection.next_event() is None:
                    break
                events += 1
                assert events <= len(data)
        connection.data_to_send()
    except TransportError:
        assert connection.state is ProtocolState.CLOSED
        return False
    return True


def test_inputs_of_every_kind_in_bulk() -> None:
    """A million of them are `make fuzz`."""
    report = fuzz(NUM_INPUTS, seed=11)
    assert report.frames > 0.05 * NUM_INPUTS
    assert {"RemoteProtocolError", "ConnectionRefused", "GreetingRefused"} <= report.refused.keys()


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.one_of(ANY_FRAME, st.binary(max_size=300)), max_size=12),
    st.sampled_from(list(ConnectionRole)),
    st.booleans(),
)
def test_any_mixture_of_frames_and_noise(parts: list[Frame | bytes], role: ConnectionRole, greeted: bool) -> None:
    data = b"".join(part if isinstance(part, bytes) else encode(part, i + greeted) for i, part in enumerate(parts))
    feed(end(role, greeted=greeted), data)


def test_a_long_body_is_refused_before_it_is_awaited() -> None:
    connection = end(ConnectionRole.RECEIVER, greeted=True)
    assert not feed(connection, HEADER.pack(4, 0, 1, (1 << 32) - 1))
    assert len(connection.receive_buffer()) <= BUFFER_BYTES

"""The receiving end of one connection: what peers that misbehave cost it, and what they are told."""

import logging
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.transport.helpers import PATIENCE_S, SECRET, Memory, deliver, wait_for
from tests.transport.raw_sender import RawSender
from transport.errors import ConnectionRefused, LocalProtocolError, PeerLost, RemoteProtocolError
from transport.receive.connection.inlet import MAX_REFUSED
from transport.receive.options import ServerOptions
from transport.receive.registry.landing import Notices
from transport.receive.registry.landings import Landings
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.wire.checksum import DIGEST_BYTES, Integrity
from transport.wire.connection import Connection, ConnectionRole
from transport.wire.encoding import encode
from transport.wire.frames import (
    KINDS,
    Abort,
    Accept,
    Chunk,
    CodedChunk,
    Frame,
    Nack,
    Ping,
    Pong,
    Reference,
    Refuse,
)
from transport.wire.identity import Identity

MB = 1 << 20
CHUNK = Chunk(slot=9, offset=0, length=16 * MB)
CODED = CodedChunk(slot=9, offset=0, length=16 * MB, coded_length=16 * MB - 1, checksum=0)
REFERENCE = Reference(slot=9, offset=0, checksum=0, extents=((0, 4096),))
NO_FILES = Identity(certificate=Path("none"), key=Path("none"), authority=Path("none"))


@pytest.fixture
def server() -> Iterator[TransferServer]:
    with TransferServer() as server:
        yield server


def let_in(server: TransferServer) -> RawSender:
    """A peer that has shown a secret and left the secret's transfer."""
    name = f"door {server.num_connections}"
    server.expect(name, SECRET, [1], Memory([1]))
    sender = RawSender.to(server.address)
    sender.say(sender.opening(99, name, [1]), Abort(slot=99, leave=True))
    assert isinstance(sender.answer(), Accept)
    return sender


@contextmanager
def keeps_little() -> Iterator[None]:
    """No memory is taken for the payload of one chunk."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 4 * MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("frame", [CHUNK, CODED, REFERENCE], ids=lambda frame: type(frame).__name__)
def test_bytes_for_a_slot_that_was_never_opened_end_the_connection(server: TransferServer, frame: Frame) -> None:
    with let_in(server) as stranger, keeps_little():
        stranger.say(frame)
        assert stranger.told().code == "protocol"
        assert server.counters["rejected:protocol"] == 1


@pytest.mark.parametrize("frame", [CHUNK, CODED], ids=lambda frame: type(frame).__name__)
def test_chunks_right_behind_an_open_that_is_refused_are_read_past(
    server: TransferServer, frame: Chunk | CodedChunk
) -> None:
    with let_in(server) as sender:
        payload = bytes(frame.length + DIGEST_BYTES if isinstance(frame, Chunk) else frame.coded_length)
        with keeps_little():
            sender.say(sender.opening(9, "unknown", [16 * MB]), frame)
            sender.sock.sendall(payload)
            sender.say(REFERENCE)
            assert sender.answer() == Refuse(slot=9, code="unknown_transfer")
            server.expect("t", SECRET, [10], Memory([10]))
            sender.say(Abort(slot=9, leave=True), sender.opening(10, "t", [10]))
            assert sender.answer() == Accept(slot=10, missing=((0, 10),))  # the connection lives on


def test_a_slot_that_was_left_takes_nothing_more(server: TransferServer) -> None:
    server.expect("t", SECRET, [10], Memory([10]))
    with RawSender.to(server.address) as sender:
        sender.say(sender.opening(9, "t", [10]), Abort(slot=9, leave=True), Chunk(slot=9, offset=0, length=10))
        assert sender.answer() == Accept(slot=9, missing=((0, 10),))
        assert "not open" in sender.told().detail


def test_refused_opens_are_not_kept(server: TransferServer) -> None:
    with let_in(server) as stranger:
        for slot in range(100, MAX_REFUSED + 101):
            stranger.say(stranger.opening(slot, "unknown", [10], arena_path=f"/dev/shm/{slot}"))
            assert stranger.answer() == Refuse(slot=slot, code="unknown_transfer")
        stranger.say(replace(REFERENCE, slot=101))
        assert stranger.hear(Nack) == Nack(slot=101, offset=0, length=4096, code="cancelled")
        stranger.say(replace(REFERENCE, slot=100))
        assert "slot 100, which is not open" in stranger.told().detail


def test_a_coded_chunk_of_a_landing_that_was_just_cancelled_is_read_past() -> None:
    options = ServerOptions(integrity=Integrity.AEAD, identity=NO_FILES)
    with TransferServer(options=options) as server:
        server.expect("t", SECRET, [10_000], Memory([10_000]))
        server.cancel("t", "gone")
        server.expect("u", SECRET, [10], Memory([10]))
        with RawSender.to(server.address, server.new_session()) as sender:
            coded = CodedChunk(slot=1, offset=0, length=10_000, coded_length=5_000, checksum=0, sealed=True)
            sender.say(sender.opening(1, "t", [10_000]), coded, bytes(5_016), sender.opening(2, "u", [10]))
            assert sender.answer() == Refuse(slot=1, code="cancelled", detail="gone")
            assert sender.answer() == Accept(slot=2, missing=((0, 10),))
        assert not server.counters["internal_errors"]


def repeated(sender: RawSender) -> bytes:
    return sender.encoded(Ping(token=1)) * 2


def overtaken(sender: RawSender) -> bytes:
    first, second = (sender.encoded(Ping(token=i)) for i in range(2))
    return second + first


def nameless(sender: RawSender) -> bytes:
    return bytes([99]) + sender.encoded(Ping(token=1))[1:]


def changed(sender: RawSender) -> bytes:
    data = sender.encoded(Ping(token=1))
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("spoilt", "code", "sealed"),
    [
        (repeated, "out_of_order", False),
        (repeated, "out_of_order", True),
        (overtaken, "out_of_order", True),
        (nameless, "protocol", False),
        (changed, "seal", True),
    ],
)
def test_a_peer_at_work_hears_what_it_did_wrong(spoilt: Callable[[RawSender], bytes], code: str, sealed: bool) -> None:
    options = ServerOptions(integrity=Integrity.AEAD, identity=NO_FILES) if sealed else ServerOptions()
    with TransferServer(options=options) as server:
        with RawSender.to(server.address, server.new_session() if sealed else None) as sender:
            sender.say(spoilt(sender), bytes(MB))  # with more behind it, as a sender at work has
            assert sender.told().code == code
        assert server.counters[f"rejected:{code}"] == 1


def test_a_chunk_that_was_changed_is_told_as_such_and_leaves_its_place_missing() -> None:
    with TransferServer(options=ServerOptions(integrity=Integrity.AEAD, identity=NO_FILES)) as server:
        landing = server.expect("t", SECRET, [MB], Memory([MB]))
        with RawSender.to(server.address, server.new_session()) as sender:
            chunk = Chunk(slot=1, offset=0, length=MB, sealed=True)
            sender.say(sender.opening(1, "t", [MB]), chunk, bytes(MB + 16), bytes(MB))
            assert sender.told().code == "seal"
        assert server.counters["rejected:seal"] == 1
        assert not landing.bytes_landed


def test_an_error_of_ours_is_logged_and_counted(
    server: TransferServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seed_of(transfer_id: str, transcript: bytes) -> int:
        raise KeyError("an unforeseen failure")

    monkeypatch.setattr("transport.receive.connection.inlet.transfer_seed", seed_of)
    server.expect("t", SECRET, [10], Memory([10]))
    with RawSender.to(server.address) as sender:
        sender.say(sender.opening(1, "t", [10]))
        with pytest.raises(EOFError), caplog.at_level(logging.ERROR):
            sender.hear(Accept)
    assert server.counters["internal_errors"] == 1
    assert "an unforeseen failure" in caplog.text


def test_one_connection_too_many_is_told() -> None:
    with TransferServer(options=ServerOptions(max_connections=1)) as server, let_in(server) as sender:
        server.expect("busy", SECRET, [1], Memory([1]))
        sender.say(sender.opening(1, "busy", [1]))
        sender.hear(Accept)
        with pytest.raises(ConnectionRefused, match="too_many_connections"):
            RawSender.to(server.address)
        with TransferClient(options=ClientOptions(connections=1, peer_timeout_s=2.0)) as client:
            pushed = deliver(server, client, [10]).push.wait(PATIENCE_S)
            assert pushed is not None
            assert (pushed.reason, pushed.detail) == ("peer_lost", "too_many_connections")
            assert client.refusals[server.address, "too_many_connections"] > 0
        assert server.counters["refused:too_many_connections"] > 0


def test_a_peer_that_never_stops_asking_is_answered_all_the_same(server: TransferServer) -> None:
    flood = b"".join(encode(Ping(token=number), number) for number in range(1, 65_537))
    with RawSender.to(server.address) as sender:
        heard = threading.Event()

        def ask() -> None:
            while not heard.is_set():
                sender.sock.sendall(flood)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            assert sender.sock.recv(1) == bytes([KINDS[Pong]])
        finally:
            heard.set()
            asking.join()


def test_babble_is_answered_before_the_connection_ends(server: TransferServer) -> None:
    with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), timeout=PATIENCE_S) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(MB))
        answer = b""
        while part := sock.recv(1000):
            answer += part
    assert b"protocol" in answer
    assert server.counters["rejected:protocol"] == 1


def test_a_greeting_that_drips_in_is_not_waited_for_longer_than_silence() -> None:
    connection = Connection(
        ConnectionRole.RECEIVER, integrity=Integrity.NONE, nonce=b"n" * 16, now=0.0, max_chunk_bytes=MB
    )
    hello = Connection(
        ConnectionRole.SENDER, integrity=Integrity.NONE, nonce=b"m" * 16, now=0.0, max_chunk_bytes=MB
    ).data_to_send()
    deadline = connection.next_timer()
    for now in range(9):
        connection.receive_data(hello[now : now + 1], float(now))
        connection.on_timer(float(now))
        assert connection.next_timer() == deadline
    with pytest.raises(PeerLost, match="no whole greeting"):
        connection.on_timer(deadline)


def test_deadlines_hold_after_an_error_of_their_keeper(server: TransferServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(landings: Landings, now: float) -> Notices:
        monkeypatch.undo()
        raise RuntimeError("once")

    monkeypatch.setattr(Landings, "expire", fails)
    landing = server.expect("t", SECRET, [10], Memory([10]), deadline_s=0.01)
    wait_for(lambda: landing.outcome is not None)
    assert server.counters["internal_errors"] == 1


def test_a_frame_for_a_connection_that_its_own_thread_has_just_closed_is_dropped(
    server: TransferServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(connection: Connection, frame: Frame) -> bytes:
        raise LocalProtocolError(f"{type(frame).__name__} cannot be sent in state CLOSED")

    with let_in(server) as sender:
        server.expect("t", SECRET, [10], Memory([10]))
        sender.say(sender.opening(1, "t", [10]))
        assert isinstance(sender.answer(), Accept)
        monkeypatch.setattr(Connection, "send", closed)
        server.cancel("t")
        wait_for(lambda: not server.num_connections)
        assert not server.counters["internal_errors"]


def test_a_listener_that_takes_smaller_chunks_gets_them() -> None:
    with TransferServer(options=ServerOptions(max_chunk_bytes=MB)) as server, TransferClient() as client:
        delivery = deliver(server, client, [16 * MB])
        pushed, _ = delivery.wait()
        assert pushed is not None
        assert pushed.ok
        assert delivery.equal
        assert not server.counters["rejected:protocol"]


def test_a_listener_cannot_have_the_bytes_in_crumbs() -> None:
    with pytest.raises(ValueError, match="max_chunk_bytes 1000"):
        ServerOptions(max_chunk_bytes=1000)
    sender, receiver = (
        Connection(role, integrity=Integrity.CHECKSUM, nonce=b"n" * 16, now=0.0, max_chunk_bytes=1000)
        for role in (ConnectionRole.SENDER, ConnectionRole.RECEIVER)
    )
    receiver.receive_data(sender.data_to_send(), 0.0)
    receiver.next_event()
    sender.receive_data(receiver.data_to_send(), 0.0)
    with pytest.raises(RemoteProtocolError, match="chunks of at most 1000 bytes"):
        sender.next_event()

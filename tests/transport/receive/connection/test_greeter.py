"""Strangers in numbers at a listener's door, beside a sender with a right to be there."""

import errno
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.transport.helpers import PATIENCE_S, SECRET, Memory, deliver, wait_for
from tests.transport.raw_sender import MAX_CHUNK_BYTES, RawSender
from transport.control.certificates import Authority
from transport.path.tcp import TcpOptions, listen, parse_address
from transport.receive.connection import greeter
from transport.receive.few_lines import EVERY_S
from transport.receive.options import Limits, ServerOptions
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.wire.checksum import DIGEST_BYTES, Integrity
from transport.wire.connection import Connection, ConnectionRole
from transport.wire.frames import Accept, Chunk, Nack, Refuse
from transport.wire.session import TLS_RECORD

STRANGERS = 2000
HELLO = Connection(
    ConnectionRole.SENDER, integrity=Integrity.CHECKSUM, nonce=b"n" * 16, now=0.0, max_chunk_bytes=MAX_CHUNK_BYTES
).data_to_send()
WORDS = {"silent": b"", "slow": HELLO[:5], "greeted": HELLO, "half a TLS record": bytes([TLS_RECORD, 3, 1, 2])}


@contextmanager
def crowd(address: str, words: bytes, size: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        sockets = []
        for _ in range(size):
            sock = stack.enter_context(socket.create_connection(parse_address(address), timeout=PATIENCE_S))
            sock.sendall(words)
            sockets.append(sock)
        yield sockets


def windows_since(began: float) -> int:
    """Times in which a log has so many lines; a busy machine takes several of them for a crowd."""
    return 1 + int((time.monotonic() - began) / EVERY_S)


def delivers(server: TransferServer, client: TransferClient, name: str) -> bool:
    delivery = deliver(server, client, [300_000, 20_000], transfer_id=name)
    pushed, _ = delivery.wait()
    return pushed is not None and pushed.ok and delivery.equal


@pytest.mark.parametrize("kind", ["silent", "slow", "greeted"])
def test_a_crowd_of_strangers_costs_no_thread_and_keeps_nobody_out(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    words, size = WORDS[kind], STRANGERS if kind == "greeted" else STRANGERS // 4
    with (
        caplog.at_level(logging.WARNING, "transport.receive.connection.greeter"),
        TransferServer() as server,
        TransferClient(options=ClientOptions(connections=2, peer_timeout_s=PATIENCE_S)) as client,
    ):
        threads, began = threading.active_count(), time.monotonic()
        with crowd(server.address, words, size):
            assert threading.active_count() == threads
            assert delivers(server, client, "honest")
            assert server.num_connections <= greeter.MAX_OF_ADDRESS + 2
            assert server.counters["turned_away:crowded_address"] >= size - greeter.MAX_OF_ADDRESS
            wait_for(lambda: "crowded_address" in caplog.text)
        wait_for(lambda: server.num_connections <= 2)
        assert delivers(server, client, "afterwards")
        assert not server.counters["internal_errors"]
    assert len(caplog.records) < 20 * windows_since(began), "one line for many"


def test_a_crowd_that_wants_tls_where_there_is_none_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    size, began = STRANGERS // 4, time.monotonic()
    with TransferServer() as server, crowd(server.address, WORDS["half a TLS record"], size):
        wait_for(lambda: server.counters["refused:identity"] == size)
        wait_for(lambda: not server.num_connections)
    assert len(caplog.records) < 40 * windows_since(began), "a few lines every ten seconds"


def test_a_crowd_that_speaks_something_else_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    size, began = 100, time.monotonic()
    with (
        caplog.at_level(logging.INFO, "transport.receive"),
        TransferServer() as server,
        crowd(server.address, b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n", size),
    ):
        wait_for(lambda: server.counters["lost_connections"] == size)
    assert len(caplog.records) < 40 * windows_since(began), "a few lines every ten seconds"


def test_of_many_addresses_the_oldest_stranger_makes_room() -> None:
    small = ServerOptions(limits=Limits(max_visitors=3))
    with TransferServer(options=small) as server, crowd(server.address, HELLO, 5) as sockets:
        wait_for(lambda: server.counters["turned_away:crowded"] == 2)
        for gone in sockets[:2]:
            while gone.recv(1 << 16):
                pass
        wait_for(lambda: server.num_connections == 3)


class FailingListener(socket.socket):
    """Each accept(2) fails that an error number is left for."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(fileno=listen(host, port).detach())
        self.numbers: list[int] = []

    def accept(self) -> tuple[socket.socket, Any]:
        if self.numbers:
            number = self.numbers.pop()
            raise OSError(number, errno.errorcode[number])
        return super().accept()


@contextmanager
def server_that_may_fail() -> Iterator[tuple[TransferServer, list[int]]]:
    """A listener, and the error numbers of its next accept(2)s."""
    listeners: list[FailingListener] = []

    def listen_here(host: str, port: int) -> FailingListener:
        listeners.append(FailingListener(host, port))
        return listeners[-1]

    with TransferServer(listen=listen_here) as server:
        yield server, listeners[0].numbers


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN, errno.EPERM])
def test_a_connection_that_cannot_be_accepted_costs_nobody_else_his_place(number: int) -> None:
    with server_that_may_fail() as (server, numbers), crowd(server.address, HELLO, 1):
        wait_for(lambda: server.num_connections == 1)
        numbers.append(number)
        with crowd(server.address, HELLO, 1):
            wait_for(lambda: server.num_connections == 2)
            assert server.counters["lost_connections"] == 1
            assert not server.counters["turned_away:no_descriptor"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_who_waits_makes_room_when_descriptors_or_memory_are_short(number: int) -> None:
    with server_that_may_fail() as (server, numbers), crowd(server.address, HELLO, 1) as waiting:
        wait_for(lambda: server.num_connections == 1)
        numbers.append(number)
        with crowd(server.address, HELLO, 1):
            wait_for(lambda: server.counters["turned_away:no_descriptor"] == 1)
            while waiting[0].recv(1 << 16):
                pass
            wait_for(lambda: server.num_connections == 1)


def test_who_says_nothing_is_turned_away_in_time() -> None:
    options = ServerOptions(tcp=TcpOptions(dead_after_s=1.0, connect_timeout_s=1.0))
    with TransferServer(options=options) as server, ExitStack() as stack:
        for words in WORDS.values():
            stack.enter_context(crowd(server.address, words, 3))
        wait_for(lambda: server.counters["turned_away:silent"] == 9)
        wait_for(lambda: not server.num_connections)
        assert server.counters["refused:identity"] == 3, "what speaks TLS hears that nobody here does"


def test_half_a_handshake_ends_in_time() -> None:
    nowhere = greeter.Identity(certificate=Path("none"), key=Path("none"), authority=Path("none"))
    options = ServerOptions(
        integrity=Integrity.AEAD, identity=nowhere, tcp=TcpOptions(dead_after_s=0.2, connect_timeout_s=0.2)
    )
    with TransferServer(options=options) as server, crowd(server.address, WORDS["half a TLS record"], 3):
        wait_for(lambda: not server.num_connections)
        assert not server.counters["internal_errors"]


def test_who_knocks_for_tls_and_resets_the_connection_leaves_nothing(tmp_path: Path) -> None:
    """ssl closes the socket of a peer that has gone, and raises: the greeter must not go on as if it were there."""
    identity = Authority(tmp_path / "ca").issue("listener")
    reset = struct.pack("ii", 1, 0)
    with TransferServer(options=ServerOptions(integrity=Integrity.AEAD, identity=identity)) as server:
        for _ in range(100):
            with socket.create_connection(parse_address(server.address), timeout=PATIENCE_S) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                sock.sendall(WORDS["half a TLS record"])
        wait_for(lambda: server.counters["lost_connections"] + server.counters["refused:identity"] >= 100)
        wait_for(lambda: not server.num_connections)
        assert not server.counters["internal_errors"]


def test_payload_of_a_refused_transfer_is_read_past_at_the_door() -> None:
    chunk = Chunk(slot=1, offset=0, length=3_000_000)
    with TransferServer() as server, RawSender.to(server.address) as sender:
        threads = threading.active_count()
        sender.say(sender.opening(1, "unknown", [3_000_000]), chunk, bytes(3_000_000 + DIGEST_BYTES))
        assert sender.answer() == Refuse(slot=1, code="unknown_transfer")
        assert isinstance(sender.hear(Nack), Nack)
        assert threading.active_count() == threads
        server.expect("t", SECRET, [10], Memory([10]))
        sender.say(sender.opening(1, "t", [10]))
        assert sender.answer() == Accept(slot=1, missing=((0, 10),))
        assert threading.active_count() == threads + 1


def test_payload_of_a_transfer_that_was_refused_at_the_door_is_read_past_inside() -> None:
    """A sender on a long link has sent some of it before it hears that it was refused: the other transfer goes on."""
    with TransferServer() as server, RawSender.to(server.address) as sender:
        landing = server.expect("t", SECRET, [10], Memory([10]))
        sender.say(sender.opening(1, "unknown", [1000]), sender.opening(2, "t", [10]))
        assert sender.answer() == Refuse(slot=1, code="unknown_transfer")
        assert sender.answer() == Accept(slot=2, missing=((0, 10),))
        sender.say(Chunk(slot=1, offset=0, length=1000), bytes(1000 + DIGEST_BYTES))
        assert isinstance(sender.hear(Nack), Nack)
        assert not landing.result().rejected_chunks
        assert not server.counters["lost_connections"]


def test_a_stranger_is_refused_only_so_often() -> None:
    with TransferServer() as server, RawSender.to(server.address) as stranger:
        for slot in range(greeter.MAX_REFUSED + 1):
            stranger.say(stranger.opening(slot, "unknown", [10]))
        assert stranger.told().code == "protocol"
        assert server.counters["refused:unknown_transfer"] == greeter.MAX_REFUSED + 1

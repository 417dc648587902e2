"""Mutual TLS for the peers' identities, AES-GCM for what they say."""

import socket
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest

from tests.transport.helpers import PATIENCE_S, PEER_TIMEOUT_S, SECRET, Memory, deliver, wait_for
from tests.transport.proxy import Forger, Proxy
from transport.control.certificates import Authority
from transport.errors import LocalProtocolError, RemoteProtocolError
from transport.path.tcp import TcpOptions, parse_address
from transport.receive.options import ServerOptions
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.send.lane.keys import SessionKeys
from transport.send.spec import TransferSpec
from transport.wire.checksum import Integrity
from transport.wire.connection import Connection, ConnectionRole
from transport.wire.frames import HEADER, Ack, Chunk, Ping
from transport.wire.identity import Identity
from transport.wire.seal import SEALED_PART_BYTES, TAG_BYTES, chunk_seal
from transport.wire.session import Sessions

MIXED = [300_000, 0, 20_480, 1, 3_000_000, 70_000] * 3
MB = 1 << 20


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def server_of(identity: Identity, **options: object) -> TransferServer:
    return TransferServer(options=ServerOptions(integrity=Integrity.AEAD, identity=identity, **options))  # type: ignore[arg-type]


def client_of(identity: Identity, **options: object) -> TransferClient:
    options = {"connections": 2, "peer_timeout_s": PEER_TIMEOUT_S, **options}
    return TransferClient(options=ClientOptions(integrity=Integrity.AEAD, identity=identity, **options))  # type: ignore[arg-type]


def test_sealed_ranges_land(authority: Authority) -> None:
    with server_of(authority.issue("decode")) as server, client_of(authority.issue("prefill")) as client:
        delivery = deliver(server, client, MIXED)
        assert all(result is not None and result.ok for result in delivery.wait())
        assert delivery.equal


def test_sealed_chunks_of_a_part_and_a_bit_land_however_they_come_in(authority: Authority) -> None:
    class Trickle(Proxy):
        """Hands on the end of a large piece bit by bit."""

        def _relay(self, index: int, source: socket.socket, sink: socket.socket, forward: bool) -> None:
            class Hesitating:
                def sendall(self, data: memoryview) -> None:
                    for start in range(0, len(data), 16_000):
                        sink.sendall(data[start : start + 16_000])
                        time.sleep(0.001)

                shutdown = sink.shutdown

            super()._relay(index, source, Hesitating(), forward)  # type: ignore[arg-type]

    sizes = [2 * (SEALED_PART_BYTES + extra) for extra in (1, 100, 1000, 20_000)] * 2  # sent in halves
    with (
        server_of(authority.issue("decode")) as server,
        Trickle(server.address) as trickle,
        client_of(authority.issue("prefill"), connections=1) as client,
    ):
        for i, size in enumerate(sizes):
            delivery = deliver(server, client, [size], transfer_id=str(i), address=trickle.address)
            assert all(result is not None and result.ok for result in delivery.wait(60))
            assert delivery.equal
        assert not server.counters["lost_connections"]


def test_nothing_readable_crosses_the_wire(authority: Authority) -> None:
    seen = bytearray()

    class Tap(Proxy):
        def _relay(self, index: int, source: socket.socket, sink: socket.socket, forward: bool) -> None:
            class Listening:
                def sendall(self, data: memoryview) -> None:
                    seen.extend(data)
                    sink.sendall(data)

                shutdown = sink.shutdown

            super()._relay(index, source, Listening(), forward)  # type: ignore[arg-type]

    with (
        server_of(authority.issue("d")) as server,
        Tap(server.address) as tap,
        client_of(authority.issue("p")) as client,
    ):
        delivery = deliver(server, client, [50_000] * 4, transfer_id="telltale-name", address=tap.address)
        assert all(result is not None and result.ok for result in delivery.wait())
        assert len(seen) > 200_000
        assert b"telltale-name" not in seen
        assert not any(range_[:64] in seen for range_ in delivery.source.content())


def test_a_chunk_that_was_changed_on_its_way_is_refused_and_comes_again(authority: Authority) -> None:
    with (
        server_of(authority.issue("d")) as server,
        Forger(server.address, [5_000_000]) as forger,
        client_of(authority.issue("p"), connections=1) as client,
    ):
        delivery = deliver(server, client, [3_000_000] * 4, address=forger.address)
        assert all(result is not None and result.ok for result in delivery.wait())
        assert delivery.equal
        assert server.counters["rejected:seal"] == 1


@pytest.mark.parametrize("stranger", ["client", "server"])
def test_a_certificate_of_another_authority_is_refused_by_either_end(
    authority: Authority, tmp_path: Path, stranger: str
) -> None:
    ours, made_up = authority.issue("node"), Authority(tmp_path / "other", "other").issue("node")
    theirs = Identity(certificate=made_up.certificate, key=made_up.key, authority=ours.authority)
    server_identity, client_identity = (ours, theirs) if stranger == "client" else (theirs, ours)
    with server_of(server_identity) as server, client_of(client_identity) as client:
        pushed = deliver(server, client, MIXED).push.wait(PATIENCE_S)
        assert pushed is not None
        assert pushed.reason == "identity"
        assert ("unknown ca" if stranger == "client" else "verify failed") in pushed.detail
        assert not pushed.stats.bytes_sent
        wait_for(lambda: server.counters["refused:identity"] > 0)


def test_a_plain_sender_and_a_plain_receiver_are_told_what_is_missing(authority: Authority) -> None:
    identity = authority.issue("node")
    with server_of(identity) as server, TransferClient() as client:
        pushed = deliver(server, client, MIXED).push.wait(PATIENCE_S)
        assert pushed is not None
        assert (pushed.reason, pushed.detail) == ("integrity_mode", "this listener wants aes-128-gcm")
        assert server.counters["refused:integrity_mode"] > 0
    with TransferServer() as server, client_of(identity) as client:
        pushed = deliver(server, client, MIXED).push.wait(PATIENCE_S)
        assert pushed is not None
        assert pushed.reason == "identity"
        assert "access denied" in pushed.detail
        assert server.counters["refused:identity"] > 0


def test_a_server_must_be_who_we_meant(authority: Authority) -> None:
    meant = authority.issue("prefill")
    identity = Identity(
        certificate=meant.certificate, key=meant.key, authority=meant.authority, peer_name="another-node"
    )
    with server_of(authority.issue("decode")) as server, client_of(identity, peer_timeout_s=1.0) as client:
        pushed = deliver(server, client, MIXED).push.wait(PATIENCE_S)
        assert pushed is not None
        assert pushed.reason == "identity"
        assert "another-node" in pushed.detail


def test_without_a_session_nobody_gets_in(authority: Authority) -> None:
    with server_of(authority.issue("decode")) as server:
        sender = Connection(
            ConnectionRole.SENDER,
            integrity=Integrity.AEAD,
            nonce=b"n" * 16,
            now=0.0,
            max_chunk_bytes=1000,
            session=b"guess",
        )
        with socket.create_connection(parse_address(server.address), timeout=PATIENCE_S) as sock:
            sock.sendall(sender.data_to_send())
            assert b"session" in sock.recv(1000)


@pytest.mark.parametrize("words", [b"\x16\x03\x01\x00\x01\x00", b"\x16\x03\x01\x02\x00\x01"])
def test_a_session_is_granted_only_to_who_has_shown_a_certificate(authority: Authority, words: bytes) -> None:
    with server_of(authority.issue("decode")) as server:
        for _ in range(5):
            with socket.create_connection(parse_address(server.address), timeout=PATIENCE_S) as sock:
                sock.sendall(words)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1000):
                    pass
        wait_for(lambda: server.counters["refused:identity"] >= 5)
        assert server.counters["refused:identity"] == 5
        assert not server.counters["sessions"]


def test_a_handshake_that_breaks_is_no_verdict_and_tried_again(authority: Authority) -> None:
    class Flaky(Proxy):
        """Hangs up on the first handshakes."""

        def _relay(self, index: int, source: socket.socket, sink: socket.socket, forward: bool) -> None:
            if index >= 3:
                super()._relay(index, source, sink, forward)
            elif forward:
                source.recv(10_000)
                source.shutdown(socket.SHUT_WR)

    with (
        server_of(authority.issue("decode")) as server,
        Flaky(server.address) as flaky,
        client_of(authority.issue("prefill"), connections=1, peer_timeout_s=PATIENCE_S) as client,
    ):
        assert all(r is not None and r.ok for r in deliver(server, client, MIXED, address=flaky.address).wait())
        assert len(flaky.pairs) >= 4
        assert not client.refusals


def test_keys_that_cannot_be_renewed_serve_until_they_end(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    options = ClientOptions(integrity=Integrity.AEAD, identity=authority.issue("prefill"), rotate_keys_s=1.0)
    now = time.monotonic()
    with server_of(authority.issue("decode")) as server:
        keys = SessionKeys(server.address, options)
        session = keys.session(now)
        assert session is not None
        assert keys.session(now) is session
    for _ in range(3):  # its address has no listener any more
        assert keys.session(now + 2.0) is session
    assert caplog.text.count("gives no new keys") == 1  # it is not asked with every connection
    with pytest.raises(OSError, match="refused"):
        keys.session(session.ends_at + 1.0)


def test_keys_rotate_in_mid_transfer(authority: Authority) -> None:
    with (
        server_of(authority.issue("decode")) as server,
        client_of(authority.issue("prefill"), rotate_keys_s=0.3, egress_bytes_per_s=20e6) as client,
    ):
        delivery = deliver(server, client, [MB] * 24)
        pushed, _ = delivery.wait()
        assert pushed is not None
        assert pushed.ok
        assert pushed.stats.bytes_resent == 0
        assert delivery.equal
        assert server.counters["sessions"] >= 3


def test_keys_rotate_after_a_cancelled_transfer(authority: Authority) -> None:
    with (
        server_of(authority.issue("decode")) as server,
        Proxy(server.address, 20e6, passes=3 * MB) as proxy,
        client_of(authority.issue("prefill"), rotate_keys_s=1.0) as client,
    ):
        cancelled = deliver(server, client, [MB] * 16, address=proxy.address)
        proxy.wait_for(3 * MB)
        server.cancel("t")
        proxy.passes = inf
        assert cancelled.wait()[0] is not None
        later = 0
        deadline = time.monotonic() + PATIENCE_S
        while server.counters["sessions"] < 2:
            assert time.monotonic() < deadline
            later += 1
            delivery = deliver(server, client, [MB // 4], transfer_id=str(later), address=proxy.address)
            assert all(result is not None and result.ok for result in delivery.wait())


def test_abort_gives_the_memory_back_at_once_though_the_link_is_stuck(authority: Authority) -> None:
    patient = TcpOptions(dead_after_s=2 * PATIENCE_S)  # it is no loss of the connection that ends the waiting
    with (
        server_of(authority.issue("decode"), tcp=patient) as server,
        Proxy(server.address, 5e6, passes=2 * MB) as proxy,
        client_of(authority.issue("prefill"), tcp=patient, peer_timeout_s=2 * PATIENCE_S) as client,
    ):
        sizes = [4 * MB] * 4
        delivery = deliver(server, client, sizes, address=proxy.address)
        proxy.wait_for(2 * MB)
        proxy.stalled |= set(range(len(proxy.pairs)))
        delivery.push.abort("another sender takes over", keep_landing=True)
        assert delivery.push.wait(PATIENCE_S) is not None  # and the link is stuck for good
        sent = delivery.source.content()
        delivery.source.buffer[:] = bytes(len(delivery.source.buffer))
        proxy.stalled.clear()
        proxy.passes = inf
        push = client.open(TransferSpec(server.address, "t", SECRET, sizes), Memory(sizes, fill=True, seed=1))
        push.ready_all()
        assert delivery.landed.wait(PATIENCE_S)
        assert delivery.target.content() == sent
        assert not server.counters["rejected:seal"]


def test_a_restarted_receiver_is_met_with_new_keys(authority: Authority) -> None:
    identity = authority.issue("decode")
    with client_of(authority.issue("prefill")) as client:
        with server_of(identity) as server:
            address = server.address
            assert all(result is not None and result.ok for result in deliver(server, client, MIXED).wait())
        host, port = parse_address(address)
        options = ServerOptions(integrity=Integrity.AEAD, identity=identity)
        with TransferServer(host, port, options=options) as server:
            delivery = deliver(server, client, MIXED)
            assert all(result is not None and result.ok for result in delivery.wait())


def deliver_until_keys_are_new(server: TransferServer, client: TransferClient) -> None:
    """And once more with them."""
    before, give_up_at = server.counters["sessions"], time.monotonic() + PATIENCE_S
    later = 0
    while server.counters["sessions"] == before or later < 2:
        assert time.monotonic() < give_up_at
        later += 1
        delivery = deliver(server, client, MIXED, transfer_id=str(later))
        assert all(result is not None and result.ok for result in delivery.wait())


def test_certificates_replaced_on_disk_serve_the_next_session(authority: Authority) -> None:
    server_identity, client_identity = authority.issue("decode"), authority.issue("prefill")
    with server_of(server_identity) as server, client_of(client_identity, rotate_keys_s=0.2) as client:
        assert all(result is not None and result.ok for result in deliver(server, client, MIXED).wait())
        for name in ("decode", "prefill"):
            authority.issue(name)
        deliver_until_keys_are_new(server, client)


def test_a_certificate_whose_key_is_not_there_yet_leaves_the_old_pair_in_service(
    authority: Authority, tmp_path: Path
) -> None:
    server_identity, client_identity = authority.issue("decode"), authority.issue("prefill")
    with server_of(server_identity) as server, client_of(client_identity, rotate_keys_s=0.1) as client:
        assert all(result is not None and result.ok for result in deliver(server, client, MIXED).wait())
        for identity in (server_identity, client_identity):
            identity.certificate.write_bytes((tmp_path / "authority.pem").read_bytes())
        server_identity.key.unlink()
        deliver_until_keys_are_new(server, client)
        assert server.counters["refused:identity"] == 0


def pair() -> Iterator[Connection]:
    for role in ConnectionRole:
        yield Connection(
            role, integrity=Integrity.AEAD, nonce=role.name[:1].encode() * 16, now=0.0, max_chunk_bytes=1 << 16,
            session_secret=lambda _: b"secret" * 5,
        )  # fmt: skip


def greet(sender: Connection, receiver: Connection) -> None:
    receiver.receive_data(sender.data_to_send(), 0.0)
    receiver.next_event()
    sender.receive_data(receiver.data_to_send(), 0.0)
    sender.next_event()


def test_replayed_reordered_forged_and_truncated_frames_do_not_open() -> None:
    for spoil in (
        lambda a, b: a + a,
        lambda a, b: b + a,
        lambda a, b: a[:-1] + bytes([a[-1] ^ 1]) + b,
        lambda a, b: a[:-1] + b + b"\0",
        lambda a, b: bytes([a[0], 0, *a[2:]]) + b,
    ):
        sender, receiver = pair()
        greet(sender, receiver)
        first, second = (receiver.send(Ack(slot=i, ranges=((0, 10),))) for i in range(2))
        sender.receive_data(spoil(first, second), 0.0)

        def drain(sender: Connection = sender) -> None:
            for _ in range(3):
                sender.next_event()

        with pytest.raises(RemoteProtocolError):
            drain()


def test_a_chunk_opens_only_in_its_place_and_under_its_transfer() -> None:
    sender, receiver = pair()
    greet(sender, receiver)
    plain, out, landed = memoryview(b"x" * 500), memoryview(bytearray(500)), memoryview(bytearray(500))
    seal = chunk_seal(b"s" * 32, sender.transcript, "t", b"secret")
    header = sender.chunk_header(3, 1000, len(plain), sealed=True)
    sealing = sender.seal_chunk(seal, header)
    for start, stop in ((0, 7), (7, 400), (400, 500)):
        sealing.update(plain[start:stop], out[start:stop])
    receiver.receive_data(header + bytes(out) + sealing.tag(), 0.0)
    assert receiver.next_event() == Chunk(slot=3, offset=1000, length=500, sealed=True)
    payload = memoryview(bytearray(500 + TAG_BYTES))
    receiver.take_payload(payload)
    opening = receiver.open_chunk(seal)
    for start, stop in ((0, 100), (100, 500)):
        opening.update(payload[start:stop], landed[start:stop])
    opening.verify(bytes(payload[500:]))
    assert landed == plain
    elsewhere = receiver.open_chunk(chunk_seal(b"s" * 32, sender.transcript, "other", b"secret"))
    elsewhere.update(payload[:500], landed)
    with pytest.raises(RemoteProtocolError, match="not authentic"):
        elsewhere.verify(bytes(payload[500:]))


def test_numbers_of_one_key_are_never_used_twice() -> None:
    sender, receiver = pair()
    greet(sender, receiver)
    # Under one key and number, the same words would be sealed into the same bytes.
    sealed = {sender.send(Ping(token=1))[HEADER.size :] for _ in range(70_000)}
    assert len(sealed) == 70_000


def test_sessions_end() -> None:
    sessions = Sessions(life_s=10.0)
    session = sessions.grant(now=0.0)
    assert sessions.secret_of(session.id, 9.9) == session.secret
    assert sessions.secret_of(session.id, 10.0) is None
    assert sessions.secret_of(b"?" * 16, 0.0) is None


def test_sealed_mode_needs_an_identity() -> None:
    with pytest.raises(ValueError, match="needs an identity"):
        ServerOptions(integrity=Integrity.AEAD)
    with pytest.raises(ValueError, match="needs an identity"):
        ClientOptions(integrity=Integrity.AEAD)
    sender = Connection(ConnectionRole.SENDER, integrity=Integrity.AEAD, nonce=b"s" * 16, now=0.0, max_chunk_bytes=10)
    receiver = next(c for c in pair() if c.role is ConnectionRole.RECEIVER)
    receiver.receive_data(sender.data_to_send(), 0.0)
    receiver.next_event()
    sender.receive_data(receiver.data_to_send(), 0.0)
    with pytest.raises(LocalProtocolError, match="session"):
        sender.next_event()

"""Which peers may send KVCache, to which others, and under which tickets."""

import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.peers import OWN, Peers
from tests.transport.helpers import PATIENCE_S, SECRET, Memory, deliver, wait_for
from tests.transport.raw_sender import RawSender
from transport.errors import ConnectionRefused
from transport.path.tcp import parse_address
from transport.peers.guard import Guard
from transport.peers.name import PeerCertificate, PeerName, PeerRole
from transport.receive.options import ServerOptions
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.send.lane.keys import SessionKeys
from transport.wire.checksum import DIGEST_BYTES, Integrity, digest, transfer_seed
from transport.wire.frames import Accept, Ack, Chunk, Nack, Refuse
from transport.wire.identity import Identity
from transport.wire.session import SESSION_LIFE_S, Session, request_session

SENDERS = (PeerRole.PREFILL, PeerRole.NODE)


def listening(identity: Identity, guard: Guard) -> TransferServer:
    return TransferServer(options=ServerOptions(integrity=Integrity.AEAD, identity=identity, guard=guard))


def session_of(server: TransferServer, identity: Identity) -> Session:
    sock = socket.create_connection(parse_address(server.address), timeout=PATIENCE_S)
    return request_session(sock, identity, PATIENCE_S, 0.0)


def opened(server: TransferServer, session: Session | None, transfer_id: str, claimed: bytes = b"") -> Accept | Refuse:
    with RawSender.to(server.address, session, claimed) as sender:
        sender.say(sender.opening(1, transfer_id, [10]))
        answer = sender.answer()
        assert isinstance(answer, Accept | Refuse)
        return answer


def test_keys_are_for_nodes_only_and_others_are_told_why(peers: Peers, tmp_path: Path) -> None:
    identity, guard = peers.guarded(tmp_path / "revoked")
    with listening(identity, guard) as server:
        for role, thief in peers.by_role.items():
            if role in SENDERS:
                session = session_of(server, thief)
                assert session.peer is not None
                assert session.peer.name == OWN
                continue
            with pytest.raises(
                ConnectionRefused, match=f"thief-{role} may not transfer.Hello: that is for node or pre"
            ):
                session_of(server, thief)
            assert guard.refused["transfer.Hello", role] == 1
        with pytest.raises(ConnectionRefused, match=r"`prfaas certificates` issues one"):
            session_of(server, peers.nameless)
        with pytest.raises(ConnectionRefused, match="2 URIs, where one must be"):
            session_of(server, peers.twofold)
        for thief in (peers.expired, peers.stranger):
            with pytest.raises(ConnectionRefused):
                session_of(server, thief)


def test_a_ticket_is_its_senders_and_nobody_elses(peers: Peers, tmp_path: Path) -> None:
    identity, guard = peers.guarded(tmp_path / "revoked")
    with listening(identity, guard) as server:
        prefill, node = (session_of(server, peers.by_role[role]) for role in SENDERS)
        landing = server.expect("bound", SECRET, [10], Memory([10]), sender="east/thief-prefill")
        assert opened(server, node, "bound") == Refuse(slot=1, code="access_denied")
        assert isinstance(opened(server, prefill, "bound"), Accept)
        server.readdress(landing, "east/thief-node")
        assert opened(server, prefill, "bound") == Refuse(slot=1, code="access_denied")
        assert isinstance(opened(server, node, "bound"), Accept)
        server.expect("anyone", SECRET, [10], Memory([10]))
        assert isinstance(opened(server, prefill, "anyone"), Accept)
        assert opened(server, prefill, "probe") == Refuse(slot=1, code="unknown_transfer")


def half_sealed(identity: Identity, guard: Guard) -> TransferServer:
    """Cluster "fabric" may send in clear."""
    options = ServerOptions(integrity=Integrity.AEAD, identity=identity, guard=guard, plain_from=frozenset({"fabric"}))
    return TransferServer(options=options)


@pytest.mark.parametrize("sender", ["", "east/thief-prefill"])
def test_no_session_that_is_only_named_opens_what_must_come_sealed(peers: Peers, tmp_path: Path, sender: str) -> None:
    identity, guard = peers.guarded(tmp_path / "revoked")
    with half_sealed(identity, guard) as server:
        server.expect("t", SECRET, [10], Memory([10]), sender=sender)
        session = session_of(server, peers.by_role[PeerRole.PREFILL])
        for claimed in (session.id, b"no such session", b""):
            assert opened(server, None, "t", claimed) == Refuse(slot=1, code="access_denied")
        assert isinstance(opened(server, session, "t"), Accept)


def test_a_sender_in_clear_lands_nothing_once_another_must_seal(peers: Peers, tmp_path: Path) -> None:
    identity, guard = peers.guarded(tmp_path / "revoked")
    with half_sealed(identity, guard) as server:
        target = Memory([10])
        landing = server.expect("t", SECRET, [10], target, sender="fabric/p0")
        with RawSender.to(server.address) as sender:
            sender.say(sender.opening(1, "t", [10]))
            assert isinstance(sender.answer(), Accept)
            server.readdress(landing, "east/thief-prefill")
            words = b"0123456789"
            behind = digest([memoryview(words)], transfer_seed("t", sender.connection.transcript), 0)
            sender.say(Chunk(slot=1, offset=0, length=10), words, behind.to_bytes(DIGEST_BYTES, "little"))
            assert isinstance(sender.hear(Ack, Nack), Nack)
            assert not landing.bytes_landed
            assert target.content() == [bytes(10)]


def test_who_is_revoked_opens_nothing_more_with_keys_of_before(peers: Peers, tmp_path: Path) -> None:
    identity, guard = peers.guarded(tmp_path / "revoked")
    with listening(identity, guard) as server:
        session = session_of(server, peers.by_role[PeerRole.PREFILL])
        server.expect("t", SECRET, [10], Memory([10]))
        assert isinstance(opened(server, session, "t"), Accept)
        (tmp_path / "revoked").write_text("thief-prefill\n")
        assert session.peer is not None

        def is_refused() -> bool:
            return isinstance(opened(server, session, "t"), Refuse)

        wait_for(is_refused)
        with pytest.raises(ConnectionRefused, match="thief-prefill is revoked"):
            session_of(server, peers.by_role[PeerRole.PREFILL])


def test_a_sender_gives_nothing_to_who_is_no_node(peers: Peers, tmp_path: Path) -> None:
    sender = peers.by_role[PeerRole.PREFILL]
    _, everybody = peers.guarded(tmp_path / "revoked")
    options = ClientOptions(integrity=Integrity.AEAD, identity=sender, guard=sender.guard(), peer_timeout_s=5.0)
    for role in PeerRole:
        with (
            listening(peers.by_role[role], everybody) as server,
            TransferClient(options=options) as client,
        ):
            delivery = deliver(server, client, [1000])
            pushed = delivery.push.wait(PATIENCE_S)
            assert pushed is not None
            assert pushed.ok is (role in SENDERS)
            assert role in SENDERS or pushed.reason == "identity"


def test_a_sender_gives_nothing_to_another_node_than_the_ticket_s(peers: Peers, tmp_path: Path) -> None:
    options = sending(peers, tmp_path / "revoked")
    _, everybody = peers.guarded(tmp_path / "nobody")
    with (
        listening(peers.by_role[PeerRole.NODE], everybody) as server,
        TransferClient(options=options) as client,
    ):
        for transfer_id, receiver, reason in (("ours", "east/thief-node", ""), ("another's", "west/d0", "identity")):
            delivery = deliver(server, client, [1000], transfer_id=transfer_id, receiver=receiver)
            pushed = delivery.push.wait(PATIENCE_S)
            assert pushed is not None
            assert (pushed.ok, pushed.reason) == (not reason, reason)


def sending(peers: Peers, revoked: Path) -> ClientOptions:
    """A sender's, with a list of its own."""
    revoked.touch()
    identity = replace(peers.by_role[PeerRole.PREFILL], revoked=revoked)
    return ClientOptions(
        integrity=Integrity.AEAD, identity=identity, guard=identity.guard(), peer_timeout_s=5.0, connections=1
    )


def test_a_revoked_receiver_is_sent_nothing_more_over_an_open_connection(peers: Peers, tmp_path: Path) -> None:
    _, everybody = peers.guarded(tmp_path / "nobody")
    options = sending(peers, tmp_path / "revoked")
    with (
        listening(peers.by_role[PeerRole.NODE], everybody) as server,
        TransferClient(options=options) as client,
    ):
        first = deliver(server, client, [1000], transfer_id="first").push.wait(PATIENCE_S)
        assert first is not None
        assert first.ok
        (tmp_path / "revoked").write_text("thief-node\n")
        guard = options.guard
        assert guard is not None
        wait_for(lambda: guard.is_revoked(PeerCertificate(PeerName("prfaas", "east", PeerRole.NODE, "thief-node"), 1)))
        later = deliver(server, client, [1000], transfer_id="later").push.wait(PATIENCE_S)
        assert later is not None
        assert (later.ok, later.reason) == (False, "identity")
        assert guard.refused["transfer.Accept", "node"] >= 1


def test_a_revoked_receiver_that_gives_no_new_keys_does_not_keep_the_old(peers: Peers, tmp_path: Path) -> None:
    _, everybody = peers.guarded(tmp_path / "nobody")
    options = sending(peers, tmp_path / "revoked")
    now = time.monotonic()
    with listening(peers.by_role[PeerRole.NODE], everybody) as server:
        keys = SessionKeys(server.address, options)
        session = keys.session(now)
        assert session is not None
        assert session.peer is not None
    assert keys.session(now + 0.9 * SESSION_LIFE_S) is session  # of one that is not revoked they serve on
    (tmp_path / "revoked").write_text("thief-node\n")
    guard, receiver = options.guard, session.peer
    assert guard is not None
    wait_for(lambda: guard.is_revoked(receiver))
    with pytest.raises(ConnectionRefused, match="thief-node is revoked"):
        keys.unless_revoked(session)
    for _ in range(2):
        with pytest.raises(OSError, match="refused"):
            keys.session(now + 1.0)


@contextmanager
def granting(identity: Identity, life_s: float) -> Iterator[socket.socket]:
    """A receiver that says how long its keys live."""

    def grant() -> None:
        with identity.server_context().wrap_socket(listener.accept()[0], server_side=True) as tls:
            tls.sendall(struct.pack("<16s32sd", b"i" * 16, b"s" * 32, life_s))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=grant)
        thread.start()
        yield socket.create_connection(listener.getsockname(), timeout=PATIENCE_S)
        thread.join()


def test_a_receiver_cannot_make_its_keys_live_for_ever(peers: Peers) -> None:
    node, sender = peers.by_role[PeerRole.NODE], peers.by_role[PeerRole.PREFILL]
    for life_s, granted_s in ((10.0, 10.0), (1e300, SESSION_LIFE_S), (math.inf, SESSION_LIFE_S)):
        with granting(node, life_s) as sock:
            assert request_session(sock, sender, PATIENCE_S, 0.0).ends_at == granted_s
    for life_s in (math.nan, -1.0, 0.0):
        with granting(node, life_s) as sock, pytest.raises(ConnectionError, match="granted a session of"):
            request_session(sock, sender, PATIENCE_S, 0.0)

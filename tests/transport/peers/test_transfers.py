"""Which peers may send KVCache, to which others, and under which tickets."""

import socket
from pathlib import Path

import pytest

from tests.peers import OWN, Peers
from tests.transport.helpers import PATIENCE_S, SECRET, Memory, deliver, wait_for
from tests.transport.raw_sender import RawSender
from transport.errors import ConnectionRefused
from transport.path.tcp import parse_address
from transport.peers.guard import Guard
from transport.peers.name import PeerRole
from transport.receive.options import ServerOptions
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.wire.checksum import Integrity
from transport.wire.frames import Accept, Refuse
from transport.wire.identity import Identity
from transport.wire.session import Session, request_session

SENDERS = (PeerRole.PREFILL, PeerRole.NODE)


def listening(identity: Identity, guard: Guard) -> TransferServer:
    return TransferServer(options=ServerOptions(integrity=Integrity.AEAD, identity=identity, guard=guard))


def session_of(server: TransferServer, identity: Identity) -> Session:
    sock = socket.create_connection(parse_address(server.address), timeout=PATIENCE_S)
    return request_session(sock, identity, PATIENCE_S, 0.0)


def opened(server: TransferServer, session: Session, transfer_id: str) -> Accept | Refuse:
    with RawSender.to(server.address, session) as sender:
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

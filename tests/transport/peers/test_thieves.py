"""A peer without the right to send says every frame, and moves nothing; a ticket is good for one landing."""

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.peers import Peers
from tests.transport.fuzzing.inputs import frame_of
from tests.transport.helpers import PATIENCE_S, SECRET, Memory, deliver
from tests.transport.peers.test_transfers import listening, opened, session_of
from tests.transport.raw_sender import RawSender
from transport.errors import ConnectionRefused
from transport.path.tcp import parse_address
from transport.peers.name import PeerRole
from transport.peers.rights import FRAMES
from transport.receive.server import TransferServer
from transport.send.client import ClientOptions, TransferClient
from transport.wire.checksum import Integrity
from transport.wire.connection import ConnectionRole
from transport.wire.encoding import encode, encode_chunk, encode_coded
from transport.wire.frames import KINDS, Accept, Chunk, CodedChunk, Frame, Refuse

BYTES = 64


class Speaker(RawSender):
    """What it is about to say is for a receiver."""

    role = ConnectionRole.RECEIVER


def said(kind: type[Frame], speaker: Speaker) -> bytes:
    frame = frame_of(random.Random(1), kind, speaker)
    if isinstance(frame, Chunk):
        return encode_chunk(frame.slot, frame.offset, frame.length, 1) + bytes(BYTES)
    if isinstance(frame, CodedChunk):
        return encode_coded(frame, 1) + bytes(BYTES)
    return encode(frame, 1)


@contextmanager
def untouched(server: TransferServer, transfer_id: str) -> Iterator[None]:
    """A landing of another sender: its memory is not written, and it does not end."""
    memory, results = Memory([BYTES]), list[object]()
    server.expect(transfer_id, SECRET, [BYTES], memory, sender="east/thief-prefill", on_done=results.append)
    yield
    assert not any(memory.buffer)
    assert results == []


def is_ended(speaker: Speaker) -> bool:
    """Whether the listener has hung up, whatever it has said before."""
    with suppress(ConnectionError):
        while speaker.sock.recv(1 << 16):
            pass
    return True


def test_no_frame_is_heard_of_a_caller_without_keys_which_other_roles_get_none_of(peers: Peers, tmp_path: Path) -> None:
    identity, guard = peers.guarded(tmp_path / "revoked")
    assert {kind.__name__ for kind in KINDS} == set(FRAMES)
    with listening(identity, guard) as server, untouched(server, "t"):
        for kind in KINDS:
            with socket.create_connection(parse_address(server.address), timeout=PATIENCE_S) as sock:
                speaker = Speaker(sock)
                speaker.say(said(kind, speaker))
                assert is_ended(speaker), kind
        for role in set(PeerRole) - {PeerRole.PREFILL, PeerRole.NODE}:
            with pytest.raises(ConnectionRefused, match=r"may not transfer\.Hello"):
                session_of(server, peers.by_role[role])


def test_with_keys_but_another_senders_ticket_no_frame_moves_anything(peers: Peers, tmp_path: Path) -> None:
    identity, guard = peers.guarded(tmp_path / "revoked")
    with listening(identity, guard) as server, untouched(server, "t"):
        session = session_of(server, peers.by_role[PeerRole.NODE])
        for kind in KINDS:
            with Speaker.to(server.address, session) as speaker:
                speaker.say(speaker.opening(1, "t", [BYTES]))
                assert speaker.answer() == Refuse(slot=1, code="access_denied")
                with suppress(OSError):
                    speaker.say(speaker.connection.encoded(frame_of(random.Random(2), kind, speaker)), bytes(BYTES))
                    speaker.sock.shutdown(socket.SHUT_WR)
                    assert is_ended(speaker), kind


def test_a_ticket_that_was_used_writes_nothing_more(peers: Peers, tmp_path: Path) -> None:
    identity, guard = peers.guarded(tmp_path / "revoked")
    sender = peers.by_role[PeerRole.PREFILL]
    options = ClientOptions(integrity=Integrity.AEAD, identity=sender, guard=sender.guard())
    with listening(identity, guard) as server, TransferClient(options=options) as client:
        delivery = deliver(server, client, [BYTES])
        pushed, landed = delivery.wait()
        assert pushed is not None
        assert landed is not None
        assert delivery.equal
        for role in (PeerRole.PREFILL, PeerRole.NODE):
            answer = opened(server, session_of(server, peers.by_role[role]), "t")
            assert isinstance(answer, Refuse) or answer == Accept(slot=1, missing=())
        assert delivery.equal
        assert len(delivery.results) == 1

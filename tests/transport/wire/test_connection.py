"""One end of a connection by itself: what greetings bind, and what a peer cannot make it keep."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from transport.errors import GreetingRefused, RemoteProtocolError
from transport.receive.registry.landings import Landings
from transport.wire.checksum import Integrity, transfer_seed
from transport.wire.connection import Connection, ConnectionRole, ProtocolState
from transport.wire.encoding import decode, encode
from transport.wire.frames import HEADER, Accept, Frame, Hello, Open, Ping, Pong, Refuse, Welcome
from transport.wire.manifest import Manifest, proof_of

MB = 1 << 20
SECRET = b"one-time secret!"
Change = Callable[[bytes], bytes]


def untouched(data: bytes) -> bytes:
    return data


def with_changes(**changes: object) -> Change:
    """What a man in the middle does to a greeting."""

    def change(data: bytes) -> bytes:
        kind, flags, seq, _ = HEADER.unpack_from(data)
        frame = cast(Hello | Welcome, decode(kind, flags, memoryview(data)[HEADER.size :]))
        return encode(replace(frame, **changes), seq)

    return change


def ends(integrity: Integrity) -> tuple[Connection, Connection]:
    sender, receiver = (
        Connection(
            role,
            integrity=integrity,
            nonce=role.name[:1].encode() * 16,
            now=0.0,
            max_chunk_bytes=MB,
            session_secret=lambda _: b"k" * 32,
            codecs=0 if role is ConnectionRole.SENDER else 3,
        )
        for role in (ConnectionRole.SENDER, ConnectionRole.RECEIVER)
    )
    return sender, receiver


def pass_on(here: Connection, there: Connection, change: Change = untouched) -> Frame | None:
    there.receive_data(change(here.data_to_send()), 0.0)
    return there.next_event()


def greet(sender: Connection, receiver: Connection, hello: Change = untouched, welcome: Change = untouched) -> None:
    pass_on(sender, receiver, hello)
    pass_on(receiver, sender, welcome)


def opening(sender: Connection) -> Open:
    manifest = Manifest([10])
    return Open(
        slot=0, transfer_id="t", proof=proof_of(SECRET, "t", manifest.digest, sender.transcript), total_bytes=10,
        num_ranges=1, manifest_digest=manifest.digest,
    )  # fmt: skip


def answer(receiver: Connection, frame: Open) -> Accept | Refuse:
    landings = Landings()
    landings.connected(1)
    landings.expect("t", SECRET, [10], [[memoryview(bytearray(10))]], on_done=None, deadline=1e9)
    return landings.open(1, frame, receiver.transcript, 0.0)


TAMPERED = {
    "version_max": (with_changes(version_max=9), untouched),
    "version_min": (with_changes(version_min=0), untouched),
    "max_chunk_bytes": (untouched, with_changes(max_chunk_bytes=1 << 16)),
    "codecs": (untouched, with_changes(codecs=0)),
    "nonce of the sender": (with_changes(nonce=b"x" * 16), untouched),
    "nonce of the receiver": (untouched, with_changes(nonce=b"x" * 16)),
    "session": (with_changes(session=b"another"), untouched),
    "number": (lambda data: data, lambda data: data[:1] + b"\x02" + data[2:]),  # a flag that means nothing
}


@pytest.mark.parametrize("integrity", [Integrity.NONE, Integrity.CHECKSUM])
def test_a_secret_is_shown_for_the_greetings_that_were_heard(integrity: Integrity) -> None:
    sender, receiver = ends(integrity)
    greet(sender, receiver)
    assert sender.transcript == receiver.transcript
    assert isinstance(answer(receiver, opening(sender)), Accept)


@pytest.mark.parametrize("integrity", [Integrity.NONE, Integrity.CHECKSUM])
@pytest.mark.parametrize(("hello", "welcome"), TAMPERED.values(), ids=TAMPERED.keys())
def test_nobody_changes_a_greeting_unseen(integrity: Integrity, hello: Change, welcome: Change) -> None:
    sender, receiver = ends(integrity)
    greet(sender, receiver, hello, welcome)
    assert sender.state is receiver.state is ProtocolState.OPEN
    assert answer(receiver, opening(sender)) == Refuse(slot=0, code="bad_secret")
    assert transfer_seed("t", sender.transcript) != transfer_seed("t", receiver.transcript)


@pytest.mark.parametrize(("hello", "welcome"), TAMPERED.values(), ids=TAMPERED.keys())
def test_after_a_greeting_that_was_changed_nothing_sealed_opens(hello: Change, welcome: Change) -> None:
    for speaks in ConnectionRole:
        sender, receiver = ends(Integrity.AEAD)
        greet(sender, receiver, hello, welcome)
        here, there = (sender, receiver) if speaks is ConnectionRole.SENDER else (receiver, sender)
        there.receive_data(here.send(Ping(token=1)), 0.0)
        with pytest.raises(RemoteProtocolError, match="not authentic"):
            there.next_event()


@pytest.mark.parametrize(("lowest", "highest"), [(0, 0), (3, 9)])
def test_versions_that_we_do_not_speak_are_refused(lowest: int, highest: int) -> None:
    sender, receiver = ends(Integrity.CHECKSUM)
    with pytest.raises(GreetingRefused, match="we speak 1 to 2"):
        pass_on(sender, receiver, with_changes(version_min=lowest, version_max=highest))


@pytest.mark.parametrize(("highest", "spoken"), [(1, 1), (2, 2), (9, 2)])
def test_both_ends_know_the_version_that_they_speak(highest: int, spoken: int) -> None:
    sender, receiver = ends(Integrity.CHECKSUM)
    greet(sender, receiver, with_changes(version_max=highest))
    assert (sender.version, receiver.version) == (spoken, spoken)


@pytest.mark.parametrize("role", list(ConnectionRole))
def test_pongs_do_not_pile_up(role: ConnectionRole) -> None:
    sender, receiver = ends(Integrity.CHECKSUM)
    greet(sender, receiver)
    asked, asking = (sender, receiver) if role is ConnectionRole.SENDER else (receiver, sender)
    for token in range(10_000):
        asked.receive_data(asking.send(Ping(token=token)), 0.0)
        assert asked.next_event() is None
    assert asked.data_to_send() == encode(Pong(token=9_999), 1)

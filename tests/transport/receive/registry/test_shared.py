"""What the threads of a listener share: no other connection waits for one that takes nothing."""

import threading
from dataclasses import dataclass, field

from tests.transport.helpers import PATIENCE_S, SECRET, Memory
from transport.receive.registry.seats import Origin
from transport.receive.registry.shared import SharedLandings
from transport.wire.frames import Accept, Cancel, Code, Frame, Open
from transport.wire.manifest import Manifest, proof_of

TRANSCRIPT = b"both greetings"
ORIGIN = Origin("peer", "t")


@dataclass
class BusyReader:
    """Of a connection whose peer takes nothing until `takes` is set."""

    takes: threading.Event = field(default_factory=threading.Event)
    heard: list[Frame] = field(default_factory=list)
    stopped: bool = False

    def stop(self) -> None:
        self.stopped = True

    def say(self, frame: Frame, timeout_s: float) -> None:
        assert self.takes.wait(PATIENCE_S)
        self.heard.append(frame)

    def join(self) -> None: ...


def sending(shared: SharedLandings, reader: BusyReader) -> int:
    """A connection that has opened transfer t."""
    who = shared.arrive()
    assert isinstance(who, int)
    assert shared.enter(who, reader, ORIGIN) is None
    manifest = Manifest([10])
    proof = proof_of(SECRET, "t", manifest.digest, TRANSCRIPT)
    opening = Open(
        slot=1,
        transfer_id="t",
        proof=proof,
        total_bytes=10,
        num_ranges=1,
        manifest_digest=manifest.digest,
        arena_path="",
    )
    assert isinstance(shared.open(who, opening, TRANSCRIPT), Accept)
    return who


def expecting(num_seats: int = 9) -> SharedLandings:
    shared = SharedLandings(None, num_seats)
    shared.landings.expect("t", SECRET, [10], Memory([10]), on_done=None, deadline=float("inf"))
    return shared


def test_cancel_does_not_wait_for_a_connection_that_takes_nothing() -> None:
    shared, reader = expecting(), BusyReader()
    sending(shared, reader)
    shared.cancel("t", "gone")
    assert shared.counters["failed:cancelled"] == 1
    assert not reader.heard
    reader.takes.set()
    shared.keep_deadlines()
    assert reader.heard == [Cancel(slot=1, code="cancelled", detail="gone")]


def test_who_is_gone_is_told_nothing() -> None:
    shared, reader = expecting(), BusyReader()
    who = sending(shared, reader)
    shared.gone(who)
    shared.left(who)
    shared.cancel("t", "gone")
    shared.say_notices()
    assert not reader.heard


def test_after_the_close_nobody_gets_in_and_who_was_there_is_stopped() -> None:
    shared, reader = expecting(), BusyReader()
    reader.takes.set()
    sending(shared, reader)
    assert shared.close() == [reader]
    assert reader.stopped
    assert reader.heard == [Cancel(slot=1, code="cancelled", detail="the receiver closes")]
    assert shared.arrive() is Code.CLOSING
    assert shared.enter(7, BusyReader(), ORIGIN) is Code.CLOSING


def test_one_reader_too_many_is_refused_and_counted() -> None:
    shared = expecting(num_seats=1)
    sending(shared, BusyReader())
    assert shared.arrive() is Code.TOO_MANY
    assert shared.enter(7, BusyReader(), ORIGIN) is Code.TOO_MANY
    assert shared.counters["refused:too_many_connections"] == 1

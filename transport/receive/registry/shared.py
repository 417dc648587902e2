"""The landings of one listener, shared by its threads under one lock, and the actions after each decision.

Decisions are those of `Landings`, taken under the lock; bytes move, and owners are told, outside of it.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

from transport.coding.choice import CodecAccounts
from transport.coding.codec import CodedPart
from transport.errors import Closed, TargetFailed
from transport.peers.guard import Guard
from transport.peers.name import PeerCertificate
from transport.peers.rights import SEND
from transport.receive.buffers import BufferRoom
from transport.receive.registry.landing import Claim, Landing, Notices, Rivals, SinkOf
from transport.receive.registry.landings import Landings
from transport.receive.registry.seats import Crowded, Origin, Seats
from transport.receive.registry.segments import ReadRequest
from transport.wire.frames import (
    Abort,
    Accept,
    Ack,
    Chunk,
    Code,
    CodedChunk,
    Frame,
    Nack,
    Open,
    Reference,
    Refuse,
    Written,
)

log = logging.getLogger(__name__)

NOTICE_TIMEOUT_S: Final = 0.5  # one thread tells all connections: one that takes nothing must not hold it up
MAX_WAIT_S: Final = 60.0
NUM_SEATS: Final = 4096
BUFFER_BYTES: Final = 1 << 30
T = TypeVar("T")


class ConnectionReader(Protocol):
    """The reader of a connection, as other threads see it."""

    def stop(self) -> None:
        """From any thread; never blocks."""

    def say(self, frame: Frame, timeout_s: float) -> None: ...

    def join(self) -> None:
        """Waits until it has ended."""


class SharedLandings:
    """All landings of a listener, and the readers of the connections that fill them."""

    def __init__(
        self,
        on_read: Callable[[ReadRequest], None] | None,
        num_seats: int = NUM_SEATS,
        buffer_bytes: int = BUFFER_BYTES,
        guard: Guard | None = None,
        *,
        spare_buffer_bytes: int = 0,
        plain_from: frozenset[str] = frozenset(),
    ) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # deadlines moved, or a connection left
        self.landings = Landings(plain_from=plain_from)
        self.closing = False
        self.received_bytes = 0
        self.decoded = CodecAccounts()
        self._guard = guard
        self._peers: dict[int, tuple[PeerCertificate, str]] = {}  # of connections with a session, and where they are
        self._on_read = on_read  # sends what a one-sided read asks for (see batch)
        self._readers: dict[int, ConnectionReader] = {}
        self._seats = Seats(num_seats)
        self.buffers = BufferRoom(buffer_bytes, spare_buffer_bytes)
        self._next_reader = 0
        self._notices: Notices = []  # not said yet

    def count(self, label: str) -> None:
        with self.lock:
            self.landings.counters[label] += 1

    @property
    def counters(self) -> Counter[str]:
        with self.lock:
            return Counter(self.landings.counters)

    # who reads

    @property
    def num_readers(self) -> int:
        with self.lock:
            return len(self._readers)

    def arrive(self) -> int | Code:
        """A number for a new connection; or the reason why it is refused."""
        with self.lock:
            if self.closing:
                return Code.CLOSING
            if self._seats.is_full(self.landings.activity.idle_since):
                return Code.TOO_MANY
            who = self._next_reader
            self._next_reader += 1
            self.landings.connected(who)
            return who

    def introduce(self, who: int, peer: PeerCertificate, address: str) -> None:
        """It goes on with a session of that peer's. The caller has the lock."""
        self._peers[who] = peer, address
        self.landings.places[who] = peer.name.place if peer.name is not None else ""

    def enter(self, who: int, reader: ConnectionReader, origin: Origin) -> Code | None:
        """Seats the connection's reader, or returns why not. Idle connections may have to make room."""
        with self.lock:
            if self.closing:
                return Code.CLOSING
            seat = self._seats.take(who, origin, self.landings.activity.idle_since)
            if isinstance(seat, Crowded):
                self.landings.counters[f"refused:{Code.TOO_MANY}"] += 1
                self.landings.counters[f"crowded:{seat.what}"] += 1
                return Code.TOO_MANY
            self._readers[who] = reader
            rivals = [self._readers[rival] for rival in seat.instead_of if rival in self._readers]
            if rivals:
                self.landings.counters["turned_away:idle"] += len(rivals)
        for rival in rivals:
            rival.stop()
        return None

    def gone(self, who: int) -> None:
        """It reads no more: whatever it had opened is left, and what it was writing does not count."""
        with self.changed:
            self.landings.disconnected(who, time.monotonic())
            self._peers.pop(who, None)
            self.changed.notify_all()
        self.settle()

    def left(self, who: int) -> None:
        """Nothing can be said to it any more."""
        with self.lock:
            self._readers.pop(who, None)
            self._seats.leave(who)

    def close(self) -> list[ConnectionReader]:
        """Ends all landings and tells their senders; returns the stopped readers."""
        with self.changed:
            self.closing = True
            readers = list(self._readers.values())
            active = self.landings.active_ids()
            self.changed.notify_all()
        for transfer_id in active:
            self.cancel(transfer_id, "the receiver closes")
        self.say_notices()
        for reader in readers:
            reader.stop()
        return readers

    # what ends landings

    def cancel(self, transfer_id: str, reason: str) -> None:
        self._end(lambda now: self.landings.cancel(transfer_id, reason, now))

    def abort(self, who: int, frame: Abort) -> None:
        self._end(lambda now: self.landings.abort(who, frame, now))

    def fail(self, who: int, slot: int, code: Code, error: Exception) -> None:
        """Ends a landing of whose memory nothing can be made, and tells its senders."""
        log.error("the landing of slot %d of connection %d: %s", slot, who, error, exc_info=error)
        self._end(lambda now: self.landings.fail(who, slot, code, str(error), now))

    def break_seal(self, who: int, slot: int) -> None:
        """A chunk was not authentic."""
        self._end(lambda now: self.landings.break_seal(who, slot, now))

    def _end(self, decide: Callable[[float], Notices]) -> None:
        """Senders are told later: that never blocks, though they may take nothing."""
        with self.changed:
            self._notices += decide(time.monotonic())
            self.changed.notify_all()
        self.settle()

    def keep_deadlines(self) -> None:
        """Waits for the next, or for something to say, and does what it asks for."""
        with self.changed:
            if self.closing:
                return
            wait_s = 0.0 if self._notices else self.landings.next_deadline() - time.monotonic()
            self.changed.wait(min(max(wait_s, 0.0), MAX_WAIT_S))
            now = time.monotonic()
            self._notices += self.landings.expire(now)
            idle = self._seats.overdue(self.landings.activity.idle_since, now)
            if idle:
                self.landings.counters["turned_away:idle"] += len(idle)
            overdue = [self._readers[who] for who in {*self.landings.overdue(now), *idle} if who in self._readers]
        for reader in overdue:
            reader.stop()
        self.settle()
        self.say_notices()

    def say_notices(self) -> None:
        with self.lock:
            notices, self._notices = self._notices, []
            said = [(self._readers[who], frame) for who, frame in notices if who in self._readers]
        for reader, frame in said:
            reader.say(frame, NOTICE_TIMEOUT_S)

    def settle(self) -> None:
        """Tells the owners of landings that are not written to any more, and serves reads."""
        with self.changed:
            settled = self.landings.take_settled()
            reads = self.landings.segments.take_reads()
            if settled:
                self.changed.notify_all()
        for read in reads:
            assert self._on_read is not None  # no segment is readable without
            try:
                self._on_read(read)
            except Exception:
                log.exception("serving read %s failed", read.reply_id)
        for landing in settled:
            try:
                landing.tell_owner()
            except Exception:
                log.exception("on_done of landing %s failed", landing.transfer_id)

    # what a connection asks for

    def open(self, who: int, frame: Open, transcript: bytes) -> Accept | Refuse:
        with self.lock:
            peer = self._peers.get(who)
        if self._guard is not None and peer is not None and (why := self._guard.refusal(SEND, *peer)):
            self.count(f"refused:{Code.ACCESS}")
            return Refuse(slot=frame.slot, code=Code.ACCESS, detail=why)
        with self.lock:
            landing = self.landings.active.get(frame.transfer_id)
        if landing is not None:
            _ = landing.inbox.manifest.digest  # it takes a while the first time, in which the lock is free
        with self.changed:
            reply = self.landings.open(who, frame, transcript, time.monotonic())
            self.changed.notify_all()
        return reply

    def bound(self, who: int, slot: int) -> Landing | None:
        with self.lock:
            return self.landings.bound(who, slot)

    def claim(self, who: int, frame: Chunk | CodedChunk | Reference | Written, sink_of: SinkOf) -> Claim | None:
        """The right to write one chunk, once nothing else writes there."""
        try:
            return self._without_rivals(
                lambda: self.landings.begin(who, frame.slot, frame.offset, frame.stop, sink_of, time.monotonic())
            )
        except TargetFailed as exc:
            self.fail(who, frame.slot, Code.TARGET, exc)
            return None

    def finish(self, claim: Claim, verified: bool, lossy_bytes: int) -> Ack | Nack | None:
        """The chunk is in its place, or else as if it had never come."""
        with self.lock:
            reply = self.landings.finish(claim, verified, time.monotonic(), lossy_bytes)
            settled = claim.landing.outcome is not None
        if settled:
            self.settle()
        return reply

    def withdraw(self, claim: Claim) -> None:
        """The chunk did not come to its end."""
        with self.lock:
            self.landings.withdraw(claim)
        self.settle()

    def takes(self, who: int, slot: int, *, lossy: bool) -> bool:
        with self.lock:
            return self.landings.takes(who, slot, lossy=lossy)

    def reject(self, who: int, chunk: CodedChunk, code: Code) -> Nack | None:
        with self.lock:
            return self.landings.reject(who, chunk.slot, chunk.offset, chunk.length, code)

    def on_decoded(self, shares: Iterable[CodedPart], cpu_s: float) -> None:
        with self.lock:
            self.decoded.add(shares, cpu_s)

    def grant_memory(self, who: int, slot: int) -> Landing | None:
        """The right of a sender to write all that is missing by itself, once nothing else writes there."""
        return self._without_rivals(lambda: self.landings.grant(who, slot))

    def is_granted(self, who: int, slot: int) -> bool:
        with self.lock:
            return self.landings.is_granted(who, slot)

    def revoke_memory(self, who: int, slot: int) -> None:
        with self.lock:
            self.landings.revoke(who, slot)
        self.settle()

    def _without_rivals(self, ask: Callable[[], T | Rivals]) -> T:
        """Waits for connections that write into the same place; they are ended, since their sender has given them
        up.
        """
        with self.changed:
            while True:
                answer = ask()
                if not isinstance(answer, Rivals):
                    return answer
                if self.closing:
                    raise Closed("the server is closed")
                for rival in answer.who:
                    if rival in self._readers:
                        self._readers[rival].stop()
                self.changed.wait(1.0)

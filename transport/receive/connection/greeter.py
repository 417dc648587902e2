"""Unknown peers of a listener: one thread serves all that have not shown a secret yet.

    KNOCKING ──first byte──> TALKING ──an Open that is accepted──> a thread of its own (see inlet)
        │ a TLS record
        ├──────────────────> SHAKING ──certificate accepted──> GRANTED ──the peer hangs up──> gone
        └──────────────────┬────┴───────────┘
                  refused, wrong ──────────────────────────────> LEAVING ──has read why──> gone

An unknown peer costs a socket and some kilobytes. Their number is bounded, overall and by address. When there is one
too many, the oldest goes. So an honest sender, which needs a round trip or two, gets in no matter how many wait.
"""

import errno
import logging
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Protocol

from transport.errors import ConnectionRefused, GreetingRefused, LocalProtocolError, PeerLost, RemoteProtocolError
from transport.path.tcp import HANG_UP_S, TICK_S, format_address, receive_now
from transport.peers.guard import Guard
from transport.peers.name import PeerCertificate, of_tls, said_by
from transport.peers.rights import GREET
from transport.receive.few_lines import FewLines
from transport.receive.options import Limits
from transport.wire.checksum import Integrity
from transport.wire.connection import Connection, ProtocolState
from transport.wire.frames import (
    Abort,
    Accept,
    AskRails,
    Chunk,
    Code,
    CodedChunk,
    Frame,
    Goodbye,
    Hello,
    Nack,
    Open,
    RailClosed,
    Reference,
    Refuse,
    Written,
)
from transport.wire.identity import Identity
from transport.wire.session import TLS_ACCESS_DENIED, TLS_RECORD, Session, begin_tls, grant_bytes, refusal_bytes

log = logging.getLogger(__name__)

MAX_OF_ADDRESS: Final = 128
MAX_REFUSED: Final = 64  # transfers of one visitor
MAX_UNSENT_BYTES: Final = 64 << 10  # to one who does not read
MAX_PAST_BYTES: Final = 1 << 30  # payload of refused transfers that one visitor may send
SINK_BYTES: Final = 64 << 10
ROUND_S: Final = 0.1  # between two looks for overdue peers
LOG_EVERY_S: Final = 10.0
# The process or its host has no more to give: a connection has to go.
SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class GreetingStep(Enum):
    KNOCKING = auto()
    TALKING = auto()
    SHAKING = auto()
    GRANTED = auto()
    LEAVING = auto()


@dataclass(slots=True, eq=False)
class Visitor:
    """A peer that has shown no secret yet."""

    who: int
    sock: socket.socket
    address: str  # without the port
    name: str
    connection: Connection
    step: GreetingStep = GreetingStep.KNOCKING
    leave_at: float = float("inf")
    unsent: bytes = b""
    refused: set[int] = field(default_factory=set)
    past_bytes: int = 0
    passed_chunks: int = 0
    asked_rails: bool = False
    shut: bool = False
    watched: bool = False  # by the selector


@dataclass(frozen=True, slots=True)
class GreetedVisitor:
    """The frames with which a peer showed its secret, and the replies that it has not had yet."""

    frame: Open
    reply: Accept
    asked_rails: bool
    unsent: bytes
    refused: frozenset[int]  # slots, whose chunks may be on their way


class Host(Protocol):
    """Decides which peers are let in."""

    def arrive(self) -> int | Code:
        """A number for a new connection; or the reason why it is refused."""

    def receiver(self) -> Connection:
        """A connection that waits for its greeting."""

    def open(self, who: int, frame: Open, transcript: bytes) -> Accept | Refuse: ...

    def admit(self, who: int, sock: socket.socket, connection: Connection, begun: GreetedVisitor) -> Code | None:
        """Takes the connection over, or returns why not. Raises RuntimeError when there is no thread for it."""

    def gone(self, who: int) -> None: ...

    def new_session(self, peer: PeerCertificate | None = None) -> Session: ...

    def introduced(self, who: int, address: str, session_id: bytes) -> None:
        """A connection goes on with a session, and so with the name of its holder."""

    def refused(self, code: str, who: str, detail: str) -> None: ...

    def count(self, label: str) -> None: ...


class Acceptor(threading.Thread):
    """Accepts connections, and greets all of them in one thread."""

    def __init__(
        self,
        host: Host,
        listener: socket.socket,
        identity: Identity | None,
        timeout_s: float,
        limits: Limits,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(name=f"kv-greeter-{listener.getsockname()[1]}", daemon=True)
        self._host = host
        self._listener = listener
        self._identity = identity
        self._guard = guard
        self._timeout_s = timeout_s
        self._limits = limits
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._visitors: dict[Visitor, None] = {}  # the oldest first
        self._of_address: Counter[str] = Counter()
        self._turned_away: Counter[str] = Counter()  # not logged yet
        self._few_lines = FewLines(log)
        self._log_at = 0.0
        self._round_at = 0.0
        self._sink = memoryview(bytearray(SINK_BYTES))
        self._steps: dict[GreetingStep, Callable[[Visitor], None]] = {
            GreetingStep.KNOCKING: self._knocked,
            GreetingStep.TALKING: self._talked,
            GreetingStep.SHAKING: self._shake,
            GreetingStep.GRANTED: self._granted,
            GreetingStep.LEAVING: self._leave,
        }

    @property
    def num_visitors(self) -> int:
        return len(self._visitors)

    def stop(self) -> None:
        """The caller shuts the listener down, too, which wakes the thread."""
        self._closing = True

    def run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        while not self._closing:
            try:
                self._round()
            except Exception:
                log.exception("an error of the greeter")
                self._host.count("internal_errors")
                time.sleep(TICK_S)
        for visitor in list(self._visitors):
            self._drop(visitor)
        self._selector.close()

    def _round(self) -> None:
        for key, _ in self._selector.select(ROUND_S if self._visitors or self._turned_away else None):
            if key.data is None:
                self._accept()
            elif key.data in self._visitors:
                self._serve(key.data)
        now = time.monotonic()
        if now >= self._round_at:
            self._round_at = now + ROUND_S
            self._look_who_is_overdue(now)

    # who comes

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:
            if not self._closing:  # else shut down by stop()'s caller
                self._not_accepted(exc)
            return
        sock.setblocking(False)
        who = self._host.arrive()
        visitor = Visitor(
            -1 if isinstance(who, Code) else who, sock, address[0], format_address(*address[:2]), self._host.receiver()
        )
        if self._of_address[visitor.address] >= MAX_OF_ADDRESS:
            self._make_room("crowded_address", visitor.address)
        elif len(self._visitors) >= self._limits.max_visitors:
            self._make_room("crowded")
        self._visitors[visitor] = None
        self._of_address[visitor.address] += 1
        self._watch(visitor)
        if isinstance(who, Code):
            self._refuse(visitor, who)

    def _not_accepted(self, exc: OSError) -> None:
        if exc.errno in SHORTAGES:
            self._make_room("no_descriptor")
        else:  # gone before we got to it, or its network is: accept(2) hands such errors on
            self._host.count("lost_connections")
        time.sleep(TICK_S)  # should it go on like this

    def _make_room(self, reason: str, address: str = "") -> None:
        """The oldest goes (of an address)."""
        for visitor in self._visitors:
            if not address or visitor.address == address:
                self._turn_away(visitor, reason)
                return

    def _turn_away(self, visitor: Visitor, reason: str) -> None:
        self._turned_away[reason] += 1
        self._host.count(f"turned_away:{reason}")
        if visitor.step is GreetingStep.TALKING and visitor.connection.state is ProtocolState.OPEN:
            with suppress(OSError):
                visitor.sock.send(visitor.connection.send(Goodbye(code=Code.TOO_MANY)))
        self._drop(visitor)

    def _look_who_is_overdue(self, now: float) -> None:
        for visitor in list(self._visitors):
            if visitor.leave_at <= now:
                self._drop(visitor)
            elif visitor.step in (GreetingStep.KNOCKING, GreetingStep.TALKING):
                try:
                    visitor.connection.on_timer(now)
                except PeerLost:
                    self._turn_away(visitor, "silent")
        if self._turned_away and now >= self._log_at:
            self._log_at = now + LOG_EVERY_S
            log.warning("turned away strangers: %s", ", ".join(f"{n} {why}" for why, n in self._turned_away.items()))
            self._turned_away.clear()

    def _drop(self, visitor: Visitor) -> None:
        self._forget(visitor)
        visitor.sock.close()
        self._host.gone(visitor.who)

    def _watch(self, visitor: Visitor) -> None:
        self._selector.register(visitor.sock, selectors.EVENT_READ, visitor)
        visitor.watched = True

    def _unwatch(self, visitor: Visitor) -> None:
        if visitor.watched:
            visitor.watched = False
            self._selector.unregister(visitor.sock)

    def _forget(self, visitor: Visitor) -> None:
        self._unwatch(visitor)
        del self._visitors[visitor]
        self._of_address[visitor.address] -= 1
        if not self._of_address[visitor.address]:
            del self._of_address[visitor.address]

    # what they say

    def _serve(self, visitor: Visitor) -> None:
        try:
            self._send(visitor)
            self._steps[visitor.step](visitor)
        except RemoteProtocolError as exc:
            self._say_goodbye(visitor, exc)
        except (OSError, PeerLost, ConnectionRefused, LocalProtocolError) as exc:
            log.debug("a stranger at %s left: %s", visitor.name, exc)
            if visitor.step is not GreetingStep.LEAVING:
                self._host.count("lost_connections")
            self._drop(visitor)
        except Exception:
            log.exception("a connection could not be served")
            self._host.count("internal_errors")
            if visitor in self._visitors:
                self._drop(visitor)

    def _knocked(self, visitor: Visitor) -> None:
        first = bytearray(1)
        size = receive_now(visitor.sock, memoryview(first), socket.MSG_PEEK)
        if size == 0:
            raise PeerLost("nothing was said")
        if size is None:
            return
        visitor.step = GreetingStep.SHAKING if first[0] == TLS_RECORD else GreetingStep.TALKING
        if visitor.step is GreetingStep.SHAKING:
            self._begin_tls(visitor)
        self._steps[visitor.step](visitor)

    def _talked(self, visitor: Visitor) -> None:
        """One read, and what it brought: no peer holds up the others."""
        if not self._read(visitor):
            return
        while (frame := self._next(visitor)) is not None:
            if self._let_in(visitor, frame):
                return
        self._say(visitor, visitor.connection.data_to_send())

    def _read(self, visitor: Visitor) -> bool:
        connection = visitor.connection
        past = connection.payload_left
        into = self._sink[: min(past, SINK_BYTES)] if past else connection.receive_buffer()
        size = receive_now(visitor.sock, into)
        if size == 0:
            raise PeerLost("the peer closed the connection")
        if size is None:
            return False
        if past:
            connection.payload_received(size, time.monotonic())
            visitor.past_bytes += size
        else:
            connection.received(size, time.monotonic())
        if visitor.past_bytes > MAX_PAST_BYTES:
            raise RemoteProtocolError("payload of transfers that were refused")
        return True

    def _next(self, visitor: Visitor) -> Frame | None:
        connection = visitor.connection
        while connection.payload_buffered:
            connection.take_payload(self._sink)
        return None if connection.payload_left else connection.next_event()

    def _let_in(self, visitor: Visitor, frame: Frame) -> bool:
        """True when the peer has shown a secret, and another thread serves it now."""
        match frame:
            case Open():
                self._say(visitor, visitor.connection.data_to_send())
                return self._opened(visitor, frame)
            case AskRails():
                visitor.asked_rails = True
            case Abort():
                visitor.refused.discard(frame.slot)
            case Chunk() | CodedChunk() | Reference() | Written():
                if frame.slot not in visitor.refused:
                    raise RemoteProtocolError(f"bytes for slot {frame.slot}, which is not open")
                visitor.passed_chunks += 1
                if visitor.passed_chunks > (most := self._limits.max_passed_chunks):
                    raise RemoteProtocolError(f"more than {most} unexpected chunks")
                nack = Nack(slot=frame.slot, offset=frame.offset, length=frame.length, code=Code.CANCELLED)
                self._say(visitor, visitor.connection.send(nack))
            case Hello():
                if visitor.connection.integrity == Integrity.AEAD:  # in clear, anybody may name a session
                    self._host.introduced(visitor.who, visitor.name, frame.session)
            case RailClosed():
                pass
            case _:
                raise RemoteProtocolError(f"{type(frame).__name__} before a transfer was opened")
        return False

    def _opened(self, visitor: Visitor, frame: Open) -> bool:
        if frame.slot in visitor.refused:  # opened once more: the receiver may have learnt of it by now
            visitor.refused.discard(frame.slot)
        reply = self._host.open(visitor.who, frame, visitor.connection.transcript)
        if isinstance(reply, Refuse):
            visitor.refused.add(frame.slot)
            self._say(visitor, visitor.connection.send(reply))
            if len(visitor.refused) > MAX_REFUSED:
                raise RemoteProtocolError(f"more than {MAX_REFUSED} transfers that were refused")
            return False
        self._forget(visitor)
        code: Code | None = None
        try:
            begun = GreetedVisitor(frame, reply, visitor.asked_rails, visitor.unsent, frozenset(visitor.refused))
            code = self._host.admit(visitor.who, visitor.sock, visitor.connection, begun)
        except RuntimeError:  # out of threads: others may have better luck
            log.exception("a connection could not be served")
            self._host.count("internal_errors")
            code = Code.TOO_MANY
        if code is not None:
            with suppress(OSError):
                visitor.sock.send(visitor.connection.send(Goodbye(code=code)))
            visitor.sock.close()
            self._host.gone(visitor.who)
        return True

    # what they are told

    def _say(self, visitor: Visitor, data: bytes) -> None:
        visitor.unsent += data
        self._send(visitor)
        if len(visitor.unsent) > MAX_UNSENT_BYTES:
            raise PeerLost("the peer does not read")

    def _send(self, visitor: Visitor) -> None:
        if not visitor.unsent:
            return
        with suppress(BlockingIOError):
            visitor.unsent = visitor.unsent[socket.socket.send(visitor.sock, visitor.unsent) :]
        self._selector.modify(
            visitor.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if visitor.unsent else 0), visitor
        )

    def _say_goodbye(self, visitor: Visitor, exc: RemoteProtocolError) -> None:
        if isinstance(exc, GreetingRefused):
            self._host.refused(exc.code, visitor.name, str(exc))
        else:
            self._few_lines.warning(time.monotonic(), "ended the connection of a stranger at %s: %s", visitor.name, exc)
            self._host.count(f"rejected:{exc.code}")
            self._host.count("lost_connections")
        self._dismiss(visitor, visitor.connection.farewell(exc))

    def _refuse(self, visitor: Visitor, code: Code) -> None:
        """No peer gets in at present."""
        self._host.count(f"refused:{code}")
        self._dismiss(visitor, visitor.connection.encoded(Goodbye(code=code)))

    def _dismiss(self, visitor: Visitor, last_words: bytes) -> None:
        """It may read why; unread bytes at close would become a reset, which would overtake that."""
        visitor.step, visitor.leave_at = GreetingStep.LEAVING, time.monotonic() + HANG_UP_S
        try:
            self._say(visitor, last_words)
            self._leave(visitor)
        except (OSError, PeerLost):
            self._drop(visitor)

    def _leave(self, visitor: Visitor) -> None:
        if not visitor.unsent and not visitor.shut:
            visitor.shut = True
            visitor.sock.shutdown(socket.SHUT_WR)  # on a TLS socket, too, what follows is plain
        with suppress(BlockingIOError, ssl.SSLWantReadError):
            if not visitor.sock.recv_into(self._sink):
                raise PeerLost("it has read why")

    # sessions

    def _begin_tls(self, visitor: Visitor) -> None:
        visitor.leave_at = time.monotonic() + self._timeout_s
        if self._identity is None:
            self._host.refused(
                Code.IDENTITY, visitor.name, "this listener speaks no TLS"
            )  # before the peer knows of it
            self._dismiss(visitor, TLS_ACCESS_DENIED)
            return
        self._unwatch(visitor)  # first: of a peer that has gone meanwhile, ssl closes the socket and raises
        visitor.sock = begin_tls(visitor.sock, self._identity)
        self._watch(visitor)

    def _shake(self, visitor: Visitor) -> None:
        assert isinstance(visitor.sock, ssl.SSLSocket)
        try:
            visitor.sock.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLWantWriteError:
            self._selector.modify(visitor.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, visitor)
            return
        except OSError as exc:
            self._host.refused(Code.IDENTITY, visitor.name, str(exc))
            self._dismiss(visitor, b"")
            return
        peer = of_tls(said_by(visitor.sock))
        if self._guard is not None and (why := self._guard.refusal(GREET, peer, visitor.name)):
            self._host.count(f"refused:{Code.ACCESS}")
            visitor.sock.send(refusal_bytes(why))
            self._dismiss(visitor, b"")
            return
        self._selector.modify(visitor.sock, selectors.EVENT_READ, visitor)
        visitor.step = GreetingStep.GRANTED
        visitor.sock.send(grant_bytes(self._host.new_session(peer), time.monotonic()))
        self._granted(visitor)

    def _granted(self, visitor: Visitor) -> None:
        """Waits until the sender closes: closing first might lose what it has not read."""
        with suppress(ssl.SSLWantReadError):
            visitor.sock.recv(1)
            self._drop(visitor)

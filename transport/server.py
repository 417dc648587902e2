"""The receiving end: one listener for all peers and all transfers.

Threads: one accepts, one keeps time, one per connection reads chunks straight into the memory of their landing. All
decisions are those of `Landings`, taken under one lock; bytes move outside of it.
"""

import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

from transport.checksum import Integrity
from transport.codec import Codec, Share, decodable
from transport.coding import CodecAccounts
from transport.crypto import Identity, Session, Sessions, grant_session, refuse_tls
from transport.errors import Closed, TargetFailed
from transport.frames import (
    LEAST_CHUNK_LIMIT,
    MAX_CHUNK_BYTES,
    Chunk,
    Code,
    CodedChunk,
    Goodbye,
    Reference,
    Written,
    encode,
)
from transport.inlet import Inlet
from transport.landings import (
    Claim,
    Landing,
    Landings,
    Notices,
    OnLanded,
    ReadRequest,
    Rivals,
    Segment,
    SinkOf,
    write_id,
)
from transport.rdma_device import RdmaDevices
from transport.shm import DEFAULT_ARENA_DIRS
from transport.tcp import (
    TICK_S,
    TcpOptions,
    format_address,
    listen,
    peer_of,
    shut,
)
from transport.transfer import RangeViews

log = logging.getLogger(__name__)

SESSION_LIFE_S: Final = 3600.0
FOREVER: Final = float("inf")
MAX_TURNED_AWAY: Final = 64
KEEPER_PAUSE_S: Final = 1.0  # after an error of its own
NOTICE_TIMEOUT_S: Final = 0.5  # one thread tells all connections: one that takes nothing must not hold it up
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Limits and habits of a listener."""

    integrity: Integrity = Integrity.CHECKSUM
    identity: Identity | None = None  # needed for Integrity.AEAD
    max_chunk_bytes: int = 16 << 20
    max_connections: int = 4096
    codecs: Codec = field(default_factory=lambda: decodable(lossy=False))  # that senders may use; RAW = none
    rdma: RdmaDevices | None = None  # NICs whose registered memory senders may write into by RDMA
    arena_dirs: Sequence[str] = DEFAULT_ARENA_DIRS  # where arenas of senders on this host may lie; () = TCP only
    tcp: TcpOptions = field(default_factory=TcpOptions)

    def __post_init__(self) -> None:
        if not LEAST_CHUNK_LIMIT <= self.max_chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"max_chunk_bytes {self.max_chunk_bytes}: {LEAST_CHUNK_LIMIT} to {MAX_CHUNK_BYTES}")
        if self.integrity is Integrity.AEAD and self.identity is None:
            raise ValueError(f"integrity {self.integrity} needs an identity")


class TransferServer:
    """Receives transfers that were announced with expect(); refuses all others.

    Callbacks come from transport threads, must not block, and may call back into the server.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        options: ServerOptions | None = None,
        on_read: Callable[[ReadRequest], None] | None = None,
    ) -> None:
        self.options = options or ServerOptions()
        self._on_read = on_read  # sends what a one-sided read asks for (see batch)
        self._bind = (host, port)
        self._listener: socket.socket | None = None
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # deadlines moved, or a connection left
        self.landings = Landings()
        self._sessions = Sessions(SESSION_LIFE_S)
        self._inlets: dict[int, Inlet] = {}
        self._threads: list[threading.Thread] = []
        self._next_inlet = 0
        self._notices: Notices = []  # not said yet
        self._turned_away: deque[socket.socket] = deque()
        self._closing = False
        self.received_bytes = 0
        self._decoded = CodecAccounts()
        self.address = ""

    def start(self) -> "TransferServer":
        """Binds and listens; `address` is set afterwards. Raises OSError."""
        self._listener = listen(*self._bind)
        host, port = self._listener.getsockname()[:2]
        self.address = format_address(host, port)
        for target in (self._accept_all, self._keep_time):
            thread = threading.Thread(target=target, name=f"kv-server-{port}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def expect(
        self,
        transfer_id: str,
        secret: bytes,
        sizes: Iterable[int],
        targets: RangeViews,
        *,
        on_done: OnLanded | None = None,
        deadline_s: float = FOREVER,
        orphan_timeout_s: float = FOREVER,
        exact: bool = True,
    ) -> Landing:
        """Announces a transfer: range i, of `sizes[i]` bytes, goes into the writable byte views `targets(i)`.

        `on_done(LandingResult)` is called once, when nothing writes into the targets any more. `deadline_s` counts from
        now; `orphan_timeout_s` from the moment when the last connection of a sender that had begun goes away. `exact`
        refuses quantised bytes even where `ServerOptions.codecs` allows them.
        """
        with self.changed:
            if self._closing:
                raise Closed("the server is closed")
            landing = self.landings.expect(
                transfer_id,
                secret,
                sizes,
                targets,
                on_done=on_done,
                deadline=time.monotonic() + deadline_s,
                orphan_timeout_s=orphan_timeout_s,
                exact=exact,
            )
            self.changed.notify_all()
        return landing

    def register_segment(
        self, name: str, memory: memoryview, secret: bytes, *, readable: bool = False, writable: bool = True
    ) -> None:
        """Opens bytes to one-sided writes, or reads, by whoever knows the secret (see batch)."""
        if ":" in name or "@" in name:
            raise ValueError(f"segment name {name!r} must contain neither a colon nor an @")
        if writable and memory.readonly:
            raise ValueError(f"segment {name!r} is writable, its memory is not")
        if readable and self._on_read is None:
            raise ValueError(f"segment {name!r} is readable, but nobody here serves reads")
        with self.lock:
            self.landings.segments[name] = Segment(memory, secret, readable, writable)

    def unregister_segment(self, name: str) -> None:
        """Refuses further access and ends the writes under way; returns when nothing writes there any more (within a
        few ticks of 10 ms). Not to be called from a callback. Idempotent.
        """
        prefix = write_id(name, "")
        with self.lock:
            self.landings.unregister(name)
            writes = [i for i in self.landings.active_ids() if i.startswith(prefix)]
        for transfer_id in writes:
            self.cancel(transfer_id, "the segment is no longer registered")
        with self.changed:
            self.changed.wait_for(lambda: self._closing or not self.landings.is_settling(prefix))

    def is_registered(self, segment: Segment) -> bool:
        """Whether others may still read or write there."""
        with self.lock:
            return segment in self.landings.segments.values()

    def await_sender(self, transfer_id: str) -> None:
        """From now on `orphan_timeout_s` runs for a landing, unless its sender has come already."""
        with self.changed:
            self.landings.await_sender(transfer_id, time.monotonic())
            self.changed.notify_all()

    def cancel(self, transfer_id: str, reason: str = "") -> None:
        """Ends a landing and has its sender told; never blocks. Its on_done comes within a few ticks (10 ms).
        Idempotent.
        """
        with self.changed:
            notices = self.landings.cancel(transfer_id, reason, time.monotonic())
            self.changed.notify_all()
        self.tell(notices)
        self.settle()

    @property
    def counters(self) -> Counter[str]:
        """What happened so far: "landed", "failed:<code>", "refused:<code>", "rejected:<code>", "lost_connections"."""
        with self.lock:
            return Counter(self.landings.counters)

    @property
    def codecs(self) -> CodecAccounts:
        """What was decoded so far; only the codecs are known here, not what the ranges are."""
        with self.lock:
            accounts = CodecAccounts()
            accounts.merge(self._decoded)
        return accounts

    @property
    def bytes_received(self) -> int:
        """Payload bytes of all landings so far, repeated ones included."""
        return self.received_bytes

    @property
    def num_connections(self) -> int:
        with self.lock:
            return len(self._inlets)

    def close(self) -> None:
        """Ends all landings and connections, and joins every thread. Idempotent."""
        with self.changed:
            self._closing = True
            inlets = list(self._inlets.values())
            active = list(self.landings.active_ids())
            self.changed.notify_all()
        for transfer_id in active:
            self.cancel(transfer_id, "the receiver closes")
        self._say_notices()
        if self._listener is not None:
            shut(self._listener)
        for inlet in inlets:
            inlet.stop()
        for thread in [*self._threads, *inlets]:
            thread.join()
        if self._listener is not None:
            self._listener.close()
        while self._turned_away:
            self._turned_away.popleft().close()
        self.settle()

    def __enter__(self) -> "TransferServer":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    # threads

    def _accept_all(self) -> None:
        assert self._listener is not None
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                time.sleep(TICK_S)  # shut down by close(), gone before we got to it, or out of descriptors
                continue
            try:
                self._admit(sock)
            except Exception:  # out of threads, for instance: others may have better luck
                log.exception("a connection could not be served")
                self.count("internal_errors")
                sock.close()
                time.sleep(TICK_S)

    def _admit(self, sock: socket.socket) -> None:
        inlet = None
        with self.lock:
            if not self._closing and len(self._inlets) < self.options.max_connections:
                who = self._next_inlet
                self._next_inlet += 1
                inlet = self._inlets[who] = Inlet(self, sock, who)
                self.landings.connected(who)
        if inlet is None:
            self._turn_away(sock)
            return
        try:
            inlet.start()
        except BaseException:
            self.left(inlet)
            raise

    def _turn_away(self, sock: socket.socket) -> None:
        """Says why, and closes only after some more have come: closing at once might lose what was said."""
        code = Code.CLOSING if self._closing else Code.TOO_MANY
        self.count(f"refused:{code}")
        with suppress(OSError):
            sock.setblocking(False)
            sock.send(encode(Goodbye(code=code), 0))
            sock.shutdown(socket.SHUT_WR)
        self._turned_away.append(sock)
        if len(self._turned_away) > MAX_TURNED_AWAY:
            self._turned_away.popleft().close()

    def _keep_time(self) -> None:
        while not self._closing:
            try:
                self._keep_deadlines()
            except Exception:
                log.exception("an error of the keeper of deadlines")
                self.count("internal_errors")
                with self.changed:
                    self.changed.wait_for(lambda: self._closing, KEEPER_PAUSE_S)

    def _keep_deadlines(self) -> None:
        """Waits for the next, or for something to say, and does what it asks for."""
        with self.changed:
            if self._closing:
                return
            wait = 0.0 if self._notices else self.landings.next_deadline() - time.monotonic()
            self.changed.wait(None if wait == FOREVER else min(max(wait, 0.0), 3600.0))
            notices = self.landings.expire(time.monotonic())
            overdue = [self._inlets[who] for who in self.landings.overdue(time.monotonic()) if who in self._inlets]
        for inlet in overdue:
            inlet.stop()
        self.tell(notices)
        self.settle()
        self._say_notices()

    # for connections

    def count(self, label: str) -> None:
        with self.lock:
            self.landings.counters[label] += 1

    def secret_of(self, session_id: bytes) -> bytes | None:
        with self.lock:
            return self._sessions.secret_of(session_id, time.monotonic())

    def grant(self, sock: socket.socket) -> None:
        """The control connection of a peer. Raises OSError when it does not show a certificate that we accept."""
        now, identity = time.monotonic(), self.options.identity
        who = peer_of(sock)  # while there is one: afterwards the socket belongs to TLS
        if identity is None:
            self.refused(Code.IDENTITY, who, "this listener speaks no TLS")  # counted before the peer knows of it
            refuse_tls(sock)
            return
        try:
            grant_session(sock, identity, lambda: self._new_session(now), self.options.tcp.connect_timeout_s, now)
        except OSError as exc:
            self.refused(Code.IDENTITY, who, str(exc))

    def _new_session(self, now: float) -> Session:
        with self.lock:
            return self._sessions.grant(now)

    def refused(self, code: str, who: str, detail: str) -> None:
        """A peer was turned away before it could say which transfer it has."""
        log.warning("refused a sender at %s: %s", who, detail)
        self.count(f"refused:{code}")

    def tell(self, notices: Notices) -> None:
        """Has connections told; never blocks, though they may take nothing."""
        with self.changed:
            self._notices += notices
            self.changed.notify_all()

    def _say_notices(self) -> None:
        with self.lock:
            notices, self._notices = self._notices, []
            said = [(self._inlets[who], frame) for who, frame in notices if who in self._inlets]
        for inlet, frame in said:
            inlet.say(frame, NOTICE_TIMEOUT_S)

    def settle(self) -> None:
        with self.changed:
            settled = self.landings.take_settled()
            reads = self.landings.take_reads()
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

    def let_go(self, inlet: Inlet) -> None:
        """It reads no more: what it was writing does not count."""
        with self.changed:
            self.landings.disconnected(inlet.who, time.monotonic())
            self.changed.notify_all()
        self.settle()

    def left(self, inlet: Inlet) -> None:
        with self.lock:
            self._inlets.pop(inlet.who, None)

    def on_decoded(self, shares: Iterable[Share], cpu_s: float) -> None:
        with self.lock:
            self._decoded.add(shares, cpu_s)

    def claim(self, who: int, frame: Chunk | CodedChunk | Reference | Written, sink_of: SinkOf) -> Claim | None:
        """The right to write one chunk, once nobody else writes there."""
        try:
            return self._without_rivals(
                lambda: self.landings.begin(who, frame.slot, frame.offset, frame.stop, sink_of, time.monotonic())
            )
        except TargetFailed as exc:
            self.fail(who, frame.slot, Code.TARGET, exc)
            return None

    def fail(self, who: int, slot: int, code: Code, error: Exception) -> None:
        """Ends a landing of whose memory nothing can be made, and tells its senders."""
        log.error("the landing of slot %d of connection %d: %s", slot, who, error, exc_info=error)
        with self.changed:
            notices = self.landings.fail(who, slot, code, str(error), time.monotonic())
            self.changed.notify_all()
        self.tell(notices)
        self.settle()

    def break_seal(self, who: int, slot: int) -> None:
        """A chunk was not authentic."""
        with self.changed:
            notices = self.landings.break_seal(who, slot, time.monotonic())
            self.changed.notify_all()
        self.tell(notices)
        self.settle()

    def grant_memory(self, who: int, slot: int) -> Landing | None:
        """The right of a sender to write all that is missing by itself, once nobody else writes there."""
        return self._without_rivals(lambda: self.landings.grant(who, slot))

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
                if self._closing:
                    raise Closed("the server is closed")
                for rival in answer.who:
                    if rival in self._inlets:
                        self._inlets[rival].stop()
                self.changed.wait(1.0)

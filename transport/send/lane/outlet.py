"""A lane at work: one connection after another to the same peer, and the thread that feeds it."""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from transport.errors import ConnectionRefused, TransportError
from transport.path.link import TcpInfo, tcp_info
from transport.path.tcp import (
    LONG_RTT_S,
    choose_congestion_control,
    congestion_control,
    dial,
    has_room,
    limit_unsent,
    set_pacing_rate,
    shut,
)
from transport.send.lane.coder import LaneCoder, PeerCoding
from transport.send.lane.keys import SessionKeys
from transport.send.lane.link_keeper import LinkKeeper
from transport.send.lane.stream import Stream
from transport.send.options import ClientOptions
from transport.send.schedule.lanes import Batch
from transport.send.schedule.transfers import Transfers
from transport.wire.connection import Connection, ConnectionRole, ProtocolState
from transport.wire.frames import Ack, Frame, Welcome
from transport.wire.greeting import NONCE_BYTES
from transport.wire.session import Session

log = logging.getLogger(__name__)

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
CARRIES_ANEW: Final = 0.2  # a smaller change is not worth a system call


class Home(Protocol):
    """The peer that an outlet belongs to."""

    def wants(self, lane: "SenderLane") -> bool: ...

    def surplus(self, lane: "SenderLane") -> bool: ...

    def lane_up(self, lane: "SenderLane", max_chunk_bytes: int) -> None: ...

    def lane_down(self, lane: "SenderLane", error: str) -> None: ...

    def lane_refused(self, error: ConnectionRefused) -> None: ...

    def on_frame(self, lane: "SenderLane", frame: Frame) -> None: ...

    @property
    def on_failed(self) -> Callable[[str], None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerContext:
    """The state that all lanes to one peer share."""

    address: str
    options: ClientOptions
    transfers: Transfers
    link: LinkKeeper
    keys: SessionKeys
    coding: PeerCoding


class SenderLane:
    """One connection after another to the same peer, and the thread that feeds it."""

    def __init__(self, home: Home, shared: PeerContext, index: int) -> None:
        self.key = index  # of the present connection: unique over the peer's life
        self.up = False
        self.idle = False
        self.congestion = ""
        self.index = index
        self._home = home
        self._address = shared.address
        self._options = shared.options
        self._transfers = shared.transfers
        self._link = shared.link
        self._keys = shared.keys
        self._coder = LaneCoder(shared.coding, shared.options.chunk_bytes)
        self._generation = 0
        self._sock: socket.socket | None = None
        self._sock_lock = threading.Lock()
        self._wake_lock = threading.Lock()
        self._eventfd = -1  # while there is no thread
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._on_long_link = False
        self._carries: float | None = None  # bytes per second, when what may wait unsent was last adapted to it

    # from other threads

    def start_or_wake(self) -> None:
        """With the transfers' lock held."""
        if self._thread is None and not self._transfers.closing:
            thread = threading.Thread(target=self._run, name=f"kv-lane-{self.index}-{self._address}", daemon=True)
            try:
                if self._eventfd < 0:
                    self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                thread.start()
            except (RuntimeError, OSError):  # out of threads or descriptors: there may be one the next time
                self._home.on_failed("lane")
                return
            self._thread = thread
        self.wake()

    def wake(self) -> None:
        with self._wake_lock:  # a closed descriptor's number may be another's by now
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)

    def stop(self) -> None:
        self.wake()
        self.cut()

    def cut(self) -> None:
        """Ends the present connection, whatever is being written to it."""
        with self._sock_lock:
            if self._sock is not None:
                shut(self._sock)

    @property
    def running(self) -> bool:
        """Whether its thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
        with self._wake_lock:
            if self._eventfd >= 0:
                os.close(self._eventfd)
                self._eventfd = -1

    def info(self) -> TcpInfo | None:
        with self._sock_lock:
            return tcp_info(self._sock) if self._sock is not None and self.up else None

    def pace(self, bytes_per_s: float | None) -> None:
        with self._sock_lock:
            if self._sock is not None:
                set_pacing_rate(self._sock, bytes_per_s)

    def carries(self, bytes_per_s: float) -> None:
        """Bounds what waits in the kernel on a long link by the connection's present rate."""
        before = self._carries
        if before is not None and abs(bytes_per_s - before) <= CARRIES_ANEW * before:
            return
        with self._sock_lock:
            if self._sock is not None:
                self._carries = bytes_per_s
                limit_unsent(self._sock, bytes_per_s)

    # the thread

    def _run(self) -> None:
        while not self._transfers.closing:
            if not self._home.wants(self):
                self._sleep(None)
                continue
            try:
                error = self._connect_and_serve()
            except Exception as exc:  # not foreseen: the connection is gone, the lane must not be
                self._home.on_failed("lane")
                error = f"an error of ours: {exc!r}"
            self._home.lane_down(self, error)
            self._back_off()

    def _back_off(self) -> None:
        """Being woken does not shorten it: more work is no reason to ask a refusing peer more often."""
        delay_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 10))
        self._failures += 1
        until = time.monotonic() + delay_s
        while not self._transfers.closing and (left := until - time.monotonic()) > 0:
            self._sleep(left)

    def _connect_and_serve(self) -> str:
        """Works until the connection ends; returns why."""
        self._generation += 1
        self.key = self._generation << 16 | self.index
        try:
            session = self._keys.session(time.monotonic())
            sock = dial(self._address, self._options.tcp)
        except ConnectionRefused as exc:
            self._home.lane_refused(exc)
            return str(exc)
        except (OSError, ValueError) as exc:
            return f"cannot connect to {self._address}: {exc}"
        with self._sock_lock:
            self._sock, self._carries = sock, None
        try:
            self._suit_to_link(sock)
            self._serve(sock, session)
        except ConnectionRefused as exc:
            self._home.lane_refused(exc)
            return str(exc)
        except (OSError, TransportError) as exc:
            log.debug("lane %d to %s ended: %s", self.index, self._address, exc)
            return str(exc)
        finally:
            with self._sock_lock:
                self._sock = None
            sock.close()
        self._failures = 0
        return "closed"

    def _suit_to_link(self, sock: socket.socket) -> None:
        """The handshake has measured the round trip."""
        rtt_s = tcp_info(sock).rtt_s
        if self._options.tcp.congestion == "auto":
            choose_congestion_control(sock, rtt_s)
        self.congestion = congestion_control(sock)
        self._on_long_link = rtt_s >= LONG_RTT_S
        if self._on_long_link:
            limit_unsent(sock)
            self._link.on_long_link(self.congestion)

    def _serve(self, sock: socket.socket, session: Session | None) -> None:
        options = self._options
        connection = Connection(
            ConnectionRole.SENDER,
            integrity=options.integrity,
            nonce=os.urandom(NONCE_BYTES),
            now=time.monotonic(),
            max_chunk_bytes=options.chunk_bytes,
            dead_after_s=options.tcp.dead_after_s,
            session=session.id if session is not None else b"",
            session_secret=lambda _: session.secret if session is not None else None,
        )
        stream = Stream(
            sock,
            connection,
            self,
            transfers=self._transfers,
            link=self._link,
            coder=self._coder,
            integrity=options.integrity,
            session=session,
            on_frame=lambda frame: self._heard(connection, frame),
        )
        self._work(stream, time.monotonic() + options.rotate_keys_s if session is not None else float("inf"))

    def _work(self, stream: Stream, retire_at: float) -> None:
        """Feeds one connection until it is to be replaced."""
        while not self._transfers.closing:
            self._keys.unless_revoked(stream.session)
            leaving = time.monotonic() >= retire_at or self._home.surplus(self)
            if leaving and self._transfers.answered(self):
                return
            stream.write_control()
            if stream.read():
                continue
            wait_s = self._link.wait_s(time.monotonic())
            free = stream.connection.state is ProtocolState.OPEN and not wait_s and not leaving
            full = free and self._on_long_link and self._transfers.ending and not has_room(stream.sock)
            batch = self._transfers.batch_for(self) if free and not full else Batch()
            if batch:
                stream.send(batch)
            else:
                self._wait(stream, wait_s, for_room=full)

    def _heard(self, connection: Connection, frame: Frame) -> None:
        if isinstance(frame, Welcome):
            self._home.lane_up(self, connection.max_chunk_bytes)
            return
        if isinstance(frame, Ack):  # not before: what is welcomed, and breaks with the first chunk, has failed
            self._failures = 0
        self._on_frame(frame)

    def _on_frame(self, frame: Frame) -> None:
        self._home.on_frame(self, frame)

    def _wait(self, stream: Stream, wait_s: float, *, for_room: bool = False) -> None:
        """Until the receiver speaks, work or room appears, the budget allows to send or a timer is due."""
        until = stream.connection.next_timer() - time.monotonic()
        self._sleep(min(wait_s, until) if wait_s else until, stream.sock, for_room=for_room)
        stream.connection.on_timer(time.monotonic())

    def _sleep(self, timeout_s: float | None, sock: socket.socket | None = None, *, for_room: bool = False) -> None:
        poller = select.poll()
        poller.register(self._eventfd, select.POLLIN)
        if sock is not None:
            poller.register(sock, select.POLLIN | (select.POLLOUT if for_room else 0))
        poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000 + 0.5)
        with suppress(BlockingIOError):  # it was the socket, or time
            os.eventfd_read(self._eventfd)

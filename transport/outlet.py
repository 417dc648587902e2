"""A lane at work: one connection after another to the same peer, and the thread that feeds it."""

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from transport.checksum import HASHED_PART_BYTES, Digest, Integrity, digest, transfer_seed
from transport.coder import LaneCoder
from transport.connection import NONCE_BYTES, Connection, Role, State
from transport.crypto import SEALED_PART_BYTES, SMALL_VIEW_BYTES, Seal, Sealing, Session, chunk_seal
from transport.errors import ConnectionRefused, PeerLost, TransportError
from transport.frames import MAX_LIST, Abort, Ack, CodedChunk, Frame, Open, Reference, Welcome
from transport.lanes import Batch, Piece, Transfer
from transport.link import TcpInfo, tcp_info
from transport.shm import ArenaSource, merge_extents, parts_of, pieces_of
from transport.tcp import (
    LONG_RTT_S,
    MAX_VIEWS,
    choose_congestion_control,
    congestion_control,
    dial,
    has_room,
    limit_unsent,
    receive_now,
    send_some,
    set_pacing_rate,
    shut,
)
from transport.transfer import proof_of

if TYPE_CHECKING:
    from transport.peer import Peer

log = logging.getLogger(__name__)

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
CARRIES_ANEW: Final = 0.2  # a smaller change is not worth a system call


@dataclass(slots=True)
class Outgoing:
    """Views still to be written, each with the transfer whose memory it is (None: our own bytes)."""

    views: deque[tuple[memoryview | bytes, Transfer | None]] = field(default_factory=deque)

    def add(self, data: bytes) -> None:
        if data:
            self.views.append((data, None))

    def head(self) -> list[memoryview | bytes]:
        return [view for view, _ in islice(self.views, MAX_VIEWS)]

    def advance(self, size: int) -> None:
        while size:
            view, owner = self.views[0]
            if size < len(view):
                self.views[0] = (memoryview(view)[size:], owner)
                return
            size -= len(view)
            self.views.popleft()

    def copy_of(self, ended: set[Transfer]) -> None:
        """What was promised of these transfers leaves from memory of ours: theirs is wanted back."""
        for i, (view, owner) in enumerate(self.views):
            if owner in ended:
                self.views[i] = (bytes(view), None)


class Outlet:
    """One connection after another to the same peer, and the thread that feeds it."""

    def __init__(self, peer: "Peer", index: int) -> None:
        self.key = index  # of the present connection: unique over the peer's life
        self.up = False
        self.idle = False
        self.congestion = ""
        self._peer = peer
        self.index = index
        self._generation = 0
        self._sock: socket.socket | None = None
        self._sock_lock = threading.Lock()
        self._wake_lock = threading.Lock()
        self._eventfd = -1  # while there is no thread
        self._thread: threading.Thread | None = None
        self._seeds: dict[int, int] = {}
        self._seals: dict[int, Seal] = {}
        self._session: Session | None = None
        self._sealed = memoryview(b"")  # what is sealed and not written yet
        self._sealed_bytes = 0
        self._reading: set[Transfer] = set()  # whose memory the present batch reads
        self._hashed_bytes = 0  # and not written yet
        self._gathered = memoryview(b"")  # small views, to be sealed together
        self._coder = LaneCoder(peer)
        self._failures = 0
        self._on_long_link = False
        self._carries: float | None = None  # bytes per second, when what may wait unsent was last adapted to it

    # from other threads

    def start_or_wake(self) -> None:
        """With the peer's lock held."""
        if self._thread is None and not self._peer.closing:
            thread = threading.Thread(target=self._run, name=f"kv-lane-{self.index}-{self._peer.address}", daemon=True)
            try:
                if self._eventfd < 0:
                    self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                thread.start()
            except (RuntimeError, OSError):  # out of threads or descriptors: there may be one the next time
                self._peer.on_failed("lane")
                return
            self._thread = thread
        self.wake()

    def wake(self) -> None:
        with self._wake_lock:  # a closed descriptor's number may be somebody else's by now
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)

    def stop(self) -> None:
        self.wake()
        with self._sock_lock:
            if self._sock is not None:
                shut(self._sock)

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
        """What it sends at present, on a long link: no more than it will soon have sent may wait in the kernel."""
        before = self._carries
        if before is not None and abs(bytes_per_s - before) <= CARRIES_ANEW * before:
            return
        with self._sock_lock:
            if self._sock is not None:
                self._carries = bytes_per_s
                limit_unsent(self._sock, bytes_per_s)

    # the thread

    def _run(self) -> None:
        while not self._peer.closing:
            with self._peer.lock:
                wanted = self._peer.wants(self)
            if not wanted:
                self._sleep(None)
                continue
            try:
                error = self._connect_and_serve()
            except Exception as exc:  # not foreseen: the connection is gone, the lane must not be
                self._peer.on_failed("lane")
                error = f"an error of ours: {exc!r}"
            self._peer.lane_down(self, error)
            self._peer.settle()
            self._back_off()

    def _back_off(self) -> None:
        """Being woken does not shorten it: a peer that refuses us is not asked more often because there is more work."""
        delay_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 10))
        self._failures += 1
        until = time.monotonic() + delay_s
        while not self._peer.closing and (left := until - time.monotonic()) > 0:
            self._sleep(left)

    def _connect_and_serve(self) -> str:
        """Works until the connection ends; returns why."""
        self._seeds, self._seals = {}, {}
        self._generation += 1
        self.key = self._generation << 16 | self.index
        try:
            self._session = self._peer.session()
            sock = dial(self._peer.address, self._peer.options.tcp)
        except ConnectionRefused as exc:
            self._peer.lane_refused(self, exc)
            return str(exc)
        except (OSError, ValueError) as exc:
            return f"cannot connect to {self._peer.address}: {exc}"
        rtt_s = tcp_info(sock).rtt_s
        if self._peer.options.tcp.congestion == "auto":
            choose_congestion_control(sock, rtt_s)
        self.congestion = congestion_control(sock)
        self._on_long_link = rtt_s >= LONG_RTT_S
        if self._on_long_link:
            limit_unsent(sock)
            self._peer.on_long_link(self.congestion)
        with self._sock_lock:
            self._sock, self._carries = sock, None
        try:
            self._serve(sock)
        except ConnectionRefused as exc:
            self._peer.lane_refused(self, exc)
            return str(exc)
        except (OSError, TransportError) as exc:
            log.debug("lane %d to %s ended: %s", self.index, self._peer.address, exc)
            return str(exc)
        finally:
            with self._sock_lock:
                self._sock = None
            sock.close()
        self._failures = 0
        return "closed"

    def _serve(self, sock: socket.socket) -> None:
        options = self._peer.options
        connection = Connection(
            Role.SENDER,
            integrity=options.integrity,
            nonce=os.urandom(NONCE_BYTES),
            now=time.monotonic(),
            max_chunk_bytes=options.chunk_bytes,
            dead_after_s=options.tcp.dead_after_s,
            session=self._session.id if self._session is not None else b"",
            session_secret=self._secret,
        )
        retire_at = time.monotonic() + options.rotate_keys_s if self._session is not None else float("inf")
        self._work(sock, connection, retire_at)

    def _work(self, sock: socket.socket, connection: Connection, retire_at: float) -> None:
        """Feeds one connection until it is to be replaced."""
        while not self._peer.closing:
            leaving = time.monotonic() >= retire_at or self._peer.surplus(self)
            if leaving and self._peer.retire(self):
                return
            self._write_control(sock, connection)
            if self._read(sock, connection):
                continue
            wait_s = self._peer.wait_s(time.monotonic())
            free = connection.state is State.OPEN and not wait_s and not leaving
            full = free and self._on_long_link and self._peer.ending and not has_room(sock)
            batch = self._peer.batch_for(self) if free and not full else Batch()
            if batch:
                self._send(sock, connection, batch)
            else:
                self._wait(sock, connection, wait_s, for_room=full)

    def _secret(self, _: bytes) -> bytes | None:
        return self._session.secret if self._session is not None else None

    def _read(self, sock: socket.socket, connection: Connection) -> bool:
        """Takes what the receiver has said; False when it was nothing."""
        size = receive_now(sock, connection.receive_buffer())
        if size is None:
            return False
        if size == 0:
            raise PeerLost("the peer closed the connection")
        connection.received(size, time.monotonic())
        while (frame := connection.next_event()) is not None:
            if isinstance(frame, Welcome):
                self._peer.lane_up(self, connection.max_chunk_bytes)
                continue
            if isinstance(frame, Ack):  # not before: what is welcomed, and breaks with the first chunk, has failed
                self._failures = 0
            self._on_frame(frame)
        self._peer.settle()
        return True

    def _on_frame(self, frame: Frame) -> None:
        self._peer.on_frame(self, frame)

    def _wait(self, sock: socket.socket, connection: Connection, wait_s: float, *, for_room: bool = False) -> None:
        """Until the receiver speaks, work or room appears, the budget allows to send or a timer is due."""
        now = time.monotonic()
        until = connection.next_timer() - now
        self._sleep(min(wait_s, until) if wait_s else until, sock, for_room=for_room)
        connection.on_timer(time.monotonic())

    def _sleep(self, timeout_s: float | None, sock: socket.socket | None = None, *, for_room: bool = False) -> None:
        poller = select.poll()
        poller.register(self._eventfd, select.POLLIN)
        if sock is not None:
            poller.register(sock, select.POLLIN | (select.POLLOUT if for_room else 0))
        poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000 + 0.5)
        with suppress(BlockingIOError):  # it was the socket, or time
            os.eventfd_read(self._eventfd)

    # sending

    def _send(self, sock: socket.socket, connection: Connection, batch: Batch) -> None:
        self._reading = {piece.transfer for piece in batch.pieces}
        try:
            outgoing = Outgoing()
            self._sealed_bytes = self._hashed_bytes = 0
            self._coder.begin_batch()
            for notice in batch.notices:
                outgoing.add(connection.send(notice))
                self._forget(notice)
            for transfer in batch.opens:
                outgoing.add(self._opening(connection, transfer))
            for piece in batch.pieces:
                if piece.transfer in self._reading:  # else it has ended, and its memory is gone
                    self._add_piece(sock, connection, outgoing, piece)
            self._write(sock, connection, outgoing)
            self._peer.charge(batch.num_bytes - self._coder.bytes_saved, time.monotonic())
        finally:
            reading, self._reading = self._reading, set()
            self._peer.let_go(reading)

    def _forget(self, notice: Frame) -> None:
        """The receiver hears that we are through with a slot: nothing leaves for it any more."""
        if isinstance(notice, Abort):
            self._seeds.pop(notice.slot, None)
            self._seals.pop(notice.slot, None)

    def _opening(self, connection: Connection, transfer: Transfer) -> bytes:
        return connection.send(self._opening_frame(connection, transfer))

    def _opening_frame(self, connection: Connection, transfer: Transfer) -> Open:
        manifest = transfer.manifest
        self._seeds[transfer.slot] = transfer_seed(transfer.transfer_id, connection.nonces)
        if self._session is not None:
            if not self._sealed:
                self._sealed, self._gathered = (memoryview(bytearray(SEALED_PART_BYTES)) for _ in range(2))
            self._seals[transfer.slot] = chunk_seal(
                self._session.secret, connection.nonces, transfer.transfer_id, transfer.secret
            )
        return Open(
            slot=transfer.slot,
            transfer_id=transfer.transfer_id,
            proof=proof_of(transfer.secret, transfer.transfer_id, manifest.digest, connection.nonces),
            total_bytes=manifest.total_bytes,
            num_ranges=len(manifest.sizes),
            manifest_digest=manifest.digest,
            arena_path=transfer.arena_path,
            placement=transfer.placement,
        )

    def _add_piece(self, sock: socket.socket, connection: Connection, outgoing: Outgoing, piece: Piece) -> None:
        transfer = piece.transfer
        formats = transfer.formats if connection.codecs else None  # once: a refusal may take it away at any time
        coded, references = None, []
        try:
            source = self._peer.source_of(transfer)
            if isinstance(source, ArenaSource) and transfer.arena_path:
                references = self._references(transfer, source, piece.start, piece.stop)
            views = transfer.manifest.views(source, piece.start, piece.stop) if not references else []
            if formats is not None:
                coded = self._coder.code(transfer, formats, connection.codecs, piece.start, piece.stop, views)
        except Exception as exc:
            log.exception("the source of push %s failed", transfer.transfer_id)
            self._peer.abort(transfer, f"source: {exc}", keep_landing=False)
            return
        if coded is not None:
            self._add_coded(sock, connection, outgoing, piece, coded)
            return
        if references:
            for reference in references:
                outgoing.add(connection.send(reference))
        elif self._session is not None:
            length = piece.stop - piece.start
            sealed_chunk = connection.seal_chunk(self._seals[transfer.slot], transfer.slot, piece.start, length)
            self._write_sealed(sock, connection, outgoing, sealed_chunk, views, transfer)
        elif connection.digest_behind:
            self._write_hashed(sock, connection, outgoing, piece, views)
        else:
            checksummed = self._peer.options.integrity is Integrity.CHECKSUM
            self._add_views(outgoing, connection, piece, views, self._checksum(piece, views) if checksummed else 0)

    def _checksum(self, piece: Piece, views: list[memoryview]) -> int:
        return digest(views, self._seeds[piece.transfer.slot], piece.start)

    def _add_views(
        self, outgoing: Outgoing, connection: Connection, piece: Piece, views: list[memoryview], checksum: int
    ) -> None:
        outgoing.add(connection.chunk_header(piece.transfer.slot, piece.start, piece.stop - piece.start, checksum))
        outgoing.views.extend((view, piece.transfer) for view in views)

    def _write_hashed(
        self, sock: socket.socket, connection: Connection, outgoing: Outgoing, piece: Piece, views: list[memoryview]
    ) -> None:
        """Hashes and writes by turns: what was hashed is still in the processor's cache when it is written.

        Once the transfer has ended, all that is left is hashed before more is written, as with what is sealed.
        """
        running = Digest(self._seeds[piece.transfer.slot], piece.start)
        self._add_views(outgoing, connection, piece, [], 0)
        for part in parts_of(views, HASHED_PART_BYTES):
            running.update(part)
            outgoing.views.extend((view, piece.transfer) for view in part)
            self._hashed_bytes += sum(map(len, part))
            if self._hashed_bytes >= HASHED_PART_BYTES:
                self._write(sock, connection, outgoing, unfinished=piece.transfer)
                self._hashed_bytes = 0
        outgoing.add(running.trailer())

    def _add_coded(
        self, sock: socket.socket, connection: Connection, outgoing: Outgoing, piece: Piece, coded: memoryview
    ) -> None:
        slot, seal = piece.transfer.slot, None
        checksum = 0
        if self._session is not None:
            seal = self._seals[slot]
        elif self._peer.options.integrity is Integrity.CHECKSUM:
            checksum = digest([coded], self._seeds[slot], piece.start)
        chunk = CodedChunk(
            slot=slot,
            offset=piece.start,
            length=piece.stop - piece.start,
            coded_length=len(coded),
            checksum=checksum,
            sealed=seal is not None,
        )
        if seal is None:
            outgoing.add(connection.coded_header(chunk))
            outgoing.views.append((coded, None))
            return
        self._write_sealed(sock, connection, outgoing, connection.seal_coded(seal, chunk), [coded], piece.transfer)

    def _write_sealed(
        self,
        sock: socket.socket,
        connection: Connection,
        outgoing: Outgoing,
        sealed_chunk: tuple[bytes, Sealing],
        views: list[memoryview],
        transfer: Transfer,
    ) -> None:
        """Seals and writes by turns: the receiver opens one part while we seal the next.

        Once the transfer has ended, all that is left is sealed before more is written: its memory is wanted back.
        """
        header, sealing = sealed_chunk
        outgoing.add(header)
        for part in pieces_of(views, SEALED_PART_BYTES, SMALL_VIEW_BYTES, self._gathered):
            if self._sealed_bytes + len(part) > SEALED_PART_BYTES:
                if not self._write(sock, connection, outgoing, unfinished=transfer):
                    self._sealed = memoryview(bytearray(SEALED_PART_BYTES))  # the other one is still to be written
                self._sealed_bytes = 0
            sealed = self._sealed[self._sealed_bytes : self._sealed_bytes + len(part)]
            self._sealed_bytes += len(part)
            sealing.update(part, sealed)
            outgoing.views.append((sealed, None))
        outgoing.add(sealing.tag())

    def _references(self, transfer: Transfer, source: ArenaSource, start: int, stop: int) -> list[Reference]:
        """One; or more, each a chunk of its own, where the bytes lie in more extents than one can name."""
        manifest = transfer.manifest
        checksum = digest(manifest.views(source, start, stop), self._seeds[transfer.slot], start)
        pieces = manifest.pieces(start, stop)
        extents = merge_extents(extent for i, skip, size in pieces for extent in source.extents(i, skip, size))
        if len(extents) <= MAX_LIST:
            return [Reference(slot=transfer.slot, offset=start, checksum=checksum, extents=tuple(extents))]
        middle = (start + stop) // 2
        self._peer.split(self, transfer, start, middle)
        return [
            part for ends in ((start, middle), (middle, stop)) for part in self._references(transfer, source, *ends)
        ]

    def _write(
        self, sock: socket.socket, connection: Connection, outgoing: Outgoing, unfinished: Transfer | None = None
    ) -> bool:
        """False when something is left, since the transfer whose chunk is still being made has ended."""
        while outgoing.views:
            if unfinished is not None and unfinished.outcome is not None:
                return False
            sent = send_some(sock, outgoing.head())
            outgoing.advance(sent)
            self._let_go_of_ended(outgoing, unfinished)
            if not sent:
                self._blocked(sock, connection)
        return True

    def _let_go_of_ended(self, outgoing: Outgoing, unfinished: Transfer | None) -> None:
        ended = {transfer for transfer in self._reading if transfer.outcome is not None and transfer is not unfinished}
        if ended:
            outgoing.copy_of(ended)
            self._reading -= ended
            self._peer.let_go(ended)

    def _blocked(self, sock: socket.socket, connection: Connection) -> None:
        """A tick without progress: listen, see whether the peer lives."""
        if self._peer.closing:
            raise PeerLost("closing")
        self._read(sock, connection)
        if connection.next_timer() <= time.monotonic():
            connection.on_timer(time.monotonic())

    def _write_control(self, sock: socket.socket, connection: Connection) -> None:
        outgoing = Outgoing()
        outgoing.add(connection.data_to_send())
        self._write(sock, connection, outgoing)

"""One connection to a receiver: reads its replies, and writes batches chunk by chunk."""

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from transport.errors import PeerLost
from transport.path.shm import ArenaSource, parts_of, pieces_of
from transport.path.tcp import MAX_VIEWS, receive_now, send_some
from transport.send.lane.coder import LaneCoder
from transport.send.lane.link_keeper import LinkKeeper
from transport.send.schedule.lanes import Batch, LanePiece, LaneTransfer
from transport.send.schedule.transfers import Taker, Transfers
from transport.wire.checksum import HASHED_PART_BYTES, Digest, Integrity, digest, transfer_seed
from transport.wire.connection import Connection
from transport.wire.frames import MAX_LIST, Abort, CodedChunk, Frame, Open, Reference
from transport.wire.manifest import proof_of
from transport.wire.seal import SEALED_PART_BYTES, SMALL_VIEW_BYTES, Seal, chunk_seal
from transport.wire.session import Session

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OutgoingViews:
    """Views still to be written, each with the transfer whose memory it is (None: our own bytes)."""

    views: deque[tuple[memoryview | bytes, LaneTransfer | None]] = field(default_factory=deque)

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

    def copy_of(self, ended: set[LaneTransfer]) -> None:
        """Copies the promised bytes of these transfers: their owners want the memory back."""
        for i, (view, owner) in enumerate(self.views):
            if owner in ended:
                self.views[i] = (bytes(view), None)


class Stream:
    """Belongs to its lane's thread."""

    def __init__(
        self,
        sock: socket.socket,
        connection: Connection,
        lane: Taker,
        *,
        transfers: Transfers,
        link: LinkKeeper,
        coder: LaneCoder,
        integrity: Integrity,
        session: Session | None,
        on_frame: Callable[[Frame], None],
    ) -> None:
        self.sock = sock
        self.connection = connection
        self._lane = lane
        self._transfers = transfers
        self._link = link
        self._coder = coder
        self._integrity = integrity
        self.session = session  # whose keys seal the chunks; None: they are not sealed
        self._on_frame = on_frame
        self._seeds: dict[int, int] = {}
        self._seals: dict[int, Seal] = {}
        self._sealed = memoryview(b"")  # what is sealed and not written yet
        self._sealed_bytes = 0
        self._gathered = memoryview(b"")  # small views, to be sealed together
        self._hashed_bytes = 0  # and not written yet
        self._reading: set[LaneTransfer] = set()  # whose memory the present batch reads

    def __repr__(self) -> str:
        return f"<Stream: {self.num_open} transfers open, reading the memory of {len(self._reading)}>"

    @property
    def num_open(self) -> int:
        """Transfers that were opened on it, and whose end the receiver has not been told."""
        return len(self._seeds)

    def read(self) -> bool:
        """Handles the receiver's replies; False when there were none."""
        size = receive_now(self.sock, self.connection.receive_buffer())
        if size is None:
            return False
        if size == 0:
            raise PeerLost("the peer closed the connection")
        self.connection.received(size, time.monotonic())
        while (frame := self.connection.next_event()) is not None:
            self._on_frame(frame)
        self._transfers.settle()
        return True

    def write_control(self) -> None:
        """Sends the connection's own frames."""
        outgoing = OutgoingViews()
        outgoing.add(self.connection.data_to_send())
        self.write(outgoing)

    def say(self, frames: Sequence[Frame]) -> None:
        outgoing = OutgoingViews()
        for frame in frames:
            outgoing.add(self.connection.send(frame))
        self.write(outgoing)

    def send(self, batch: Batch) -> None:
        """All of it; what its transfers' memory is read for is over afterwards."""
        self._reading = {piece.transfer for piece in batch.pieces}
        try:
            outgoing = OutgoingViews()
            self._sealed_bytes = self._hashed_bytes = 0
            self._coder.begin_batch()
            for notice in batch.notices:
                outgoing.add(self.connection.send(notice))
                self.forget(notice)
            for transfer in batch.opens:
                outgoing.add(self.connection.send(self.opening(transfer)))
            for piece in batch.pieces:
                if piece.transfer in self._reading:  # else it has ended, and its memory is gone
                    self._add_piece(outgoing, piece)
            self.write(outgoing)
            self._link.charge(batch.num_bytes - self._coder.bytes_saved, time.monotonic())
        finally:
            reading, self._reading = self._reading, set()
            self._transfers.let_go(reading)

    def forget(self, notice: Frame) -> None:
        """Tells the receiver that the sender has finished with a slot: nothing more leaves for it."""
        if isinstance(notice, Abort):
            self._seeds.pop(notice.slot, None)
            self._seals.pop(notice.slot, None)

    def opening(self, transfer: LaneTransfer) -> Open:
        """The frame that begins a transfer on this connection."""
        manifest = transfer.manifest
        self._seeds[transfer.slot] = transfer_seed(transfer.transfer_id, self.connection.transcript)
        if self.session is not None:
            if not self._sealed:
                self._sealed, self._gathered = (memoryview(bytearray(SEALED_PART_BYTES)) for _ in range(2))
            self._seals[transfer.slot] = chunk_seal(
                self.session.secret, self.connection.transcript, transfer.transfer_id, transfer.secret
            )
        return Open(
            slot=transfer.slot,
            transfer_id=transfer.transfer_id,
            proof=proof_of(transfer.secret, transfer.transfer_id, manifest.digest, self.connection.transcript),
            total_bytes=manifest.total_bytes,
            num_ranges=manifest.num_ranges,
            manifest_digest=manifest.digest,
            arena_path=transfer.arena_path,
            placement=transfer.placement,
        )

    def _add_piece(self, outgoing: OutgoingViews, piece: LanePiece) -> None:
        transfer = piece.transfer
        formats = transfer.formats if self.connection.codecs else None  # once: a refusal may take it away at any time
        coded, references = None, []
        try:
            source = self._transfers.source_of(transfer)
            if isinstance(source, ArenaSource) and transfer.arena_path:
                references = self._references(transfer, source, piece.start, piece.stop)
            views = transfer.manifest.views(source, piece.start, piece.stop) if not references else []
            if formats is not None:
                coded = self._coder.code(transfer, formats, self.connection.codecs, piece.start, piece.stop, views)
        except Exception as exc:
            log.exception("the source of push %s failed", transfer.transfer_id)
            self._transfers.abort(transfer, f"source: {exc}", keep_landing=False)
            return
        if coded is not None:
            self._add_coded(outgoing, piece, coded)
            return
        if references:
            for reference in references:
                outgoing.add(self.connection.send(reference))
        elif self.session is not None:
            length = piece.stop - piece.start
            header = self.connection.chunk_header(transfer.slot, piece.start, length, sealed=True)
            self._write_sealed(outgoing, header, views, transfer)
        elif self.connection.digest_behind:
            self._write_hashed(outgoing, piece, views)
        else:
            self._add_views(outgoing, piece, views)

    def checksum(self, transfer: LaneTransfer, start: int, views: Sequence[memoryview]) -> int:
        """The checksum of a chunk that begins at `start` and lies in `views`."""
        return digest(views, self._seeds[transfer.slot], start)

    def _add_views(self, outgoing: OutgoingViews, piece: LanePiece, views: list[memoryview]) -> None:
        transfer = piece.transfer
        outgoing.add(self.connection.chunk_header(transfer.slot, piece.start, piece.stop - piece.start))
        outgoing.views.extend((view, piece.transfer) for view in views)

    def _write_hashed(self, outgoing: OutgoingViews, piece: LanePiece, views: list[memoryview]) -> None:
        """Hashes and writes by turns: what was hashed is still in the processor's cache when it is written.

        Once the transfer has ended, all that is left is hashed before more is written, as with what is sealed.
        """
        running = Digest(self._seeds[piece.transfer.slot], piece.start)
        self._add_views(outgoing, piece, [])
        for part in parts_of(views, HASHED_PART_BYTES):
            running.update(part)
            outgoing.views.extend((view, piece.transfer) for view in part)
            self._hashed_bytes += sum(map(len, part))
            if self._hashed_bytes >= HASHED_PART_BYTES:
                self.write(outgoing, unfinished=piece.transfer)
                self._hashed_bytes = 0
        outgoing.add(running.trailer())

    def _add_coded(self, outgoing: OutgoingViews, piece: LanePiece, coded: memoryview) -> None:
        sealed, checksum = self.session is not None, 0
        if not sealed and self._integrity is Integrity.CHECKSUM:
            checksum = self.checksum(piece.transfer, piece.start, [coded])
        chunk = CodedChunk(
            slot=piece.transfer.slot,
            offset=piece.start,
            length=piece.stop - piece.start,
            coded_length=len(coded),
            checksum=checksum,
            sealed=sealed,
        )
        header = self.connection.coded_header(chunk)
        if sealed:
            self._write_sealed(outgoing, header, [coded], piece.transfer)
            return
        outgoing.add(header)
        outgoing.views.append((coded, None))

    def _write_sealed(
        self,
        outgoing: OutgoingViews,
        header: bytes,
        views: list[memoryview],
        transfer: LaneTransfer,
    ) -> None:
        """Seals and writes by turns: the receiver opens one part while we seal the next.

        Once the transfer has ended, all that is left is sealed before more is written: its memory is wanted back.
        """
        sealing = self.connection.seal_chunk(self._seals[transfer.slot], header)
        outgoing.add(header)
        for part in pieces_of(views, SEALED_PART_BYTES, SMALL_VIEW_BYTES, self._gathered):
            if self._sealed_bytes + len(part) > SEALED_PART_BYTES:
                if not self.write(outgoing, unfinished=transfer):
                    self._sealed = memoryview(bytearray(SEALED_PART_BYTES))  # the other one is still to be written
                self._sealed_bytes = 0
            sealed = self._sealed[self._sealed_bytes : self._sealed_bytes + len(part)]
            self._sealed_bytes += len(part)
            sealing.update(part, sealed)
            outgoing.views.append((sealed, None))
        outgoing.add(sealing.tag())

    def _references(self, transfer: LaneTransfer, source: ArenaSource, start: int, stop: int) -> list[Reference]:
        """One; or more, each a chunk of its own, where the bytes lie in more extents than one can name."""
        manifest = transfer.manifest
        checksum = self.checksum(transfer, start, manifest.views(source, start, stop))
        extents = source.extents(*manifest.covering(start, stop), stop - start)
        if len(extents) <= MAX_LIST:
            return [Reference(slot=transfer.slot, offset=start, checksum=checksum, extents=tuple(extents))]
        middle = (start + stop) // 2
        self._transfers.split(self._lane, transfer, start, middle)
        return [
            part for ends in ((start, middle), (middle, stop)) for part in self._references(transfer, source, *ends)
        ]

    def write(self, outgoing: OutgoingViews, unfinished: LaneTransfer | None = None) -> bool:
        """False when something is left, since the transfer whose chunk is still being made has ended."""
        while outgoing.views:
            if unfinished is not None and unfinished.outcome is not None:
                return False
            sent = send_some(self.sock, outgoing.head())
            outgoing.advance(sent)
            self._let_go_of_ended(outgoing, unfinished)
            if not sent:
                self._blocked()
        return True

    def _let_go_of_ended(self, outgoing: OutgoingViews, unfinished: LaneTransfer | None) -> None:
        ended = {transfer for transfer in self._reading if transfer.outcome is not None and transfer is not unfinished}
        if ended:
            outgoing.copy_of(ended)
            self._reading -= ended
            self._transfers.let_go(ended)

    def _blocked(self) -> None:
        """A tick without progress: listen, see whether the peer lives."""
        if self._transfers.closing:
            raise PeerLost("closing")
        self.read()
        if self.connection.next_timer() <= time.monotonic():
            self.connection.on_timer(time.monotonic())

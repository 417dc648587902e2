"""A lane whose chunks are written to the receiver by RDMA, over several rails at once.

    connection   AskRails, Open ──►            ◄── LandingBuffers, Nics, Accept    who showed the secret learns of NICs
                 RailOffer ──►                 ◄── RailBuffer, RailAnswer   one queue pair a rail, and its buffer
    rails        chunk = writes, the last one with the chunk's number ══►   into a place of the buffer
    connection   Written(checksum) ──►         ◄── Ack, Nack, Cancel        copied into the pages, and verified there

A receiver in direct mode, or of version 1, says Grant for each transfer instead: chunks go straight into its pages.

Each rail is a lane of the peer's scheduler. It takes chunks when it has room, so a slow one does not hold up the rest.
The sender closes a rail that fails, and tells the receiver (RailClosed), which closes its end. Only then do its chunks
leave again over the others: no late packet can write into a page that has been given away. While no rail works, and for
memory that is not registered, chunks go over the connection itself; that is counted, with the reason.
"""

import time
from collections import Counter
from typing import Final

from transport.errors import RemoteProtocolError
from transport.rdma.device import RdmaDevices
from transport.rdma.inlet import MAX_EXTENTS
from transport.rdma.rails import RailReport
from transport.rdma.topology import parse_nics
from transport.send.lane.outlet import Home, PeerContext, SenderLane
from transport.send.lane.running_rails import RunningRails, Slot
from transport.send.lane.stream import Stream
from transport.send.schedule.lanes import Batch, LaneTransfer
from transport.wire.connection import ProtocolState
from transport.wire.frames import (
    Abort,
    Accept,
    Ack,
    AskRails,
    Frame,
    Grant,
    LandingBuffers,
    Nack,
    Nics,
    RailAnswer,
    RailBuffer,
    RailClosed,
)

# Completions are polled: waiting for their events would hold the interpreter lock.
NAP_FIRST_S: Final = 20e-6
NAP_MAX_S: Final = 1e-3


class RdmaSenderLane(SenderLane):
    """One connection after another to the same peer, and the rails that each of them agrees on."""

    def __init__(self, home: Home, shared: PeerContext, index: int, devices: RdmaDevices) -> None:
        super().__init__(home, shared, index)
        self._said: list[Frame] = []
        self._rails = RunningRails(devices, shared.transfers, self._said.append)
        self._held: list[Abort] = []  # the receiver may reuse the memory after one: not while writes are under way
        self._nap_s = NAP_FIRST_S
        self.fallback_bytes: Counter[str] = Counter()  # sent over TCP, by reason

    def reports(self) -> list[RailReport]:
        """The rails, as they are now."""
        return self._rails.table.reports(self._address)

    # the connection

    def _work(self, stream: Stream, retire_at: float) -> None:
        self._held = []
        self._said[:] = [AskRails()]
        self._rails.begin(self.key, stream.checksum)
        try:
            while not self._transfers.closing:
                self._keys.unless_revoked(stream.session)
                leaving = time.monotonic() >= retire_at
                if leaving and not self._rails.writing and self._transfers.answered(self):
                    return
                stream.write_control()
                moved = stream.read()
                if stream.connection.state is ProtocolState.OPEN:
                    moved = self._advance(stream, leaving) or moved
                self._rest(stream, moved)
        finally:
            self._rails.close()

    def _advance(self, stream: Stream, leaving: bool) -> bool:
        """One round of everything there is to do; False when it was nothing."""
        with self._transfers.lock:
            self.idle = True  # before looking for work: what becomes ready from here on wakes us
        moved = self._rails.tend(time.monotonic())
        moved = self._open_transfers(stream) or moved
        if not leaving:
            moved = self._rails.feed() or moved
        moved = self._speak(stream) or moved
        if not leaving:
            moved = self._fall_back(stream) or moved
        return moved

    def _speak(self, stream: Stream) -> bool:
        said = list(self._said)
        self._said.clear()
        stream.say(said)
        return bool(said)

    def _rest(self, stream: Stream, moved: bool) -> None:
        if moved:
            self._nap_s = NAP_FIRST_S
        elif self._rails.polling:
            time.sleep(self._nap_s)
            self._nap_s = min(2 * self._nap_s, NAP_MAX_S)
        else:
            rails_s = self._rails.table.next_timer() if self._rails.remote is not None else float("inf")
            until = min(stream.connection.next_timer(), rails_s)
            self._sleep(max(0.0, until - time.monotonic()), stream.sock)
        stream.connection.on_timer(time.monotonic())

    # transfers

    def _open_transfers(self, stream: Stream) -> bool:
        with self._transfers.lock:
            notices = self._transfers.scheduler.take_notices(self.key)
            openings = self._transfers.scheduler.take_openings(self.key)
        for transfer in openings:
            self._rails.slots[transfer.slot] = Slot(transfer)
            self._said.append(stream.opening(transfer))
        writing = self._rails.writing if notices or self._held else ()
        held, self._held = self._held, []
        for notice in (*held, *notices):
            if isinstance(notice, Abort) and notice.slot in writing:
                self._held.append(notice)
                continue
            self._said.append(notice)
            stream.forget(notice)
            if isinstance(notice, Abort):
                self._rails.slots.pop(notice.slot, None)
        return bool(openings or notices) or len(self._held) < len(held)

    def _on_frame(self, frame: Frame) -> None:
        match frame:
            case LandingBuffers():
                self._rails.use_buffers(frame)
            case Nics():
                self._rails.plan(parse_nics(frame.nics))
            case Grant():
                self._granted(frame)
            case RailBuffer():
                self._rails.on_buffer(frame)
            case RailAnswer():
                self._rails.on_answer(frame)
            case RailClosed():
                self._rails.on_closed(frame)
            case _:
                self._on_transfer_frame(frame)

    def _on_transfer_frame(self, frame: Frame) -> None:
        match frame:
            case Accept():
                self._accepted(frame)
            case Ack():
                for start, _ in frame.ranges:
                    self._rails.on_acknowledged(frame.slot, start)
            case Nack():
                self._rails.on_acknowledged(frame.slot, frame.offset)
            case _:
                pass
        super()._on_frame(frame)

    def _granted(self, frame: Grant) -> None:
        slot = self._rails.slots.get(frame.slot)
        if slot is None:
            return
        granted = slot.granted
        if granted.num_bytes + sum(length for _, length in frame.extents) > slot.transfer.manifest.total_bytes:
            raise RemoteProtocolError("a grant of more bytes than there are to write")
        if granted.num_extents + len(frame.extents) > MAX_EXTENTS:
            raise RemoteProtocolError("a grant in too many pieces")
        slot.keys = dict(frame.keys)
        try:
            granted.add((frame.address + offset, length) for offset, length in frame.extents)
        except OverflowError as exc:
            raise RemoteProtocolError("a grant beyond all memory") from exc

    def _accepted(self, frame: Accept) -> None:
        slot = self._rails.slots.get(frame.slot)
        if slot is None:
            return
        slot.accepted = True
        if self._rails.buffers is None:
            if not slot.granted.num_bytes:
                slot.fallback = self._rails.none_because or "not_granted"
                return
            slot.placement = slot.granted
            if slot.placement.num_bytes != slot.transfer.manifest.total_bytes or len(slot.keys) < len(
                self._rails.remote or ()
            ):
                raise RemoteProtocolError(f"a grant of {slot.placement.num_bytes} bytes with {len(slot.keys)} keys")
        slot.fallback = self._rails.none_because or self._rails.register(slot)

    def _fall_back(self, stream: Stream) -> bool:
        """Over the connection itself: one batch at a time, so that the rails are not forgotten meanwhile."""
        exhausted = self._rails.table.exhausted

        def may_leave(transfer: LaneTransfer) -> bool:
            slot = self._rails.slots.get(transfer.slot)
            return slot is not None and slot.accepted and (exhausted or bool(slot.fallback))

        with self._transfers.lock:
            pieces = self._transfers.scheduler.take_pieces(self.key, may_leave)
            for transfer in {piece.transfer for piece in pieces}:
                transfer.writing += 1
        for piece in pieces:
            self.fallback_bytes[self._rails.slots[piece.transfer.slot].fallback or "no_rail"] += (
                piece.stop - piece.start
            )
        if pieces:
            stream.send(Batch(pieces=tuple(pieces)))
        return bool(pieces)

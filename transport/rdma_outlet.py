"""A lane whose chunks are written into the receiver's pages by RDMA, over several rails at once.

    connection   AskRails, Open ──►            ◄── Nics, Grant, Accept      who showed the secret learns where to write
                 RailOffer ──►                 ◄── RailAnswer               one queue pair a rail
    rails        chunk = writes, the last one with the chunk's number ══►   straight into the pages
    connection   Written(checksum) ──►         ◄── Ack, Nack, Cancel        verified where it lies

Each rail is a lane of the peer's scheduler and takes chunks when it has room, so a slow one does not hold up the rest.
A rail that fails is closed, the receiver is told so (RailClosed, and closes its end), and only then do its chunks leave
again over the others: no late packet can write into a page that has been given away. While no rail works, and for
memory that is not registered, chunks go over the connection itself; that is counted, with the reason.
"""

import logging
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from transport.checksum import digest
from transport.connection import Connection, State
from transport.errors import RemoteProtocolError
from transport.frames import (
    Abort,
    Accept,
    Ack,
    AskRails,
    Frame,
    Grant,
    Nack,
    Nics,
    RailAnswer,
    RailClosed,
    RailOffer,
    Written,
)
from transport.lanes import Batch, Piece, Transfer
from transport.outlet import Outgoing, Outlet
from transport.rdma_device import (
    PROOF,
    RECEIVE_DEPTH,
    SEND_DEPTH,
    Completion,
    QueuePair,
    QueuePairEnd,
    RdmaDevices,
    RdmaError,
    Region,
    address_of,
)
from transport.rdma_inlet import MAX_EXTENTS
from transport.rdma_rails import Placement, Rail, RailReport, RailState, RailTable, SendQueue, plan_writes
from transport.rdma_topology import Nic, parse_nics, plan_rails
from transport.shm import ArenaSource, merge_extents

if TYPE_CHECKING:
    from transport.peer import Peer

log = logging.getLogger(__name__)

RDMA_VERSION: Final = 3
RDMA_CHUNK_BYTES: Final = 1 << 20  # what a lost rail costs, and what one checksum covers
# Completions are polled: waiting for their events would hold the interpreter lock.
NAP_FIRST_S: Final = 20e-6
NAP_MAX_S: Final = 1e-3
# Why a rail is given up whose time is over.
LATE: Final = {RailState.OFFERED: "no_answer", RailState.PROVING: "no_proof", RailState.UP: "no_completion"}


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    piece: Piece
    checksum: int
    local_key: int
    remote_key: int


@dataclass(slots=True, eq=False)
class _Running:
    """A rail's present queue pair."""

    rail: Rail
    attempt: int
    lane: int  # of the scheduler
    remote_nic: int
    queue_pair: QueuePair
    queue: SendQueue[_Chunk] = field(default_factory=lambda: SendQueue(room=SEND_DEPTH, max_unanswered=RECEIVE_DEPTH))


@dataclass(slots=True)
class _Slot:
    """A transfer on this connection, and where its bytes go."""

    transfer: Transfer
    address: int = 0
    keys: dict[int, int] = field(default_factory=dict)  # by place of the receiver's NIC
    extents: list[tuple[int, int]] = field(default_factory=list)
    placement: Placement | None = None
    memory: Region | None = None  # ours
    accepted: bool = False
    fallback: str = ""  # why its chunks go over TCP


class RdmaOutlet(Outlet):
    """One connection after another to the same peer, and the rails that each of them agrees on."""

    def __init__(self, peer: "Peer", index: int, devices: RdmaDevices) -> None:
        super().__init__(peer, index)
        self._devices = devices
        self._table = RailTable(())
        self._remote: tuple[Nic, ...] | None = None  # until the receiver has told
        self._no_rails = ""  # why there are none
        self._asked = False
        self._slots: dict[int, _Slot] = {}
        self._running: dict[int, _Running] = {}
        self._unanswered: dict[tuple[int, int], _Running] = {}  # (slot, offset) of what was written
        self._said: list[Frame] = []
        self._held: list[Abort] = []  # the receiver may reuse the memory after one: not while writes are under way
        self._next_lane = 0
        self._nap_s = NAP_FIRST_S
        self.fallback_bytes: Counter[str] = Counter()  # sent over TCP, by reason

    def reports(self) -> list[RailReport]:
        """The rails, as they are now."""
        return self._table.reports(self._peer.address)

    # the connection

    def _work(self, sock: socket.socket, connection: Connection, retire_at: float) -> None:
        self._slots, self._unanswered, self._said, self._held = {}, {}, [], []
        self._no_rails, self._remote, self._asked = "", None, False
        self._table.restart()
        try:
            while not self._peer.closing:
                leaving = time.monotonic() >= retire_at
                if leaving and not self._running_chunks() and self._peer.retire(self):
                    return
                self._write_control(sock, connection)
                moved = self._read(sock, connection)
                if connection.state is State.OPEN:
                    moved = self._advance(sock, connection, leaving) or moved
                self._rest(sock, connection, moved)
        finally:
            self._close_rails()

    def _advance(self, sock: socket.socket, connection: Connection, leaving: bool) -> bool:
        """One round of everything there is to do; False when it was nothing."""
        if not self._asked:
            self._ask(connection)
        with self._peer.lock:
            self.idle = True  # before looking for work: what becomes ready from here on wakes us
        moved = self._tend_rails(time.monotonic())
        moved = self._open_transfers(connection) or moved
        if not leaving:
            moved = self._feed_rails() or moved
        moved = self._speak(sock, connection) or moved
        if not leaving:
            moved = self._fall_back(sock, connection) or moved
        return moved

    def _ask(self, connection: Connection) -> None:
        self._asked = True
        if connection.version >= RDMA_VERSION:
            self._said.append(AskRails())
        else:
            self._no_rails = "peer_too_old"

    def _speak(self, sock: socket.socket, connection: Connection) -> bool:
        said, self._said = self._said, []
        outgoing = Outgoing()
        for frame in said:
            outgoing.add(connection.send(frame))
        self._write(sock, connection, outgoing)
        return bool(said)

    def _rest(self, sock: socket.socket, connection: Connection, moved: bool) -> None:
        now = time.monotonic()
        if moved:
            self._nap_s = NAP_FIRST_S
        elif self._polling():
            time.sleep(self._nap_s)
            self._nap_s = min(2 * self._nap_s, NAP_MAX_S)
        else:
            rails_s = self._table.next_timer() if self._remote is not None else float("inf")
            until = min(connection.next_timer(), rails_s)
            self._sleep(max(0.0, until - now), sock)
        connection.on_timer(time.monotonic())

    def _polling(self) -> bool:
        return any(r.queue.busy or r.rail.state is RailState.PROVING for r in self._running.values())

    def _running_chunks(self) -> list[_Chunk]:
        return [chunk for running in self._running.values() for chunk in running.queue.pending]

    # transfers

    def _open_transfers(self, connection: Connection) -> bool:
        with self._peer.lock:
            notices = self._peer.scheduler.take_notices(self.key)
            openings = self._peer.scheduler.take_openings(self.key)
        for transfer in openings:
            self._slots[transfer.slot] = _Slot(transfer)
            self._said.append(self._opening_frame(connection, transfer))
        writing = {chunk.piece.transfer.slot for chunk in self._running_chunks()}
        held, self._held = self._held, []
        for notice in (*held, *notices):
            if isinstance(notice, Abort) and notice.slot in writing:
                self._held.append(notice)
                continue
            self._said.append(notice)
            self._forget(notice)
            if isinstance(notice, Abort):
                self._slots.pop(notice.slot, None)
        return bool(openings or notices) or len(self._held) < len(held)

    def _on_frame(self, frame: Frame) -> None:
        match frame:
            case Nics():
                self._plan(parse_nics(frame.nics))
            case Grant():
                self._granted(frame)
            case RailAnswer():
                self._answered_rail(frame)
            case RailClosed():
                self._closed_by_peer(frame)
            case _:
                self._on_transfer_frame(frame)

    def _on_transfer_frame(self, frame: Frame) -> None:
        match frame:
            case Accept():
                self._accepted(frame)
            case Ack():
                for start, _ in frame.ranges:
                    self._answered(frame.slot, start)
            case Nack():
                self._answered(frame.slot, frame.offset)
            case _:
                pass
        super()._on_frame(frame)

    def _answered(self, slot: int, start: int) -> None:
        running = self._unanswered.pop((slot, start), None)
        if running is not None:
            running.queue.answered()

    def _granted(self, frame: Grant) -> None:
        slot = self._slots.get(frame.slot)
        if slot is None:
            return
        if len(slot.extents) + len(frame.extents) > MAX_EXTENTS:
            raise RemoteProtocolError("a grant in too many pieces")
        slot.address, slot.keys = frame.address, dict(frame.keys)
        slot.extents += [(frame.address + offset, length) for offset, length in frame.extents]

    def _accepted(self, frame: Accept) -> None:
        slot = self._slots.get(frame.slot)
        if slot is None:
            return
        slot.accepted = True
        if not slot.extents:
            slot.fallback = self._no_rails or "not_granted"
            return
        slot.placement, slot.extents = Placement(slot.extents), []
        if slot.placement.num_bytes != slot.transfer.manifest.total_bytes or len(slot.keys) < len(self._remote or ()):
            raise RemoteProtocolError(f"a grant of {slot.placement.num_bytes} bytes with {len(slot.keys)} keys")
        slot.fallback = self._no_rails or self._register(slot)

    def _register(self, slot: _Slot) -> str:
        """Opens the source's memory to our NICs; returns why not."""
        if slot.memory is not None:
            return ""
        with self._peer.lock:
            source = self._peer.source_of(slot.transfer) if slot.transfer.outcome is None else None
        if not isinstance(source, ArenaSource):
            return "not_registered"
        try:
            slot.memory = self._devices.register(source.arena)
        except RdmaError as exc:
            log.warning("memory of push %s: %s", slot.transfer.transfer_id, exc)
            return "not_registered"
        return ""

    # rails

    def _plan(self, remote: tuple[Nic, ...]) -> None:
        """Which pairs of NICs to connect: those near to the memory of what is to be sent, at both ends."""
        if self._remote is not None:  # rails of the first answer may be at work
            raise RemoteProtocolError("NICs are told once")
        self._remote = remote
        for slot in self._slots.values():
            self._register(slot)
        memory = next((slot.memory for slot in self._slots.values() if slot.memory is not None), None)
        plans = plan_rails(self._devices.nics_for(memory), remote)
        if not plans:
            self._no_rails = "no_common_fabric" if remote else "peer_has_no_rdma"
        self._table.plan(plans)

    def _tend_rails(self, now: float) -> bool:
        moved = False
        if self._remote is None:
            return False
        for running in list(self._running.values()):  # before judging: what has come is not late
            moved = self._poll(running, now) or moved
        for rail in self._table.late(now):
            self._lose(rail, LATE[rail.state])
            moved = True
        for rail in self._table.due(now):
            self._offer(rail, now)
            moved = True
        if moved:
            self._peer.settle()
        return moved

    def _offer(self, rail: Rail, now: float) -> None:
        self._table.offered(rail, now)
        device = self._devices.device(rail.plan.local)
        try:
            if not device.active():
                raise RdmaError("the port is down")
            queue_pair = device.queue_pair()
        except RdmaError as exc:
            log.debug("rail %d: %s", rail.index, exc)
            self._table.fail(rail, "no_local_port", now)
            return
        self._next_lane += 1
        # Above the bits of any connection's key.
        lane = self._next_lane << 48 | self.key & 0xFFFFFFFFFFFF
        remote_nic = next(i for i, nic in enumerate(self._remote or ()) if nic.name == rail.plan.remote)
        self._running[rail.index] = _Running(rail, rail.attempt, lane, remote_nic, queue_pair)
        try:
            end = queue_pair.end
        except RdmaError:
            self._lose(rail, "no_local_port")
            return
        self._said.append(
            RailOffer(
                rail=rail.index, attempt=rail.attempt, nic=remote_nic,
                queue_pair=end.number, packet_number=end.packet_number, gid=end.gid, mtu=end.mtu,
            )
        )  # fmt: skip

    def _answered_rail(self, frame: RailAnswer) -> None:
        rail = self._table.find(frame.rail, frame.attempt)
        if rail is None or rail.state is not RailState.OFFERED:
            return
        if frame.depth < RECEIVE_DEPTH:
            raise RemoteProtocolError(f"a rail for {frame.depth} chunks, at least {RECEIVE_DEPTH}")
        queue_pair = self._running[rail.index].queue_pair
        end = QueuePairEnd(number=frame.queue_pair, packet_number=frame.packet_number, gid=frame.gid, mtu=frame.mtu)
        self._table.answered(rail, time.monotonic())
        try:
            queue_pair.connect(end)
            queue_pair.prove()
        except RdmaError as exc:
            log.warning("rail %s -> %s: %s", rail.plan.local, rail.plan.remote, exc)
            self._lose(rail, "not_connected")

    def _closed_by_peer(self, frame: RailClosed) -> None:
        rail = self._table.find(frame.rail, frame.attempt)
        if rail is not None:
            log.info("rail %s -> %s closed by the peer: %s", rail.plan.local, rail.plan.remote, frame.reason)
            self._lose(rail, "closed_by_peer")

    def _poll(self, running: _Running, now: float) -> bool:
        try:
            completions = running.queue_pair.poll()
        except RdmaError as exc:
            completions = [Completion(wr_id=0, error=str(exc) and "device_lost")]
        for completion in completions:
            if completion.error:
                self._lose(running.rail, completion.error)
                return True
            if completion.wr_id == PROOF:
                self._prove(running)
                continue
            for number, chunk in running.queue.completed(completion.wr_id):
                self._arrived(running, chunk, number)
        moved = bool(completions)
        silent_after_s = self._devices.device(running.rail.plan.local).silent_after_s
        self._table.watch(running.rail, now, silent_after_s, busy=running.queue.busy, moved=moved)
        return moved

    def _prove(self, running: _Running) -> None:
        self._table.proved(running.rail)
        log.info("rail %s -> %s is up", running.rail.plan.local, running.rail.plan.remote)
        with self._peer.lock:
            self._peer.scheduler.lane_up(running.lane)

    def _arrived(self, running: _Running, chunk: _Chunk, number: int) -> None:
        piece = chunk.piece
        size = piece.stop - piece.start
        with self._peer.lock:
            piece.transfer.writing -= 1
            self._peer.scheduler.hand_over(piece, running.lane, self.key)
        self._table.carried(running.rail, size)
        self._unanswered[piece.transfer.slot, piece.start] = running
        self._said.append(
            Written(
                slot=piece.transfer.slot, offset=piece.start, length=size, checksum=chunk.checksum,
                rail=running.rail.index, attempt=running.attempt, number=number,
            )
        )  # fmt: skip

    def _lose(self, rail: Rail, reason: str) -> None:
        """Closes the queue pair before anything else: what it had on its way may then leave over another."""
        running = self._running.pop(rail.index, None)
        if running is not None:
            self._take_back(running)
            self._said.append(RailClosed(rail=rail.index, attempt=running.attempt, reason=reason))
        log.warning("rail %s -> %s failed: %s", rail.plan.local, rail.plan.remote, reason)
        self._table.fail(rail, reason, time.monotonic())

    def _take_back(self, running: _Running) -> None:
        running.queue_pair.close()
        with self._peer.lock:
            for chunk in running.queue.pending:
                chunk.piece.transfer.writing -= 1
            self._peer.scheduler.lane_down(running.lane)

    def _close_rails(self) -> None:
        for running in self._running.values():
            self._take_back(running)
        self._running.clear()
        self._peer.settle()

    # chunks

    def _feed_rails(self) -> bool:
        moved = False
        for rail in self._table.carriers():
            running = self._running[rail.index]
            while running.queue.wants_more and self._take(running):
                moved = True
            moved = self._post(running) or moved
        return moved

    def _take(self, running: _Running) -> bool:
        with self._peer.lock:
            room = running.queue.chunks_free
            pieces = self._peer.scheduler.take_pieces(running.lane, self._may_be_written, max_pieces=room)
            for piece in pieces:
                piece.transfer.writing += 1
        for piece in pieces:
            try:
                self._put(running, piece)
            except Exception as exc:  # whatever the owner's source does
                log.exception("the source of push %s failed", piece.transfer.transfer_id)
                with self._peer.lock:
                    piece.transfer.writing -= 1
                self._peer.abort(piece.transfer, f"source: {exc}", keep_landing=False)
        return bool(pieces)

    def _may_be_written(self, transfer: Transfer) -> bool:
        slot = self._slots.get(transfer.slot)
        return slot is not None and slot.accepted and not slot.fallback

    def _put(self, running: _Running, piece: Piece) -> None:
        transfer, slot = piece.transfer, self._slots[piece.transfer.slot]
        assert slot.placement is not None
        assert slot.memory is not None
        source = self._peer.source_of(transfer)
        assert isinstance(source, ArenaSource)
        manifest = transfer.manifest
        checksum = digest(manifest.views(source, piece.start, piece.stop), self._seeds[transfer.slot], piece.start)
        base = address_of(source.arena)
        extents = merge_extents(
            (base + start, length)
            for i, skip, size in manifest.pieces(piece.start, piece.stop)
            for start, length in source.extents(i, skip, size)
        )
        writes = plan_writes(extents, slot.placement.slice(piece.start, piece.stop))
        local_key = slot.memory.keys[running.rail.plan.local].local
        running.queue.put(_Chunk(piece, checksum, local_key, slot.keys[running.remote_nic]), writes)

    def _post(self, running: _Running) -> bool:
        postings = running.queue.take_postings()
        try:
            for posting, chunk in postings:
                running.queue_pair.write(posting, chunk.local_key, chunk.remote_key)
        except RdmaError as exc:
            log.debug("rail %d: %s", running.rail.index, exc)
            self._lose(running.rail, "not_posted")
        return bool(postings)

    def _fall_back(self, sock: socket.socket, connection: Connection) -> bool:
        """Over the connection itself: one batch at a time, so that the rails are not forgotten meanwhile."""
        exhausted = self._table.exhausted

        def may_leave(transfer: Transfer) -> bool:
            slot = self._slots.get(transfer.slot)
            return slot is not None and slot.accepted and (exhausted or bool(slot.fallback))

        with self._peer.lock:
            pieces = self._peer.scheduler.take_pieces(self.key, may_leave)
            for transfer in {piece.transfer for piece in pieces}:
                transfer.writing += 1
        for piece in pieces:
            self.fallback_bytes[self._slots[piece.transfer.slot].fallback or "no_rail"] += piece.stop - piece.start
        if pieces:
            self._send(sock, connection, Batch(pieces=tuple(pieces)))
        return bool(pieces)

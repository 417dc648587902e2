"""The rails of one connection at work: offered, proved, fed with chunks, given up and tried again.

Each rail is a lane of the peer's scheduler. It takes chunks when it has room, so a slow one does not hold up the rest.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from transport.errors import RemoteProtocolError
from transport.path.shm import ArenaSource
from transport.rdma.device import (
    PROOF,
    RDMA_CHUNK_BYTES,
    RECEIVE_DEPTH,
    SEND_DEPTH,
    MemoryRegion,
    QueuePair,
    QueuePairEnd,
    RdmaDevices,
    RdmaError,
    WorkCompletion,
    address_of,
)
from transport.rdma.rails import MemoryPlacement, Rail, RailState, RailTable, SendQueue, plan_writes
from transport.rdma.topology import Nic, plan_rails
from transport.send.schedule.lanes import LanePiece, LaneTransfer
from transport.send.schedule.transfers import Transfers
from transport.wire.frames import (
    MAX_CHUNK_BYTES,
    Frame,
    LandingBuffers,
    RailAnswer,
    RailBuffer,
    RailClosed,
    RailOffer,
    Written,
)

log = logging.getLogger(__name__)

# Why a rail is given up whose time is over.
LATE: Final = {RailState.OFFERED: "no_answer", RailState.PROVING: "no_proof", RailState.UP: "no_completion"}
Checksum: TypeAlias = Callable[[LaneTransfer, int, Sequence[memoryview]], int]


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    piece: LanePiece
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
    queue: SendQueue[_Chunk]
    buffer: RailBuffer | None = None  # the receiver's; None: direct mode, or not told yet


@dataclass(slots=True)
class Slot:
    """A transfer on this connection, and where its bytes go."""

    transfer: LaneTransfer
    keys: dict[int, int] = field(default_factory=dict)  # direct mode: by place of the receiver's NIC
    granted: MemoryPlacement = field(default_factory=MemoryPlacement)
    placement: MemoryPlacement | None = None  # what was granted, once it is accepted
    memory: MemoryRegion | None = None  # ours
    accepted: bool = False
    fallback: str = ""  # why its chunks go over TCP


class RunningRails:
    """Belongs to its lane's thread. The table, and its accounts, outlive the connections that agree on rails."""

    def __init__(self, devices: RdmaDevices, transfers: Transfers, say: Callable[[Frame], None]) -> None:
        self.table = RailTable(())
        self.slots: dict[int, Slot] = {}
        self.remote: tuple[Nic, ...] | None = None  # until the receiver has told
        self.none_because = ""
        self.buffers: LandingBuffers | None = None  # None: the receiver is in direct mode
        self._devices = devices
        self._transfers = transfers
        self._say = say  # to the receiver, over the connection
        self._checksum: Checksum = _nothing_opened
        self._key = 0
        self._running: dict[int, _Running] = {}
        self._unanswered: dict[tuple[int, int], _Running] = {}  # (slot, offset) of what was written
        self._next_lane = 0

    def begin(self, key: int, checksum: Checksum) -> None:
        """A new connection, `key` to the scheduler: there are no rails yet."""
        self._key, self._checksum = key, checksum
        self.slots, self._unanswered = {}, {}
        self.none_because, self.remote, self.buffers = "", None, None
        self.table.restart()

    def use_buffers(self, frame: LandingBuffers) -> None:
        """The receiver has buffers for chunks. Raises RemoteProtocolError for those that we cannot use."""
        if self.remote is not None or self.buffers is not None:
            raise RemoteProtocolError("landing buffers are told once, before the NICs")
        if not (0 < frame.places <= RECEIVE_DEPTH and RDMA_CHUNK_BYTES <= frame.place_bytes <= MAX_CHUNK_BYTES):
            raise RemoteProtocolError(f"buffers of {frame.places} places of {frame.place_bytes} bytes")
        self.buffers = frame

    def plan(self, remote: tuple[Nic, ...]) -> None:
        """Which pairs of NICs to connect: those near to the memory of what is to be sent, at both ends."""
        if self.remote is not None:  # rails of the first answer may be at work
            raise RemoteProtocolError("NICs are told once")
        self.remote = remote
        for slot in self.slots.values():
            self.register(slot)
        memory = next((slot.memory for slot in self.slots.values() if slot.memory is not None), None)
        plans = plan_rails(self._devices.nics_for(memory), remote)
        if not plans:
            self.none_because = "no_common_fabric" if remote else "peer_has_no_rdma"
        self.table.plan(plans)

    def register(self, slot: Slot) -> str:
        """Opens the source's memory to our NICs; returns why not."""
        if slot.memory is not None:
            return ""
        with self._transfers.lock:
            source = self._transfers.source_of(slot.transfer) if slot.transfer.outcome is None else None
        if not isinstance(source, ArenaSource):
            return "not_registered"
        try:
            slot.memory = self._devices.register(source.arena)
        except RdmaError as exc:
            log.warning("memory of push %s: %s", slot.transfer.transfer_id, exc)
            return "not_registered"
        return ""

    def tend(self, now: float) -> bool:
        """Handles completions, late rails and retries; False when there was nothing to do."""
        moved = False
        if self.remote is None:
            return False
        for running in list(self._running.values()):  # before judging: what has come is not late
            moved = self._poll(running, now) or moved
        for rail in self.table.late(now):
            self._lose(rail, LATE[rail.state])
            moved = True
        for rail in self.table.due(now):
            self._offer(rail, now)
            moved = True
        if moved:
            self._transfers.settle()
        return moved

    def feed(self) -> bool:
        """Chunks for every rail that has room; False when there were none."""
        moved = False
        for rail in self.table.carriers():
            running = self._running[rail.index]
            while running.queue.wants_more and self._take(running):
                moved = True
            moved = self._post(running) or moved
        return moved

    @property
    def polling(self) -> bool:
        """Whether a completion is to come."""
        return any(r.queue.busy or r.rail.state is RailState.PROVING for r in self._running.values())

    @property
    def writing(self) -> set[int]:
        """Slots with chunks on a rail."""
        return {chunk.piece.transfer.slot for running in self._running.values() for chunk in running.queue.pending}

    def close(self) -> None:
        """Chunks that were on their way may leave over other lanes."""
        for running in self._running.values():
            self._take_back(running)
        self._running.clear()
        self._transfers.settle()

    def on_buffer(self, frame: RailBuffer) -> None:
        """Raises RemoteProtocolError for one that lies in no memory."""
        if self.buffers is not None and frame.address + self.buffers.places * self.buffers.place_bytes > 1 << 64:
            raise RemoteProtocolError("a rail's buffer beyond all memory")
        rail = self.table.find(frame.rail, frame.attempt)
        if rail is not None and rail.state is RailState.OFFERED:
            self._running[rail.index].buffer = frame

    def on_answer(self, frame: RailAnswer) -> None:
        rail = self.table.find(frame.rail, frame.attempt)
        if rail is None or rail.state is not RailState.OFFERED:
            return
        if frame.depth < RECEIVE_DEPTH:
            raise RemoteProtocolError(f"a rail for {frame.depth} chunks, at least {RECEIVE_DEPTH}")
        running = self._running[rail.index]
        if (running.buffer is None) != (self.buffers is None):
            raise RemoteProtocolError("a rail's buffer is told before its answer, and only where there are buffers")
        queue_pair = running.queue_pair
        end = QueuePairEnd(number=frame.queue_pair, packet_number=frame.packet_number, gid=frame.gid, mtu=frame.mtu)
        self.table.answered(rail, time.monotonic())
        try:
            queue_pair.connect(end)
            queue_pair.prove()
        except RdmaError as exc:
            log.warning("rail %s -> %s: %s", rail.plan.local, rail.plan.remote, exc)
            self._lose(rail, "not_connected")

    def on_closed(self, frame: RailClosed) -> None:
        rail = self.table.find(frame.rail, frame.attempt)
        if rail is not None:
            log.info("rail %s -> %s closed by the peer: %s", rail.plan.local, rail.plan.remote, frame.reason)
            self._lose(rail, "closed_by_peer")

    def on_acknowledged(self, slot: int, start: int) -> None:
        """The receiver has dealt with the chunk, either way."""
        running = self._unanswered.pop((slot, start), None)
        if running is not None:
            running.queue.answered()

    def _offer(self, rail: Rail, now: float) -> None:
        self.table.offered(rail, now)
        device = self._devices.device(rail.plan.local)
        try:
            if not device.active():
                raise RdmaError("the port is down")
            queue_pair = device.queue_pair()
        except RdmaError as exc:
            log.debug("rail %d: %s", rail.index, exc)
            self.table.fail(rail, "no_local_port", now)
            return
        self._next_lane += 1
        # Above the bits of any connection's key.
        lane = self._next_lane << 48 | self._key & 0xFFFFFFFFFFFF
        remote_nic = next(i for i, nic in enumerate(self.remote or ()) if nic.name == rail.plan.remote)
        out = RECEIVE_DEPTH if self.buffers is None else self.buffers.places
        queue: SendQueue[_Chunk] = SendQueue(room=SEND_DEPTH, max_unanswered=out)
        self._running[rail.index] = _Running(rail, rail.attempt, lane, remote_nic, queue_pair, queue)
        try:
            end = queue_pair.end
        except RdmaError:
            self._lose(rail, "no_local_port")
            return
        self._say(
            RailOffer(
                rail=rail.index, attempt=rail.attempt, nic=remote_nic,
                queue_pair=end.number, packet_number=end.packet_number, gid=end.gid, mtu=end.mtu,
            )
        )  # fmt: skip

    def _poll(self, running: _Running, now: float) -> bool:
        try:
            completions = running.queue_pair.poll()
        except RdmaError as exc:
            completions = [WorkCompletion(wr_id=0, error=str(exc) and "device_lost")]
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
        self.table.watch(running.rail, now, silent_after_s, busy=running.queue.busy, moved=moved)
        return moved

    def _prove(self, running: _Running) -> None:
        self.table.proved(running.rail)
        log.info("rail %s -> %s is up", running.rail.plan.local, running.rail.plan.remote)
        with self._transfers.lock:
            self._transfers.scheduler.lane_up(running.lane)

    def _arrived(self, running: _Running, chunk: _Chunk, number: int) -> None:
        piece = chunk.piece
        size = piece.stop - piece.start
        with self._transfers.lock:
            piece.transfer.writing -= 1
            self._transfers.scheduler.hand_over(piece, running.lane, self._key)
        self.table.carried(running.rail, size)
        self._unanswered[piece.transfer.slot, piece.start] = running
        self._say(
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
            self._say(RailClosed(rail=rail.index, attempt=running.attempt, reason=reason))
        log.warning("rail %s -> %s failed: %s", rail.plan.local, rail.plan.remote, reason)
        self.table.fail(rail, reason, time.monotonic())

    def _take_back(self, running: _Running) -> None:
        running.queue_pair.close()
        with self._transfers.lock:
            for chunk in running.queue.pending:
                chunk.piece.transfer.writing -= 1
            self._transfers.scheduler.lane_down(running.lane)

    def _take(self, running: _Running) -> bool:
        with self._transfers.lock:
            room = running.queue.chunks_free
            pieces = self._transfers.scheduler.take_pieces(running.lane, self._may_be_written, max_pieces=room)
            for piece in pieces:
                piece.transfer.writing += 1
        for piece in pieces:
            try:
                self._put(running, piece)
            except Exception as exc:  # whatever the owner's source does
                log.exception("the source of push %s failed", piece.transfer.transfer_id)
                with self._transfers.lock:
                    piece.transfer.writing -= 1
                self._transfers.abort(piece.transfer, f"source: {exc}", keep_landing=False)
        return bool(pieces)

    def _may_be_written(self, transfer: LaneTransfer) -> bool:
        slot = self.slots.get(transfer.slot)
        return slot is not None and slot.accepted and not slot.fallback

    def _put(self, running: _Running, piece: LanePiece) -> None:
        transfer, slot = piece.transfer, self.slots[piece.transfer.slot]
        assert slot.memory is not None
        source = self._transfers.source_of(transfer)
        assert isinstance(source, ArenaSource)
        manifest = transfer.manifest
        checksum = self._checksum(transfer, piece.start, manifest.views(source, piece.start, piece.stop))
        base = address_of(source.arena)
        found = source.extents(*manifest.covering(piece.start, piece.stop), piece.stop - piece.start)
        extents = [(base + start, length) for start, length in found]
        targets, remote_key = self._targets(running, piece)
        local_key = slot.memory.keys[running.rail.plan.local].local
        running.queue.put(_Chunk(piece, checksum, local_key, remote_key), plan_writes(extents, targets))

    def _targets(self, running: _Running, piece: LanePiece) -> tuple[list[tuple[int, int]], int]:
        """Where a chunk goes, and the key of that memory. A place of a buffer is free again once its chunk is answered."""
        if self.buffers is not None:
            assert running.buffer is not None
            place = running.queue.next_number % self.buffers.places
            return [
                (running.buffer.address + place * self.buffers.place_bytes, piece.stop - piece.start)
            ], running.buffer.key
        slot = self.slots[piece.transfer.slot]
        assert slot.placement is not None
        return slot.placement.slice(piece.start, piece.stop), slot.keys[running.remote_nic]

    def _post(self, running: _Running) -> bool:
        postings = running.queue.take_postings()
        try:
            for posting, chunk in postings:
                running.queue_pair.write(posting, chunk.local_key, chunk.remote_key)
        except RdmaError as exc:
            log.debug("rail %d: %s", running.rail.index, exc)
            self._lose(running.rail, "not_posted")
        return bool(postings)


def _nothing_opened(transfer: LaneTransfer, start: int, views: Sequence[memoryview]) -> int:
    raise AssertionError("a chunk before any connection")

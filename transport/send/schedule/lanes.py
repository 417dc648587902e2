"""Decides which bytes leave next, and on which connection: the sender's pure scheduler.

A lane is one connection to the peer. Lanes ask for work when they have room for it, so a fast lane takes more chunks
than a slow one (work stealing; static stripes would finish with the slowest). What they get:

    urgent before normal before bulk      strictly
    inside a class, tenants by weight     the one with the least bytes sent per weight lately
    inside a tenant                       what is due (or given up) first, then first come
    inside a transfer                     the order in which ranges became ready, that is layer order
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from transport.coding.choice import FormatOf
from transport.send.schedule.fairness import Fairness, Flow
from transport.send.spec import Urgency
from transport.wire.frames import Abort, Accept, Ack, Cancel, Code, Frame, Nack, Refuse, known
from transport.wire.manifest import Manifest, Outbox
from transport.wire.outcome import MAX_REJECTED_CHUNKS, TransferOutcome

MIN_CHUNK_BYTES: Final = 128 << 10
# The last chunks of a transfer on a long link are smaller: what a lane has taken, no other one can send.
LEAST_CHUNK_S: Final = 0.02
LEAST_CHUNK_BYTES: Final = 8 << 10
ENDING_S: Final = 0.3  # before the end of what is queued: longer than what a slow lane has taken takes to leave
MAX_BATCH_CHUNKS: Final = 64
CHUNK_S: Final = 0.1  # how long a chunk may take
CHUNK_AMONG_SEVERAL_S: Final = 0.025  # while tenants share a line: a light one waits behind such a chunk
MAX_UNDECODED_CHUNKS: Final = 4096  # all that may be on its way when the receiver says that it takes none coded


@dataclass(slots=True, eq=False, kw_only=True)
class LaneTransfer:
    """A transfer as the scheduler sees it."""

    slot: int
    transfer_id: str
    secret: bytes
    outbox: Outbox
    urgency: Urgency = Urgency.NORMAL
    deadline: float = float("inf")  # when it is given up
    due: float = float("inf")  # when the receiver may stop waiting: orders, and ends nothing
    tenant: str = ""
    weight: float = 1.0
    arena_path: str = ""
    placement: tuple[tuple[int, int], ...] = ()
    formats: FormatOf | None = None  # what its ranges are; without, they leave as they are
    undecoded_chunks: int = 0
    outcome: TransferOutcome | None = None
    opened_on: set[int] = field(default_factory=set)
    writing: int = 0  # lanes that are reading the source memory at this moment

    @property
    def manifest(self) -> Manifest:
        return self.outbox.manifest

    def may_leave(self, eager_bytes: int) -> bool:
        """A long link costs a round trip until the receiver has answered; only a sender that resumes sends in vain."""
        return self.outbox.accepted or self.outbox.bytes_sent < eager_bytes

    @property
    def flow(self) -> Flow:
        """Within which it is first come, first served."""
        return self.urgency, self.tenant


@dataclass(frozen=True, slots=True)
class LanePiece:
    """A chunk to send: `[start, stop)` of a transfer."""

    transfer: LaneTransfer
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What a lane sends next: notices, then openings, then chunks."""

    notices: tuple[Frame, ...] = ()
    opens: tuple[LaneTransfer, ...] = ()
    pieces: tuple[LanePiece, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    def __bool__(self) -> bool:
        return bool(self.notices or self.opens or self.pieces)


@dataclass(slots=True)
class _Lane:
    notices: deque[Frame] = field(default_factory=deque)
    in_flight_bytes: int = 0
    bytes_per_s: float = 0.0  # what it carries at present; 0 = not known


class LaneScheduler:
    """All transfers to one peer, shared by all lanes to it."""

    def __init__(self, *, chunk_bytes: int, window_bytes: int = 64 << 20) -> None:
        self.chunk_bytes = chunk_bytes
        self.window_bytes = window_bytes  # sent but not acknowledged, per lane
        self.lane_bytes_per_s = float("inf")  # what a lane carries, where known, and nothing is known of this one
        self.eager_bytes = 0  # of a transfer that may leave before the receiver has said what it misses
        self.budget_bytes_per_s = float("inf")  # of all lanes together
        self.burst_bytes = float("inf")  # what the egress budget lets leave at once
        self._lanes: dict[int, _Lane] = {}
        self._transfers: dict[int, LaneTransfer] = {}
        self._fairness = Fairness()
        self._settled: list[LaneTransfer] = []

    # transfers

    def add(self, transfer: LaneTransfer) -> None:
        self._transfers[transfer.slot] = transfer

    def ready(self, transfer: LaneTransfer, indexes: Iterable[int | range]) -> None:
        if transfer.outcome is None:
            transfer.outbox.ready(indexes)

    def abort(self, transfer: LaneTransfer, detail: str, *, leave: bool = False, code: str = Code.ABORTED) -> None:
        """Ends a transfer from our side; with `leave` the landing stays open for another sender."""
        if transfer.outcome is None:
            self._finish(transfer, TransferOutcome(code, detail), Abort(slot=transfer.slot, leave=leave, detail=detail))

    def expire(self, now: float) -> None:
        """Gives up what is past its deadline; what tenants have sent fades as time goes by."""
        self._fairness.at(now)
        for transfer in [t for t in self._transfers.values() if t.deadline <= now]:
            self.abort(transfer, "the sender's deadline passed", code=Code.DEADLINE)

    def fail_all(self, code: Code, detail: str) -> None:
        for transfer in list(self._transfers.values()):
            self._finish(transfer, TransferOutcome(code, detail))

    def take_settled(self) -> list[LaneTransfer]:
        """Transfers that ended and whose source memory is not read any more."""
        settled = [t for t in self._settled if not t.writing]
        self._settled = [t for t in self._settled if t.writing]
        return settled

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def only_bulk(self) -> bool:
        """Whether bulk is all that could leave now."""
        waiting = [t.urgency for t in self._transfers.values() if t.outbox.bytes_queued or not t.outbox.accepted]
        return bool(waiting) and min(waiting) is Urgency.BULK

    @property
    def bytes_queued(self) -> int:
        """Ready to leave, not yet on any lane."""
        return sum(t.outbox.bytes_queued for t in self._transfers.values())

    @property
    def ending(self) -> bool:
        """True when the queue drains within ENDING_S at current rates; lanes then take only what they can send.

        Before that, a stock keeps each lane busy while the machine is.
        """
        return self.bytes_queued < ENDING_S * sum(lane.bytes_per_s for lane in self._lanes.values())

    @property
    def bytes_in_flight(self) -> int:
        return sum(lane.in_flight_bytes for lane in self._lanes.values())

    @property
    def unanswered(self) -> bool:
        """Whether chunks or an opening have left that the receiver has not answered yet."""
        opened = any(t.opened_on and not t.outbox.accepted for t in self._transfers.values())
        return opened or self.bytes_in_flight > 0

    def lanes_wanted(self) -> int:
        """How many lanes have something to do now."""
        queued = sum(t.outbox.bytes_queued for t in self._transfers.values() if t.may_leave(self.eager_bytes))
        for_bytes = -(-queued // min(MIN_CHUNK_BYTES, self.chunk_bytes))
        to_open = any(not t.outbox.accepted and not t.opened_on for t in self._transfers.values())
        return max(1, for_bytes) if to_open else for_bytes

    def lanes_useful(self, bytes_per_lane: int) -> int:
        """How many lanes are worth having for what is still to come, ready or not."""
        left = sum(t.manifest.total_bytes - t.outbox.acked.num_bytes for t in self._transfers.values())
        return max(1, -(-left // bytes_per_lane)) if self._transfers else 0

    # lanes

    def lane_up(self, lane: int) -> None:
        self._lanes[lane] = _Lane()

    def lane_down(self, lane: int) -> None:
        """Its chunks go back to the queue; nothing is known of what it carried."""
        self._lanes.pop(lane, None)
        for transfer in self._transfers.values():
            transfer.opened_on.discard(lane)
            transfer.outbox.on_lane_lost(lane)

    def on_rates(self, bytes_per_s: Mapping[int, float]) -> None:
        """Sets the present rate of each lane."""
        for lane, rate in bytes_per_s.items():
            if lane in self._lanes:
                self._lanes[lane].bytes_per_s = rate

    def lane_in_flight(self, lane: int) -> int:
        """Bytes that were sent on a lane and not answered yet."""
        state = self._lanes.get(lane)
        return state.in_flight_bytes if state is not None else 0

    def next_batch(self, lane: int) -> Batch:
        """Work for a lane that has room; an empty batch without work."""
        notices = tuple(self.take_notices(lane))
        opens = [t for t in self._transfers.values() if not t.outbox.accepted and not t.opened_on]
        pieces = self.take_pieces(lane)
        for piece in pieces:
            if lane not in piece.transfer.opened_on and piece.transfer not in opens:
                opens.append(piece.transfer)
        for transfer in opens:
            transfer.opened_on.add(lane)
        return Batch(notices, tuple(opens), tuple(pieces))

    def take_notices(self, lane: int) -> list[Frame]:
        """Frames that tell the receiver about ended transfers."""
        notices = self._lanes[lane].notices
        taken = list(notices)
        notices.clear()
        return taken

    def take_openings(self, lane: int) -> list[LaneTransfer]:
        """Transfers that are new to this lane."""
        opens = [transfer for transfer in self._transfers.values() if lane not in transfer.opened_on]
        for transfer in opens:
            transfer.opened_on.add(lane)
        return opens

    def hand_over(self, piece: LanePiece, lane: int, to: int) -> None:
        """The bytes went over `lane`; what the receiver says of them will come over `to`."""
        size = piece.stop - piece.start
        if piece.transfer.outcome is None:
            self._release_window(lane, size)
            self._lanes[to].in_flight_bytes += size
            piece.transfer.outbox.hand_over(piece.start, piece.stop, lane, to)

    def on_frame(self, lane: int, frame: Frame) -> None:
        """Handles any reply about a transfer. Raises RemoteProtocolError; the lane is lost then."""
        slot = getattr(frame, "slot", None)
        transfer = self._transfers.get(slot) if slot is not None else None
        match frame:
            case Ack() if transfer is not None:
                for start, stop in frame.ranges:
                    self._release_window(lane, stop - start)
                    transfer.outbox.on_acked(lane, start, stop)
            case Nack() if transfer is not None:
                self._on_nack(lane, frame, transfer)
            case Accept() if transfer is not None:
                transfer.outbox.accept(frame.missing)
            case Refuse() | Cancel() if transfer is not None:
                self._finish(transfer, TransferOutcome(known(frame.code), frame.detail))
        if transfer is not None and transfer.outbox.complete:
            self._finish(transfer, TransferOutcome())

    # inside

    def take_pieces(
        self, lane: int, may_leave: Callable[[LaneTransfer], bool] = lambda _: True, max_pieces: int = MAX_BATCH_CHUNKS
    ) -> list[LanePiece]:
        """The next chunks for a lane, as far as its window has room; they are in flight on it from now on."""
        state = self._lanes[lane]
        sendable = [
            t
            for t in self._transfers.values()
            if t.may_leave(self.eager_bytes) and t.outbox.bytes_queued and may_leave(t)
        ]
        queued = sum(t.outbox.bytes_queued for t in sendable)
        limit = self._chunk_limit(state, queued * _part_of(state, self._lanes.values()))
        pieces: list[LanePiece] = []
        room = min(limit, self.window_bytes - state.in_flight_bytes)
        while room > 0 and sendable and len(pieces) < min(max_pieces, MAX_BATCH_CHUNKS):
            transfer = min(sendable, key=self._rank)
            chunk = transfer.outbox.take(room, lane)
            if chunk is None:
                sendable.remove(transfer)
                continue
            size = chunk[1] - chunk[0]
            pieces.append(LanePiece(transfer, *chunk))
            self._fairness.charge(transfer.flow, size, transfer.weight)
            state.in_flight_bytes += size
            room -= size
        return pieces

    def _chunk_limit(self, lane: _Lane, share_bytes: float) -> int:
        """Smaller chunks towards the end, so that no lane is left with a large one when the others are through.

        And on slow lanes: a chunk is what an urgent transfer has to wait for, and what a lost connection costs.
        """
        rate = min(lane.bytes_per_s or self.lane_bytes_per_s, self.budget_bytes_per_s / len(self._lanes))
        chunk_s = CHUNK_AMONG_SEVERAL_S if self._fairness.among_several else CHUNK_S
        limit = min(share_bytes / 2, rate * chunk_s, self.burst_bytes)
        least = min(MIN_CHUNK_BYTES, max(LEAST_CHUNK_BYTES, rate * LEAST_CHUNK_S))
        return int(min(self.chunk_bytes, max(limit, least)))

    def _rank(self, transfer: LaneTransfer) -> tuple[int, float, float, int]:
        return (
            transfer.urgency,
            self._fairness.rank(transfer.flow),
            min(transfer.due, transfer.deadline),
            transfer.slot,
        )

    def _on_nack(self, lane: int, nack: Nack, transfer: LaneTransfer) -> None:
        if nack.code == Code.CANCELLED:
            return  # the Cancel on its way ends the transfer; if the lane is lost before that, the chunk leaves again
        self._release_window(lane, nack.length)
        transfer.outbox.on_rejected(lane, nack.offset, nack.offset + nack.length)
        if nack.code == Code.CODEC:
            transfer.formats = None  # from now on plain
            transfer.undecoded_chunks += 1
        rejected = transfer.outbox.rejected_chunks - transfer.undecoded_chunks
        hopeless = rejected > MAX_REJECTED_CHUNKS or transfer.undecoded_chunks > MAX_UNDECODED_CHUNKS
        if hopeless or nack.code == Code.ARENA:
            self.abort(transfer, f"chunk at {nack.offset} was rejected: {nack.code}", code=known(nack.code))

    def _release_window(self, lane: int, size: int) -> None:
        if (state := self._lanes.get(lane)) is not None:
            state.in_flight_bytes = max(0, state.in_flight_bytes - size)

    def _finish(self, transfer: LaneTransfer, outcome: TransferOutcome, notice: Abort | None = None) -> None:
        """Lanes tell the receiver that the slot is free, when they next have something to say."""
        if self._transfers.pop(transfer.slot, None) is None:
            return
        transfer.outcome = outcome
        self._settled.append(transfer)
        for lane, size in transfer.outbox.in_flight().items():  # the receiver reads past it, and may never answer it
            self._release_window(lane, size)
        notice = notice or Abort(slot=transfer.slot, leave=True)
        for lane in transfer.opened_on & self._lanes.keys():
            self._lanes[lane].notices.append(notice)


def _part_of(lane: _Lane, lanes: Collection[_Lane]) -> float:
    """A lane's part of the rate of all lanes; lanes of unknown rate count alike."""
    known = [other.bytes_per_s for other in lanes if other.bytes_per_s]
    average = sum(known) / len(known) if known else 1.0
    return (lane.bytes_per_s or average) / (average * len(lanes))

"""All transfers to one peer, between their pushes on one side and the lanes on the other."""

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from transport.errors import Closed
from transport.path.link import LinkMonitor
from transport.path.shm import ArenaSource
from transport.send.schedule.lanes import Batch, LaneScheduler, LaneTransfer
from transport.send.schedule.push import OnPushed, Push
from transport.send.spec import TransferSpec, Via
from transport.wire.frames import Code, Frame
from transport.wire.manifest import Manifest, Outbox, RangeViews


class Wakes(Protocol):
    """The keeper of the lanes. Both are called with the transfers' lock held."""

    def wake_for_work(self) -> None:
        """As many lanes as there is work for."""
        ...

    def wake_connected(self) -> None:
        """Every lane that has a connection."""
        ...


class Taker(Protocol):
    """A lane: `key` is its name in the scheduler; `idle`, that the next work must wake it."""

    key: int
    idle: bool


class Transfers:
    """`lock` guards the scheduler and the peer's record of its lanes: work and waiting lanes change together."""

    def __init__(self, scheduler: LaneScheduler, monitor: LinkMonitor, lanes: Wakes) -> None:
        self.lock = threading.Lock()
        self.scheduler = scheduler
        self.closing = False
        self._monitor = monitor
        self._lanes = lanes
        self._pushes: dict[int, Push] = {}
        self._next_slot = 0

    @property
    def busy(self) -> bool:
        return self.scheduler.num_transfers > 0

    @property
    def ending(self) -> bool:
        """Little is left (LaneScheduler.ending)."""
        with self.lock:
            return self.scheduler.ending

    # what pushes ask for

    def open(
        self, spec: TransferSpec, manifest: Manifest, source: RangeViews, on_done: OnPushed | None, now: float
    ) -> Push:
        """Raises Closed."""
        with self.lock:
            if self.closing:
                raise Closed("the client is closed")
            transfer = LaneTransfer(
                slot=self._next_slot,
                transfer_id=spec.transfer_id,
                secret=spec.secret,
                outbox=Outbox(manifest),
                urgency=spec.urgency,
                deadline=now + spec.deadline_s,
                due=now + spec.due_s,
                tenant=spec.tenant,
                weight=spec.weight,
                arena_path=source.path if spec.via is Via.SHM and isinstance(source, ArenaSource) else "",
                placement=tuple(spec.placement),
                formats=spec.formats if spec.via is Via.TCP else None,
            )
            self._next_slot = (self._next_slot + 1) & 0xFFFFFFFF
            push = Push(self, transfer, source, on_done)
            self._pushes[transfer.slot] = push
            self.scheduler.add(transfer)
            self._lanes.wake_for_work()
        return push

    def ready(self, transfer: LaneTransfer, indexes: Iterable[int | range]) -> None:
        with self.lock:
            outbox = transfer.outbox
            before = outbox.bytes_ready
            self.scheduler.ready(transfer, indexes)
            if before < outbox.bytes_ready == transfer.manifest.total_bytes:
                self._predict(self._pushes.get(transfer.slot))
            self._lanes.wake_for_work()

    def abort(self, transfer: LaneTransfer, reason: str, keep_landing: bool) -> None:
        with self.lock:
            self.scheduler.abort(transfer, reason, leave=keep_landing)
            self._lanes.wake_connected()  # an abort frees memory at the far end: do not let it wait
        self.settle()

    def settle(self) -> None:
        """Reports transfers that ended and whose memory is no longer read."""
        with self.lock:
            pushes = [self._pushes.pop(transfer.slot) for transfer in self.scheduler.take_settled()]
        for push in pushes:
            self._judge_prediction(push)
            push.finish()

    def close(self) -> None:
        """Ends all transfers, and opens no more."""
        with self.lock:
            self.closing = True
            self.scheduler.fail_all(Code.CLOSING, "the sender closes")

    def _predict(self, push: Push | None) -> None:
        """From the moment when everything is ready, only the link decides when it will have arrived."""
        if push is not None:
            queued = self.scheduler.bytes_queued + self.scheduler.bytes_in_flight
            state = replace(self._monitor.state, queued_bytes=queued)
            push.predicted = (time.monotonic(), state.drain_s)

    def _judge_prediction(self, push: Push) -> None:
        if push.predicted is not None and push.succeeded:
            self._monitor.on_arrived(push.predicted[1], time.monotonic() - push.predicted[0])

    # what lanes ask for

    def source_of(self, transfer: LaneTransfer) -> RangeViews:
        return self._pushes[transfer.slot].source

    def batch_for(self, lane: Taker) -> Batch:
        """Work, or nothing and the lane counts as idle: the next ready() will wake it."""
        with self.lock:
            batch = self.scheduler.next_batch(lane.key)
            for transfer in {piece.transfer for piece in batch.pieces}:
                transfer.writing += 1
            lane.idle = not batch
            return batch

    def let_go(self, transfers: Iterable[LaneTransfer]) -> None:
        """A lane does not read their memory any more."""
        with self.lock:
            for transfer in transfers:
                transfer.writing -= 1
        self.settle()

    def split(self, lane: Taker, transfer: LaneTransfer, start: int, at: int) -> None:
        """A chunk that is about to leave does so as two: up to `at`, and the rest."""
        with self.lock:
            transfer.outbox.split(lane.key, start, at)

    def answered(self, lane: Taker) -> bool:
        """Whether nothing is open of what the lane sent."""
        with self.lock:
            return not self.scheduler.lane_in_flight(lane.key)

    def on_frame(self, lane: Taker, frame: Frame) -> None:
        """What the receiver says about a transfer. Raises RemoteProtocolError."""
        with self.lock:
            self.scheduler.on_frame(lane.key, frame)
            self._lanes.wake_for_work()

"""Everything that goes to one address: its transfers, its lanes, the link to it, the keys that it shares with us."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from transport.coding.budget import CodingBudget
from transport.coding.choice import CodecAccounts, Situation
from transport.errors import ConnectionRefused
from transport.path.governor import Governor
from transport.path.link import LinkMonitor, LinkState
from transport.path.pacing import EgressBudget
from transport.rdma.device import RDMA_CHUNK_BYTES
from transport.rdma.rails import RailReport
from transport.send.lane.coder import PeerCoding
from transport.send.lane.keys import SessionKeys
from transport.send.lane.link_keeper import LinkKeeper
from transport.send.lane.outlet import PeerContext, SenderLane
from transport.send.lane.rdma_outlet import RdmaSenderLane
from transport.send.options import ClientOptions
from transport.send.reach import Reach
from transport.send.schedule.lanes import LaneScheduler
from transport.send.schedule.push import OnPushed, Push
from transport.send.schedule.transfers import Transfers
from transport.send.spec import TransferSpec, Via
from transport.wire.frames import Ack, Code, Frame, Nack, known
from transport.wire.manifest import Manifest, RangeViews

log = logging.getLogger(__name__)

BYTES_PER_LANE: Final = 1 << 20  # another connection is worth its handshake from about here on
HOPELESS: Final = (Code.VERSION, Code.INTEGRITY_MODE, Code.IDENTITY)  # trying again will not change that


class Peer:
    """Wakes lanes for work, tracks them, and tracks whether the peer can be reached."""

    def __init__(
        self,
        address: str,
        via: Via,
        options: ClientOptions,
        *,
        link: str,
        receiver: str,
        egress: EgressBudget,
        coding_budget: CodingBudget,
        on_refused: Callable[[str, str], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self.address = address
        self.via = via
        self.options = options
        self.on_failed = on_failed  # an unforeseen error came up in a thread of this name
        self._on_refused = on_refused
        rdma = options.rdma if via is Via.RDMA else None
        chunk_bytes = options.chunk_bytes if rdma is None else min(options.chunk_bytes, RDMA_CHUNK_BYTES)
        monitor = LinkMonitor(address)
        self.transfers = Transfers(
            LaneScheduler(chunk_bytes=chunk_bytes, window_bytes=options.window_bytes), monitor, self
        )
        self.coding = PeerCoding(self.transfers.lock, coding_budget)
        count = min(2, options.connections) if via is Via.SHM else options.connections
        adaptive = options.adaptive and via is Via.TCP
        governor = Governor(count, options.max_connections if adaptive else count)
        self.link_keeper = LinkKeeper(link, via, monitor, governor, egress, self.transfers, adaptive=adaptive)
        self._reach = Reach(time.monotonic())
        self._shared = PeerContext(
            address=address,
            options=options,
            transfers=self.transfers,
            link=self.link_keeper,
            keys=SessionKeys(address, options, receiver),
            coding=self.coding,
        )
        # Over RDMA one connection serves all rails.
        self._lanes: list[SenderLane] = (
            [SenderLane(self, self._shared, i) for i in range(count)]
            if rdma is None
            else [RdmaSenderLane(self, self._shared, 0, rdma)]
        )
        self.busy_at = time.monotonic()
        self.follow_budget()

    @property
    def busy(self) -> bool:
        return self.transfers.busy

    @property
    def rails(self) -> list[RailReport]:
        """Pairs of NICs, where it is reached by RDMA."""
        return [report for lane in self._lanes if isinstance(lane, RdmaSenderLane) for report in lane.reports()]

    @property
    def fallback_bytes(self) -> Counter[str]:
        """Bytes that should have gone by RDMA and went over TCP, by reason."""
        total: Counter[str] = Counter()
        for lane in self._lanes:
            if isinstance(lane, RdmaSenderLane):
                total += Counter(dict(lane.fallback_bytes))
        return total

    @property
    def link(self) -> LinkState:
        return self.link_keeper.state

    @property
    def codecs(self) -> CodecAccounts:
        return self.coding.accounts()

    def open(
        self, spec: TransferSpec, manifest: Manifest, source: RangeViews, on_done: OnPushed | None, now: float
    ) -> Push:
        """Raises Closed."""
        with self.transfers.lock:
            if not self.busy:
                self._reach.on_work(now, connected=any(lane.up for lane in self._lanes))
        return self.transfers.open(spec, manifest, source, on_done, now)

    def follow_budget(self) -> None:
        self.link_keeper.follow_budget(self._lanes)

    # what transfers ask for, with their lock held

    def wake_for_work(self) -> None:
        """Connected lanes first."""
        scheduler = self.transfers.scheduler
        wanted = scheduler.lanes_wanted()
        for lane in self._lanes:
            if wanted > 0 and lane.up and lane.idle:
                lane.idle = False
                lane.wake()
                wanted -= 1
        missing = scheduler.lanes_useful(BYTES_PER_LANE) - sum(lane.up for lane in self._lanes)
        for lane in self._lanes:
            if missing > 0 and not lane.up:
                lane.start_or_wake()
                missing -= 1

    def wake_connected(self) -> None:
        for lane in self._lanes:
            if lane.up:
                lane.wake()

    # what lanes ask for

    def wants(self, lane: SenderLane) -> bool:
        """Whether a lane that is down should connect."""
        with self.transfers.lock:
            up = sum(other.up for other in self._lanes)
            useful = self.transfers.scheduler.lanes_useful(BYTES_PER_LANE)
            return self.busy and not self.surplus(lane) and up < useful

    def surplus(self, lane: SenderLane) -> bool:
        """The governor has found that fewer lanes do as well."""
        return lane.index >= self.link_keeper.connections

    def lane_up(self, lane: SenderLane, max_chunk_bytes: int) -> None:
        with self.transfers.lock:
            scheduler = self.transfers.scheduler
            scheduler.chunk_bytes = min(scheduler.chunk_bytes, max_chunk_bytes)
            if not any(other.up for other in self._lanes):
                self._reach.on_first_up(time.monotonic())
            lane.up = True
            scheduler.lane_up(lane.key)
        self.link_keeper.share(self._lanes)

    def lane_down(self, lane: SenderLane, error: str) -> None:
        with self.transfers.lock:
            if lane.up:
                lane.up = lane.idle = False
                self.transfers.scheduler.lane_down(lane.key)
                if not any(other.up for other in self._lanes):
                    self._reach.on_all_lost(time.monotonic(), self.options.peer_timeout_s)
            self._reach.last_error = error
            self.wake_for_work()
        self.link_keeper.share(self._lanes)
        self.transfers.settle()

    def lane_refused(self, error: ConnectionRefused) -> None:
        """The peer does not talk to us at all."""
        self._on_refused(self.link_keeper.name, known(error.code))
        log.warning("%s refuses us: %s", self.address, error)
        if error.code in HOPELESS:
            with self.transfers.lock:
                self.transfers.scheduler.fail_all(Code(error.code), error.detail)
        if error.code == Code.SESSION:  # the receiver was restarted, or has forgotten us
            self._shared.keys.forget()
        self.transfers.settle()

    def on_frame(self, lane: SenderLane, frame: Frame) -> None:
        """Handles the receiver's reply about a transfer. Raises RemoteProtocolError."""
        if isinstance(frame, Nack) and frame.code == Code.CODEC:
            self.coding.refused()
        self.transfers.on_frame(lane, frame)
        if isinstance(frame, Ack):
            self._reach.on_progress()

    # time

    @property
    def sampling_s(self) -> float:
        """How often keep() should be called while there is work."""
        return self.link_keeper.sampling_s

    def keep(self, now: float, idle_cores: float) -> None:
        """Samples the link, ends what is late or has no connection left."""
        lanes = list(self._lanes)
        self.link_keeper.follow_time(now, lanes)
        if self.busy:
            self.busy_at = now
        infos = {lane.key: info for lane in lanes if (info := lane.info()) is not None}
        with self.transfers.lock:
            silent = self._end_what_is_late(now, sum(info.bytes_delivered for info in infos.values()))
            state = self.link_keeper.sample(infos, now, lanes)
            rate = self.link_keeper.available_bytes_per_s(state)
            self.coding.on_situation(
                Situation(link_bytes_per_s=rate, backlog_bytes=state.queued_bytes, idle_cores=idle_cores), now
            )
        for lane in lanes if silent else ():  # their threads are in the middle of what is not taken
            lane.cut()
        self.link_keeper.spread(infos, state, lanes)
        self.transfers.settle()
        self._govern(state, now)

    def _end_what_is_late(self, now: float, delivered_bytes: int) -> bool:
        """Whether its connections are up and carry nothing."""
        scheduler, patience_s = self.transfers.scheduler, self.options.peer_timeout_s
        scheduler.expire(now)
        up = any(lane.up for lane in self._lanes)
        if self.busy and not up and self._reach.lost_for_s(now) > patience_s:
            scheduler.fail_all(Code.PEER_LOST, self._reach.last_error)
        self._reach.on_sample(now, delivered_bytes, owed=up and self.via is Via.TCP and scheduler.unanswered)
        if self._reach.silent_s <= patience_s:
            return False
        scheduler.fail_all(Code.PEER_LOST, f"nothing acknowledged for {self._reach.silent_s:.1f} s")
        return True

    def _govern(self, state: LinkState, now: float) -> None:
        if not self.link_keeper.adaptive:
            return
        pace_changed = self.link_keeper.govern(state, now)
        with self.transfers.lock:
            while len(self._lanes) < self.link_keeper.connections and not self.transfers.closing:
                self._lanes.append(SenderLane(self, self._shared, len(self._lanes)))
            self.wake_for_work()
        if pace_changed:
            self.link_keeper.share(self._lanes)

    # the end

    def stop(self) -> None:
        """Ends what is under way; does not wait for it."""
        self.transfers.close()
        for lane in self._lanes:
            lane.stop()

    @property
    def stopped(self) -> bool:
        """After stop(): whether no thread is left, so that join() does not wait."""
        return not any(lane.running for lane in self._lanes)

    def join(self) -> None:
        for lane in self._lanes:
            lane.close()
        self.transfers.settle()

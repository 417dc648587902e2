"""Everything that goes to one address: one scheduler for all transfers, its lanes, its budget, the state of its link."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from transport.checksum import Integrity
from transport.codec import Codec, Share
from transport.coding import Chooser, CodecAccounts, FormatOf, Situation
from transport.crypto import Identity, Session, request_session
from transport.errors import Closed, ConnectionRefused
from transport.frames import MAX_CHUNK_BYTES, Ack, Code, Frame, Nack, known
from transport.governor import Governor
from transport.lanes import Batch, LaneScheduler, Transfer, Urgency
from transport.link import LinkMonitor, LinkState
from transport.outlet import Outlet
from transport.pacing import BULK_LEAVES, Budget, Egress
from transport.push import OnPushed, Push
from transport.rdma_device import RdmaDevices
from transport.rdma_outlet import RDMA_CHUNK_BYTES, RdmaOutlet
from transport.rdma_rails import RailReport
from transport.shm import ArenaSource
from transport.tcp import (
    LONG_RTT_S,
    NOTSENT_LOWAT_BYTES,
    TcpOptions,
    dial,
)
from transport.transfer import Manifest, Outbox, RangeViews

log = logging.getLogger(__name__)

BYTES_PER_LANE: Final = 1 << 20  # another connection is worth its handshake from about here on
FIRST_LANE_BYTES_PER_S: Final = 10e6  # on a long link, until it has been measured
RENEW_AGAIN_S: Final = 5.0  # after keys could not be renewed
# Of a transfer over a long link that may leave before its receiver has answered: what fills the pipe meanwhile.
EAGER_RTTS: Final = 2.0
EAGER_BYTES: Final = 4 << 20  # until that has been measured
SAMPLING_S: Final = 0.03
LONG_LINK_SAMPLING_S: Final = 0.01  # a fraction of a round trip: when the link narrows, its queue fills within one
# The bucket keeps the budget; the kernel's pacing only spreads it, and must leave a slow lane's share to the others.
BUDGET_HEADROOM: Final = 1.25
# A connection that has just halved its window sends less than its share: the others must be able to send more.
LOSS_BASED_HEADROOM: Final = 1.5


class Path(StrEnum):
    """How bytes get to a peer."""

    TCP = "tcp"
    SHM = "shm"  # by reference, on one host
    RDMA = "rdma"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Habits of a sender. `connections` is per peer; over shared memory two suffice.

    With `adaptive`, a long link gets up to `max_connections`, and is paced to what it carries (see governor).
    """

    connections: int = 4
    max_connections: int = 64
    adaptive: bool = True
    chunk_bytes: int = 4 << 20  # at most; within a host 16 MiB are faster
    window_bytes: int = 64 << 20
    integrity: Integrity = Integrity.CHECKSUM
    identity: Identity | None = None  # needed for Integrity.AEAD
    rotate_keys_s: float = 600.0  # a connection is replaced, with new keys, after this time
    egress_bytes_per_s: Budget = None  # of every link that has no budget of its own; None = as fast as it goes
    max_peers: int = 256  # with connections; more only while all of them are busy
    idle_timeout_s: float = 300.0  # after which an unused peer's connections are closed
    peer_timeout_s: float = 5.0  # transfers fail when there was no connection at all for this long
    rdma: RdmaDevices | None = None  # NICs for transfers over RDMA
    tcp: TcpOptions = field(default_factory=TcpOptions)

    def __post_init__(self) -> None:
        if self.connections < 1:
            raise ValueError(f"connections {self.connections}: at least 1")
        if not 0 < self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes {self.chunk_bytes}: 1 to {MAX_CHUNK_BYTES}")
        if self.integrity is Integrity.AEAD and self.identity is None:
            raise ValueError(f"integrity {self.integrity} needs an identity")


class Peer:
    """Everything that goes to one address: one scheduler, its lanes, its link state, and the budget of the link
    behind which it lies, perhaps with others.
    """

    def __init__(
        self,
        address: str,
        same_host: bool,
        options: ClientOptions,
        *,
        link: str,
        egress: Egress,
        on_refused: Callable[[str, str], None],
        on_failed: Callable[[str], None],
        rdma: RdmaDevices | None = None,
    ) -> None:
        self.address = address
        self.same_host = same_host
        self.over_rdma = rdma is not None
        self.link_name = link
        self._egress = egress
        self._on_refused = on_refused
        self.on_failed = on_failed  # an error that nobody foresaw came up in a thread of this name
        self.options = options
        self.lock = threading.Lock()
        chunk_bytes = options.chunk_bytes if rdma is None else min(options.chunk_bytes, RDMA_CHUNK_BYTES)
        self.scheduler = LaneScheduler(chunk_bytes=chunk_bytes, window_bytes=options.window_bytes)
        self.closing = False
        self._monitor = LinkMonitor(address)
        self._session: Session | None = None
        self._session_lock = threading.Lock()
        self._renew_at = 0.0
        self._pushes: dict[int, Push] = {}
        self._next_slot = 0
        self._lost_since = time.monotonic()
        self._up_since = float("inf")  # the first of the present connections
        self._promising = True  # bytes have arrived since the last loss, or there was none
        self._last_error = "never connected"
        count = min(2, options.connections) if same_host else options.connections
        adaptive = options.adaptive and not same_host and rdma is None
        self._governor = Governor(count, options.max_connections if adaptive else count)
        self._adaptive = adaptive
        self._loss_based = False
        self._pace: float | None = None
        # Over RDMA one connection serves all rails.
        self._lanes: list[Outlet] = (
            [Outlet(self, i) for i in range(count)] if rdma is None else [RdmaOutlet(self, 0, rdma)]
        )
        self._budget: float | None = None
        self.chooser = Chooser()
        self.busy_at = time.monotonic()
        self.follow_budget()

    @property
    def rails(self) -> list[RailReport]:
        """Pairs of NICs, where it is reached by RDMA."""
        return [report for lane in self._lanes if isinstance(lane, RdmaOutlet) for report in lane.reports()]

    @property
    def fallback_bytes(self) -> Counter[str]:
        """Bytes that should have gone by RDMA and went over TCP, by reason."""
        total: Counter[str] = Counter()
        for lane in self._lanes:
            if isinstance(lane, RdmaOutlet):
                total += Counter(dict(lane.fallback_bytes))
        return total

    @property
    def busy(self) -> bool:
        return self.scheduler.num_transfers > 0

    # what pushes ask for

    def open(
        self, manifest: Manifest, source: RangeViews, on_done: OnPushed | None, *, transfer_id: str, secret: bytes,
        urgency: Urgency, deadline: float, due: float, tenant: str, weight: float, placement: tuple[tuple[int, int], ...],
        formats: FormatOf | None,
    ) -> Push:  # fmt: skip
        with self.lock:
            if self.closing:
                raise Closed("the client is closed")
            transfer = Transfer(
                slot=self._next_slot,
                transfer_id=transfer_id,
                secret=secret,
                outbox=Outbox(manifest),
                urgency=urgency,
                deadline=deadline,
                due=due,
                tenant=tenant,
                weight=weight,
                arena_path=source.path if self.same_host and isinstance(source, ArenaSource) else "",
                placement=placement,
                formats=None if self.same_host or self.over_rdma else formats,
            )
            self._next_slot = (self._next_slot + 1) & 0xFFFFFFFF
            push = Push(self, transfer, source, on_done)
            self._pushes[transfer.slot] = push
            if not self.busy:
                self._promising = True
                if not any(lane.up for lane in self._lanes):
                    self._lost_since = time.monotonic()
            self.scheduler.add(transfer)
            self._wake_lanes()
        return push

    def ready(self, transfer: Transfer, indexes: Iterable[int]) -> None:
        with self.lock:
            outbox = transfer.outbox
            before = outbox.bytes_ready
            self.scheduler.ready(transfer, indexes)
            if before < outbox.bytes_ready == transfer.manifest.total_bytes:
                self._predict(self._pushes.get(transfer.slot))
            self._wake_lanes()

    def _predict(self, push: Push | None) -> None:
        """From the moment when everything is ready, only the link decides when it will have arrived."""
        if push is not None:
            queued = self.scheduler.bytes_queued + self.scheduler.bytes_in_flight
            state = replace(self._monitor.state, queued_bytes=queued)
            push.predicted = (time.monotonic(), state.drain_s)

    def _judge_prediction(self, push: Push) -> None:
        if push.predicted is not None and push.succeeded:
            self._monitor.on_arrived(push.predicted[1], time.monotonic() - push.predicted[0])

    def abort(self, transfer: Transfer, reason: str, keep_landing: bool) -> None:
        with self.lock:
            self.scheduler.abort(transfer, reason, leave=keep_landing)
            for lane in self._lanes:  # an abort frees memory at the far end: do not let it wait
                if lane.up:
                    lane.wake()
        self.settle()

    def session(self) -> Session | None:
        """The keys of this peer: agreed on when first needed, and again when half their life is over. Raises OSError."""
        if self.options.integrity is not Integrity.AEAD or self.options.identity is None:
            return None
        with self._session_lock:
            now = time.monotonic()
            if self._session is None or now >= self._renew_at:
                self._session = self._new_session(self.options.identity, now)
            return self._session

    def _new_session(self, identity: Identity, now: float) -> Session:
        """Or the present one, when there is no other to be had and it has not ended."""
        try:
            sock = dial(self.address, self.options.tcp)
            session = request_session(sock, identity, self.options.tcp.connect_timeout_s, now)
        except OSError as exc:
            if self._session is None or now >= self._session.ends_at:
                raise
            log.warning("%s gives no new keys, the present ones serve on: %s", self.address, exc)
            self._renew_at = now + RENEW_AGAIN_S
            return self._session
        self._renew_at = now + min(self.options.rotate_keys_s, (session.ends_at - now) / 2)
        return session

    def forget_session(self) -> None:
        with self._session_lock:
            self._session = None

    def source_of(self, transfer: Transfer) -> RangeViews:
        return self._pushes[transfer.slot].source

    def settle(self) -> None:
        """Reports transfers that ended and whose memory is no longer read."""
        with self.lock:
            pushes = [self._pushes.pop(transfer.slot) for transfer in self.scheduler.take_settled()]
        for push in pushes:
            self._judge_prediction(push)
            push.finish()

    # what lanes ask for

    def wants(self, lane: "Outlet") -> bool:
        """Whether a lane that is down should connect. Called with the lock held."""
        up = sum(other.up for other in self._lanes)
        return self.busy and not self.surplus(lane) and up < self.scheduler.lanes_useful(BYTES_PER_LANE)

    def surplus(self, lane: "Outlet") -> bool:
        """The governor has found that fewer lanes do as well."""
        return lane.index >= self._governor.plan.connections

    def batch_for(self, lane: "Outlet") -> Batch:
        """Work, or nothing and the lane counts as idle: the next ready() will wake it."""
        with self.lock:
            batch = self.scheduler.next_batch(lane.key)
            for transfer in {piece.transfer for piece in batch.pieces}:
                transfer.writing += 1
            lane.idle = not batch
            return batch

    @property
    def ending(self) -> bool:
        with self.lock:
            return self.scheduler.ending

    def retire(self, lane: "Outlet") -> bool:
        """Whether the lane may go: nothing of what it sent is unanswered."""
        with self.lock:
            return not self.scheduler.lane_in_flight(lane.key)

    def let_go(self, transfers: Iterable[Transfer]) -> None:
        """A lane does not read their memory any more."""
        with self.lock:
            for transfer in transfers:
                transfer.writing -= 1
        self.settle()

    def split(self, lane: "Outlet", transfer: Transfer, start: int, at: int) -> None:
        """A chunk that is about to leave does so as two: up to `at`, and the rest."""
        with self.lock:
            transfer.outbox.split(lane.key, start, at)

    def lane_up(self, lane: "Outlet", max_chunk_bytes: int) -> None:
        with self.lock:
            self.scheduler.chunk_bytes = min(self.scheduler.chunk_bytes, max_chunk_bytes)
            if not any(other.up for other in self._lanes):
                self._up_since = time.monotonic()
            lane.up = True
            self.scheduler.lane_up(lane.key)
        self._share_budget()

    def on_long_link(self, congestion: str) -> None:
        with self.lock:
            if congestion != "bbr" and self._adaptive:
                self._loss_based = True
                self._governor.expect_loss_based()
            if self.scheduler.lane_bytes_per_s == float("inf"):
                self.scheduler.lane_bytes_per_s = FIRST_LANE_BYTES_PER_S
                self.scheduler.eager_bytes = 0 if self.over_rdma else EAGER_BYTES

    def lane_down(self, lane: "Outlet", error: str) -> None:
        with self.lock:
            if lane.up:
                lane.up = lane.idle = False
                self.scheduler.lane_down(lane.key)
                if not any(other.up for other in self._lanes):
                    self._all_lost(time.monotonic())
            self._last_error = error
            self._wake_lanes()
        self._share_budget()

    def _all_lost(self, now: float) -> None:
        """Counted from the last connection that was lost, not from the last attempt that failed; and one that broke
        before anything had arrived over it was no more than an attempt, unless it lasted.
        """
        if self._promising or now - self._up_since > self.options.peer_timeout_s:
            self._lost_since = now
        self._promising = False

    def lane_refused(self, lane: "Outlet", error: ConnectionRefused) -> None:
        """The peer does not talk to us at all: trying again will not change that."""
        self._on_refused(self.link_name, known(error.code))
        log.warning("%s refuses us: %s", self.address, error)
        with self.lock:
            if error.code in (Code.VERSION, Code.INTEGRITY_MODE, Code.IDENTITY):
                self.scheduler.fail_all(Code(error.code), error.detail)
        if error.code == Code.SESSION:  # the receiver was restarted, or has forgotten us
            self.forget_session()
        self.settle()

    def on_frame(self, lane: Outlet, frame: Frame) -> None:
        """What the receiver says about a transfer. Raises RemoteProtocolError."""
        with self.lock:
            if isinstance(frame, Nack) and frame.code == Code.CODEC:
                self.chooser.accounts.events["refused_by_peer"] += 1
            self.scheduler.on_frame(lane.key, frame)
            self._promising = self._promising or isinstance(frame, Ack)
            self._wake_lanes()

    def _wake_lanes(self) -> None:
        """Wakes as many as there is work for; connected ones first."""
        wanted = self.scheduler.lanes_wanted()
        for lane in self._lanes:
            if wanted > 0 and lane.up and lane.idle:
                lane.idle = False
                lane.wake()
                wanted -= 1
        missing = self.scheduler.lanes_useful(BYTES_PER_LANE) - sum(lane.up for lane in self._lanes)
        for lane in self._lanes:
            if missing > 0 and not lane.up:
                lane.start_or_wake()
                missing -= 1

    # budget, time

    def follow_budget(self) -> None:
        """What the link's budget is now, which others may have changed."""
        budget = self._egress.bytes_per_s
        with self.lock:
            changed, self._budget = self._budget != budget, budget
            self.scheduler.burst_bytes = self._egress.burst_bytes
        if changed:
            self._share_budget()

    def wait_s(self, now: float) -> float:
        """How long the budget forbids to send. Bulk waits for what the other peers of the link have to send."""
        if self._egress.bytes_per_s is None:
            return 0.0
        with self.lock:
            leaves = BULK_LEAVES if self.scheduler.only_bulk else 0.0
        return self._egress.wait_s(now, leaves)

    def charge(self, size: int, now: float) -> None:
        self._egress.charge(size, now)

    def _share_budget(self) -> None:
        """Lets the kernel pace each connection at its share of the budget and of what the link carries."""
        with self.lock:
            up = [lane for lane in self._lanes if lane.up]
            limits = [self._pace, None if self._budget is None else BUDGET_HEADROOM * self._budget]
        total = min((limit for limit in limits if limit is not None), default=None)
        headroom = LOSS_BASED_HEADROOM if self._loss_based else 1.0
        for lane in up:
            lane.pace(None if total is None else headroom * total / len(up))

    def _govern(self, state: LinkState, now: float) -> None:
        if not self._adaptive:
            return
        # What fits into the kernel's buffers may leave at once; beyond that, the link is what holds us back.
        busy = state.queued_bytes > state.connections * NOTSENT_LOWAT_BYTES
        plan = self._governor.on_sample(state, now, busy=busy)
        with self.lock:
            while len(self._lanes) < plan.connections and not self.closing:
                self._lanes.append(Outlet(self, len(self._lanes)))
            self._wake_lanes()
            changed, self._pace = self._pace != plan.pace_bytes_per_s, plan.pace_bytes_per_s
        if changed:
            self._share_budget()

    def _spread(self, rates: Mapping[int, float], state: LinkState) -> None:
        """Over a long link each lane takes what it can send soon, since what it has taken no other one can send."""
        average = state.available_bytes_per_s / len(rates) if rates else 0.0
        with self.lock:
            self.scheduler.lane_bytes_per_s = average or FIRST_LANE_BYTES_PER_S
            self.scheduler.on_rates(rates)
            path_bytes = state.available_bytes_per_s * state.rtt_s
            self.scheduler.eager_bytes = int(EAGER_RTTS * path_bytes) or EAGER_BYTES
        for lane in list(self._lanes):
            if rate := rates.get(lane.key):
                lane.carries(rate)

    def on_coded(
        self, transfer: Transfer, asked: Mapping[str, Codec], shares: Sequence[Share], cpu_s: float, sent: int
    ) -> None:
        """A chunk of `transfer` was coded, and leaves as `sent` bytes."""
        plain = sum(share.plain_bytes for share in shares)
        with self.lock:
            self.chooser.on_coded(asked, shares, cpu_s, time.monotonic())
            transfer.outbox.bytes_saved += plain - sent
            for share in shares:
                transfer.outbox.bytes_by_codec[share.codec.label] += share.plain_bytes

    def codecs(self) -> CodecAccounts:
        accounts = CodecAccounts()
        with self.lock:
            accounts.merge(self.chooser.accounts)
        return accounts

    def keep(self, now: float, idle_cores: float) -> None:
        """Samples the link, ends what is late or has no connection left."""
        self._egress.follow(now)
        self.follow_budget()
        if self.busy:
            self.busy_at = now
        infos = {lane.key: info for lane in list(self._lanes) if (info := lane.info()) is not None}
        with self.lock:
            self.scheduler.expire(now)
            up = any(lane.up for lane in self._lanes)
            if self.busy and not up and now - self._lost_since > self.options.peer_timeout_s:
                self.scheduler.fail_all(Code.PEER_LOST, self._last_error)
            queued = self.scheduler.bytes_queued + self.scheduler.bytes_in_flight
            state = self._monitor.sample(
                infos,
                now,
                queued_bytes=queued,
                budget_bytes_per_s=self._budget or 0.0,
                congestion_control=next((lane.congestion for lane in self._lanes if lane.up), ""),
            )
            rate = state.available_bytes_per_s or self._budget or 0.0
            situation = Situation(link_bytes_per_s=rate, backlog_bytes=queued, idle_cores=idle_cores)
            self.chooser.on_situation(situation, now)
        if state.min_rtt_s >= LONG_RTT_S and not self.over_rdma:  # there, TCP carries little and says nothing of rails
            self._spread({key: info.reach_bytes_per_s for key, info in infos.items()}, state)
        self.settle()
        self._govern(state, now)

    @property
    def sampling_s(self) -> float:
        """How often keep() should be called while there is work."""
        return LONG_LINK_SAMPLING_S if self._monitor.state.min_rtt_s >= LONG_RTT_S else SAMPLING_S

    def link(self) -> LinkState:
        return replace(self._monitor.state, link=self.link_name)

    def stop(self) -> None:
        with self.lock:
            self.closing = True
            self.scheduler.fail_all(Code.CLOSING, "the sender closes")
        for lane in self._lanes:
            lane.stop()

    def join(self) -> None:
        for lane in self._lanes:
            lane.close()
        self.settle()

"""The link to one peer as its sender sees it: measured, steered by the governor, spread over the lanes, kept in budget."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from transport.path.governor import Governor
from transport.path.link import LinkMonitor, LinkState, TcpInfo
from transport.path.pacing import BULK_LEAVES, EgressBudget
from transport.path.tcp import LONG_RTT_S, NOTSENT_LOWAT_BYTES
from transport.send.schedule.transfers import Transfers
from transport.send.spec import Via

FIRST_LANE_BYTES_PER_S: Final = 10e6  # on a long link, until it has been measured
# Of a transfer over a long link that may leave before its receiver has answered: what fills the pipe meanwhile.
EAGER_RTTS: Final = 2.0
EAGER_BYTES: Final = 4 << 20  # until that has been measured
SAMPLING_S: Final = 0.03
LONG_LINK_SAMPLING_S: Final = 0.01  # a fraction of a round trip: when the link narrows, its queue fills within one
# The bucket keeps the budget; the kernel's pacing only spreads it, and must leave a slow lane's share to the others.
BUDGET_HEADROOM: Final = 1.25
# A connection that has just halved its window sends less than its share: the others must be able to send more.
LOSS_BASED_HEADROOM: Final = 1.5


class PacedLane(Protocol):
    """A lane as far as the link goes."""

    key: int
    up: bool
    congestion: str

    def info(self) -> TcpInfo | None: ...

    def pace(self, bytes_per_s: float | None) -> None: ...

    def carries(self, bytes_per_s: float) -> None: ...


class LinkKeeper:
    """The link's measured rate, its budget and its target. The budget may be shared with other peers."""

    def __init__(
        self,
        name: str,
        via: Via,
        monitor: LinkMonitor,
        governor: Governor,
        egress: EgressBudget,
        transfers: Transfers,
        *,
        adaptive: bool,
    ) -> None:
        self.name = name
        self.adaptive = adaptive  # otherwise the number of connections is fixed, and they are as fast as they are
        self._via = via
        self._monitor = monitor
        self._governor = governor
        self._egress = egress
        self._transfers = transfers
        self._budget: float | None = None
        self._pace: float | None = None
        self._loss_based = False

    @property
    def state(self) -> LinkState:
        """As last sampled."""
        return replace(self._monitor.state, link=self.name)

    @property
    def sampling_s(self) -> float:
        """How often it should be sampled while there is work."""
        return LONG_LINK_SAMPLING_S if self._monitor.state.min_rtt_s >= LONG_RTT_S else SAMPLING_S

    @property
    def connections(self) -> int:
        """How many connections it deserves."""
        return self._governor.plan.connections

    def available_bytes_per_s(self, state: LinkState) -> float:
        """The link's rate, measured or allowed; 0 = not known."""
        return state.available_bytes_per_s or self._budget or 0.0

    # the budget

    def follow_budget(self, lanes: Sequence[PacedLane]) -> None:
        """Takes over the present budget, which other threads may have changed."""
        budget = self._egress.bytes_per_s
        with self._transfers.lock:
            changed, self._budget = self._budget != budget, budget
            self._transfers.scheduler.budget_bytes_per_s = float("inf") if budget is None else budget
            self._transfers.scheduler.burst_bytes = self._egress.burst_bytes
        if changed:
            self.share(lanes)

    def follow_time(self, now: float, lanes: Sequence[PacedLane]) -> None:
        """A budget may depend on the time of day."""
        self._egress.follow(now)
        self.follow_budget(lanes)

    def wait_s(self, now: float) -> float:
        """How long the budget forbids to send. Bulk waits for what the other peers of the link have to send."""
        if self._egress.bytes_per_s is None:
            return 0.0
        with self._transfers.lock:
            leaves = BULK_LEAVES if self._transfers.scheduler.only_bulk else 0.0
        return self._egress.wait_s(now, leaves)

    def charge(self, size: int, now: float) -> None:
        self._egress.charge(size, now)

    def share(self, lanes: Sequence[PacedLane]) -> None:
        """Lets the kernel pace each connection at its share of the budget and of what the link carries."""
        with self._transfers.lock:
            up = [lane for lane in lanes if lane.up]
            limits = [self._pace, None if self._budget is None else BUDGET_HEADROOM * self._budget]
        total = min((limit for limit in limits if limit is not None), default=None)
        headroom = LOSS_BASED_HEADROOM if self._loss_based else 1.0
        for lane in up:
            lane.pace(None if total is None else headroom * total / len(up))

    # what it carries

    def on_long_link(self, congestion: str) -> None:
        """A connection was made whose round trip is long."""
        scheduler = self._transfers.scheduler
        with self._transfers.lock:
            if congestion != "bbr" and self.adaptive:
                self._loss_based = True
                self._governor.expect_loss_based()
            if scheduler.lane_bytes_per_s == float("inf"):
                scheduler.lane_bytes_per_s = FIRST_LANE_BYTES_PER_S
                scheduler.eager_bytes = 0 if self._via is Via.RDMA else EAGER_BYTES

    def sample(self, infos: Mapping[int, TcpInfo], now: float, lanes: Iterable[PacedLane]) -> LinkState:
        """With the transfers' lock held."""
        scheduler = self._transfers.scheduler
        return self._monitor.sample(
            infos,
            now,
            queued_bytes=scheduler.bytes_queued + scheduler.bytes_in_flight,
            budget_bytes_per_s=self._budget or 0.0,
            congestion_control=next((lane.congestion for lane in lanes if lane.up), ""),
        )

    def spread(self, infos: Mapping[int, TcpInfo], state: LinkState, lanes: Iterable[PacedLane]) -> None:
        """Over a long link each lane takes only what it can send soon, since no other lane can send it then."""
        if state.min_rtt_s < LONG_RTT_S or self._via is Via.RDMA:  # there, TCP carries little and says nothing of rails
            return
        scheduler = self._transfers.scheduler
        rates = {key: info.reach_bytes_per_s for key, info in infos.items()}
        average = state.available_bytes_per_s / len(rates) if rates else 0.0
        with self._transfers.lock:
            scheduler.lane_bytes_per_s = average or FIRST_LANE_BYTES_PER_S
            scheduler.on_rates(rates)
            path_bytes = state.available_bytes_per_s * state.rtt_s
            scheduler.eager_bytes = int(EAGER_RTTS * path_bytes) or EAGER_BYTES
        for lane in lanes:
            if rate := rates.get(lane.key):
                lane.carries(rate)

    def govern(self, state: LinkState, now: float) -> bool:
        """Lets the governor decide again; returns whether the pace has changed, so that it must be shared out."""
        # What fits into the kernel's buffers may leave at once; beyond that, the link is what holds us back.
        busy = state.queued_bytes > state.connections * NOTSENT_LOWAT_BYTES
        plan = self._governor.on_sample(state, now, busy=busy)
        with self._transfers.lock:
            changed, self._pace = self._pace != plan.pace_bytes_per_s, plan.pace_bytes_per_s
        return changed

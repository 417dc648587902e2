"""How many connections a link deserves, and how fast they may send: the pure controller of one peer.

Two knobs, one signal. The signal is the round trip: while it stays at its minimum, no queue stands before the
bottleneck and the pipe takes more; once it grows, the pipe is full and what is acknowledged per second is its width.

    no queue, pace reached         -> raise the pace, in growing steps
    no queue, pace not reached     -> the connections cannot fill it (loss holds cubic back, buffers hold bbr back): add
    some queue                          -> pace = a little less than what arrives

So bbr, which by itself keeps a queue and loses 7-15 % of its bytes in it when several connections compete, runs paced
at pace / N; and cubic gets as many connections as RTT and loss make it need.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from transport.link import MIN_WINDOW_S, LinkState

LAN_RTT_S: Final = 1e-3  # below it, round trips measure the scheduler and not the link
# Round trips over the smallest. A short queue is wanted: without one, the bottleneck is idle now and then.
NO_QUEUE: Final = 1.2
QUEUE: Final = 1.4
LONG_QUEUE: Final = 1.8
LONGER_QUEUE: Final = 2.5
# A standing queue is drained within some round trips; it keeps the link busy meanwhile, so that costs nothing.
DRAIN_RTTS: Final = 4.0
DRAIN_LEAST: Final = 0.3
DRAINED: Final = 0.97
PACE_REACHED: Final = 0.8
STEP_FIRST: Final = 0.02
STEP_MAX: Final = 0.1
FLOOR: Final = 0.05  # of the best goodput of late: a longer route looks like a queue that never drains
MEMORY_S: Final = 10.0
PLATEAU: Final = 1.1  # growth of the goodput below which a start is over
GAIN: Final = 1.05  # what more connections must bring, or no more are added for a while
HOLD_S: Final = 5.0  # doubled each time
HOLD_MAX_S: Final = 300.0
RECENT_S: Final = 1.0
LOSS_BASED_CONNECTIONS: Final = 16
LEAST_BYTES_PER_S: Final = 2e6


@dataclass(frozen=True, slots=True)
class Plan:
    """What the lanes of a peer should do. `pace` is for all together; None: as fast as the kernel likes."""

    connections: int
    pace_bytes_per_s: float | None = None


class Governor:
    """Adapts a Plan to a series of link states."""

    def __init__(self, connections: int, max_connections: int) -> None:
        self._max_connections = max(connections, max_connections)
        self._plan = Plan(connections)
        self._step = STEP_FIRST
        self._decided_at = 0.0
        self._judged_at: float | None = None  # when the goodput was last compared with what it was
        self._judged_goodput = 0.0
        self._grown = False
        self._hold_until = 0.0
        self._hold_s = HOLD_S
        self._first_connections = connections
        self._queued_since: float | None = None
        self._width: float | None = None  # of the link, while a queue is drained
        self._last_goodput = 0.0
        self._busy_since: float | None = None
        self._best: deque[tuple[float, float]] = deque()  # (when, goodput), falling

    def expect_loss_based(self) -> None:
        """The kernel gives us no bbr: every loss halves a connection, so many are needed from the start."""
        if self._judged_at is None and self._plan.pace_bytes_per_s is None:
            many = max(self._plan.connections, min(LOSS_BASED_CONNECTIONS, self._max_connections))
            self._plan = Plan(many)

    @property
    def plan(self) -> Plan:
        return self._plan

    def on_sample(self, state: LinkState, now: float, *, busy: bool) -> Plan:
        """`busy`: there was more to send than the link has taken; otherwise the state says nothing about its limits."""
        if not busy or state.min_rtt_s < LAN_RTT_S:
            self._judged_at = self._busy_since = self._queued_since = None
            return self._plan
        if self._busy_since is None:
            self._busy_since = now
        # Until what was sent after a pause is acknowledged, the state still tells of the time before.
        if now - self._busy_since < MIN_WINDOW_S + 2 * state.rtt_s:
            return self._plan
        self._remember(state.goodput_bytes_per_s, now)
        if now - self._decided_at >= state.rtt_s:
            self._decided_at = now
            self._plan = self._decide(state, now)
        return self._plan

    def _decide(self, state: LinkState, now: float) -> Plan:
        plan, goodput = self._plan, state.goodput_bytes_per_s
        if state.rtt_inflation > QUEUE:
            self._step, self._judged_at = STEP_FIRST, None
            return Plan(plan.connections, self._pace_under_queue(state, now))
        self._queued_since = None
        if self._width is not None:  # the queue has drained: on at what arrived while it stood
            width, self._width = self._width, None
            return Plan(plan.connections, DRAINED * width)
        if state.rtt_inflation > NO_QUEUE:
            return plan
        if plan.pace_bytes_per_s is not None and goodput >= PACE_REACHED * plan.pace_bytes_per_s:
            self._step = min(STEP_MAX, self._step * 1.5)
            return Plan(plan.connections, plan.pace_bytes_per_s * (1 + self._step))
        if state.budget_bytes_per_s and goodput >= PACE_REACHED * state.budget_bytes_per_s:
            return plan
        return Plan(self._connections(state, now), plan.pace_bytes_per_s)

    def _pace_under_queue(self, state: LinkState, now: float) -> float | None:
        goodput, before = state.goodput_bytes_per_s, self._last_goodput
        self._last_goodput = goodput
        if self._plan.pace_bytes_per_s is None and goodput > PLATEAU * before:
            return None  # still coming to speed: what arrives now is less than the link's width
        if self._queued_since is None:
            self._queued_since = now
        # A stall of the machine looks like a queue, too, and ends by itself; a link that became narrower does not.
        patience_s = 0.25 if state.rtt_inflation < LONGER_QUEUE else 0.12
        if state.rtt_inflation > LONG_QUEUE and now - self._queued_since > max(patience_s, 3 * state.min_rtt_s):
            self._width = goodput
            share = max(DRAIN_LEAST, DRAINED - (state.rtt_inflation - QUEUE) / DRAIN_RTTS)
            return max(share * goodput, FLOOR * self._best[0][1], LEAST_BYTES_PER_S)
        recent = max(rate for when, rate in self._best if when >= now - RECENT_S or rate == goodput)
        return max(DRAINED * recent, LEAST_BYTES_PER_S)

    def _connections(self, state: LinkState, now: float) -> int:
        """Twice as many, if the present ones have come to speed and the last addition was worth it."""
        present = self._plan.connections
        if self._judged_at is None:
            self._judged_at, self._judged_goodput, self._grown = now, state.goodput_bytes_per_s, False
        if now - self._judged_at < max(0.3, 8 * state.rtt_s) or now < self._hold_until or state.connections < present:
            return present
        gain = state.goodput_bytes_per_s / max(1.0, self._judged_goodput)
        self._judged_at, self._judged_goodput = now, state.goodput_bytes_per_s
        if gain > PLATEAU and not self._grown:
            return present
        if gain < GAIN and self._grown:
            self._hold_until, self._grown = now + self._hold_s, False
            self._hold_s = min(HOLD_MAX_S, 2 * self._hold_s)
            return max(self._first_connections, present // 2)
        self._grown = True
        return min(self._max_connections, 2 * present)

    def _remember(self, goodput: float, now: float) -> None:
        while self._best and (self._best[0][0] < now - MEMORY_S):
            self._best.popleft()
        while self._best and self._best[-1][1] <= goodput:
            self._best.pop()
        self._best.append((now, goodput))

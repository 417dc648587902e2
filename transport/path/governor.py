"""Sets how many connections a link gets, and how fast they may send: the pure controller of one peer.

Two knobs, one signal. The signal is the round trip: while it stays at its minimum, no queue stands before the
bottleneck and the pipe takes more; once it grows, the pipe is full and what is acknowledged per second is its width.

    no queue, pace reached         -> raise the pace, in growing steps
    no queue, pace not reached     -> the connections cannot fill it (loss holds cubic back, buffers hold bbr back): add
    some queue                     -> pace = a little less than what arrives
    much less arrives than before  -> the link has become narrower: (almost) nothing, until what is under way fits into it
    no round trip at its minimum   -> less for a moment: either it is seen again, or the route has become longer

So bbr, which by itself keeps a queue and loses 7-15 % of its bytes in it when several connections compete, runs paced
at pace / N; and cubic gets as many connections as RTT and loss make it need.

What it is at is a phase; what a sample says can end it:

    RESTING ──busy──► STEERING ──narrowed──► DRAINING ──fits──► STEERING
                          └──────forgotten──► PROBING ──seen───► STEERING         each ──idle──► RESTING

docs/design/transport.md has the links it was tried on, and the results. Constants that name no other source are from
there.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from transport.path.link import INSTANT_S, LAN_RTT_S, MIN_WINDOW_S, LinkState

# The queue, as round trips over the smallest. A short one is wanted: without one, the bottleneck is idle now and then.
NO_QUEUE: Final = 1.2
QUEUE: Final = 1.4
LONG_QUEUE: Final = 1.8
LONGER_QUEUE: Final = 2.5
# A stall of the machine looks like a queue, too, and ends by itself; a link that became narrower does not.
LONG_QUEUE_PATIENCE_S: Final = 0.25
LONGER_QUEUE_PATIENCE_S: Final = 0.12
PATIENCE_RTTS: Final = 3.0
# A standing queue is drained within some round trips; it keeps the link busy meanwhile, so that costs nothing.
DRAIN_RTTS: Final = 4.0
DRAIN_LEAST: Final = 0.3
DRAINED: Final = 0.97

# The pace, and how it grows while it is reached without a queue.
PACE_REACHED: Final = 0.8
STEP_FIRST: Final = 0.02
STEP_GROWTH: Final = 1.5
STEP_MAX: Final = 0.25
FLOOR: Final = 0.05  # of the best goodput of late: a longer route looks like a queue that never drains
LEAST_BYTES_PER_S: Final = 2e6
# The kernel plans the next packet of a connection when it sends one: at a tiny pace that is an eternity away, and a
# faster pace meanwhile changes nothing. Two packets in 20 ms.
LEAST_PER_CONNECTION: Final = 150e3
MEMORY_S: Final = 10.0  # of the goodputs that were reached; as long as bbr remembers its smallest round trip
RECENT_S: Final = 1.0

# The connections, and what makes another one worth its while.
PLATEAU: Final = 1.1  # growth of the goodput below which a start is over; bbr asks for 1.25, in one round trip
GAIN: Final = 1.05  # what more connections must bring, or no more are added for a while
JUDGE_S: Final = 0.3  # at least, until a number of connections is judged
JUDGE_RTTS: Final = 8.0
HOLD_S: Final = 5.0  # doubled each time
HOLD_MAX_S: Final = 300.0
LOSS_BASED_CONNECTIONS: Final = 32
# Of the best goodput of late: below it, and without a queue, it is loss that holds us back.
LOSS_BASED_REACHED: Final = 0.9

# A link that narrows shows in what arrives, half a round trip before its queue has grown to its full length.
NARROWER: Final = 0.5  # of the best goodput of the last second
STALLED: Final = 0.02  # less than that: the machine stands still, or the link does
NARROWER_INFLATION: Final = 1.5
NARROWER_SAMPLES: Final = 3
TRICKLE: Final = 0.05  # of the new width, while the queue drains
FITS: Final = 1.2  # in flight, over width times round trip
DRAIN_MAX_S: Final = 1.0

# A queue too short to be worth draining may stand for ever, and pass for the route once its true length is forgotten.
PROBE_AFTER_S: Final = 5.0  # without a round trip as short as the smallest: half of what the monitor remembers
PROBE_SHARE: Final = 0.4  # of what arrives; with the headroom that loss-based connections get, 0.6
PROBE_RTTS: Final = 4.0  # at most, and a little more on short links
PROBE_S: Final = 0.1


class GovernorPhase(Enum):
    RESTING = auto()  # nothing is to be learnt: there is little to send, or the link is short
    STEERING = auto()
    DRAINING = auto()  # the link has become narrower
    PROBING = auto()  # for the length of the route


class LinkEvent(Enum):
    IDLE = auto()
    BUSY = auto()
    NARROWED = auto()
    FITS = auto()  # what is under way, into the link as it is now
    FORGOTTEN = auto()  # how long the route is
    SEEN = auto()  # how long it is, or it has become longer


TRANSITIONS: Final[dict[GovernorPhase, dict[LinkEvent, GovernorPhase]]] = {
    GovernorPhase.RESTING: {LinkEvent.IDLE: GovernorPhase.RESTING, LinkEvent.BUSY: GovernorPhase.STEERING},
    GovernorPhase.STEERING: {
        LinkEvent.IDLE: GovernorPhase.RESTING,
        LinkEvent.NARROWED: GovernorPhase.DRAINING,
        LinkEvent.FORGOTTEN: GovernorPhase.PROBING,
    },
    GovernorPhase.DRAINING: {LinkEvent.IDLE: GovernorPhase.RESTING, LinkEvent.FITS: GovernorPhase.STEERING},
    GovernorPhase.PROBING: {LinkEvent.IDLE: GovernorPhase.RESTING, LinkEvent.SEEN: GovernorPhase.STEERING},
}


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Targets for the lanes of a peer. `pace` is for all together; None: as fast as the kernel likes."""

    connections: int
    pace_bytes_per_s: float | None = None


class Governor:
    """Adapts a LanePlan to a series of link states."""

    def __init__(self, connections: int, max_connections: int) -> None:
        self._max_connections = max(connections, max_connections)
        self._plan = LanePlan(connections)
        self._phase = GovernorPhase.RESTING
        self._step = STEP_FIRST
        self._decided_at = 0.0
        self._judged_at: float | None = None  # when the goodput was last compared with what it was
        self._judged_goodput = 0.0
        self._grown = False
        self._hold_until = 0.0
        self._hold_s = HOLD_S
        self._first_connections = connections
        self._loss_based = False
        self._queued_since: float | None = None
        self._width: float | None = None  # of the link, while a queue is drained
        self._narrower_since = 0.0
        self._narrower_samples = 0
        self._sampled_at = 0.0
        self._new_width = self._old_width = 0.0
        self._last_goodput = 0.0
        self._before_probe = self._plan
        self._probed_at = 0.0
        self._busy_since = 0.0
        self._best: deque[tuple[float, float]] = deque()  # (when, goodput), falling

    def expect_loss_based(self) -> None:
        """The kernel offers no bbr: every loss halves a connection, so the link needs many from the start."""
        if self._judged_at is None and self._plan.pace_bytes_per_s is None:
            many = max(self._plan.connections, min(LOSS_BASED_CONNECTIONS, self._max_connections))
            self._plan, self._first_connections, self._loss_based = LanePlan(many), many, True

    @property
    def plan(self) -> LanePlan:
        return self._plan

    def on_sample(self, state: LinkState, now: float, *, busy: bool) -> LanePlan:
        """`busy`: there was more to send than the link has taken; otherwise the state says nothing about its limits."""
        if not busy or state.min_rtt_s < LAN_RTT_S:
            self._plan = self._rest(now)
            return self._plan
        if self._phase is GovernorPhase.RESTING:
            self._enter(LinkEvent.BUSY)
            self._busy_since = now
        # Until what was sent after a pause is acknowledged, the state still tells of the time before.
        if now - self._busy_since < MIN_WINDOW_S + 2 * state.rtt_s:
            return self._plan
        self._remember(state.goodput_bytes_per_s, now)
        at_work: dict[GovernorPhase, Callable[[LinkState, float], LanePlan]] = {
            GovernorPhase.STEERING: self._steer,
            GovernorPhase.DRAINING: self._drain,
            GovernorPhase.PROBING: self._probe,
        }
        self._plan = at_work[self._phase](state, now)
        return self._plan

    def _enter(self, event: LinkEvent) -> None:
        self._phase = TRANSITIONS[self._phase][event]

    def _rest(self, now: float) -> LanePlan:
        plan = self._plan
        if self._phase is GovernorPhase.DRAINING:
            plan = self._resume(now)
        if self._phase is GovernorPhase.PROBING:
            plan = self._before_probe
        self._judged_at = self._queued_since = None
        self._enter(LinkEvent.IDLE)
        return plan

    def _steer(self, state: LinkState, now: float) -> LanePlan:
        if self._has_forgotten(state, now):
            return self._begin_probe(state, now)
        if self._narrows(state, now):
            self._enter(LinkEvent.NARROWED)
            self._narrower_since, self._narrower_samples = now, 0
            self._new_width, self._old_width = 0.0, self._recent_best(now)
            return self._drain(state, now)
        if now - self._decided_at >= state.rtt_s:
            self._decided_at = now
            return self._decide(state, now)
        return self._plan

    def _decide(self, state: LinkState, now: float) -> LanePlan:
        plan, goodput = self._plan, state.goodput_bytes_per_s
        if state.rtt_inflation > QUEUE:
            self._step = STEP_FIRST
            if not self._loss_based:
                self._judged_at = None
            return LanePlan(plan.connections, self._pace_under_queue(state, now))
        self._queued_since = None
        if self._width is not None:  # the queue has drained: on at what arrived while it stood
            width, self._width = self._width, None
            return LanePlan(plan.connections, DRAINED * width)
        if state.rtt_inflation > NO_QUEUE:
            return plan
        best = self._best[0][1]
        if self._loss_based and plan.pace_bytes_per_s is not None and goodput < LOSS_BASED_REACHED * best:
            return LanePlan(self._connections(state, now), max(plan.pace_bytes_per_s, best))
        if plan.pace_bytes_per_s is not None and goodput >= PACE_REACHED * plan.pace_bytes_per_s:
            self._step = min(STEP_MAX, self._step * STEP_GROWTH)
            return LanePlan(plan.connections, plan.pace_bytes_per_s * (1 + self._step))
        if state.budget_bytes_per_s and goodput >= PACE_REACHED * state.budget_bytes_per_s:
            return plan
        return LanePlan(self._connections(state, now), plan.pace_bytes_per_s)

    def _narrows(self, state: LinkState, now: float) -> bool:
        """Much less arrives although the pipe is full, and a queue has begun: several times in a row, without a pause
        of our own. On a busy machine, any one of these alone is seen all the time.
        """
        arriving, best = state.arriving_bytes_per_s, self._recent_best(now)
        gap_s, self._sampled_at = now - self._sampled_at, now
        seen = (
            gap_s <= 2 * INSTANT_S
            and state.rtt_inflation > NARROWER_INFLATION
            and STALLED * best < arriving < NARROWER * best
            and state.in_flight_bytes > best * state.min_rtt_s
        )
        self._narrower_samples = self._narrower_samples + 1 if seen else 0
        return self._narrower_samples >= NARROWER_SAMPLES

    def _drain(self, state: LinkState, now: float) -> LanePlan:
        """(Almost) nothing, until what is under way fits into the link as it is now."""
        # While a queue stands, what arrives is the width; after a stall of the machine it is what it was before.
        if now - self._narrower_since >= INSTANT_S:
            self._new_width = max(self._new_width, min(state.arriving_bytes_per_s, self._old_width))
        fits = state.in_flight_bytes <= FITS * self._new_width * state.min_rtt_s
        if not fits and now - self._narrower_since < DRAIN_MAX_S:
            return LanePlan(self._plan.connections, max(TRICKLE * state.arriving_bytes_per_s, self._least))
        self._enter(LinkEvent.FITS)
        return self._resume(now)

    def _resume(self, now: float) -> LanePlan:
        """After a drain: earlier measurements of the link are void."""
        width = self._new_width
        self._width = self._judged_at = self._queued_since = None
        self._best.clear()
        self._remember(width, now)
        self._decided_at, self._step, self._last_goodput = now, STEP_FIRST, width
        self._busy_since = now  # the pipe must fill again before it tells anything
        return LanePlan(self._plan.connections, max(DRAINED * width, LEAST_BYTES_PER_S, self._least))

    def _has_forgotten(self, state: LinkState, now: float) -> bool:
        """Whether the length of the route has been forgotten."""
        return state.min_rtt_age_s > PROBE_AFTER_S and now - self._probed_at > PROBE_AFTER_S

    def _begin_probe(self, state: LinkState, now: float) -> LanePlan:
        """Less than arrives, until a round trip is as short as it was or should have been."""
        self._enter(LinkEvent.FORGOTTEN)
        self._before_probe, self._probed_at = self._plan, now
        pace = max(PROBE_SHARE * state.goodput_bytes_per_s, self._least)
        return LanePlan(self._plan.connections, min(pace, self._plan.pace_bytes_per_s or pace))

    def _probe(self, state: LinkState, now: float) -> LanePlan:
        probed_s = now - self._probed_at
        if state.min_rtt_age_s > probed_s and probed_s < PROBE_S + PROBE_RTTS * state.rtt_s:
            return self._plan
        self._enter(LinkEvent.SEEN)
        self._busy_since, self._judged_at = now, None  # the pipe must fill again before it tells anything
        return self._before_probe

    @property
    def _least(self) -> float:
        return LEAST_PER_CONNECTION * self._plan.connections

    def _recent_best(self, now: float) -> float:
        return max((rate for when, rate in self._best if when >= now - RECENT_S), default=0.0)

    def _pace_under_queue(self, state: LinkState, now: float) -> float | None:
        goodput, before = state.goodput_bytes_per_s, self._last_goodput
        self._last_goodput = goodput
        if self._plan.pace_bytes_per_s is None and goodput > PLATEAU * before:
            return None  # still coming to speed: what arrives now is less than the link's width
        if self._queued_since is None:
            self._queued_since = now
        longer = state.rtt_inflation >= LONGER_QUEUE
        patience_s = LONGER_QUEUE_PATIENCE_S if longer else LONG_QUEUE_PATIENCE_S
        patience_s = max(patience_s, PATIENCE_RTTS * state.min_rtt_s)
        if state.rtt_inflation > LONG_QUEUE and now - self._queued_since > patience_s:
            self._width = goodput
            share = max(DRAIN_LEAST, DRAINED - (state.rtt_inflation - QUEUE) / DRAIN_RTTS)
            return max(share * goodput, FLOOR * self._best[0][1], LEAST_BYTES_PER_S, self._least)
        recent = max(rate for when, rate in self._best if when >= now - RECENT_S or rate == goodput)
        return max(DRAINED * recent, LEAST_BYTES_PER_S, self._least)

    def _connections(self, state: LinkState, now: float) -> int:
        """Twice as many, if the present ones have come to speed and the last addition was worth it."""
        present = self._plan.connections
        if self._judged_at is None:
            self._judged_at, self._judged_goodput, self._grown = now, state.goodput_bytes_per_s, False
        too_early = now - self._judged_at < max(JUDGE_S, JUDGE_RTTS * state.rtt_s)
        if too_early or now < self._hold_until or state.connections < present:
            return present
        gain = state.goodput_bytes_per_s / max(1.0, self._judged_goodput)
        self._judged_at, self._judged_goodput = now, state.goodput_bytes_per_s
        if gain > PLATEAU and not self._grown:
            return present
        if gain < GAIN and self._grown:
            self._hold_until, self._grown = now + self._hold_s, False
            self._hold_s = min(HOLD_MAX_S, 2 * self._hold_s)
            # Where loss holds connections back, the next dip would only bring them again.
            return present if self._loss_based else max(self._first_connections, present // 2)
        self._grown = True
        return min(self._max_connections, 2 * present)

    def _remember(self, goodput: float, now: float) -> None:
        while self._best and (self._best[0][0] < now - MEMORY_S):
            self._best.popleft()
        while self._best and self._best[-1][1] <= goodput:
            self._best.pop()
        self._best.append((now, goodput))

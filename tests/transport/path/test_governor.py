"""The governor against a model of a link: a rate, a queue, and connections that each reach so much."""

import pytest

from transport.path.governor import TRANSITIONS, Governor, GovernorPhase, LinkEvent
from transport.path.link import MIN_RTT_MEMORY_S, LinkMonitor, LinkState, TcpInfo

RTT_S = 0.04
STEP_S = 0.02


class Pipe:
    """A bottleneck of `rate` with a queue; `per_connection` is what one connection reaches by itself."""

    def __init__(self, rate: float, per_connection: float = 1e12) -> None:
        self.rate = rate
        self.per_connection = per_connection
        self.queue = 0.0
        self.now = 0.0
        self.delays: list[float] = []
        self.carried = 0.0

    def run(self, governor: Governor, seconds: float, min_rtt_s: float = RTT_S) -> None:
        """Lets the governor steer for a while; an unpaced sender offers twice the rate, as bbr does while it probes."""
        self.delays, self.carried = [], 0.0
        for _ in range(round(seconds / STEP_S)):
            plan = governor.plan
            offered = min(plan.pace_bytes_per_s or 2 * self.rate, plan.connections * self.per_connection)
            total = self.queue + offered * STEP_S
            delivered = min(total, self.rate * STEP_S)
            self.queue = min(total - delivered, self.rate * RTT_S * 5)
            self.now += STEP_S
            rtt_s = min_rtt_s + self.queue / self.rate
            state = LinkState(
                peer="p", at=self.now, connections=plan.connections, goodput_bytes_per_s=delivered / STEP_S,
                rtt_s=rtt_s, min_rtt_s=min_rtt_s, queued_bytes=1 << 30,
                arriving_bytes_per_s=delivered / STEP_S,
                in_flight_bytes=int(self.queue + min(offered, self.rate) * min_rtt_s),
            )  # fmt: skip
            governor.on_sample(state, self.now, busy=True)
            self.delays.append(rtt_s - min_rtt_s)
            self.carried += delivered
        self.goodput = self.carried / seconds


def test_it_fills_the_pipe_without_a_standing_queue() -> None:
    pipe, governor = Pipe(60e6), Governor(4, 64)
    pipe.run(governor, 2.0)
    pipe.run(governor, 10.0)
    assert pipe.goodput > 0.95 * 60e6
    assert sum(pipe.delays) / len(pipe.delays) < RTT_S
    assert governor.plan.connections == 4


def test_a_narrower_link_is_met_with_a_slower_pace() -> None:
    pipe, governor = Pipe(60e6), Governor(4, 64)
    pipe.run(governor, 5.0)
    pipe.rate = 12e6
    pipe.run(governor, 1.5)
    pipe.run(governor, 5.0)
    assert max(pipe.delays) < 2 * RTT_S
    assert pipe.goodput > 0.9 * 12e6


def test_what_stands_in_the_queue_of_a_link_that_narrows_is_drained_at_once() -> None:
    pipe, governor = Pipe(60e6), Governor(4, 64)
    pipe.run(governor, 5.0)
    pipe.rate = 12e6
    pipe.run(governor, 1.0)
    over_s = STEP_S * sum(delay > 2 * RTT_S for delay in pipe.delays)
    assert max(pipe.delays) > 2 * RTT_S  # what was on its way; nothing helps against that
    assert over_s < 0.35
    assert pipe.goodput > 0.85 * 12e6
    pipe.run(governor, 2.0)
    assert max(pipe.delays) < 2 * RTT_S
    assert pipe.goodput > 0.9 * 12e6


@pytest.mark.parametrize("arriving", [0.0, 20e6])
def test_a_machine_that_stands_still_does_not_pass_for_a_narrow_link(arriving: float) -> None:
    pipe, governor = Pipe(60e6), Governor(4, 64)
    pipe.run(governor, 5.0)
    pace = governor.plan.pace_bytes_per_s
    assert pace is not None
    for _ in range(4):  # our samples come late, or nothing at all arrives
        pipe.now += STEP_S if not arriving else 0.1
        state = LinkState(
            peer="p", at=pipe.now, connections=4, goodput_bytes_per_s=30e6, arriving_bytes_per_s=arriving,
            in_flight_bytes=5_000_000, rtt_s=1.6 * RTT_S, min_rtt_s=RTT_S, queued_bytes=1 << 30,
        )  # fmt: skip
        governor.on_sample(state, pipe.now, busy=True)
    plan = governor.plan
    assert plan.pace_bytes_per_s is not None
    assert plan.pace_bytes_per_s > 0.8 * pace


def test_a_transfer_that_ends_while_a_queue_drains_leaves_a_pace_to_go_on_with() -> None:
    pipe, governor = Pipe(60e6), Governor(4, 64)
    pipe.run(governor, 5.0)
    pipe.rate = 12e6
    while governor.plan.pace_bytes_per_s is None or governor.plan.pace_bytes_per_s > 5e6:
        pipe.run(governor, STEP_S)
    pipe.run(governor, 4 * STEP_S)
    governor.on_sample(LinkState(peer="p", at=pipe.now, rtt_s=0.2, min_rtt_s=RTT_S), pipe.now, busy=False)
    assert governor.plan.pace_bytes_per_s == pytest.approx(12e6, rel=0.1)


def test_a_wider_link_is_found() -> None:
    pipe, governor = Pipe(12e6), Governor(4, 64)
    pipe.run(governor, 5.0)
    pipe.rate = 60e6
    pipe.run(governor, 3.0)
    pipe.run(governor, 5.0)
    assert pipe.goodput > 0.9 * 60e6


def test_connections_that_loss_holds_back_become_more() -> None:
    pipe, governor = Pipe(60e6, per_connection=2e6), Governor(4, 64)
    governor.expect_loss_based()
    assert governor.plan.connections == 32
    pipe.run(governor, 5.0)
    assert governor.plan.connections == 32  # and they suffice
    assert pipe.goodput > 0.9 * 60e6
    pipe.per_connection = 1e6
    pipe.run(governor, 2.0)
    pipe.run(governor, 2.0)
    assert governor.plan.connections == 64
    assert pipe.goodput > 0.9 * 60e6


def test_connections_that_bring_nothing_stay_few() -> None:
    class Elsewhere(Pipe):
        """Something else is slow, the disk or the peer: no queue, and no gain from more connections."""

        def run(self, governor: Governor, seconds: float, min_rtt_s: float = RTT_S) -> None:
            for _ in range(round(seconds / STEP_S)):
                self.now += STEP_S
                connections = governor.plan.connections
                state = LinkState(
                    peer="p", at=self.now, connections=connections, goodput_bytes_per_s=5e6,
                    rtt_s=RTT_S, min_rtt_s=RTT_S, queued_bytes=1 << 30,
                )  # fmt: skip
                governor.on_sample(state, self.now, busy=True)

    governor = Governor(4, 64)
    elsewhere = Elsewhere(60e6)
    for _ in range(10):
        elsewhere.run(governor, 4.0)
        assert governor.plan.connections <= 8


def test_a_short_link_and_an_idle_one_are_left_alone() -> None:
    pipe, governor = Pipe(60e6), Governor(4, 64)
    pipe.run(governor, 2.0, min_rtt_s=50e-6)
    assert governor.plan.pace_bytes_per_s is None
    idle = LinkState(peer="p", at=0.0, rtt_s=0.5, min_rtt_s=0.04)
    assert governor.on_sample(idle, 3.0, busy=False) == governor.plan


@pytest.mark.parametrize("pause_s", [0.5, 60.0])
def test_a_pause_does_not_pass_for_a_narrow_link(pause_s: float) -> None:
    pipe, governor = Pipe(60e6), Governor(4, 64)
    pipe.run(governor, 5.0)
    pace = governor.plan.pace_bytes_per_s
    pipe.now += pause_s
    quiet = LinkState(peer="p", at=pipe.now, connections=4, rtt_s=2 * RTT_S, min_rtt_s=RTT_S)
    governor.on_sample(quiet, pipe.now, busy=False)
    for step in range(4):  # the first samples after the pause still show the old round trip and no goodput
        governor.on_sample(quiet, pipe.now + step * STEP_S, busy=True)
    assert governor.plan.pace_bytes_per_s == pace


class Route:
    """A bottleneck behind a route of some length, seen only through what the kernel would say of one connection."""

    def __init__(self, rate: float, rtt_s: float, headroom: float = 1.0) -> None:
        self.rate, self.rtt_s, self.headroom = rate, rtt_s, headroom
        self.standing_s = 0.0  # of queue that is not ours
        self.queue, self.now, self.acked = 0.0, 0.0, 0
        self.smoothed_rtt_s = self.kernel_min_rtt_s = rtt_s  # the handshake's
        self.monitor, self.governor = LinkMonitor("p"), Governor(4, 64)
        self.lane = 0
        self.states: list[LinkState] = []

    def run(self, seconds: float) -> float:
        """Bytes per second that arrived meanwhile."""
        before, self.states = self.acked, []
        for _ in range(round(seconds / STEP_S)):
            pace = self.governor.plan.pace_bytes_per_s
            total = self.queue + min(self.headroom * (pace or 2 * self.rate), 2 * self.rate) * STEP_S
            delivered = min(total, self.rate * STEP_S)
            self.queue = min(total - delivered, self.rate * RTT_S * 5)
            self.now += STEP_S
            self.acked += int(delivered)
            state = self.monitor.sample({self.lane: self.info(delivered / STEP_S)}, self.now, queued_bytes=1 << 30)
            self.governor.on_sample(state, self.now, busy=True)
            self.states.append(state)
        return (self.acked - before) / seconds

    def info(self, rate: float) -> TcpInfo:
        rtt_s = self.rtt_s + self.standing_s + self.queue / self.rate
        self.smoothed_rtt_s += (rtt_s - self.smoothed_rtt_s) / 2
        self.kernel_min_rtt_s = min(self.kernel_min_rtt_s, rtt_s)
        return TcpInfo(
            rtt_s=self.smoothed_rtt_s, min_rtt_s=self.kernel_min_rtt_s, delivery_rate=rate, app_limited=False,
            bytes_delivered=self.acked, bytes_sent=self.acked, bytes_retransmitted=0,
            in_flight_bytes=int(self.queue + rate * self.rtt_s),
        )  # fmt: skip

    def reconnect(self) -> None:
        self.lane += 1
        self.queue, self.acked, self.smoothed_rtt_s, self.kernel_min_rtt_s = 0.0, 0, self.rtt_s, self.rtt_s


@pytest.mark.parametrize(("before_s", "after_s"), [(0.04, 0.1), (0.02, 0.15), (0.04, 0.05), (0.1, 0.04)])
def test_a_route_that_becomes_longer_or_shorter_is_used_as_before(before_s: float, after_s: float) -> None:
    route = Route(60e6, before_s)
    route.run(15.0)
    route.rtt_s = after_s
    route.run(MIN_RTT_MEMORY_S + 10.0)
    assert route.run(20.0) > 0.95 * 60e6
    assert route.states[-1].min_rtt_s == pytest.approx(after_s, rel=0.1)
    assert not any(state.inflated for state in route.states)


def test_connections_that_are_all_new_have_a_route_of_their_own() -> None:
    route = Route(60e6, 0.04)
    route.run(15.0)
    route.rtt_s = 0.1
    route.reconnect()
    route.run(1.0)
    assert route.states[0].min_rtt_s >= 0.1
    assert route.run(10.0) > 0.9 * 60e6


@pytest.mark.parametrize("rtt_s", [0.02, 0.04, 0.1])
@pytest.mark.parametrize("headroom", [1.0, 1.5])  # of loss-based connections: without losses they keep a queue
def test_a_queue_of_our_own_never_passes_for_the_route(rtt_s: float, headroom: float) -> None:
    route = Route(60e6, rtt_s, headroom)
    route.run(5.0)
    assert route.run(120.0) > 0.95 * 60e6
    assert max(state.min_rtt_s for state in route.states) < 1.15 * rtt_s
    assert headroom > 1.0 or max(state.rtt_inflation for state in route.states) < 2.0


def test_a_queue_of_others_counts_as_one_until_the_route_was_looked_at() -> None:
    route = Route(60e6, 0.04)
    route.run(15.0)
    route.standing_s = 0.05
    route.run(0.5 * MIN_RTT_MEMORY_S)
    assert route.states[-1].inflated
    assert route.states[-1].min_rtt_s == pytest.approx(0.04, rel=0.1)
    route.standing_s = 0.0
    route.run(3.0)
    assert not route.states[-1].inflated
    assert route.run(10.0) > 0.9 * 60e6


def test_a_short_queue_that_stands_is_drained_now_and_then() -> None:
    governor, paces = Governor(4, 64), []
    for step in range(3_000):  # nothing that we do makes it shorter
        now = step * 0.01
        state = LinkState(
            peer="p", at=now, connections=4, goodput_bytes_per_s=50e6, arriving_bytes_per_s=50e6, rtt_s=0.05,
            min_rtt_s=0.04, min_rtt_age_s=now, queued_bytes=1 << 30, in_flight_bytes=2_500_000,
        )  # fmt: skip
        paces.append(governor.on_sample(state, now, busy=True).pace_bytes_per_s)
    slow = sum(pace is not None and pace <= 25e6 for pace in paces)
    assert 3 * 10 < slow < 0.08 * len(paces)
    assert paces.count(None) > 0.9 * len(paces)  # and goes on as before


def test_whatever_it_is_at_it_can_rest_and_gets_back_to_steering() -> None:
    assert all(TRANSITIONS[phase][LinkEvent.IDLE] is GovernorPhase.RESTING for phase in GovernorPhase)
    for phase in set(GovernorPhase) - {GovernorPhase.STEERING}:
        assert GovernorPhase.STEERING in TRANSITIONS[phase].values()

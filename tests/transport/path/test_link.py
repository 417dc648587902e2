import math
import socket
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.path.link import (
    DRAIN_LIMIT_S,
    MIN_RTT_AGAIN,
    MIN_RTT_MEMORY_S,
    RETRANSMIT_LIMIT,
    LinkMonitor,
    LinkState,
    MinRtt,
    TcpInfo,
    parse_tcp_info,
    tcp_info,
    together,
)

CARRIED_BYTES = 20_000  # by a lane that is at work, in 10 ms


def info(**fields: object) -> TcpInfo:
    base = TcpInfo(
        rtt_s=0.05, min_rtt_s=0.04, delivery_rate=1e6, app_limited=False, bytes_delivered=0, bytes_sent=0,
        bytes_retransmitted=0, in_flight_bytes=0,
    )  # fmt: skip
    return replace(base, **fields)  # type: ignore[arg-type]


def test_goodput_and_retransmissions_are_differences_over_time() -> None:
    monitor = LinkMonitor("p")
    monitor.sample({0: info(), 1: info()}, 0.0)
    for i in range(1, 21):
        lanes = {
            k: info(bytes_delivered=i * 50_000, bytes_sent=i * 52_000, bytes_retransmitted=i * 1_000) for k in (0, 1)
        }
        state = monitor.sample(lanes, i * 0.1)
    assert state.goodput_bytes_per_s == pytest.approx(1e6)
    assert state.retransmit_ratio == pytest.approx(1 / 52, rel=0.05)
    assert state.available_bytes_per_s == pytest.approx(2e6, rel=0.05)
    assert state.utilisation == pytest.approx(0.5, rel=0.05)
    assert state.bytes_total == 2_000_000


def test_what_arrives_just_now_is_known_at_once() -> None:
    monitor, acked = LinkMonitor("p"), 0
    for i in range(100):
        acked += 100_000 if i < 95 else 20_000
        state = monitor.sample({0: info(bytes_delivered=acked, in_flight_bytes=7)}, i * 0.01)
    assert state.arriving_bytes_per_s == pytest.approx(2e6)
    assert state.goodput_bytes_per_s == pytest.approx(6e6)
    assert state.in_flight_bytes == 7


def test_a_lane_that_reconnects_counts_from_zero() -> None:
    monitor = LinkMonitor("p")
    monitor.sample({0: info(bytes_delivered=1000)}, 0.0)
    state = monitor.sample({7: info(bytes_delivered=500)}, 0.1)
    assert state.bytes_total == 1500


def test_an_idle_sender_does_not_make_the_link_look_narrow() -> None:
    monitor = LinkMonitor("p")
    monitor.sample({0: info(delivery_rate=5e6)}, 0.0)
    state = monitor.sample({0: info(delivery_rate=1e3, app_limited=True)}, 0.1)
    assert state.available_bytes_per_s == 5e6


def test_congestion_shows_in_round_trips_and_in_losses() -> None:
    state = LinkState(peer="p", at=0.0, rtt_s=0.05, min_rtt_s=0.04)
    assert not state.congested
    assert replace(state, rtt_s=0.1).congested
    assert replace(state, retransmit_ratio=0.03).congested
    assert not replace(state, rtt_s=0.003, min_rtt_s=0.0001).congested


def test_what_waits_for_its_budget_is_congestion_but_no_queue_of_the_line() -> None:
    state = LinkState(peer="p", at=0.0, rtt_s=0.05, min_rtt_s=0.04, available_bytes_per_s=1e6, budget_bytes_per_s=1e6)
    assert not replace(state, queued_bytes=1_000_000).congested
    waiting = replace(state, queued_bytes=5_000_000)
    assert (waiting.congested, waiting.inflated) == (True, False)
    assert not replace(waiting, available_bytes_per_s=0.0).congested, "while nothing is known of the link"


def test_estimates_and_their_error() -> None:
    state = LinkState(peer="p", at=0.0, available_bytes_per_s=1e6, queued_bytes=500_000, rtt_s=0.1)
    assert state.estimate_s(1_000_000) == pytest.approx(1.6)
    assert state.drain_s == pytest.approx(0.6)
    assert math.isinf(LinkState(peer="p", at=0.0).estimate_s(1))
    monitor = LinkMonitor("p")
    monitor.on_arrived(math.inf, 1.0)
    monitor.on_arrived(1.0, 2.0)
    monitor.on_arrived(3.0, 2.0)
    assert monitor.sample({}, 0.0).estimate_error == pytest.approx(0.5)


def test_the_kernel_is_understood() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        with far:
            near.sendall(b"x" * 100_000)
            received = 0
            while received < 100_000:
                received += len(far.recv(65536))
            got = tcp_info(near)
    assert got.bytes_sent - got.bytes_retransmitted == 100_000
    assert 0 < got.rtt_s < 1
    assert 0 < got.min_rtt_s <= got.rtt_s
    assert got.window_bytes >= 10_000
    assert got.reach_bytes_per_s > 1e6


def test_a_connection_reaches_what_its_window_and_its_pace_allow() -> None:
    assert info().reach_bytes_per_s == 0
    assert info(window_bytes=100_000, pacing_rate=9e9).reach_bytes_per_s == pytest.approx(2e6)
    assert info(window_bytes=100_000, pacing_rate=1e6).reach_bytes_per_s == 1e6
    assert info(rtt_s=0.0, window_bytes=100_000, pacing_rate=1e6).reach_bytes_per_s == 0


def test_an_older_kernel_tells_less() -> None:
    assert parse_tcp_info(b"\0" * 104).bytes_sent == 0


def test_a_drained_pipe_shows_how_long_the_route_has_become() -> None:
    monitor, congested = LinkMonitor("p"), []
    for i in range(3_000):
        rtt_s = 0.04 if i < 1_000 else 0.1  # the kernel keeps the old minimum for 300 s
        state = monitor.sample({0: info(rtt_s=rtt_s, min_rtt_s=0.04, bytes_delivered=i * CARRIED_BYTES)}, i * 0.01)
        congested.append(state.congested)
    assert congested.index(True) == 1_000
    assert congested.count(True) == pytest.approx(MIN_RTT_MEMORY_S / 0.01, abs=1)
    assert state.min_rtt_s == 0.1


def test_what_an_idle_link_said_last_is_not_what_it_is_like_now() -> None:
    monitor = LinkMonitor("p")
    for i in range(100):
        state = monitor.sample({0: info(rtt_s=0.2, bytes_delivered=i * CARRIED_BYTES)}, i * 0.01)
    assert state.congested
    monitor.sample({0: info(rtt_s=0.2, bytes_delivered=99 * CARRIED_BYTES)}, 3.0)
    state = monitor.sample({0: info(rtt_s=0.2, bytes_delivered=99 * CARRIED_BYTES)}, 100.0)
    assert (state.congested, state.min_rtt_s) == (False, 0.04)
    assert state.rtt_s == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("min_rtt_s", "carried_bytes", "congested"),
    [
        pytest.param(0.004, CARRIED_BYTES, True, id="a queue before the link"),
        pytest.param(0.0009, CARRIED_BYTES, False, id="a receiver on a LAN that waits for a core"),
        pytest.param(0.004, 20, False, id="pings that are acknowledged late"),
    ],
)
def test_round_trips_that_grow_are_a_queue_only_where_there_can_be_one(
    min_rtt_s: float, carried_bytes: int, congested: bool
) -> None:
    monitor = LinkMonitor("p")
    for i in range(200):
        lane = info(rtt_s=min_rtt_s if i < 100 else 0.04, min_rtt_s=min_rtt_s, bytes_delivered=i * carried_bytes)
        state = monitor.sample({0: lane}, i * 0.01)
    assert state.congested is congested
    assert state.min_rtt_s == min_rtt_s


def test_on_a_lan_the_smallest_round_trip_is_the_kernels() -> None:
    monitor = LinkMonitor("p")
    for i in range(3_000):
        state = monitor.sample({0: info(rtt_s=0.004, min_rtt_s=5e-5, bytes_delivered=i)}, i * 0.01)
    assert state.min_rtt_s == 5e-5


@given(st.lists(st.tuples(st.floats(0.001, 4.0), st.floats(0.01, 1.0)), min_size=1, max_size=60))
def test_the_smallest_round_trip_is_one_of_late(samples: list[tuple[float, float]]) -> None:
    smallest, now, seen = MinRtt(), 0.0, []
    for pause_s, rtt_s in samples:
        now += pause_s
        smallest.add(rtt_s, now)
        seen.append((now, rtt_s))
        late = [rtt for when, rtt in seen if when >= now - MIN_RTT_MEMORY_S]
        # A little below them all, at most: what is confirmed keeps its value.
        assert min(late) / MIN_RTT_AGAIN * (1 - 1e-9) <= smallest.seconds <= min(late)
        assert smallest.age_s(now) <= MIN_RTT_MEMORY_S


def test_a_budget_is_all_that_is_available() -> None:
    monitor = LinkMonitor("p")
    for i in range(200):
        lanes = {0: info(delivery_rate=5e8, bytes_delivered=i * 50_000)}
        state = monitor.sample(lanes, i * 0.01, queued_bytes=10_000_000, budget_bytes_per_s=5e6)
    assert (state.available_bytes_per_s, state.utilisation) == (5e6, pytest.approx(1.0))
    assert state.drain_s == pytest.approx(2.05)
    assert monitor.sample(lanes, 2.0).available_bytes_per_s == pytest.approx(5e8)  # once it is lifted


def test_a_sender_that_its_budget_holds_back_uses_its_budget() -> None:
    """It never fills the line, so nothing is known of that."""
    monitor, seen = LinkMonitor("p"), []
    for i in range(2_000):
        lanes = {0: info(app_limited=True, delivery_rate=5e6, bytes_delivered=i * 40_000)}
        seen.append(monitor.sample(lanes, i * 0.01, queued_bytes=10_000_000, budget_bytes_per_s=4e6))
    assert (seen[-1].available_bytes_per_s, seen[-1].utilisation) == (0.0, pytest.approx(1.0, rel=0.01))
    assert together(seen[-1:]).utilisation == seen[-1].utilisation
    assert monitor.sample(lanes, 20.0).utilisation == 0.0  # without a budget, too, nothing is known


rates = st.floats(1e3, 1e10)
peers = st.builds(
    LinkState,
    peer=st.just("p"),
    at=st.just(0.0),
    link=st.just("west"),
    available_bytes_per_s=st.just(0.0) | rates,
    goodput_bytes_per_s=rates,
    rtt_s=st.floats(0.001, 1.0),
    min_rtt_s=st.floats(0.001, 0.1),
    retransmit_ratio=st.floats(0.0, 1.0),
    queued_bytes=st.integers(0, 1 << 40),
)


@given(st.lists(peers, min_size=1, max_size=5), st.just(0.0) | rates)
def test_peers_of_one_link_share_its_budget_and_queue(states: list[LinkState], budget: float) -> None:
    states = [replace(state, budget_bytes_per_s=budget) for state in states]
    link = together(states)
    assert link.peer == "west"
    assert link.queued_bytes == sum(state.queued_bytes for state in states)
    assert not budget or link.available_bytes_per_s <= budget
    known = any(state.available_bytes_per_s for state in states)
    assert bool(link.available_bytes_per_s) == known
    if known:
        assert link.drain_s >= link.queued_bytes / (budget or link.available_bytes_per_s)
    assert link.inflated == any(state.inflated for state in states)
    waits = known and link.queued_bytes > DRAIN_LIMIT_S * link.available_bytes_per_s
    lossy = any(state.retransmit_ratio > RETRANSMIT_LIMIT for state in states)
    assert link.congested == (waits or lossy or link.inflated)


def test_a_steady_share_of_a_budget_reads_as_that_share_whenever_it_is_looked_at() -> None:
    """A transfer of 1.1 s at the budget's rate in every 2 s: 55 %."""
    monitor, delivered, seen = LinkMonitor("p"), 0, []
    for i in range(4000):
        busy = i % 200 < 110
        delivered += 40_000 * busy
        lanes = {0: info(app_limited=not busy, delivery_rate=5e6, bytes_delivered=delivered)}
        seen.append(monitor.sample(lanes, i * 0.01, budget_bytes_per_s=4e6).utilisation)
    assert 0.49 < min(seen[1500:]) <= max(seen[1500:]) < 0.61


def test_peers_behind_one_budget_use_it_together() -> None:
    peers = [
        LinkState(peer=name, at=0.0, available_bytes_per_s=4e6, budget_bytes_per_s=4e6, sent_bytes_per_s=1e6)
        for name in "abc"
    ]
    assert together(peers).utilisation == 0.75


def test_round_trips_are_those_of_the_peer_that_is_furthest_and_has_measured_some() -> None:
    unmeasured = LinkState(peer="a", at=0.0)
    near = LinkState(peer="b", at=0.0, rtt_s=0.002, min_rtt_s=0.00001)
    far = LinkState(peer="c", at=0.0, rtt_s=0.065, min_rtt_s=0.06)
    assert together([unmeasured, near, far]).rtt_s == 0.065
    assert together([unmeasured, near]).rtt_s == 0.002

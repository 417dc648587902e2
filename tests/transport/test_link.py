import math
import socket
from dataclasses import replace

import pytest

from transport.link import LinkMonitor, LinkState, TcpInfo, parse_tcp_info, tcp_info


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


def test_estimates_and_their_error() -> None:
    state = LinkState(peer="p", at=0.0, available_bytes_per_s=1e6, queued_bytes=500_000, rtt_s=0.1)
    assert state.estimate_s(1_000_000) == pytest.approx(1.6)
    assert state.drain_s == pytest.approx(0.6)
    assert replace(state, budget_bytes_per_s=0.5e6).estimate_s(0) == pytest.approx(1.1)
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
    assert got.bytes_sent == 100_000
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

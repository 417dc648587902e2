"""Measures what a link can carry now, from the kernel's own account of its connections (TCP_INFO).

sockets --tcp_info()--> {lane: TcpInfo} --LinkMonitor.sample(now)--> LinkState
"""

import math
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

_STRUCT: Final = struct.Struct("=8B24I4Q6I4Q2I2Q6I")  # linux/tcp.h, struct tcp_info, up to tcpi_rehash
# Position of each field in the tuple; an older kernel writes fewer bytes, the rest reads 0.
_FLAGS = 7
_SND_MSS, _UNACKED, _SACKED, _LOST, _RETRANS, _RTT, _CWND = 10, 12, 13, 14, 15, 23, 26
_PACING_RATE, _BYTES_ACKED, _MIN_RTT, _DELIVERY_RATE = 32, 34, 39, 42
_BYTES_SENT, _BYTES_RETRANS = 48, 49
_APP_LIMITED_BIT: Final = 1

SMOOTHING_S: Final = 0.3  # a change of the link shows within a second
MIN_WINDOW_S: Final = 0.1  # of the goodput; two round trips (without a queue) where they are longer
USE_WINDOW_S: Final = 10.0  # of the utilisation: several transfers, and the pauses between them
USE_STEP_S: Final = 0.25
INSTANT_S: Final = 0.025  # the window of what arrives just now: short, so that a link that narrows is met at once
ESTIMATES_KEPT: Final = 20
# As bbr has it: long enough for a busy link to be drained once or twice meanwhile, short enough for a route that changed.
MIN_RTT_MEMORY_S: Final = 10.0
MIN_RTT_AGAIN: Final = 1.1  # times the smallest: a round trip up to here says that it still holds
LAN_RTT_S: Final = 1e-3  # below it, round trips measure the scheduler and not the link
# Below it a link is idle: a lone message is acknowledged up to 40 ms late, which is no queue.
TRICKLE_BYTES_PER_S: Final = 128e3
RTT_INFLATION_LIMIT: Final = 2.0  # times min RTT: the queue before the bottleneck holds a round trip
RETRANSMIT_LIMIT: Final = 0.02
DRAIN_LIMIT_S: Final = 1.0  # from here on routing, too, sees pressure, unless it is told otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpInfo:
    """The fields of struct tcp_info that describe the link. Seconds and bytes."""

    rtt_s: float
    min_rtt_s: float
    delivery_rate: float
    app_limited: bool
    bytes_delivered: int  # acknowledged, holes of lost packets left out
    bytes_sent: int
    bytes_retransmitted: int
    in_flight_bytes: int  # not acknowledged, as far as not known to be lost
    window_bytes: int = 0  # that may be in flight: the congestion window
    pacing_rate: float = 0.0

    @property
    def reach_bytes_per_s(self) -> float:
        """The rate at which the connection may send now, with or without bytes to send; 0 = not known yet."""
        return min(self.window_bytes / self.rtt_s, self.pacing_rate) if self.rtt_s else 0.0


def tcp_info(sock: socket.socket) -> TcpInfo:
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
    return parse_tcp_info(raw)


def parse_tcp_info(raw: bytes) -> TcpInfo:
    f = _STRUCT.unpack(raw.ljust(_STRUCT.size, b"\0")[: _STRUCT.size])
    return TcpInfo(
        rtt_s=f[_RTT] / 1e6,
        min_rtt_s=0.0 if f[_MIN_RTT] == 0xFFFFFFFF else f[_MIN_RTT] / 1e6,
        delivery_rate=float(f[_DELIVERY_RATE]),
        app_limited=bool(f[_FLAGS] & _APP_LIMITED_BIT),
        bytes_delivered=f[_BYTES_ACKED] + f[_SACKED] * f[_SND_MSS],
        bytes_sent=f[_BYTES_SENT],
        bytes_retransmitted=f[_BYTES_RETRANS],
        in_flight_bytes=max(0, f[_UNACKED] - f[_SACKED] - f[_LOST] + f[_RETRANS]) * f[_SND_MSS],
        window_bytes=f[_CWND] * f[_SND_MSS],
        pacing_rate=float(f[_PACING_RATE]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """The egress link to one peer, smoothed over about SMOOTHING_S."""

    peer: str
    at: float  # seconds, on the sampler's clock
    link: str = ""  # behind which the peer lies, with others that share its budget
    connections: int = 0
    congestion_control: str = ""
    available_bytes_per_s: float = 0.0  # what a busy sender gets, the budget's worth at most; 0 = not known yet
    goodput_bytes_per_s: float = 0.0  # acknowledged by the peer's kernel
    sent_bytes_per_s: float = 0.0  # the same over USE_WINDOW_S, pauses included
    arriving_bytes_per_s: float = 0.0  # the same over the last instant: noisy
    in_flight_bytes: int = 0  # sent and not acknowledged, as far as not known to be lost
    budget_bytes_per_s: float = 0.0  # egress budget; 0 = none
    retransmit_ratio: float = 0.0
    rtt_s: float = 0.0
    min_rtt_s: float = 0.0  # of late: a route may become longer
    min_rtt_age_s: float = 0.0  # since a round trip was (about) that short
    estimate_error: float = 0.0  # mean of |predicted - actual| / actual, over recent transfers
    queued_bytes: int = 0  # ready to leave and not acknowledged yet
    bytes_total: int = 0
    retransmitted_bytes_total: int = 0

    @property
    def utilisation(self) -> float:
        """Share of what a sender gets that was used over USE_WINDOW_S, 0 to 1."""
        return used_share(self.sent_bytes_per_s, self.available_bytes_per_s, self.budget_bytes_per_s)

    @property
    def rtt_inflation(self) -> float:
        """RTT over the smallest recent one; 1 = no queue."""
        return max(1.0, self.rtt_s / self.min_rtt_s) if self.min_rtt_s else 1.0

    @property
    def queueing_delay_s(self) -> float:
        return max(0.0, self.rtt_s - self.min_rtt_s)

    @property
    def inflated(self) -> bool:
        """Whether round trips have grown by a queue, and not by noise."""
        # Within a host or a LAN, and by a few ms anywhere, what grows is the scheduler's delay: no queue is before a link.
        inflated = self.rtt_inflation > RTT_INFLATION_LIMIT and self.queueing_delay_s > 0.01
        return inflated and self.min_rtt_s >= LAN_RTT_S

    @property
    def congested(self) -> bool:
        """The early signal: the link loses or queues more than it should, in the network or, for its budget, before it."""
        waits = 0.0 < DRAIN_LIMIT_S * self.available_bytes_per_s < self.queued_bytes
        return waits or self.inflated or self.retransmit_ratio > RETRANSMIT_LIMIT

    @property
    def drain_s(self) -> float:
        """Predicted time until the bytes queued now have arrived; inf while nothing is known."""
        return self.estimate_s(0)

    def estimate_s(self, num_bytes: int) -> float:
        """Predicted time for `num_bytes` more, behind what is queued; inf while nothing is known."""
        rate = self.available_bytes_per_s
        return (self.queued_bytes + num_bytes) / rate + self.rtt_s if rate else math.inf


def used_share(sent_bytes_per_s: float, available_bytes_per_s: float, budget_bytes_per_s: float) -> float:
    """How much of the available bandwidth is used; of the budget, while that has kept a sender from measuring its line.

    0 where neither is known.
    """
    most = available_bytes_per_s or budget_bytes_per_s
    return min(1.0, sent_bytes_per_s / most) if most else 0.0


def together(states: Sequence[LinkState]) -> LinkState:
    """The link that several peers lie behind, one at least: they share its bandwidth and its budget."""
    goodput = sum(state.goodput_bytes_per_s for state in states)
    # A peer that gets half of the line measures half of it: together they are right. 0 stays 0: not known yet.
    line = max(state.available_bytes_per_s for state in states)
    budget = max(state.budget_bytes_per_s for state in states)
    # Of peers within a host or a LAN, and of those that have measured nothing yet, round trips say nothing of the line.
    worst = max(
        states, key=lambda state: (state.inflated, state.min_rtt_s >= LAN_RTT_S, state.rtt_inflation, state.rtt_s)
    )
    total = sum(state.bytes_total for state in states)
    return replace(
        worst,
        peer=worst.link,
        connections=sum(state.connections for state in states),
        available_bytes_per_s=_within(budget, max(line, goodput) if line else 0.0),
        goodput_bytes_per_s=goodput,
        sent_bytes_per_s=sum(state.sent_bytes_per_s for state in states),
        arriving_bytes_per_s=sum(state.arriving_bytes_per_s for state in states),
        in_flight_bytes=sum(state.in_flight_bytes for state in states),
        budget_bytes_per_s=budget,
        retransmit_ratio=max(state.retransmit_ratio for state in states),
        estimate_error=sum(state.estimate_error * state.bytes_total for state in states) / total if total else 0.0,
        queued_bytes=sum(state.queued_bytes for state in states),
        bytes_total=total,
        retransmitted_bytes_total=sum(state.retransmitted_bytes_total for state in states),
    )


class MinRtt:
    """The smallest round trip of the last MIN_RTT_MEMORY_S.

    It is the length of the route only if the pipe was empty once in that time: the governor sees to that.
    """

    def __init__(self) -> None:
        self._rising: deque[tuple[float, float]] = deque()  # (when, seconds): each smaller than all that came later

    @property
    def seconds(self) -> float:
        """0 while there was none."""
        return self._rising[0][1] if self._rising else 0.0

    def age_s(self, now: float) -> float:
        """Since a round trip was about that short."""
        return now - self._rising[0][0] if self._rising else 0.0

    def add(self, rtt_s: float, now: float) -> None:
        """Forgets values older than the memory, counted from this sample; without samples it forgets nothing."""
        while self._rising and self._rising[0][0] < now - MIN_RTT_MEMORY_S:
            self._rising.popleft()
        while self._rising and self._rising[-1][1] >= rtt_s:
            self._rising.pop()
        self._rising.append((now, rtt_s))
        if rtt_s <= MIN_RTT_AGAIN * self.seconds:
            self._rising[0] = (now, self.seconds)

    def clear(self) -> None:
        self._rising.clear()


class LinkMonitor:
    """Turns samples of all connections to a peer into a LinkState."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._last: dict[int, TcpInfo] = {}
        self._last_at: float | None = None
        self._acked: deque[tuple[float, int]] = deque()  # (when, bytes acknowledged so far)
        self._used: deque[tuple[float, int]] = deque()  # the same, USE_STEP_S apart
        self._state = LinkState(peer=peer, at=0.0)
        self._min_rtt = MinRtt()
        self._line_bytes_per_s = 0.0  # what it could carry without a budget
        self._estimate_error = 0.0
        self._estimates = 0

    def on_arrived(self, predicted_s: float, actual_s: float) -> None:
        """A transfer for which estimate_s() had said `predicted_s` took `actual_s`."""
        if not (0 < predicted_s < math.inf and actual_s > 0):
            return
        error = abs(predicted_s - actual_s) / actual_s
        self._estimates += 1
        self._estimate_error += (error - self._estimate_error) / min(self._estimates, ESTIMATES_KEPT)

    @property
    def state(self) -> LinkState:
        return self._state

    def sample(
        self,
        infos: Mapping[int, TcpInfo],
        now: float,
        *,
        queued_bytes: int = 0,
        budget_bytes_per_s: float = 0.0,
        congestion_control: str = "",
    ) -> LinkState:
        """`infos` by lane; a lane that reconnects takes a new key."""
        old = self._state
        elapsed = 0.0 if self._last_at is None else now - self._last_at
        acked = sum(info.bytes_delivered - self._before(lane, "bytes_delivered") for lane, info in infos.items())
        sent = sum(info.bytes_sent - self._before(lane, "bytes_sent") for lane, info in infos.items())
        resent = sum(
            info.bytes_retransmitted - self._before(lane, "bytes_retransmitted") for lane, info in infos.items()
        )
        keep = math.exp(-elapsed / SMOOTHING_S)
        goodput, arriving = self._rates(old.bytes_total + max(0, acked), now)
        carries = goodput > TRICKLE_BYTES_PER_S
        self._see_min_rtt(infos, now, carries)
        rtt_s = self._rtt_s(infos, keep, carries)
        self._last, self._last_at = dict(infos), now
        ratio = _blend(old.retransmit_ratio, resent / sent if sent else 0.0, keep)
        self._line_bytes_per_s = _available(infos, self._line_bytes_per_s, goodput, keep)
        self._state = LinkState(
            peer=self._peer,
            at=now,
            connections=len(infos),
            congestion_control=congestion_control,
            available_bytes_per_s=_within(budget_bytes_per_s, self._line_bytes_per_s),
            goodput_bytes_per_s=goodput,
            sent_bytes_per_s=self._sent(old.bytes_total + max(0, acked), now),
            arriving_bytes_per_s=arriving,
            in_flight_bytes=sum(info.in_flight_bytes for info in infos.values()),
            budget_bytes_per_s=budget_bytes_per_s,
            retransmit_ratio=ratio,
            rtt_s=rtt_s,
            min_rtt_s=self._min_rtt.seconds,
            min_rtt_age_s=self._min_rtt.age_s(now),
            estimate_error=self._estimate_error,
            queued_bytes=queued_bytes,
            bytes_total=old.bytes_total + max(0, acked),
            retransmitted_bytes_total=old.retransmitted_bytes_total + max(0, resent),
        )
        return self._state

    def _see_min_rtt(self, infos: Mapping[int, TcpInfo], now: float, carries: bool) -> None:
        """From what was acknowledged since the last sample.

        The kernel's own minimum is 300 s old at worst: it only counts when a connection is new, and on a LAN, where
        smoothed round trips are the scheduler's.
        """
        if not self._last.keys() & infos.keys() and infos:
            self._min_rtt.clear()  # whatever ended all connections may have changed the route
        for lane, info in infos.items():
            if not (info.rtt_s and info.min_rtt_s):
                continue
            if lane not in self._last or info.min_rtt_s < LAN_RTT_S:
                self._min_rtt.add(info.min_rtt_s, now)
            elif carries and info.bytes_delivered != self._last[lane].bytes_delivered:
                self._min_rtt.add(info.rtt_s, now)

    def _rtt_s(self, infos: Mapping[int, TcpInfo], keep: float, carries: bool) -> float:
        """The median of connections that carry something. When none does, no queue of ours is left."""
        working = [
            info.rtt_s
            for lane, info in infos.items()
            if info.rtt_s and (info.in_flight_bytes or info.bytes_delivered != self._before(lane, "bytes_delivered"))
        ]
        if working and carries:
            return sorted(working)[len(working) // 2]
        return _blend(self._state.rtt_s or self._min_rtt.seconds, self._min_rtt.seconds, keep)

    def _rates(self, acked: int, now: float) -> tuple[float, float]:
        """Bytes per second over the last window, and over the last instant, as far as there are samples."""
        self._acked.append((now, acked))
        window_s = max(MIN_WINDOW_S, 2 * self._min_rtt.seconds)
        while len(self._acked) > 2 and self._acked[1][0] <= now - window_s:
            self._acked.popleft()
        instant = next((sample for sample in reversed(self._acked) if sample[0] <= now - INSTANT_S), self._acked[0])
        goodput, arriving = (
            (acked - before) / (now - since) if now > since else 0.0 for since, before in (self._acked[0], instant)
        )
        return goodput, arriving

    def _sent(self, acked: int, now: float) -> float:
        """Bytes per second over the last USE_WINDOW_S, as far as there are samples."""
        if not self._used or now >= self._used[-1][0] + USE_STEP_S:
            self._used.append((now, acked))
        while len(self._used) > 2 and self._used[1][0] <= now - USE_WINDOW_S:
            self._used.popleft()
        since, before = self._used[0]
        return (acked - before) / (now - since) if now > since else 0.0

    def _before(self, lane: int, name: str) -> int:
        info = self._last.get(lane)
        return 0 if info is None else getattr(info, name)


def _blend(old: float, new: float, keep: float) -> float:
    return keep * old + (1 - keep) * new


def _within(budget: float, rate: float) -> float:
    return min(budget, rate) if budget else rate


def _available(infos: Mapping[int, TcpInfo], old: float, goodput: float, keep: float) -> float:
    """Connections that the network held back show what it can carry; those that had nothing to send show nothing."""
    limited = [info for info in infos.values() if not info.app_limited and info.delivery_rate]
    if limited and 2 * len(limited) >= len(infos):
        rate = sum(info.delivery_rate for info in limited) * len(infos) / len(limited)
        return _blend(old, max(rate, goodput), keep) if old else rate
    # A trickle over an idle link is not all that it can carry: without such a sample nothing is known.
    return max(old, goodput) if old else 0.0

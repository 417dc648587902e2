"""An egress link under simulation: fair sharing, a capacity that changes, and a record of what left when.

A capacity of 0 is a link that is down. Deciders are not told: what waits for it fails once nothing has got through for as long as
senders give a peer up after (`transport.send.options.ClientOptions.peer_timeout_s`), all of it together.
"""

from collections.abc import Callable
from math import exp, inf
from typing import Any, Final

import numpy as np

from planner.decisions.views import LinkView
from planner.model.profile import Floats
from planner.simulator.loop import Loop
from planner.simulator.nodes.node import SimulatedRequest
from planner.simulator.scenario import Wire
from planner.simulator.sharing import FairShare

# The routing sees utilisation as a link monitor would report it, smoothed over about this long.
MONITOR_S: Final = 1.0


class SimulatedEgress:
    """Transfers that share a link; `on_delivered(now, item)` is called as each arrives, `on_lost(now, items)` as they fail."""

    def __init__(
        self,
        wire: Wire,
        loop: Loop,
        on_delivered: Callable[[float, Any], None],
        on_lost: Callable[[float, list[Any]], None],
        peer_timeout_s: float,
    ) -> None:
        self.wire = wire
        self._loop = loop
        self._on_delivered = on_delivered
        self._on_lost = on_lost
        self._peer_timeout_s = peer_timeout_s
        self._silences = 0  # times in which nothing got through that began or ended: news of another one is no news
        self._silent = False
        self._rate = wire.capacity[0][1]
        self._scale = 1.0
        # What it last carried is what senders go on telling of a link that carries nothing now.
        self._last_rate = next((rate for _, rate in wire.capacity if rate > 0), 0.0)
        self._flows = FairShare(self._speed)
        self._busy_since: float | None = None
        self._busy: list[tuple[float, float, float]] = []  # (from, to, bytes per s)
        self._promised = 0.0
        self._utilisation = 0.0
        self._seen_at = 0.0
        for at, rate in wire.capacity[1:]:
            loop.at(at, self._change_rate, rate)

    def _speed(self, flows: int) -> float:
        return self._rate / flows

    def promise(self, job: SimulatedRequest) -> None:
        """A prefill that was routed here will send this job's KVCache."""
        self._promised += job.unsent

    def leaves(self, size: float) -> None:
        """So much of what was promised begins to leave."""
        self._promised = max(0.0, self._promised - size)

    def forget(self, job: SimulatedRequest) -> None:
        """All of it has arrived, or what is left of it will not be sent."""
        self._promised = max(0.0, self._promised - job.unsent)

    def send(self, now: float, size: float, item: Any, over_s: float = 0.0) -> None:
        """Starts a transfer of `size` bytes, which are computed in the next `over_s`: what waits for that is in no queue."""
        if self._busy_since is None:
            self._monitor(now)
            self._busy_since = now
        self._flows.add(now, size, item)
        if self._rate <= 0:
            self._fall_silent(now)
        self._expect(now)

    def up_again_at(self, now: float) -> float:
        """When something gets through: now, later, or never (infinite). Deciders cannot know."""
        if self._rate > 0:
            return now
        return next((at for at, rate in self.wire.capacity if at > now and rate > 0), inf)

    def view(self, now: float) -> LinkView:
        """What a monitor would tell the routing."""
        self._monitor(now)
        return LinkView(
            source=self.wire.source,
            destination=self.wire.destination,
            available_bytes_per_s=self._rate or self._last_rate,
            utilisation=self._utilisation,
            queued_bytes=self._flows.remaining(now) if self._busy_since is not None else 0.0,
            promised_bytes=self._promised,
            rtt_s=self.wire.rtt_s,
            min_rtt_s=self.wire.rtt_s,
        )

    def _monitor(self, now: float) -> None:
        fade = exp((self._seen_at - now) / MONITOR_S)
        self._utilisation = self._utilisation * fade + (0.0 if self._busy_since is None else 1 - fade)
        self._seen_at = now

    def _expect(self, now: float) -> None:
        end = self._flows.next_end(now)
        if end is not None and end != inf:
            self._loop.at(end, self._on_end, self._flows.version)

    def _on_end(self, now: float, version: int) -> None:
        if version != self._flows.version:
            return
        ended = self._flows.pop_ended(now)
        if not self._flows:
            self._monitor(now)
            self._close(now)
        self._expect(now)
        if (way_s := self.wire.rtt_s / 2) > 0:
            for item in ended:
                self._loop.at(now + way_s, self._on_delivered, item)
        else:
            for item in ended:
                self._on_delivered(now, item)

    def _fall_silent(self, now: float) -> None:
        if not self._silent:
            self._silent = True
            self._silences += 1
            self._loop.at(now + self._peer_timeout_s, self._on_silence, self._silences)

    def _on_silence(self, now: float, silence: int) -> None:
        """Nothing has got through for too long: its connections are gone, and with them what was on its way."""
        if silence != self._silences or not self._silent:
            return
        self._silent = False
        items = self._flows.pop_all(now)
        self._monitor(now)
        self._close(now)
        self._on_lost(now, items)

    @property
    def has_sent(self) -> bool:
        """Whether anything has begun to leave."""
        return bool(self._busy) or self._busy_since is not None

    @property
    def rate_bytes_per_s(self) -> float:
        """What it carries now."""
        return self._rate

    @property
    def unscaled_bytes_per_s(self) -> float:
        """What its wire carries, or carried last."""
        return (self._rate or self._last_rate) / self._scale

    def scale(self, now: float, factor: float) -> None:
        """From now on it carries so many times what its wire says."""
        before, self._scale = self._scale, factor
        self._last_rate *= factor / before
        self._set_rate(now, self._rate * factor / before)

    def _change_rate(self, now: float, rate: float) -> None:
        self._set_rate(now, rate * self._scale)

    def _set_rate(self, now: float, rate: float) -> None:
        if self._busy_since is not None:
            self._close(now)
            self._busy_since = now
        self._flows.change_speed(now, self._speed)  # brings V up to date at the old rate
        self._last_rate = self._rate or self._last_rate
        self._rate = rate
        if rate > 0:
            self._silent = False
        elif self._flows:
            self._fall_silent(now)
        self._expect(now)

    def _close(self, now: float) -> None:
        assert self._busy_since is not None
        self._busy.append((self._busy_since, now, self._rate))
        self._busy_since = None

    def sent_bytes_per_s(self, now: float, window_s: float) -> float:
        """What has left over the last `window_s`, or since the first transfer if that began later."""
        first = self._busy[0][0] if self._busy else self._busy_since
        since = now if first is None else max(first, now - window_s)
        if now <= since:
            return 0.0
        sent = 0.0 if self._busy_since is None else self._rate * (now - max(since, self._busy_since))
        for start, stop, rate in reversed(self._busy):
            if stop <= since:
                break
            sent += rate * (stop - max(since, start))
        return sent / (now - since)

    @property
    def sent_bytes(self) -> float:
        """All that has left so far, but for what leaves without a pause now."""
        return sum((stop - start) * rate for start, stop, rate in self._busy)

    def sent_per_window(self, window_s: float, horizon_s: float) -> Floats:
        """Bytes that left in each window of [0, horizon)."""
        windows = max(1, int(np.ceil(horizon_s / window_s)))
        edges = np.arange(windows + 1) * window_s
        if not self._busy:
            return np.zeros(windows)
        start, stop, rate = np.array(self._busy).T
        # Bytes sent before each edge: whole periods before it, and a part of the one it falls into.
        total = np.concatenate(([0.0], np.cumsum((stop - start) * rate)))
        at = np.searchsorted(start, edges, side="right")
        inside = np.maximum(at - 1, 0)
        part = np.clip(edges - start[inside], 0.0, stop[inside] - start[inside]) * rate[inside]
        before = np.where(at > 0, total[inside] + part, 0.0)
        return np.diff(before)

"""An egress link under simulation: fair sharing, a capacity that changes, and a record of what left when."""

from collections.abc import Callable
from math import exp
from typing import Any, Final

import numpy as np

from planner.decisions.views import LinkView
from planner.model.profile import Floats
from planner.simulator.loop import Loop
from planner.simulator.scenario import Wire
from planner.simulator.sharing import FairShare

# The routing sees utilisation as a link monitor would report it, smoothed over about this long.
MONITOR_S: Final = 1.0


class Egress:
    """Transfers that share a link; `on_delivered(now, item)` is called as each ends."""

    def __init__(self, wire: Wire, loop: Loop, on_delivered: Callable[[float, Any], None]) -> None:
        self.wire = wire
        self._loop = loop
        self._on_delivered = on_delivered
        self._rate = wire.capacity[0][1]
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

    def promise(self, size: float) -> None:
        """Bytes that a prefill which was routed here will send; negative once it has."""
        self._promised = max(0.0, self._promised + size)

    def send(self, now: float, size: float, item: Any) -> None:
        """Starts a transfer of `size` bytes."""
        if self._busy_since is None:
            self._monitor(now)
            self._busy_since = now
        self._flows.add(now, size, item)
        self._expect(now)

    def view(self, now: float) -> LinkView:
        """What a monitor would tell the routing."""
        self._monitor(now)
        return LinkView(
            source=self.wire.source,
            destination=self.wire.destination,
            up=self._rate > 0,
            available_bytes_per_s=self._rate,
            utilisation=self._utilisation,
            queued_bytes=self._flows.remaining(now) if self._busy_since is not None else 0.0,
            promised_bytes=self._promised,
        )

    def _monitor(self, now: float) -> None:
        fade = exp((self._seen_at - now) / MONITOR_S)
        self._utilisation = self._utilisation * fade + (0.0 if self._busy_since is None else 1 - fade)
        self._seen_at = now

    def _expect(self, now: float) -> None:
        end = self._flows.next_end(now)
        if end is not None and end != float("inf"):
            self._loop.at(end, self._on_end, self._flows.version)

    def _on_end(self, now: float, version: int) -> None:
        if version != self._flows.version:
            return
        ended = self._flows.pop_ended(now)
        if not self._flows:
            self._monitor(now)
            self._close(now)
        self._expect(now)
        for item in ended:
            self._on_delivered(now, item)

    def _change_rate(self, now: float, rate: float) -> None:
        if self._busy_since is not None:
            self._close(now)
            self._busy_since = now
        self._flows.change_speed(now, self._speed)  # brings V up to date at the old rate
        self._rate = rate
        self._expect(now)

    def _close(self, now: float) -> None:
        assert self._busy_since is not None
        self._busy.append((self._busy_since, now, self._rate))
        self._busy_since = None

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

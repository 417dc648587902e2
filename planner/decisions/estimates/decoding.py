"""Predicts and bounds the load of decode: requests joining and leaving, and the time of a token by the batch."""

from bisect import bisect_right, insort
from collections.abc import Iterable
from math import exp, inf
from typing import Final

PREFILL_SHARE_S: Final = 10.0  # how long ago "lately" is: some tens of prompts
FADE: Final = 0.05  # weight of a new sample, once there are enough
LONG: Final = 20  # samples that are enough: 1 / FADE
STEPS_BELIEVED: Final = 8
STEPS_FADE: Final = 1 / 64
LEAST_S: Final = 1e-6  # what took less was not measured: tokens that came all at once
OUTLIER: Final = 4.0  # times what was expected is all that one answer may say: its client may have been slow to read


class DecodeForecast:
    """How many requests decode will hold at a later time: Mooncake's system-level prediction (§4.3.4), made memoryless.

    Mooncake takes every request to decode for the same time. Answers differ in length, though: some that have run that
    long go on, and counting them out makes room that is not there. So a running request is assumed to end at the mean
    rate. One in prefill joins when its prefill is predicted to end.
    """

    def __init__(self, decode_s: float, samples: int = LONG) -> None:
        """`decode_s` is a guess that is worth as much as so many `samples`."""
        self.decode_s = decode_s
        self.lead_s = 0.0
        self.running = 0
        self._samples = samples
        self._joining: list[float] = []

    def on_accepted(self, decode_start: float, now: float) -> None:
        """A request will start to decode at about `decode_start`."""
        insort(self._joining, decode_start)
        self.lead_s += FADE * (decode_start - now - self.lead_s)

    def on_started(self, predicted: float) -> None:
        """The request that was predicted to start at `predicted` has started now."""
        self.on_dropped(predicted)
        self.running += 1

    def on_ended(self, started: float, now: float) -> None:
        """A request that started at `started` is done."""
        self.on_left()
        self.learn(now - started)

    def on_left(self) -> None:
        """A request that had started is gone, which alone says nothing about how long answers take."""
        self.running -= 1

    def on_back(self) -> None:
        """One that was gone decodes again: on another node, say, as its answer was cut."""
        self.running += 1

    def learn(self, seconds: float) -> None:
        """An answer has taken so long."""
        self._samples += 1
        self.decode_s += max(FADE, 1.0 / self._samples) * (max(LEAST_S, seconds) - self.decode_s)

    def on_dropped(self, predicted: float) -> None:
        """A request that was to start at `predicted` will not."""
        at = bisect_right(self._joining, predicted) - 1
        assert self._joining[at] == predicted
        del self._joining[at]

    def running_at(self, time: float, now: float) -> float:
        """Requests expected to decode at `time`; those overdue are taken to join now."""
        time = max(time, now)
        stays = exp((now - time) / self.decode_s) * self.running
        for start in self._joining[: bisect_right(self._joining, time)]:
            stays += exp((max(start, now) - time) / self.decode_s)
        return stays


class StepEstimate:
    """Seconds from token to token by the number of requests that decode together: a + b·n, least squares that forget."""

    def __init__(self) -> None:
        self.samples = 0
        self._mean_n = self._mean_s = self._var = self._cov = 0.0
        self.line = (0.0, 0.0)  # (a, b); neither is negative: another request never makes tokens come sooner

    def observe(self, running: float, seconds: float) -> None:
        """An answer took `seconds` per token on average while, on average, so many were `running`, itself included."""
        if seconds < LEAST_S:
            return
        if self.samples >= STEPS_BELIEVED:
            seconds = min(seconds, OUTLIER * self.at(running))
        self.samples += 1
        weight = max(STEPS_FADE, 1.0 / self.samples)
        off_n, off_s = running - self._mean_n, seconds - self._mean_s
        self._mean_n += weight * off_n
        self._mean_s += weight * off_s
        self._var = (1.0 - weight) * (self._var + weight * off_n * off_n)
        self._cov = (1.0 - weight) * (self._cov + weight * off_n * off_s)
        self.line = self._fit()

    def _fit(self) -> tuple[float, float]:
        slope = max(0.0, self._cov / self._var) if self._var > 1e-9 else 0.0
        if slope * self._mean_n > self._mean_s:
            return 0.0, self._mean_s / self._mean_n
        return self._mean_s - slope * self._mean_n, slope

    def at(self, running: float) -> float:
        constant, slope = self.line
        return constant + slope * running

    def within(self, tbt_s: float, slots: float) -> float:
        """The most requests at once that keep `tbt_s`, of `slots`; never none, since nothing better could be learned then."""
        if self.samples < STEPS_BELIEVED or self.at(slots) <= tbt_s:
            return slots
        constant, slope = self.line
        return max(1.0, (tbt_s - constant) / slope) if slope else 1.0


class PrefillShare:
    """The part of its time that a decode node has lately spent on prompts: what its streams had to wait for."""

    def __init__(self) -> None:
        self._share = 0.0
        self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """A prompt of so much computing was given to it."""
        self._share, self._at = self.at(now) + seconds / PREFILL_SHARE_S, now

    def at(self, now: float) -> float:
        if not self._share:
            return 0.0
        return self._share * exp((self._at - now) / PREFILL_SHARE_S)


class LearnedSteps:
    """The step times of every decode node, as answers have shown them."""

    def __init__(self) -> None:
        self._nodes: dict[str, StepEstimate] = {}
        self.lines: dict[str, tuple[float, float]] = {}  # of those that are believed: seconds are a + b · requests

    def observe(self, node_id: str, running: float, seconds: float) -> None:
        if (steps := self._nodes.get(node_id)) is None:
            steps = self._nodes[node_id] = StepEstimate()
        steps.observe(running, seconds)
        if steps.samples >= STEPS_BELIEVED:
            self.lines[node_id] = steps.line

    def step_s(self, node_id: str, running: float) -> float:
        """Predicted seconds from token to token of one of `running` requests there; 0 while too little has been seen."""
        constant, slope = self.lines.get(node_id, (0.0, 0.0))
        return constant + slope * running

    def forget(self, node_id: str) -> None:
        """The node is gone, or is not what it was."""
        self._nodes.pop(node_id, None)
        self.lines.pop(node_id, None)

    def room(self, node_ids: Iterable[str], slots: float, tbt_s: float = inf) -> float:
        """Requests that these nodes, of so many slots each, decode within `tbt_s`, all together."""
        return sum(
            steps.within(tbt_s, slots) if tbt_s < inf and (steps := self._nodes.get(name)) is not None else slots
            for name in node_ids
        )

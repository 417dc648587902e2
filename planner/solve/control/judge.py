"""Whether another threshold or split would do better, asked of samples so that chance does not answer.

The best cut of some samples looks better on them than it is: with a few hundred of them Λ seems to rise by percents where nothing
is to be gained. So a gain counts only as far as it exceeds what its own estimate may be off by, which the samples tell, too: the
jackknife takes it anew with each eighth of them left out (Efron and Stein, 1981).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.model.profile import Floats
from planner.solve.search import Bottleneck, Capacity, Loads, cuts_of, rate_at, solve, stage_rates, threshold_of

PARTS: Final = 8
SURE: Final = 2.5  # standard errors
MOST_GAIN: Final = 1000.0  # relative: over nothing at all, any gain is without bound, and a plan must be a number
WORTH_A_SHARE: Final = 0.01  # of Λ: each of a few hundred samples is an atom, too, and none worth splitting


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdChoice:
    """A threshold, and the share of the requests of exactly that length that stays local."""

    threshold_tokens: float
    tie_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judge:
    """The model on all samples, and on all but each of some parts; no choice is further than a factor `step` from the current."""

    whole: Loads
    without: tuple[Loads, ...]
    capacity: Capacity
    current: ThresholdChoice
    step: float

    @classmethod
    def of(
        cls,
        samples: Floats,
        loads: Callable[[Floats], Loads],
        capacity: Capacity,
        current: ThresholdChoice,
        step: float,
    ) -> "Judge":
        """`loads` says what samples ask of the stages. Raises InputError for no samples, or senseless ones."""
        part = np.arange(len(samples)) % PARTS
        return cls(
            whole=loads(samples),
            without=tuple(loads(samples[part != out]) for out in range(PARTS)),
            capacity=capacity,
            current=current,
            step=step,
        )

    def best(self, num_prefill: int) -> ThresholdChoice:
        """The best choice within a step of the current one."""
        found = solve(self.whole, self.capacity, num_prefill=num_prefill, worth_a_share=WORTH_A_SHARE)
        return self._within_a_step(threshold_of(self.whole, found), found.share or 1.0)

    def gain_of_threshold(self, num_prefill: int) -> float:
        """What the best threshold surely gains over the current one, relative; it may be negative."""
        return self._sure_gain((num_prefill, self.best(num_prefill)), (num_prefill, self.current))

    def gain_of_split(self, num_prefill: int, other: int) -> float:
        """What another split surely gains, each with its own best threshold, relative; it may be negative."""
        return self._sure_gain((other, self.best(other)), (num_prefill, self.best(num_prefill)))

    def binding(self, num_prefill: int) -> Bottleneck:
        """The stage that limits Λ as things are."""
        cut, share = _cut_of(self.whole, self.current)
        limits = stage_rates(self.whole, self.capacity, num_prefill, cut, share)
        return min(limits, key=lambda stage: limits[stage])

    def _sure_gain(self, other: tuple[int, ThresholdChoice], now: tuple[int, ThresholdChoice]) -> float:
        gain = self._gain(self.whole, other, now)
        if gain >= MOST_GAIN:
            return gain
        each = np.array([self._gain(loads, other, now) for loads in self.without])
        error = float(np.sqrt((PARTS - 1) * np.var(each))) if (each < MOST_GAIN).all() else 0.0
        return gain - SURE * error

    def _gain(self, loads: Loads, other: tuple[int, ThresholdChoice], now: tuple[int, ThresholdChoice]) -> float:
        rate, rate_now = (
            rate_at(loads, self.capacity, split, *_cut_of(loads, choice)) for split, choice in (other, now)
        )
        if rate == rate_now:
            return 0.0
        return min(rate / rate_now - 1, MOST_GAIN) if rate_now else MOST_GAIN

    def _within_a_step(self, threshold_tokens: float, tie_share: float) -> ThresholdChoice:
        lengths = self.whole.lengths.tokens
        # From where a step begins to change anything: beyond the lengths there are, all thresholds are one.
        start = float(np.clip(self.current.threshold_tokens, lengths[0], lengths[-1]))
        # And to the next length it may go in any case: nothing changes on the way there.
        shorter, longer = lengths[lengths < start], lengths[lengths > start]
        low = min(start / self.step, float(shorter[-1]) if len(shorter) else start)
        high = max(start * self.step, float(longer[0]) if len(longer) else start)
        if low <= threshold_tokens <= high or (not threshold_tokens and low < lengths[0]):
            return ThresholdChoice(threshold_tokens=threshold_tokens, tie_share=tie_share)
        return ThresholdChoice(threshold_tokens=low if threshold_tokens < low else high)


def _cut_of(loads: Loads, choice: ThresholdChoice) -> tuple[int, float]:
    """The cut that a choice makes, and the share of the next length that it keeps."""
    cut = int(cuts_of(loads, np.array([choice.threshold_tokens]))[0])
    if choice.tie_share < 1 and cut and loads.lengths.tokens[cut - 1] == choice.threshold_tokens:
        return cut - 1, choice.tie_share
    return cut, 0.0

"""The long timescale (§3.4.3): when to move the threshold, and when to convert a node between prefill and decode.

One call per tick, `on_tick(observation) -> effects`; the caller carries the effects out, or shows them, and says when it has
begun a conversion. What it fears is oscillation, so a change must be worth it, comes in small steps, and is followed by a pause:

    warm-up      samples of a fresh start (or of the time just after a conversion) are not believed
    hysteresis   a plan must be better than the current one by a margin, beyond what chance may have done (`judge.py`)
    step         at most one node changes role per decision, and the threshold by at most a factor
    cool-down    no further conversion until the last one has shown its effect; a threshold may move with every decision

It plans on *offered* load: what completes is capped by the very shortage it should see.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np

from planner.model.profile import Floats, KvSize, PrefillCurve
from planner.model.traffic import Lengths
from planner.solve.control.judge import Judge, ThresholdChoice
from planner.solve.goals import ServiceTime, SplitRule
from planner.solve.search import Capacity, Loads, build_loads

LEAST_REQUESTS: Final = 2  # of one nothing can be left out, to see what chance does


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Limits of the controller. Times in seconds; `hysteresis` is the least gain in Λ that a conversion must promise.

    `threshold_step` is the greatest factor by which one decision moves the threshold.
    """

    rule: SplitRule = SplitRule.MODEL
    tick_s: float = 60.0
    warmup_s: float = 120.0
    window_s: float = 900.0
    min_requests: int = 200
    hysteresis: float = 0.05
    threshold_step: float = 2.0
    cooldown_s: float = 600.0
    imbalance_high: float = 1.3
    min_prefill: int = 1
    min_decode: int = 1

    def __post_init__(self) -> None:
        if self.tick_s <= 0 or self.hysteresis < 0 or self.imbalance_high <= 1:
            raise ValueError(f"{self}: need tick_s > 0, hysteresis >= 0, imbalance_high > 1")
        if self.min_requests < LEAST_REQUESTS:
            raise ValueError(f"min_requests={self.min_requests}: must be at least {LEAST_REQUESTS}")
        if self.threshold_step <= 1:
            raise ValueError(f"threshold_step={self.threshold_step}: must be above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The observations since the last tick. Lengths are uncached prompt tokens of all requests *offered*, refused ones
    too; answers are those that have ended since, so there may be more or fewer of them.

    Loads are requests in a stage over what it can hold at once, one sample per node. What is None is as the model says.
    """

    at_s: float
    uncached_tokens: Sequence[float]
    output_tokens: Sequence[float]
    num_prefill: int
    num_decode: int
    threshold_tokens: float
    tie_share: float = 1.0
    prefill_loads: Sequence[float]
    decode_loads: Sequence[float]
    num_prfaas: int | None = None
    egress_bytes_per_s: float | None = None
    converting: int = 0


class RoleMove(StrEnum):
    """A role conversion."""

    TO_PREFILL = "to_prefill"
    TO_DECODE = "to_decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """The decision: None means no opinion. `diagnosis` says why, for logs and reports. A threshold comes with its tie
    share.

    `judged` is false while there is too little to judge by. `gain` is also that of what is not worth it.
    """

    threshold_tokens: float | None = None
    tie_share: float | None = None
    convert: RoleMove | None = None
    diagnosis: str = ""
    gain: float = 0.0
    judged: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareModel:
    """The hardware as the controller knows it."""

    local: PrefillCurve
    remote: PrefillCurve
    kv: KvSize
    num_prfaas: int
    egress_bytes_per_s: float
    decode_s_per_token: float  # T_decode / BS_max


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    uncached: Floats
    outputs: int
    output_mean: float
    imbalance: float


@dataclass(slots=True)
class Controller:
    """The state behind `on_tick`: recent samples, and when something last changed."""

    config: ControllerConfig
    model: HardwareModel
    started_s: float = 0.0
    _window: deque[_Sample] = field(default_factory=deque)
    _settled_s: float = 0.0
    _converted_s: float = float("-inf")

    def __post_init__(self) -> None:
        self._settled_s = self.started_s + self.config.warmup_s

    def on_tick(self, seen: Observation) -> Effects:
        """The decision for this tick."""
        if seen.converting:
            # The samples of a pool that changes are of no pool at all.
            self._settled_s = seen.at_s + self.config.warmup_s
            return Effects(diagnosis="a conversion is under way", judged=False)
        self._remember(seen)
        if seen.at_s < self._settled_s:
            return Effects(diagnosis=f"warming up for {self._settled_s - seen.at_s:.0f} s more", judged=False)
        if sum(len(sample.uncached) for sample in self._window) < self.config.min_requests:
            return Effects(diagnosis="too few requests to judge by", judged=False)
        if not any(sample.outputs for sample in self._window):
            return Effects(diagnosis="no answer has ended yet", judged=False)
        by_rule = {SplitRule.MODEL: self._by_model, SplitRule.IMBALANCE: self._by_imbalance}
        return by_rule[self.config.rule](seen)

    def converted(self, at_s: float) -> None:
        """A conversion has begun; the cool-down counts from now."""
        self._converted_s = at_s

    def _remember(self, seen: Observation) -> None:
        if len(seen.uncached_tokens) or len(seen.output_tokens):
            outputs = len(seen.output_tokens)
            self._window.append(
                _Sample(
                    seen.at_s,
                    np.asarray(seen.uncached_tokens, dtype=np.float64),
                    outputs,
                    float(np.mean(seen.output_tokens)) if outputs else 0.0,
                    imbalance_factor(seen.prefill_loads, seen.decode_loads),
                )
            )
        while self._window and self._window[0].at_s < seen.at_s - self.config.window_s:
            self._window.popleft()

    def _cooling(self, now: float) -> bool:
        return now < self._converted_s + self.config.cooldown_s

    def _by_model(self, seen: Observation) -> Effects:
        judge, here = self._judge(seen), seen.num_prefill
        moves = {
            RoleMove.TO_PREFILL: here + 1 if seen.num_decode > self.config.min_decode else None,
            RoleMove.TO_DECODE: here - 1 if here > self.config.min_prefill else None,
        }
        gains = {move: judge.gain_of_split(here, count) for move, count in moves.items() if count is not None}
        move = max(gains, key=lambda each: gains[each], default=None)
        if move is not None and gains[move] >= self.config.hysteresis and not self._cooling(seen.at_s):
            split = moves[move]
            assert split is not None
            best = judge.best(split)
            return Effects(
                threshold_tokens=best.threshold_tokens,
                tie_share=best.tie_share,
                convert=move,
                gain=gains[move],
                diagnosis=f"{move}: Λ +{gains[move]:.1%}, {judge.binding(here)} binds",
            )
        gain = judge.gain_of_threshold(here)
        # A threshold costs nothing to move, so a fifth of the margin will do.
        if gain < self.config.hysteresis / 5:
            return Effects(gain=gain, diagnosis=f"no threshold is surely better by {self.config.hysteresis / 5:.1%}")
        best = judge.best(here)
        return Effects(
            threshold_tokens=best.threshold_tokens,
            tie_share=best.tie_share,
            gain=gain,
            diagnosis=f"threshold: Λ +{gain:.1%}, {judge.binding(here)} binds",
        )

    def _judge(self, seen: Observation) -> Judge:
        model = self.model
        uncached = np.concatenate([sample.uncached for sample in self._window])
        output = float(np.average([s.output_mean for s in self._window], weights=[s.outputs for s in self._window]))
        egress = model.egress_bytes_per_s if seen.egress_bytes_per_s is None else seen.egress_bytes_per_s

        def loads(samples: Floats) -> Loads:
            return build_loads(
                Lengths.of(samples), model.local, model.remote, model.kv,
                egress_bytes_per_s=egress, service=ServiceTime.EXACT,
            )  # fmt: skip

        capacity = Capacity(
            num_prfaas=model.num_prfaas if seen.num_prfaas is None else seen.num_prfaas,
            num_pd=seen.num_prefill + seen.num_decode,
            egress_bytes_per_s=egress,
            decode_s=model.decode_s_per_token * output,
        )
        current = ThresholdChoice(threshold_tokens=seen.threshold_tokens, tie_share=seen.tie_share)
        return Judge.of(uncached, loads, capacity, current, self.config.threshold_step)

    def _by_imbalance(self, seen: Observation) -> Effects:
        factor = float(np.mean([sample.imbalance for sample in self._window]))
        high = self.config.imbalance_high
        if self._cooling(seen.at_s):
            return Effects(diagnosis=f"imbalance {factor:.2f}, cooling down")
        if factor > high and seen.num_prefill > self.config.min_prefill:
            return Effects(convert=RoleMove.TO_DECODE, gain=factor - 1, diagnosis=f"imbalance {factor:.2f}")
        if factor < 1 / high and seen.num_decode > self.config.min_decode:
            return Effects(convert=RoleMove.TO_PREFILL, gain=1 / factor - 1, diagnosis=f"imbalance {factor:.2f}")
        return Effects(diagnosis=f"imbalance {factor:.2f}")


def imbalance_factor(prefill_loads: Sequence[float], decode_loads: Sequence[float]) -> float:
    """f_im = (mean decode load + 1) / (mean prefill load + 1), each mean without its top and bottom tenth (§5.1)."""
    return (_trimmed_mean(decode_loads) + 1) / (_trimmed_mean(prefill_loads) + 1)


def _trimmed_mean(samples: Sequence[float]) -> float:
    if not len(samples):
        return 0.0
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    cut = len(ordered) // 10
    return float(ordered[cut : len(ordered) - cut].mean())

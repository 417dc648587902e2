"""Curves through measured points: seconds of a prefill by length, and of a decode step by requests at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Final

import numpy as np

from planner.errors import InputError
from planner.model.profile import DecodeProfile, PrefillCurve
from planner.profiles.results.run import ALONE, BenchmarkRun

SAME_LENGTH: Final = 1.05  # prompts whose lengths differ by less count as equally long
NOISE: Final = 0.02  # relative; what is not repeated may be off by so much at least
OUTLIERS: Final = 3  # samples from which a median is taken
DEVIATIONS: Final = 1.4826  # a standard deviation in median deviations, of normal errors
SHORTER_STEPS: Final = 0.1  # by how much a fuller batch may be faster
DIGITS: Final = 6  # of an error; what is smaller comes of rounding
ESTIMATED: Final = 0.3  # what aiconfigurator's times are off by, with its overhead added


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLength:
    """What prefills of one length took. `spread` is relative, None where there was one time only."""

    tokens: float
    seconds: float
    spread: float | None
    source: str

    @property
    def noise(self) -> float:
        return max(NOISE, self.spread or 0.0)


def prefill_curve(runs: Sequence[BenchmarkRun]) -> PrefillCurve:
    """T_prefill from runs in which no prompt waited for another. Raises InputError that says which are missing."""
    alone = [run for run in runs if run.is_alone]
    if not alone:
        least = min(run.running for run in runs)
        met = "came at any time, so that some met others" if least <= ALONE else "were mostly waiting"
        raise InputError(
            f"prefill: every run had several requests at once ({least:.3g} at least), and its first tokens {met}; add runs with "
            "one at a time (--max-concurrency 1), of several prompt lengths"
        )
    points = timed_lengths(alone)
    if len(points) < 2:
        raise InputError(
            f"prefill: all prompts that came one at a time have about {points[0].tokens:,.0f} tokens, which is one point and no "
            "curve; add runs with shorter and with longer prompts"
        )
    risen = _rising(points)
    spreads = [point.spread for point in points if point.spread is not None]
    is_estimate = any(run.is_estimate for run in alone)
    error = ESTIMATED if is_estimate else round(max(spreads), DIGITS) if spreads else None
    return PrefillCurve(
        points=tuple((point.tokens, point.seconds) for point in risen),
        valid_tokens=(risen[0].tokens, risen[-1].tokens),
        provenance=f"{_kind(is_estimate)}: time to the first token, one request at a time; {_sources(alone)}",
        error=error,
    )  # fmt: skip


def timed_lengths(runs: Iterable[BenchmarkRun]) -> list[TimedLength]:
    """What was timed, by length: single prefills where they are known, means of runs elsewhere."""
    timed: list[tuple[float, float, float | None, int, str]] = []
    for run in runs:
        if run.prefills:
            timed += [(tokens, seconds, None, 1, run.source) for tokens, seconds in run.prefills]
        else:
            timed.append((run.prompt_tokens, run.ttft_s, run.ttft_spread_s, run.requests, run.source))
    timed.sort(key=lambda each: each[0])
    groups: list[list[tuple[float, float, float | None, int, str]]] = []
    for each in timed:
        if groups and each[0] <= groups[-1][0][0] * SAME_LENGTH:
            groups[-1].append(each)
        else:
            groups.append([each])
    return [_point(group) for group in groups]


def _point(group: Sequence[tuple[float, float, float | None, int, str]]) -> TimedLength:
    """Medians where there are several times, and their spread, too: the first prompt after a start often takes longer."""
    weights = np.array([each[3] for each in group], dtype=np.float64)
    tokens = float(np.average([each[0] for each in group], weights=weights))
    times = np.array([each[1] for each in group])
    seconds = float(np.median(times)) if len(group) >= OUTLIERS else float(np.average(times, weights=weights))
    within = [each[2] ** 2 for each in group if each[2] is not None]
    between = DEVIATIONS * float(np.median(np.abs(times - seconds))) if len(group) >= OUTLIERS else float(times.std())
    variance = (sum(within) / len(within) if within else 0.0) + between**2
    known = bool(within) or len(group) > 1
    return TimedLength(
        tokens=tokens, seconds=seconds, spread=sqrt(variance) / seconds if known else None, source=group[0][4]
    )  # fmt: skip


def _rising(points: Sequence[TimedLength]) -> list[TimedLength]:
    """Falls within the noise are levelled. Raises InputError for one beyond it."""
    risen: list[list[TimedLength]] = []
    for point in points:
        group = [point]
        while risen and _seconds(risen[-1]) > _seconds(group):
            before = risen.pop()
            if _seconds(before) * (1 - before[-1].noise) > _seconds(group) * (1 + group[0].noise):
                longer, shorter = group[0], before[-1]
                raise InputError(
                    f"prefill: {longer.seconds:.3g} s for {longer.tokens:,.0f} tokens ({longer.source}), but "
                    f"{shorter.seconds:.3g} s for {shorter.tokens:,.0f} ({shorter.source}): more tokens never take less time. "
                    "Were prompts cached, or the first ones a warm-up? Measure again, or leave that run out"
                )
            group = before + group
        risen.append(group)
    return [
        TimedLength(tokens=each.tokens, seconds=_seconds(group), spread=each.spread, source=each.source)
        for group in risen
        for each in group
    ]


def _seconds(group: Sequence[TimedLength]) -> float:
    return sum(each.seconds for each in group) / len(group)


def decode_profile(runs: Sequence[BenchmarkRun], max_running: int | None = None) -> DecodeProfile | None:
    """T_decode by batch, by least squares in relative error; None where no run had answers. Raises InputError."""
    timed = [run for run in runs if run.step_s]
    if not timed:
        return None
    batch = np.array([max(1.0, run.decoding) for run in timed])
    steps = np.array([run.step_s or 0.0 for run in timed])
    step_s, step_s_per_request = _line(batch, steps)
    off = np.abs((step_s + step_s_per_request * batch) / steps - 1)
    _check_steps(timed, batch, steps)
    largest = max(1, ceil(float(batch.max()) - 0.5))
    is_estimate = any(run.is_estimate for run in timed)
    kept = "the largest batch measured" if max_running is None else f"--max-running; {largest} at once were measured"
    contexts = [run.context_tokens for run in timed]
    measured = (
        f"time between tokens at {batch.min():.0f} to {batch.max():.0f} requests at once with {min(contexts):,.0f} to "
        f"{max(contexts):,.0f} tokens each"
    )
    return DecodeProfile(
        max_running=max_running or largest,
        step_s=step_s,
        step_s_per_request=step_s_per_request,
        provenance=f"{_kind(is_estimate)}: {measured}; max_running is {kept}; {_sources(timed)}",
        error=ESTIMATED if is_estimate else round(float(off.max()), DIGITS) if len(timed) > 2 else None,
    )  # fmt: skip


def _line(batch: np.ndarray, steps: np.ndarray) -> tuple[float, float]:
    """Neither part is negative: a batch without requests takes no less than nothing, and each adds something or nothing."""
    if np.ptp(batch) < 0.5:
        return float(steps.mean()), 0.0
    design = np.stack([np.ones_like(batch), batch], axis=1) / steps[:, None]
    (step_s, slope), *_ = np.linalg.lstsq(design, np.ones_like(steps), rcond=None)
    if slope < 0:
        return float(1 / np.mean(1 / steps)), 0.0
    if step_s < 0:
        ratio = batch / steps
        return 0.0, float(ratio.sum() / (ratio**2).sum())
    return float(step_s), float(slope)


def _check_steps(runs: Sequence[BenchmarkRun], batch: np.ndarray, steps: np.ndarray) -> None:
    few, many = int(batch.argmin()), int(batch.argmax())
    if batch[many] > 2 * batch[few] and steps[many] < steps[few] * (1 - SHORTER_STEPS):
        raise InputError(
            f"decode: {steps[many]:.3g} s between tokens with {batch[many]:.0f} requests at once ({runs[many].source}), but "
            f"{steps[few]:.3g} s with {batch[few]:.0f} ({runs[few].source}): fuller batches take no less time. Are these runs of "
            "one system?"
        )


def _kind(is_estimate: bool) -> str:
    return "unverified" if is_estimate else "measured"


def _sources(runs: Sequence[BenchmarkRun]) -> str:
    """Which tool's files, and how much they hold."""
    tools = dict.fromkeys(run.tool for run in runs)
    files = list(dict.fromkeys(run.source.split(", ")[0] for run in runs))
    shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    requests = sum(run.requests for run in runs)
    counted = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    return f"{', '.join(tools)}: {counted} of {requests} requests in {shown}"

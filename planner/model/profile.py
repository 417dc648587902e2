"""One model on some hardware: the time of a prefill, the size of its KVCache, the time of decode steps.

A profile is a JSON file. Every group of numbers carries a `provenance`, whose first word says what they are worth:

    quoted     printed in a paper or a data sheet
    measured   timed on the hardware named
    derived    arithmetic on quoted or measured numbers
    fitted     chosen such that the model meets numbers it is later compared with
    unverified general knowledge, not checked

An `error` says how far they may be off, as a share of them; without one it is not known.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from planner.errors import InputError, OutsideProfile
from planner.model.memory import ERROR, MemoryProfile
from planner.model.reading import GBPS, LEAST, SECONDS, TOKENS, Range, named, placed, read_json
from transport.control.settings import build, mapped, require

Floats: TypeAlias = npt.NDArray[np.float64]
Profiled = TypeVar("Profiled")

BYTES: Final = Range(0, 1e15, "bytes")
MAX_RUNNING: Final = 1_000_000
FALL: Final = 1e-9  # of a curve, by rounding
PROVENANCES: Final = ("quoted", "measured", "derived", "fitted", "unverified")


def provenance_kind(text: str) -> str:
    """First word of a provenance. Raises InputError unless it is one of PROVENANCES."""
    kind = text.split(":")[0].strip()
    if kind not in PROVENANCES:
        raise InputError(f"provenance={text!r}: must start with one of {', '.join(PROVENANCES)}, then a colon")
    return kind


def _check_error(error: float | None) -> None:
    if error is not None:
        ERROR.of("error", error)


@dataclass(frozen=True, slots=True)
class ProfileWindow:
    """Sliding-window layers together: they keep the last `window_tokens` tokens only."""

    window_tokens: int
    bytes_per_token: float

    def __post_init__(self) -> None:
        TOKENS.of("window_tokens", self.window_tokens)
        BYTES.of("bytes_per_token", self.bytes_per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """S_kv(n) in bytes: what grows with length (full attention), what stops growing (windows), what never did."""

    fixed_bytes: float = 0.0
    bytes_per_token: float = 0.0
    windows: tuple[ProfileWindow, ...] = ()
    provenance: str = "unverified: not stated"
    error: float | None = None

    def __post_init__(self) -> None:
        _check_error(self.error)
        BYTES.of("fixed_bytes", self.fixed_bytes)
        BYTES.of("bytes_per_token", self.bytes_per_token)

    def __call__(self, num_tokens: float) -> float:
        unbounded = self.fixed_bytes + self.bytes_per_token * num_tokens
        if not self.windows:
            return unbounded
        return unbounded + sum(w.bytes_per_token * min(num_tokens, w.window_tokens) for w in self.windows)

    def beyond(self, num_tokens: Floats, held_tokens: Floats | None) -> Floats:
        """What is sent of prompts with `num_tokens` after tokens whose attention is there: states and windows whatever is."""
        if held_tokens is None:
            return self.of(num_tokens)
        return self.of(held_tokens + num_tokens) - self.bytes_per_token * held_tokens

    def of(self, num_tokens: Floats) -> Floats:
        """The same for many lengths at once."""
        total = self.fixed_bytes + self.bytes_per_token * num_tokens
        for w in self.windows:
            total = total + w.bytes_per_token * np.minimum(num_tokens, w.window_tokens)
        return np.asarray(total, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCurve:
    """T_prefill(l) in seconds for l uncached tokens on one instance.

    Either `coefficients` (a0, a1, a2) of a0 + a1·l + a2·l², or `points` joined by straight lines. What is measured is
    corrected by `overhead_s + scale · raw(l)`: simulated profiles miss a fixed cost per request.
    `valid_tokens` is the range that the profile is valid for.
    """

    coefficients: tuple[float, float, float] | None = None
    points: tuple[tuple[float, float], ...] = ()
    valid_tokens: tuple[float, float]
    overhead_s: float = 0.0
    scale: float = 1.0
    provenance: str = "unverified: not stated"
    error: float | None = None

    def __post_init__(self) -> None:
        _check_error(self.error)
        if (self.coefficients is None) == (len(self.points) < 2):
            raise InputError("prefill: give either coefficients or at least two points")
        if any(after[0] <= before[0] for before, after in pairwise(self.points)):
            raise InputError("prefill points: must be sorted by length, each length once")
        low, high = self.valid_tokens
        if not 0 <= low <= high <= TOKENS.high:
            raise InputError(f"valid_tokens=[{low:g}, {high:g}]: need 0 <= least <= largest <= {TOKENS.high:g}")
        for at in self._lowest_at():
            if not (LEAST if at else 0) <= self(at) <= SECONDS.high:
                raise InputError(f"prefill: {self(at):g} s for {at:g} tokens: must be above 0 and finite")
        for fewer, more in pairwise(sorted(self._lowest_at())):
            if self(more) < self(fewer) * (1 - FALL):
                raise InputError(
                    f"prefill: {self(more):g} s for {more:g} tokens, {self(fewer):g} s for {fewer:g}: more tokens never "
                    "take less time; measure again, or leave that point out"
                )

    def _lowest_at(self) -> list[float]:
        """The lengths at which the curve may be least, or most."""
        low, high = self.valid_tokens
        ends = [low, high, *(length for length, _ in self.points)]
        if self.coefficients is None or not self.coefficients[2]:
            return ends
        vertex = -self.coefficients[1] / (2 * self.coefficients[2])
        return [*ends, vertex] if low < vertex < high else ends

    def __call__(self, num_tokens: float) -> float:
        if self.coefficients is not None:
            a0, a1, a2 = self.coefficients
            raw = a0 + num_tokens * (a1 + num_tokens * a2)
        else:
            raw = self._between_points(num_tokens)
        return self.overhead_s + self.scale * raw

    def _between_points(self, num_tokens: float) -> float:
        at = min(max(bisect_right(self.points, (num_tokens, math.inf)), 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[at - 1], self.points[at]
        return y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0)

    def of(self, num_tokens: Floats) -> Floats:
        """T_prefill of many lengths at once."""
        if self.coefficients is not None:
            a0, a1, a2 = self.coefficients
            raw = a0 + num_tokens * (a1 + num_tokens * a2)
        else:
            x, y = np.array(self.points, dtype=np.float64).T
            at = np.clip(np.searchsorted(x, num_tokens, side="right"), 1, len(x) - 1)
            slope = (y[at] - y[at - 1]) / (x[at] - x[at - 1])
            raw = y[at - 1] + slope * (num_tokens - x[at - 1])
        return np.asarray(self.overhead_s + self.scale * raw, dtype=np.float64)

    def after(self, num_tokens: Floats, cached_tokens: Floats | None) -> Floats:
        """T_prefill of many lengths at once, each after tokens that are cached."""
        if cached_tokens is None:
            return self.of(num_tokens)
        return self.of(cached_tokens + num_tokens) - self.of(cached_tokens) + self(0)

    def with_prefix(self, num_tokens: int, cached_tokens: int) -> float:
        """T_prefill for tokens `[cached, num)`: they attend to the prefix too, so this is T(num) − T(cached) + T(0)."""
        if not cached_tokens:
            return self(num_tokens)
        return self(num_tokens) - self(cached_tokens) + self(0)

    def scaled(self, factor: float) -> "PrefillCurve":
        """The same hardware, `factor` times as slow."""
        return replace(self, overhead_s=self.overhead_s * factor, scale=self.scale * factor)

    def check(self, lengths: Floats, name: str, extrapolate: bool = False) -> None:
        """Raises OutsideProfile when a length lies outside `valid_tokens` and `extrapolate` is not given."""
        low, high = self.valid_tokens
        if extrapolate or not len(lengths):
            return
        for bad in (float(lengths.min()), float(lengths.max())):
            if not low <= bad <= high:
                raise OutsideProfile(
                    f"{name}: length {bad:.0f} tokens lies outside the profiled {low:.0f}–{high:.0f}; "
                    f"cut the workload to {low:.0f}–{high:.0f} tokens, profile that length, or pass --extrapolate"
                )


def fit_quadratic(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Least-squares a0 + a1·l + a2·l² through `points` of (tokens, seconds); at least three are needed."""
    if (found := len({length for length, _ in points})) < 3:
        raise InputError(f"points={found}: a quadratic needs at least 3, of different lengths")
    x, y = np.array(points, dtype=np.float64).T
    # In thousands of tokens the normal equations are well conditioned.
    a2, a1, a0 = np.polyfit(x / 1000, y, 2)
    return float(a0), float(a1) / 1e3, float(a2) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A curve corrected by measured points, and what the correction leaves unexplained (seconds, per point)."""

    curve: PrefillCurve
    residuals_s: tuple[float, ...]


def calibrate(curve: PrefillCurve, points: Sequence[tuple[float, float]]) -> Calibration:
    """Offset and scale of `curve` by least squares on 2 or more measured (tokens, seconds), in relative error.

    Relative, because a miss of 0.3 s matters for 1K tokens and not for 128K. A negative offset or scale is refused:
    more tokens never take less time.
    """
    if len(points) < 2:
        raise InputError(f"points={len(points)}: calibration needs at least 2")
    x, y = np.array(points, dtype=np.float64).T
    bare = replace(curve, overhead_s=0.0, scale=1.0)
    raw = bare.of(x)
    design = np.stack([np.ones_like(raw), raw], axis=1) / y[:, None]
    (overhead_s, scale), *_ = np.linalg.lstsq(design, np.ones_like(y), rcond=None)
    if scale <= 0 or overhead_s < 0:
        raise InputError(
            f"calibration gives overhead_s={overhead_s:.3f}, scale={scale:.3f}: both must be positive; check the points"
        )
    low, high = min(curve.valid_tokens[0], x.min()), max(curve.valid_tokens[1], x.max())
    fitted = replace(
        bare, overhead_s=float(overhead_s), scale=float(scale), valid_tokens=(float(low), float(high)),
        provenance=f"fitted: calibrated on {len(points)} points; was {curve.provenance}", error=None,
    )  # fmt: skip
    return Calibration(curve=fitted, residuals_s=tuple(float(r) for r in fitted.of(x) - y))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProfile:
    """Decode on one instance: `max_running` (BS_max) requests at once, one step (T_decode) for all of them.

    A step with b requests takes `step_s + step_s_per_request · b`; the paper's T_decode is that at b = BS_max.
    """

    max_running: int
    step_s: float
    step_s_per_request: float = 0.0
    provenance: str = "unverified: not stated"
    error: float | None = None

    def __post_init__(self) -> None:
        _check_error(self.error)
        if not 1 <= self.max_running <= MAX_RUNNING:
            raise InputError(f"max_running={self.max_running}: must be at least 1, and at most {MAX_RUNNING}")
        steps = (self.step_s, self.step_s_per_request)
        if not min(steps) >= 0 or not LEAST <= self.full_step_s <= SECONDS.high:
            raise InputError(f"step_s={self.step_s}, step_s_per_request={self.step_s_per_request}: must be positive")

    def scaled(self, factor: float) -> "DecodeProfile":
        """Steps that take `factor` times as long."""
        return replace(self, step_s=self.step_s * factor, step_s_per_request=self.step_s_per_request * factor)

    def within(self, tbt_s: float) -> "DecodeProfile | None":
        """With the largest batch whose steps take `tbt_s` at most; None where even one request's do not."""
        if self.full_step_s <= tbt_s:
            return self
        if self.at(1) > tbt_s:
            return None
        return replace(self, max_running=max(1, int((tbt_s - self.step_s) / self.step_s_per_request + 1e-9)))

    @property
    def full_step_s(self) -> float:
        """T_decode: the step time of a full batch."""
        return self.step_s + self.step_s_per_request * self.max_running

    def at(self, running: int) -> float:
        """Step time with `running` requests."""
        return self.step_s + self.step_s_per_request * running


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """All there is to know about one model: S_kv, and per kind of hardware T_prefill, decode and memory."""

    model: str
    kv: KvSize | None
    prefill: Mapping[str, PrefillCurve] = field(default_factory=dict)
    decode: Mapping[str, DecodeProfile] = field(default_factory=dict)
    memory: Mapping[str, MemoryProfile] = field(default_factory=dict)
    kv_throughput_gbps: tuple[tuple[float, float], ...] = ()
    kv_throughput_hardware: str = ""
    notes: str = ""

    def prefill_on(self, hardware: str) -> PrefillCurve:
        """Raises InputError naming the hardware that is profiled."""
        return _lookup(self.prefill, hardware, f"{self.model}: prefill")

    def decode_on(self, hardware: str) -> DecodeProfile:
        """Raises InputError naming the hardware that is profiled."""
        return _lookup(self.decode, hardware, f"{self.model}: decode")

    def kv_size(self) -> KvSize:
        """S_kv. Raises InputError when only Φ_kv is known of the model."""
        if self.kv is None:
            raise InputError(f"{self.model}: the profile has no kv section (S_kv); only its KV throughput is known")
        return self.kv

    def kv_throughput(self, num_tokens: float) -> float:
        """Quoted Φ_kv in Gbit/s at a length of the table. Raises InputError elsewhere."""
        table = dict(self.kv_throughput_gbps)
        if num_tokens not in table:
            known = ", ".join(f"{length:.0f}" for length in table)
            raise InputError(f"{self.model}: Φ_kv is known at {known or 'no length'} tokens, not at {num_tokens:.0f}")
        return table[num_tokens]


def _lookup(table: Mapping[str, Profiled], hardware: str, what: str) -> Profiled:
    if hardware not in table:
        raise InputError(f"{what} is not profiled on {hardware!r}; known: {', '.join(table) or 'nothing'}")
    return table[hardware]


def load_profile(path: Path) -> ModelProfile:
    """Reads a profile file. Raises InputError with the file, the key and its value in it."""
    with named(f"profile {path}"):
        return parse_profile(read_json(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """A prefill curve's keys: either `coefficients`, or `points` through which a quadratic or straight lines are drawn."""

    coefficients: tuple[float, ...] | None = None
    points: tuple[tuple[float, ...], ...] = ()
    interpolation: str = "linear"
    valid_tokens: tuple[float, ...] | None = None
    overhead_s: float = 0.0
    scale: float = 1.0
    provenance: str = "unverified: not stated"
    error: float | None = None

    def curve(self) -> PrefillCurve:
        """Raises SettingsError or InputError."""
        if self.interpolation not in ("linear", "quadratic"):
            raise InputError(f"interpolation={self.interpolation!r}: must be linear or quadratic")
        points = _pairs("points", self.points, SECONDS)
        coefficients = self.coefficients
        if coefficients is None and self.interpolation == "quadratic":
            coefficients = fit_quadratic(points)
        require(
            coefficients is None or len(coefficients) == 3, "coefficients", coefficients, "three numbers: a0, a1, a2"
        )
        require(coefficients is not None or bool(points), "points", points, "given where there are no coefficients")
        valid = self.valid_tokens
        require(valid is not None or bool(points), "valid_tokens", valid, "the least and the largest length")
        if valid is None:
            valid = (points[0][0], points[-1][0])
        require(len(valid) == 2, "valid_tokens", valid, "the least and the largest length")
        return PrefillCurve(
            coefficients=None if coefficients is None else (coefficients[0], coefficients[1], coefficients[2]),
            points=points if coefficients is None else (),
            valid_tokens=(valid[0], valid[1]),
            overhead_s=self.overhead_s,
            scale=self.scale,
            provenance=self.provenance,
            error=self.error,
        )


def _pairs(name: str, rows: Sequence[Sequence[float]], allowed: Range) -> tuple[tuple[float, float], ...]:
    for at, row in enumerate(rows):
        require(len(row) == 2, f"{name}[{at}]", row, "a length and its value")
        TOKENS.of(f"{name}[{at}][0]", row[0])
        allowed.of(f"{name}[{at}][1]", row[1])
    return tuple((row[0], row[1]) for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quoted:
    """`kv_throughput_gbps`: what a paper prints of it."""

    hardware: str = ""
    points: tuple[tuple[float, ...], ...] = ()
    provenance: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """A profile's keys."""

    schema: int
    model: str
    notes: str = ""
    kv: KvSize | None = None
    prefill: Mapping[str, _Curve] = field(default_factory=dict)
    decode: Mapping[str, DecodeProfile] = field(default_factory=dict)
    memory: Mapping[str, MemoryProfile] = field(default_factory=dict)
    kv_throughput_gbps: _Quoted = _Quoted()

    def __post_init__(self) -> None:
        if self.schema != 1:
            raise InputError(f"schema={self.schema}: must be 1")


def parse_profile(table: Mapping[str, Any]) -> ModelProfile:
    """A profile from its JSON form. Raises InputError naming the key and its value."""
    with mapped(InputError):
        document = build(_Document, table, "")
        prefill = {}
        for hardware, curve in document.prefill.items():
            with placed(f"[prefill.{hardware}]"):
                prefill[hardware] = curve.curve()
        for part in [document.kv, *prefill.values(), *document.decode.values(), *document.memory.values()]:
            if part is not None:
                provenance_kind(part.provenance)
        quoted = document.kv_throughput_gbps
        return ModelProfile(
            model=document.model, kv=document.kv, prefill=prefill, decode=document.decode, memory=document.memory,
            kv_throughput_gbps=_pairs("kv_throughput_gbps.points", quoted.points, GBPS),
            kv_throughput_hardware=quoted.hardware, notes=document.notes,
        )  # fmt: skip


def dump_curve(curve: PrefillCurve) -> dict[str, Any]:
    """The JSON form of a curve."""
    shape: dict[str, Any] = (
        {"points": [list(p) for p in curve.points]}
        if curve.coefficients is None
        else {"coefficients": list(curve.coefficients)}
    )
    return (
        shape
        | {
            "valid_tokens": list(curve.valid_tokens),
            "overhead_s": curve.overhead_s,
            "scale": curve.scale,
            "provenance": curve.provenance,
        }
        | ({} if curve.error is None else {"error": curve.error})
    )

"""Decides from numbers whether coding pays, and again as the link and the machine change.

A codec trades processor time for bytes. It pays only where a transfer waits for the link, and only as far as cores are
idle:

    plain bytes per second = min(link / ratio, idle cores × speed of the codec on one core)

against `link` for plain bytes. Ratio and speed are measured on the bytes sent; until then priors stand in for them.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from transport.coding.codec import Codec, CodedPart
from transport.coding.cores import usable_cores
from transport.coding.elements import Run

# The link becomes the bottleneck when the ready bytes need the first of these, and stops being it below the second.
BACKLOG_ENTER_S: Final = 0.2
BACKLOG_LEAVE_S: Final = 0.02
SWITCH_GAIN: Final = 1.15  # another codec has to be this much faster than the present one
DWELL_S: Final = 0.5  # between two changes of mind
SMOOTHING_BYTES: Final = 16 << 20  # over which ratio and speed are averaged
LEAST_CORES: Final = 0.02  # that coding may always take: a line for which so little is enough is worth more than it
FORGET_S: Final = 30.0  # older measurements of a codec say nothing about present bytes


class Compression(StrEnum):
    OFF = "off"
    AUTO = "auto"  # while it makes transfers faster
    ZSTD = "zstd"  # always


class Quantisation(StrEnum):
    OFF = "off"
    INT8 = "int8"
    FP8 = "fp8"


class QuantiseWhen(StrEnum):
    BOTTLENECK = "bottleneck"  # while it makes transfers faster: tokens then depend on the load of the link
    ALWAYS = "always"


_QUANTISED: Final = {Quantisation.OFF: Codec.RAW, Quantisation.INT8: Codec.INT8, Quantisation.FP8: Codec.FP8}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingPolicy:
    """The codings allowed for one kind of range; by default none."""

    compression: Compression = Compression.OFF
    quantisation: Quantisation = Quantisation.OFF
    quantise_when: QuantiseWhen = QuantiseWhen.BOTTLENECK

    @property
    def off(self) -> bool:
        return self.compression is Compression.OFF and self.quantisation is Quantisation.OFF

    def exact(self) -> "CodingPolicy":
        """The same without quantisation."""
        return replace(self, quantisation=Quantisation.OFF)

    def choices(self, taken: Codec) -> tuple[Codec, ...]:
        """Codecs to choose from, the one for an idle link first. `taken` is what the receiver decodes."""
        zstd = Codec.ZSTD & taken if self.compression is not Compression.OFF else Codec.RAW
        quantised = _QUANTISED[self.quantisation] & taken
        least = zstd if self.compression is Compression.ZSTD else Codec.RAW
        if self.quantise_when is QuantiseWhen.ALWAYS:
            least |= quantised
        every = [q | z for q in {Codec.RAW, quantised} for z in {Codec.RAW, zstd}]
        more = sorted(codec for codec in every if codec & least == least and codec != least)
        return (least, *more)


@dataclass(frozen=True, slots=True)
class RangeFormat:
    """A range's values (`runs` are as long as the range), its allowed codings, and the account that pays for coding."""

    label: str
    runs: tuple[Run, ...]
    policy: CodingPolicy


FormatOf = Callable[[int], RangeFormat]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a codec does to bytes: coded size ÷ plain size, and plain bytes per second of one core."""

    ratio: float
    bytes_per_cpu_s: float


PLAIN: Final = Estimate(1.0, math.inf)
# Before anything was measured: bfloat16 KVCache, the slower of the machines seen.
PRIORS: Final[Mapping[Codec, Estimate]] = {
    Codec.RAW: PLAIN,
    Codec.ZSTD: Estimate(0.75, 0.15e9),
    Codec.INT8: Estimate(0.52, 0.5e9),
    Codec.FP8: Estimate(0.52, 0.2e9),
    Codec.INT8 | Codec.ZSTD: Estimate(0.48, 0.4e9),
    Codec.FP8 | Codec.ZSTD: Estimate(0.42, 0.17e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The present state of link and machine."""

    link_bytes_per_s: float  # what the link carries, or may carry; 0 = not known
    backlog_bytes: int  # plain bytes that are ready to leave
    idle_cores: float  # those that coding itself uses count as idle

    @property
    def backlog_s(self) -> float:
        return self.backlog_bytes / self.link_bytes_per_s if self.link_bytes_per_s else 0.0


def plain_bytes_per_s(estimate: Estimate, situation: Situation) -> float:
    """How fast plain bytes get over the link with a codec."""
    over_link = situation.link_bytes_per_s / estimate.ratio if estimate.ratio else math.inf
    return min(over_link, situation.idle_cores * estimate.bytes_per_cpu_s)


def choose(
    choices: tuple[Codec, ...], present: Codec, estimates: Mapping[Codec, Estimate], situation: Situation
) -> Codec:
    """The codec to use next. `choices` are those of CodingPolicy.choices(); changes have hysteresis."""
    idle = choices[0]
    present = present if present in choices else idle
    enough = BACKLOG_LEAVE_S if present != idle else BACKLOG_ENTER_S
    if situation.backlog_s < enough:
        return idle
    speed = {codec: plain_bytes_per_s(estimates[codec], situation) for codec in choices}
    best = max(choices, key=lambda codec: speed[codec])
    return best if speed[best] > SWITCH_GAIN * speed[present] else present


@dataclass(slots=True)
class _Measured:
    ratio: float = 0.0
    bytes_per_cpu_s: float = 0.0
    at: float = -math.inf

    def add(self, plain_bytes: int, coded_bytes: int, cpu_s: float, now: float) -> None:
        ratio, speed = coded_bytes / plain_bytes, plain_bytes / max(cpu_s, 1e-9)
        keep = math.exp(-plain_bytes / SMOOTHING_BYTES) if now - self.at < FORGET_S else 0.0
        self.ratio = keep * self.ratio + (1 - keep) * ratio
        self.bytes_per_cpu_s = keep * self.bytes_per_cpu_s + (1 - keep) * speed
        self.at = now


@dataclass(slots=True)
class CodecUse:
    """The bytes that went through one codec, on one side of a link."""

    plain_bytes: int = 0
    coded_bytes: int = 0
    cpu_s: float = 0.0

    def add(self, other: "CodecUse") -> None:
        self.plain_bytes += other.plain_bytes
        self.coded_bytes += other.coded_bytes
        self.cpu_s += other.cpu_s


@dataclass(slots=True)
class CodecAccounts:
    """Uses by (label of the ranges, codec), and what went wrong by reason. Not locked."""

    uses: dict[tuple[str, str], CodecUse] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)

    @property
    def cpu_s(self) -> float:
        return sum(use.cpu_s for use in list(self.uses.values()))

    def add(self, shares: Iterable[CodedPart], cpu_s: float) -> None:
        """Processor time is shared out by plain bytes."""
        shares = list(shares)
        total = sum(share.plain_bytes for share in shares) or 1
        for share in shares:
            use = self.uses.setdefault((share.label, share.codec.label), CodecUse())
            use.add(CodecUse(share.plain_bytes, share.coded_bytes, cpu_s * share.plain_bytes / total))

    def merge(self, other: "CodecAccounts") -> None:
        for key, use in other.uses.items():
            self.uses.setdefault(key, CodecUse()).add(use)
        self.events.update(other.events)


class Chooser:
    """The codec that ranges of each label use now. Not locked; time comes in as `now`, seconds."""

    def __init__(self) -> None:
        self.accounts = CodecAccounts()
        self._present: dict[str, Codec] = {}
        self._choices: dict[str, tuple[Codec, ...]] = {}
        self._measured: dict[tuple[str, Codec], _Measured] = {}
        self._changed_at = -math.inf

    @property
    def active(self) -> bool:
        """Whether there was ever anything to choose."""
        return bool(self._choices)

    def codec_of(self, label: str, choices: tuple[Codec, ...]) -> Codec:
        """The codec for bytes of `label` now."""
        if self._choices.get(label) != choices:
            self._choices[label] = choices
            self._present[label] = choices[0]
        return self._present[label]

    def is_as_idle(self, asked: Mapping[str, Codec]) -> bool:
        """Whether all is coded as on an idle link."""
        return all(label in self._choices and codec == self._choices[label][0] for label, codec in asked.items())

    def on_coded(self, asked: Mapping[str, Codec], shares: Iterable[CodedPart], cpu_s: float, now: float) -> None:
        """A chunk was coded in `cpu_s`; `asked` says with what. Where that gained nothing, the share says RAW."""
        shares = list(shares)
        self.accounts.add(shares, cpu_s)
        total = sum(share.plain_bytes for share in shares) or 1
        for label, codec in asked.items():
            mine = [share for share in shares if share.label == label]
            plain = sum(share.plain_bytes for share in mine)
            if codec and plain:
                measured = self._measured.setdefault((label, codec), _Measured())
                measured.add(plain, sum(share.coded_bytes for share in mine), cpu_s * plain / total, now)

    def on_situation(self, situation: Situation, now: float) -> None:
        """Decides again, unless the last change is too recent."""
        if now - self._changed_at < DWELL_S:
            return
        for label, choices in self._choices.items():
            estimates = {codec: self._estimate(label, codec, now) for codec in choices}
            codec = choose(choices, self._present[label], estimates, situation)
            if codec != self._present[label]:
                self._present[label] = codec
                self._changed_at = now
                self.accounts.events[f"switched_to_{codec.label}"] += 1

    def _estimate(self, label: str, codec: Codec, now: float) -> Estimate:
        measured = self._measured.get((label, codec))
        if measured is None or now - measured.at > FORGET_S:
            return PRIORS[codec]
        return Estimate(measured.ratio, measured.bytes_per_cpu_s)


class CpuMeter:
    """Idle cores of this machine, from /proc/stat: averages between two calls that are `INTERVAL_S` apart or more."""

    INTERVAL_S: Final = 0.25

    def __init__(
        self, path: Path = Path("/proc/stat"), *, ticks_per_s: int | None = None, usable: float | None = None
    ) -> None:
        self._path = path
        self._ticks_per_s = ticks_per_s or os.sysconf("SC_CLK_TCK")
        self._usable = usable_cores() if usable is None else usable
        self._last: tuple[float, float] | None = None  # (when, core seconds that were idle or ours so far)
        self._idle_cores = 0.0

    def idle_cores(self, now: float, own_cpu_s: float) -> float:
        """Idle cores, counting as idle the work that spent `own_cpu_s` so far; LEAST_CORES at least.

        0 until there are two samples.
        """
        if self._last is not None and now - self._last[0] < self.INTERVAL_S:
            return self._idle_cores
        free_s = self._idle_s() + own_cpu_s
        if self._last is not None:
            idle = (free_s - self._last[1]) / (now - self._last[0])
            self._idle_cores = min(max(idle, LEAST_CORES), self._usable)
        self._last = (now, free_s)
        return self._idle_cores

    def _idle_s(self) -> float:
        fields = self._path.read_text().split("\n", 1)[0].split()  # cpu user nice system idle iowait ...
        return (int(fields[4]) + int(fields[5])) / self._ticks_per_s

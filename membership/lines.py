"""A line between two clusters, described once: gateways, plans, simulations and the plan service read the same tables.

    [[lines]]
    name = "carrier-a"
    source = "east"                   # a PrfaaS cluster
    destination = "west"              # a PD cluster
    capacity_gbps = 40
    shared_gbps = 10                  # of it, left to others
    shared_by = ["backups"]
    price_per_hour_per_gbps = 0.5
    price_per_gb = 0.02
    budget_per_month = 20_000
    warn_ratio = 0.65
    critical_ratio = 0.8

Several lines may have the same ends. What goes between these takes all of them, each by its capacity.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Final

import msgspec

from transport.control.settings import SettingsError, build, in_file, read_toml, require

BYTES_PER_S_PER_GBPS: Final = 1e9 / 8
LEAST: Final = 1e-12  # of any number that is not 0, in its unit
HOURS_PER_MONTH: Final = 730.0
_GB_PER_HOUR: Final = 3600.0 / 1e9  # of a byte a second

Ends = tuple[str, str]  # clusters: source, destination


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Egress from a PrfaaS cluster to a PD cluster. Without a `name` it is called SOURCE:DESTINATION.

    Of its capacity, `shared_gbps` are left to what `shared_by` names: other systems, or gateways that do not read this.
    `price_per_hour_per_gbps` is paid whatever is sent, `price_per_gb` for each gigabyte. `budget_per_month` is in the same
    money; 0: no budget. From `warn_ratio` of what it may carry, or of its budget, it is worth a look; from
    `critical_ratio` requests wait for it. `quantiles_gbps` are capacities that robust plans must stand. `rtt_ms` counts in
    simulations; next to prefills of seconds, plans leave it out.
    """

    source: str
    destination: str
    capacity_gbps: float
    name: str = ""
    shared_gbps: float = 0.0
    shared_by: tuple[str, ...] = ()
    price_per_hour_per_gbps: float = 0.0
    price_per_gb: float = 0.0
    budget_per_month: float = 0.0
    warn_ratio: float = 0.65
    critical_ratio: float = 0.8
    rtt_ms: float = 0.0
    quantiles_gbps: tuple[float, ...] = ()
    provenance: str = ""

    def __post_init__(self) -> None:
        _within("capacity_gbps", self.capacity_gbps, 1e6, "Gbit/s")
        _within("shared_gbps", self.shared_gbps, 1e6, "Gbit/s")
        for name in ("price_per_hour_per_gbps", "price_per_gb", "budget_per_month"):
            _within(name, getattr(self, name), 1e12)
        _within("rtt_ms", self.rtt_ms, 1e6, "milliseconds")
        for at, quantile in enumerate(self.quantiles_gbps):
            _within(f"quantiles_gbps[{at}]", quantile, 1e6, "Gbit/s")
        require(self.source != self.destination, "destination", self.destination, "another cluster than the source")
        require(
            self.shared_gbps <= self.capacity_gbps, "shared_gbps", self.shared_gbps, f"at most {self.capacity_gbps:g}"
        )
        require(not self.shared_by or self.shared_gbps > 0, "shared_by", self.shared_by, "left out without shared_gbps")
        require(0 < self.warn_ratio <= 1, "warn_ratio", self.warn_ratio, "a number above 0, at most 1")
        what = "a number from warn_ratio to 1"
        require(self.warn_ratio <= self.critical_ratio <= 1, "critical_ratio", self.critical_ratio, what)

    @property
    def label(self) -> str:
        return self.name or f"{self.source}:{self.destination}"

    @property
    def ends(self) -> Ends:
        return self.source, self.destination

    @property
    def bytes_per_s(self) -> float:
        """What is ours of it."""
        return (self.capacity_gbps - self.shared_gbps) * BYTES_PER_S_PER_GBPS

    @property
    def rent_per_hour(self) -> float:
        return self.price_per_hour_per_gbps * self.capacity_gbps


class LineLevel(StrEnum):
    """Whether a line is worth a look."""

    OK = "ok"
    WARN = "warn"
    CRITICAL = "critical"


class LineUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a line carries now, and what that costs. `spend_per_month` is that of a month at the present rate, rent included."""

    name: str
    source: str
    destination: str
    shared_by: tuple[str, ...]
    rate_bytes_per_s: float  # what is ours
    share: float  # of all that goes between its ends
    carried_bytes_per_s: float
    used_ratio: float
    spend_per_hour: float
    spend_per_month: float
    rent_per_month: float
    price_per_gb: float
    budget_per_month: float  # 0: none
    warn_ratio: float
    critical_ratio: float
    level: LineLevel


def read_lines(path: Path) -> tuple[Line, ...]:
    """The lines that a file describes. Raises SettingsError that names it."""
    with in_file(path, SettingsError):
        found = build(_Lines, read_toml(path), "").lines
        check_lines(found, "lines")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """A file of lines has nothing else."""

    lines: tuple[Line, ...]


def check_lines(lines: Iterable[Line], what: str) -> None:
    """Names are for one line each. Raises SettingsError."""
    seen: set[str] = set()
    for line in lines:
        if line.label in seen:
            raise SettingsError(f"{what}: there are two from {line.source!r} to {line.destination!r} that are called "
                                f"{line.label!r}; give each line a name of its own")  # fmt: skip
        seen.add(line.label)


def by_ends(lines: Iterable[Line]) -> dict[Ends, Line]:
    """All lines between the same ends as one."""
    found: dict[Ends, list[Line]] = {}
    for line in lines:
        found.setdefault(line.ends, []).append(line)
    return {ends: _together(several) for ends, several in found.items()}


def _together(lines: Sequence[Line]) -> Line:
    if len(lines) == 1:
        return lines[0]
    capacity = sum(line.capacity_gbps for line in lines)

    def mean(name: str) -> float:
        return sum(getattr(line, name) * line.capacity_gbps for line in lines) / capacity if capacity else 0.0

    # One of them at a time is thinner than it should be.
    thin = sorted({capacity - line.capacity_gbps + quantile for line in lines for quantile in line.quantiles_gbps})
    has_budget = all(line.budget_per_month for line in lines)
    return replace(
        lines[0],
        name=" + ".join(line.label for line in lines),
        capacity_gbps=capacity,
        shared_gbps=sum(line.shared_gbps for line in lines),
        shared_by=tuple(dict.fromkeys(each for line in lines for each in line.shared_by)),
        price_per_hour_per_gbps=mean("price_per_hour_per_gbps"),
        price_per_gb=mean("price_per_gb"),
        budget_per_month=sum(line.budget_per_month for line in lines) if has_budget else 0.0,
        warn_ratio=min(line.warn_ratio for line in lines),
        critical_ratio=max(line.critical_ratio for line in lines),
        rtt_ms=max(line.rtt_ms for line in lines),
        quantiles_gbps=tuple(thin),
        provenance="; ".join(dict.fromkeys(line.provenance for line in lines if line.provenance)),
    )


def uses(lines: Sequence[Line], carried: Mapping[Ends, float]) -> dict[Ends, tuple[LineUse, ...]]:
    """How each line stands, if so many bytes a second go between its ends."""
    totals = {ends: all_of_them.bytes_per_s for ends, all_of_them in by_ends(lines).items()}
    found: dict[Ends, list[LineUse]] = {}
    for line in lines:
        share = line.bytes_per_s / total if (total := totals[line.ends]) else 0.0
        found.setdefault(line.ends, []).append(_use(line, share, share * carried.get(line.ends, 0.0)))
    return {ends: tuple(several) for ends, several in found.items()}


def _use(line: Line, share: float, carried: float) -> LineUse:
    used = carried / line.bytes_per_s if line.bytes_per_s else 0.0
    spend = line.rent_per_hour + line.price_per_gb * carried * _GB_PER_HOUR
    spent = spend * HOURS_PER_MONTH / line.budget_per_month if line.budget_per_month else 0.0
    worst = max(used, spent)
    level = LineLevel.CRITICAL if worst >= line.critical_ratio else LineLevel.OK
    if level is LineLevel.OK and worst >= line.warn_ratio:
        level = LineLevel.WARN
    return LineUse(
        name=line.label,
        source=line.source,
        destination=line.destination,
        shared_by=line.shared_by,
        rate_bytes_per_s=line.bytes_per_s,
        share=share,
        carried_bytes_per_s=carried,
        used_ratio=used,
        spend_per_hour=spend,
        spend_per_month=spend * HOURS_PER_MONTH,
        rent_per_month=line.rent_per_hour * HOURS_PER_MONTH,
        price_per_gb=line.price_per_gb,
        budget_per_month=line.budget_per_month,
        warn_ratio=line.warn_ratio,
        critical_ratio=line.critical_ratio,
        level=level,
    )


def _within(name: str, value: float, high: float, unit: str = "") -> None:
    is_number = isfinite(value) and 0 <= value <= high
    require(is_number, name, value, f"a number{f' of {unit}' if unit else ''}, 0 to {high:.10g}")
    require(not 0 < value < LEAST, name, value, f"0, or at least {LEAST:g}: what is divided by it overflows")

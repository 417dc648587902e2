"""A market file: what will be asked for, and what GPUs and lines cost, read from TOML into values.

Prices are in one unit, whatever it is; each table says where its numbers come from.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from planner.errors import InputError
from planner.model.demand.week import MEASURED_SHARE, check_week, load_not_exceeded, mean_load, one_of
from planner.model.profile import PROVENANCES
from planner.model.reading import GBPS, RATE, Range
from planner.model.site import INSTANCES, Workload
from transport.control.settings import build, in_file, read_toml, require

HOURS_PER_MONTH: Final = 730.0
MONTHS: Final = Range(1, 120, "months", is_whole=True)
LEAD: Final = Range(0, 120, "months", is_whole=True)
GROWTH: Final = Range(-0.5, 1.0)
DISCOUNT: Final = Range(0, 1.0)
MONEY: Final = Range(0, 1e12)
KILOWATTS: Final = Range(0, 1e3, "kW")
GPUS: Final = Range(1, 1e5, "GPUs", is_whole=True)


def _check_provenance(text: str) -> None:
    """Raises SettingsError for one whose kind is not known. Without any, numbers count as unverified."""
    kind = text.split(":")[0].strip()
    require(not text or kind in PROVENANCES, "provenance", text, f"one of {', '.join(PROVENANCES)}, then a colon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What will be asked for. `rate_req_per_s` is that of the week's busiest hour in the first month.

    `week` is the load of the week's hours, or of any equal parts of it, in any unit; empty: it is always the same. `week_file`
    is a CSV file that has it as `load`. With `ends` nothing is needed after the last month: what was bought or committed until
    then counts in full.
    """

    months: int = 12
    rate_req_per_s: float | None = None
    growth_per_month: float = 0.0
    week: tuple[float, ...] = ()
    week_file: Path | None = None
    ends: bool = False
    provenance: str = ""

    def __post_init__(self) -> None:
        MONTHS.of("months", self.months)
        GROWTH.of("growth_per_month", self.growth_per_month)
        if self.rate_req_per_s is not None:
            RATE.above_low("rate_req_per_s", self.rate_req_per_s)
        check_week(self.week)
        _check_provenance(self.provenance)

    def rates(self) -> list[float]:
        """Requests/s in the busiest hour of each month."""
        if self.rate_req_per_s is None:
            raise InputError("[demand] rate_req_per_s is missing, and the workload has no rate; give one")
        return [self.rate_req_per_s * (1.0 + self.growth_per_month) ** month for month in range(self.months)]

    @property
    def mean_load(self) -> float:
        """The mean load of the week over that of its busiest hour."""
        return mean_load(self.week)

    @property
    def measured_load(self) -> float:
        """The load that is exceeded in 5 % of the week, over that of its busiest hour."""
        return load_not_exceeded(self.week, MEASURED_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commitment:
    """GPUs that are rented for so many months at least."""

    months: int
    per_gpu_hour: float

    def __post_init__(self) -> None:
        MONTHS.of("months", self.months)
        MONEY.of("per_gpu_hour", self.per_gpu_hour)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOffer:
    """One kind of hardware: instances of so many GPUs each.

    They are rented by the hour, rented for some months, or bought. `owned` are there already. What is bought or rented for
    months comes `lead_months` after it was ordered, which is in the first month at the earliest. A purchase is there for
    `lifetime_months`, and loses its value evenly over them. Power is paid for what is owned; rent includes it.
    """

    hardware: str
    gpus: int
    rent_per_gpu_hour: float | None = None
    commitments: tuple[Commitment, ...] = ()
    purchase_per_gpu: float | None = None
    lifetime_months: int = 48
    kw_per_gpu: float = 0.0
    per_kwh: float = 0.0
    lead_months: int = 0
    owned: int = 0
    provenance: str = ""

    def __post_init__(self) -> None:
        GPUS.of("gpus", self.gpus)
        for name in ("rent_per_gpu_hour", "purchase_per_gpu"):
            if (value := getattr(self, name)) is not None:
                MONEY.of(name, value)
        terms = [each.months for each in self.commitments]
        require(len(set(terms)) == len(terms), "commitments", terms, "of different months")
        MONTHS.of("lifetime_months", self.lifetime_months)
        KILOWATTS.of("kw_per_gpu", self.kw_per_gpu)
        MONEY.of("per_kwh", self.per_kwh)
        LEAD.of("lead_months", self.lead_months)
        INSTANCES.of("owned", self.owned)
        _check_provenance(self.provenance)

    @property
    def rent_per_month(self) -> float | None:
        """Of an instance that is rented by the hour."""
        return None if self.rent_per_gpu_hour is None else self.rent_per_gpu_hour * self.gpus * HOURS_PER_MONTH

    def committed_per_month(self, commitment: Commitment) -> float:
        return commitment.per_gpu_hour * self.gpus * HOURS_PER_MONTH

    @property
    def power_per_month(self) -> float:
        """Of an instance that is owned."""
        return self.kw_per_gpu * self.gpus * self.per_kwh * HOURS_PER_MONTH

    @property
    def purchase_price(self) -> float | None:
        """Of an instance."""
        return None if self.purchase_per_gpu is None else self.purchase_per_gpu * self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOffer:
    """A line from the PrfaaS cluster to the PD cluster: a price per month, and one for what is sent.

    `per_gb` is for each gigabyte. What exceeds `committed_gbps` in the 95th percentile of the week costs `per_gbps_above`
    a month for each Gbit/s.
    """

    gbps: float
    per_month: float = 0.0
    per_gb: float = 0.0
    committed_gbps: float = 0.0
    per_gbps_above: float = 0.0
    lead_months: int = 0
    provenance: str = ""

    def __post_init__(self) -> None:
        GBPS.above_low("gbps", self.gbps)
        GBPS.of("committed_gbps", self.committed_gbps)
        for name in ("per_month", "per_gb", "per_gbps_above"):
            MONEY.of(name, getattr(self, name))
        LEAD.of("lead_months", self.lead_months)
        _check_provenance(self.provenance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """All of a market file. What is paid a year later counts `discount_per_year` less."""

    schema: int
    demand: Demand
    hardware: tuple[HardwareOffer, ...]
    lines: tuple[LineOffer, ...] = ()
    currency: str = "$"
    discount_per_year: float = 0.0
    fast_at_home: bool = False  # the PrfaaS cluster's hardware can be had beside the PD cluster, at the same price

    def __post_init__(self) -> None:
        require(self.schema == 1, "schema", self.schema, "1")
        require(self.currency.isprintable(), "currency", self.currency, "printable")
        DISCOUNT.of("discount_per_year", self.discount_per_year)
        names = [offer.hardware for offer in self.hardware]
        require(len(set(names)) == len(names), "hardware", names, "kinds of hardware that differ")

    def offer(self, hardware: str) -> HardwareOffer:
        """Raises InputError for hardware without an offer."""
        for offer in self.hardware:
            if offer.hardware == hardware:
                return offer
        known = ", ".join(offer.hardware for offer in self.hardware) or "none"
        raise InputError(f"hardware {hardware!r} has no [[hardware]] table; there are: {known}")

    def line_number(self, line: LineOffer) -> int:
        """Which [[lines]] table, counted from 1: others may be of the same Gbit/s."""
        return self.lines.index(line) + 1

    def worth(self, month: int) -> float:
        """What money of a month is worth in the first one."""
        return float((1.0 + self.discount_per_year) ** (-month / 12.0))

    def asked_by(self, workload: Workload) -> "Market":
        """The same with what the file does not say: the week of a trace, and the rate of the first month's busiest hour."""
        demand = self.demand
        week = demand.week or workload.week
        rate = demand.rate_req_per_s
        if rate is None:
            rate = max(workload.week) if workload.week else workload.rate_req_per_s
        return replace(self, demand=replace(demand, rate_req_per_s=rate, week=week))


def load_market(path: Path) -> Market:
    """Reads a market file. Raises InputError naming it."""
    with in_file(path, InputError):
        market = build(Market, read_toml(path), "", path.parent)
    demand = market.demand
    return replace(market, demand=replace(demand, week=one_of(demand.week, demand.week_file), week_file=None))

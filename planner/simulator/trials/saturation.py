"""The largest rate that still meets an SLO, by bisection over simulations."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from planner.errors import Infeasible, InputError
from planner.model.demand.slo import Slo
from planner.model.reading import Range, named

BOUND: Final = Range(0, 1e12)
TTFT_S, TBT_S = 5.0, 0.1  # where the site says nothing
OPERATORS: Final = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True, slots=True)
class Condition:
    """One clause of an SLO, on a key of the simulation's report."""

    key: str
    relation: str
    bound: float

    def holds(self, report: dict[str, Any]) -> bool:
        value = report.get(self.key)
        return value is not None and bool(OPERATORS[self.relation](value, self.bound))

    def __str__(self) -> str:
        return f"{self.key} {self.relation} {self.bound:g}"


def parse_slo(text: str) -> list[Condition]:
    """`ttft_p90<5,tbt_p99<0.1`: keys of a report, the _s may be left out. Raises InputError."""
    conditions = []
    for clause in text.split(","):
        match = re.fullmatch(r"\s*([a-z0-9_]+)\s*(<=|>=|<|>)\s*(\S+)\s*", clause)
        if match is None:
            raise InputError(f"slo {clause!r}: write it like ttft_p90<5 or rejected<=0")
        key, relation, spelled = match.groups()
        with named(f"slo {clause!r}"):
            bound = BOUND.of_text(key, spelled)
        if key.startswith(("ttft", "tbt", "e2e")) and not key.endswith("_s"):
            key += "_s"
        conditions.append(Condition(key, relation, bound))
    return conditions


def slo_of(slo: Slo) -> str:
    """The clauses of a site's SLO; of what it does not say, P90 TTFT 5 s and P99 TBT 0.1 s."""
    clauses = [f"ttft_p90<={TTFT_S if slo.ttft_p90_s is None else slo.ttft_p90_s:g}"]
    if slo.ttft_p90_s is None and slo.targets:
        clauses = []
    clauses.append(f"tbt_p99<={TBT_S if slo.tbt_s is None else slo.tbt_s:g}")
    return ",".join([*clauses, *(["target_margin>=0"] if slo.targets else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """The highest rate found to meet the SLO, the lowest found to break it, and what broke; None where no rate tried did."""

    rate_req_per_s: float
    broken_at_req_per_s: float | None
    broken: tuple[str, ...]
    report: dict[str, Any]
    steps: int


def saturate(
    report_at: Callable[[float], dict[str, Any]], slo: Sequence[Condition], *, upper: float, tolerance: float = 0.02
) -> Saturation:
    """Bisects on the rate below `upper` until bounds are within `tolerance` of each other.

    Raises InputError for a key that no report has, and Infeasible when even a hundredth of `upper` breaks the SLO.
    """
    low, high = upper / 100, upper
    best = report_at(low)
    known = [key for key, value in best.items() if value is None or isinstance(value, int | float)]
    for condition in slo:
        if condition.key not in known:
            raise InputError(f"slo: {condition.key!r} is not a key of a report; known are {', '.join(known)}")
    if failed := [str(condition) for condition in slo if not condition.holds(best)]:
        values = ", ".join(f"{condition.key}={best.get(condition.key)}" for condition in slo)
        raise Infeasible(
            f"slo: {', '.join(failed)} is broken even at {low:.3f} req/s ({values}); ask for less than that"
        )
    broken: tuple[str, ...] = ()
    steps = 1
    while high - low > tolerance * high:
        middle = (low + high) / 2
        report = report_at(middle)
        steps += 1
        failed = [str(condition) for condition in slo if not condition.holds(report)]
        if failed:
            high, broken = middle, tuple(failed)
        else:
            low, best = middle, report
    broken_at = high if broken else None
    return Saturation(rate_req_per_s=low, broken_at_req_per_s=broken_at, broken=broken, report=best, steps=steps)

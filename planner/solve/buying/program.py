"""The cheapest way through the months: which system is run in each, and what is bought and rented for it.

A mixed-integer linear program (scipy's HiGHS). What is bought stays for its lifetime, and what is committed for its months. A
line is paid for by the month.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import numpy as np

from planner.errors import Infeasible, needing_scipy
from planner.model.market import HOURS_PER_MONTH, Commitment, HardwareOffer, LineOffer, Market
from planner.model.profile import Floats
from planner.solve.buying.systems import SizedSystem

LIMIT_S: Final = 20.0  # of the search; what was found by then is taken, and the gap is printed
GAP: Final = 1e-4  # at which the search stops
NOTHING_DOES: Final = 2  # the status of milp where no values keep all rows
SECONDS_PER_HOUR: Final = 3600.0
GB: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Instances of one kind of hardware that are ordered in a month (counted from 0) and come `lead_months` later."""

    hardware: str
    month: int
    bought: int = 0
    committed: Mapping[int, int] = field(default_factory=dict)  # by how many months
    rented: int = 0  # for this month


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOrder:
    """A line that is rented from a month to another one, which is included; months are counted from 0."""

    line: LineOffer
    first: int
    last: int

    @property
    def month(self) -> int:
        """In which it is ordered."""
        return self.first - self.line.lead_months


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchases:
    """The answer: a system for each month, what is ordered for it, and what all of it costs.

    `cost` is worth of the first month, and what is bought counts by the value that it loses. `cash` is what is paid in each
    month. After the last month `still_to_pay` is left of commitments, and `still_worth` of what was bought.
    """

    systems: Sequence[SizedSystem]
    held: Sequence[Mapping[str, int]]  # instances by hardware, by month
    orders: Sequence[Order]
    cost: float
    cash: Sequence[float]
    still_to_pay: float
    still_worth: float
    sent_gb: float
    gap: float  # by which a cheaper way might exist, as a share


def line_orders(systems: Sequence[SizedSystem]) -> list[LineOrder]:
    """The lines of the systems of all months, in runs of months that have the same one, as they are ordered."""
    found, first = [], 0
    for line, run in groupby(each.line for each in systems):
        last = first + len(list(run)) - 1
        if line is not None:
            found.append(LineOrder(line=line, first=first, last=last))
        first = last + 1
    return sorted(found, key=lambda order: order.month)


def gb_per_month(system: SizedSystem, rate: float, market: Market) -> float:
    """What a system sends in a month whose busiest hour has that rate."""
    return system.sent_bytes * rate * market.demand.mean_load * HOURS_PER_MONTH * SECONDS_PER_HOUR / GB


def line_cost(system: SizedSystem, rate: float, market: Market) -> float:
    """What a month of a system's line costs."""
    line = system.line
    if line is None:
        return 0.0
    measured_gbps = system.sent_bytes * 8e-9 * rate * market.demand.measured_load
    above = max(0.0, measured_gbps - line.committed_gbps) * line.per_gbps_above
    return line.per_month + line.per_gb * gb_per_month(system, rate, market) + above


def purchase_cost(offer: HardwareOffer, month: int, market: Market) -> float:
    """What an instance costs that is there from a month on: the value that it loses until the end, and power."""
    months = market.demand.months
    until = min(months, month + offer.lifetime_months)
    price = offer.purchase_price
    assert price is not None
    left = 0.0 if market.demand.ends else price * (1.0 - (until - month) / offer.lifetime_months)
    power = offer.power_per_month * sum(market.worth(each) for each in range(month, until))
    return price * market.worth(month) - left * market.worth(until) + power


def commitment_cost(offer: HardwareOffer, commitment: Commitment, month: int, market: Market) -> float:
    """What an instance costs that is committed from a month on."""
    until = month + commitment.months
    if not market.demand.ends:
        until = min(until, market.demand.months)
    return offer.committed_per_month(commitment) * sum(market.worth(each) for each in range(month, until))


def needs(system: SizedSystem, far: str, near: str) -> dict[str, int]:
    """Instances by hardware: that of PrfaaS nodes, and that of the PD cluster."""
    found = {near: system.num_pd}
    if system.num_prfaas:
        found[far] = found.get(far, 0) + system.num_prfaas
    return found


class _Columns:
    """The variables of a program, and its rows."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.most: list[float] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def add(self, cost: float, most: float = np.inf) -> int:
        """A whole number from 0 to `most`."""
        self.costs.append(cost)
        self.most.append(most)
        return len(self.costs) - 1

    def row(self, entries: Mapping[int, float], low: float, high: float = np.inf) -> None:
        self._rows.append((dict(entries), low, high))

    def solve(self, limit_s: float) -> tuple[Floats, float] | None:
        """The values of least cost, and the gap; None if no values do. Raises Infeasible if none were found in time."""
        with needing_scipy("purchases"):
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import coo_array

        where = [
            (row, column, value) for row, (entries, *_) in enumerate(self._rows) for column, value in entries.items()
        ]
        rows, columns, values = zip(*where, strict=True)
        places = (np.array(rows, np.int32), np.array(columns, np.int32))  # milp of scipy 1.14 takes no wider ones
        matrix = coo_array((values, places), shape=(len(self._rows), len(self.costs)))
        found = milp(
            np.array(self.costs),
            integrality=np.ones(len(self.costs)),
            bounds=Bounds(0, np.array(self.most)),
            constraints=LinearConstraint(
                matrix.tocsr(), [low for _, low, _ in self._rows], [high for *_, high in self._rows]
            ),
            options={"time_limit": limit_s, "mip_rel_gap": GAP},
        )
        if found.x is None:
            if found.status == NOTHING_DOES:
                return None
            raise Infeasible(f"no purchases were found within {limit_s:g} s: {found.message}")
        return np.round(found.x), float(found.mip_gap or 0.0)


@dataclass(frozen=True, slots=True)
class _Supply:
    """The variables of one kind of hardware, by the month in which they are ordered."""

    offer: HardwareOffer
    bought: Mapping[int, int]
    committed: Mapping[tuple[int, int], int]  # by (month, for how many months)
    rented: Mapping[int, int]

    def entries(self, month: int) -> dict[int, float]:
        """What is there in a month."""
        lead, lifetime = self.offer.lead_months, self.offer.lifetime_months
        found = {column: 1.0 for at, column in self.bought.items() if at + lead <= month < at + lead + lifetime}
        for (at, months), column in self.committed.items():
            if at + lead <= month < at + lead + months:
                found[column] = 1.0
        if month in self.rented:
            found[self.rented[month]] = 1.0
        return found


def _supply(program: _Columns, offer: HardwareOffer, market: Market, most: int) -> _Supply:
    months, lead = market.demand.months, offer.lead_months
    bought, committed, rented = {}, {}, {}
    if offer.purchase_price is not None:
        bought = {at: program.add(purchase_cost(offer, at + lead, market), most) for at in range(months - lead)}
    for each in offer.commitments:
        for at in range(months - lead):
            committed[at, each.months] = program.add(commitment_cost(offer, each, at + lead, market), most)
    if offer.rent_per_month is not None:
        rented = {at: program.add(offer.rent_per_month * market.worth(at), most) for at in range(months)}
    return _Supply(offer, bought, committed, rented)


def worth_a_look(systems: Sequence[SizedSystem], rate: float, market: Market, far: str, near: str) -> list[SizedSystem]:
    """Those that no other one beats: by hardware, and by what the line costs."""
    kept: list[tuple[tuple[int, int], SizedSystem]] = []
    for system in sorted(systems, key=lambda each: (line_cost(each, rate, market), each.num_pd, each.num_prfaas)):
        wanted = needs(system, far, near)
        size = (wanted[near], 0 if far == near else wanted.get(far, 0))
        if not any(one[0] <= size[0] and one[1] <= size[1] for one, _ in kept):
            kept.append((size, system))
    return [system for _, system in kept]


def cheapest_purchases(
    systems: Sequence[Sequence[SizedSystem]],
    rates: Sequence[float],
    market: Market,
    far: str,
    near: str,
    *,
    sends_at_last: bool = False,
    limit_s: float = LIMIT_S,
) -> Purchases:
    """The cheapest way; with `sends_at_last` one that runs PrfaaS nodes in the last month. Raises Infeasible.

    `systems` are those that carry each month's rate; `far` and `near` are the hardware of PrfaaS nodes and of the PD cluster.
    """
    program, months = _Columns(), len(rates)
    chosen = []
    for month, rate in enumerate(rates):
        able = _able(systems[month], rate, month, sends=sends_at_last and month == months - 1)
        choices = worth_a_look(able, rate, market, far, near)
        chosen.append([(program.add(line_cost(each, rate, market) * market.worth(month), 1), each) for each in choices])
    for picks in chosen:
        program.row({column: 1.0 for column, _ in picks}, 1, 1)
    names = sorted({name for picks in chosen for _, each in picks for name in needs(each, far, near)})
    supplies = []
    for name in names:
        offer = market.offer(name)
        most = max(needs(each, far, near).get(name, 0) for picks in chosen for _, each in picks)
        supply = _supply(program, offer, market, most)
        supplies.append(supply)
        for month, picks in enumerate(chosen):
            wanted = {column: -float(needs(each, far, near).get(name, 0)) for column, each in picks}
            program.row({**supply.entries(month), **wanted}, -float(offer.owned))
    found = program.solve(limit_s)
    if found is None:
        raise Infeasible(
            "no way to have the hardware in time: rent by the hour, shorter lead_months or more owned would do"
            f" ({_delays(names, market)})"
        )
    values, gap = found
    taken = [next(each for column, each in picks if values[column]) for picks in chosen]
    owned = [offer for offer in market.hardware if offer.hardware in (far, near)]
    owned_power = sum(offer.owned * offer.power_per_month for offer in owned)
    cash = [line_cost(each, rate, market) + owned_power for each, rate in zip(taken, rates, strict=True)]
    orders = [order for supply in supplies for order in _orders(supply, values, months)]
    spent = [_spent(order, market, cash) for order in orders]
    return Purchases(
        systems=taken,
        held=[_held(supplies, values, month) for month in range(months)],
        orders=orders,
        cost=float(np.array(program.costs) @ values) + owned_power * sum(map(market.worth, range(months))),
        cash=cash,
        still_to_pay=sum(to_pay for to_pay, _ in spent),
        still_worth=sum(worth for _, worth in spent),
        sent_gb=sum(gb_per_month(each, rate, market) for each, rate in zip(taken, rates, strict=True) if each.line),
        gap=gap,
    )


def _able(systems: Sequence[SizedSystem], rate: float, month: int, *, sends: bool) -> list[SizedSystem]:
    """Those whose line is there in that month; if it `sends`, those with PrfaaS nodes. Raises Infeasible."""
    able = [each for each in systems if each.line is None or each.line.lead_months <= month]
    able = [each for each in able if each.num_prfaas or not sends]
    if not able:
        raise Infeasible(f"month {month + 1}: {_why_none(systems, rate, month)}")
    return able


def _why_none(systems: Sequence[SizedSystem], rate: float, month: int) -> str:
    """Why none of the systems for a month can be had in it."""
    leads = [each.line.lead_months for each in systems if each.line is not None]
    late = [lead for lead in leads if lead > month]
    if late:
        return f"{rate:.3f} req/s need a line, and the first that carries them is there in month {min(late) + 1}"
    return f"no instances and no line carry {rate:.3f} req/s within the SLO"


def _delays(names: Sequence[str], market: Market) -> str:
    offers = [market.offer(name) for name in names]
    return ", ".join(
        f"{each.hardware}: {each.owned} owned, {_more(each)}" for each in offers if each.rent_per_gpu_hour is None
    )


def _more(offer: HardwareOffer) -> str:
    has_price = offer.purchase_per_gpu is not None or offer.commitments
    return f"more in month {offer.lead_months + 1}" if has_price else "no price for more"


def _held(supplies: Sequence[_Supply], values: Floats, month: int) -> dict[str, int]:
    return {
        each.offer.hardware: each.offer.owned + int(sum(values[column] for column in each.entries(month)))
        for each in supplies
    }


def _spent(order: Order, market: Market, cash: list[float]) -> tuple[float, float]:
    """Adds what an order costs to the `cash` of its months; what is left to pay after them, and what is left of its value."""
    offer, months, first = market.offer(order.hardware), len(cash), order.month
    if order.rented:
        assert offer.rent_per_month is not None
        cash[first] += order.rented * offer.rent_per_month
    first += offer.lead_months
    to_pay = worth = 0.0
    if order.bought:
        assert offer.purchase_price is not None
        until = min(months, first + offer.lifetime_months)
        cash[first] += order.bought * offer.purchase_price
        for month in range(first, until):
            cash[month] += order.bought * offer.power_per_month
        worth = order.bought * offer.purchase_price * (1.0 - (until - first) / offer.lifetime_months)
    for term in offer.commitments:
        count = order.committed.get(term.months, 0)
        for month in range(first, first + term.months if count else first):
            if month < months:
                cash[month] += count * offer.committed_per_month(term)
            else:
                to_pay += count * offer.committed_per_month(term)
    return to_pay, worth


def _orders(supply: _Supply, values: Floats, months: int) -> list[Order]:
    found = []
    for month in range(months):
        bought = int(values[supply.bought[month]]) if month in supply.bought else 0
        committed = {
            term: int(values[column])
            for (at, term), column in supply.committed.items()
            if at == month and values[column]
        }
        rented = int(values[supply.rented[month]]) if month in supply.rented else 0
        if bought or committed or rented:
            found.append(
                Order(hardware=supply.offer.hardware, month=month, bought=bought, committed=committed, rented=rented)
            )
    return found

"""What is bought and rented over the months: against brute force, and what counts in the cost."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from planner.errors import Infeasible
from planner.model.market import Commitment, Demand, HardwareOffer, LineOffer, Market
from planner.solve.buying.program import Purchases, cheapest_purchases, line_cost, needs
from planner.solve.buying.systems import Contender, SizedSystem

FAR, NEAR = "h200x8", "h20x8"
THIN = LineOffer(gbps=10, per_month=100.0, lead_months=1)
METERED = LineOffer(gbps=40, per_gb=0.02, committed_gbps=1.0, per_gbps_above=50.0)


def system(far: int, near: int, line: LineOffer | None = None, sent_bytes: float = 0.0) -> SizedSystem:
    return SizedSystem(
        contender=Contender.PRFAAS if far else Contender.HOMOGENEOUS, num_prfaas=far, num_prefill=near - 1, num_decode=1,
        line=line, threshold_tokens=0.0, sent_bytes=sent_bytes, busy=(),
    )  # fmt: skip


def random_market(rng: np.random.Generator, months: int) -> Market:
    offers = [
        HardwareOffer(
            hardware=name,
            gpus=1,
            rent_per_gpu_hour=float(rng.uniform(1, 3)) if rng.random() < 0.8 else None,
            commitments=(Commitment(months=2, per_gpu_hour=float(rng.uniform(0.5, 2))),) if rng.random() < 0.7 else (),
            purchase_per_gpu=float(rng.uniform(500, 4_000)),
            lifetime_months=int(rng.integers(1, 5)),
            kw_per_gpu=0.5,
            per_kwh=float(rng.uniform(0, 0.3)),
            lead_months=int(rng.integers(0, 2)),
            owned=int(rng.integers(0, 2)),
        )
        for name in (FAR, NEAR)
    ]
    demand = Demand(
        months=months, rate_req_per_s=1.0, growth_per_month=0.1, week=(1.0, 2.0, 3.0, 4.0), ends=rng.random() < 0.3
    )
    discount = float(rng.choice([0.0, 0.5]))
    return Market(
        schema=1, demand=demand, hardware=tuple(offers), lines=(THIN, METERED), discount_per_year=discount
    )  # fmt: skip


def random_systems(rng: np.random.Generator) -> list[SizedSystem]:
    found = [system(0, 2)]
    for line in (THIN, METERED):
        found.append(system(1, int(rng.integers(1, 3)), line, float(rng.uniform(0, 1e6))))
    return found


def price_of(market: Market, price: float, per_month: float, first: int, months: int, lasts: int) -> float:
    """What costs a price when it comes, and so much for each of `months`; those after the end count only if demand ends."""
    year = np.float64(1.0 + market.discount_per_year)
    last = first + months if market.demand.ends else min(first + months, market.demand.months)
    cost = price / year ** (first / 12) + sum(per_month / year ** (month / 12) for month in range(first, last))
    if lasts and not market.demand.ends:
        cost -= price * (1 - (last - first) / lasts) / year ** (last / 12)
    return float(cost)


def least_supply(market: Market, offer: HardwareOffer, wanted: Sequence[int]) -> float:
    """The least that this hardware costs, by trying all: what is bought and committed in each month; the rest is rented."""
    months, most = len(wanted), max(0, max(wanted) - offer.owned)
    orders = range(max(0, months - offer.lead_months))
    best = inf
    counts = range(most + 1)
    committed_counts = counts if offer.commitments else range(1)
    assert offer.purchase_per_gpu is not None
    life, price, power = offer.lifetime_months, offer.purchase_per_gpu * offer.gpus, offer.power_per_month
    owned_cost = sum(offer.owned * power / (1.0 + market.discount_per_year) ** (month / 12) for month in range(months))
    for bought in itertools.product(counts, repeat=len(orders)):
        for committed in itertools.product(committed_counts, repeat=len(orders)):
            cost = 0.0
            there = [float(offer.owned)] * months
            for at in orders:
                first = at + offer.lead_months
                until = min(months, first + life)
                cost += bought[at] * price_of(market, price, 0.0, first, until - first, life)
                cost += bought[at] * price_of(market, 0.0, power, first, until - first, 0)
                for month in range(first, until):
                    there[month] += bought[at]
                if offer.commitments:
                    term = offer.commitments[0]
                    paid = offer.committed_per_month(term)
                    cost += committed[at] * price_of(market, 0.0, paid, first, term.months, 0)
                    for month in range(first, min(months, first + term.months)):
                        there[month] += committed[at]
            for month in range(months):
                if (missing := wanted[month] - there[month]) > 0:
                    rent = offer.rent_per_month
                    cost += inf if rent is None else price_of(market, 0.0, missing * rent, month, 1, 0)
            best = min(best, cost)
    return float(best + owned_cost)


def by_brute_force(systems: Sequence[Sequence[SizedSystem]], market: Market) -> float:
    rates = market.demand.rates()
    supplies: dict[tuple[str, tuple[int, ...]], float] = {}
    best = inf
    for way in itertools.product(*systems):
        if any(each.line is not None and each.line.lead_months > month for month, each in enumerate(way)):
            continue
        lines = [line_cost(each, rate, market) for each, rate in zip(way, rates, strict=True)]
        cost = sum(price_of(market, 0.0, line, month, 1, 0) for month, line in enumerate(lines))
        for name in (FAR, NEAR):
            wanted = tuple(needs(each, FAR, NEAR).get(name, 0) for each in way)
            key = (name, wanted)
            if key not in supplies:
                supplies[key] = least_supply(market, market.offer(name), wanted)
            cost += supplies[key]
        best = min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(1, 11))
def test_no_way_is_cheaper(seed: int) -> None:
    rng = np.random.default_rng(seed)
    market = random_market(rng, 3)
    systems = [random_systems(rng) for _ in range(3)]
    least = by_brute_force(systems, market)
    if least == inf:
        with pytest.raises(Infeasible):
            cheapest_purchases(systems, market.demand.rates(), market, FAR, NEAR)
        return
    found = cheapest_purchases(systems, market.demand.rates(), market, FAR, NEAR)
    assert found.cost == pytest.approx(least, rel=1e-3)
    for month, each in enumerate(found.systems):
        assert each in systems[month]
        assert all(found.held[month][name] >= count for name, count in needs(each, FAR, NEAR).items())


def bought_only(months: int, **fields: Any) -> Market:
    offer = HardwareOffer(hardware=NEAR, gpus=8, purchase_per_gpu=100.0, **fields)
    return Market(schema=1, demand=Demand(months=months, rate_req_per_s=1.0), hardware=(offer,))


def cheapest(market: Market, counts: Sequence[int]) -> Purchases:
    return cheapest_purchases([[system(0, count)] for count in counts], market.demand.rates(), market, NEAR, NEAR)


def test_what_is_bought_stays() -> None:
    found = cheapest(bought_only(4, lifetime_months=8), (2, 4, 3, 2))
    assert [held[NEAR] for held in found.held] == [2, 4, 4, 4]
    assert found.cost == pytest.approx(8 * 100.0 * (2 * 4 / 8 + 2 * 3 / 8))


def test_what_is_bought_is_there_for_its_lifetime() -> None:
    found = cheapest(bought_only(4, lifetime_months=2), (2, 2, 2, 2))
    assert [(order.month, order.bought) for order in found.orders] == [(0, 2), (2, 2)]
    assert found.cost == pytest.approx(4 * 8 * 100.0)


def test_what_is_there_after_the_last_month_is_told() -> None:
    """By the month in which it is paid, and what is left; if demand ends, nothing is."""
    market = bought_only(3, lifetime_months=12, lead_months=1, owned=1, kw_per_gpu=1.0, per_kwh=0.1)
    found = cheapest(market, (1, 2, 2))
    power = 8 * 0.1 * 730
    assert found.cash == pytest.approx([power, 800 + 2 * power, 2 * power])
    assert [found.still_worth, found.still_to_pay] == pytest.approx([800 * 10 / 12, 0])
    assert sum(found.cash) == pytest.approx(found.cost + found.still_worth)
    ends = replace(market, demand=replace(market.demand, ends=True))
    assert cheapest(ends, (1, 2, 2)).cost == pytest.approx(sum(found.cash))


def test_a_commitment_that_outlives_the_months_is_told_and_counts_if_demand_ends() -> None:
    offer = HardwareOffer(
        hardware=NEAR, gpus=1, rent_per_gpu_hour=2.0, commitments=(Commitment(months=12, per_gpu_hour=1.0),)
    )  # fmt: skip
    market = Market(schema=1, demand=Demand(months=2, rate_req_per_s=1.0), hardware=(offer,))
    found = cheapest(market, (3, 3))
    assert [order.committed for order in found.orders] == [{12: 3}]
    assert [found.cost, found.still_to_pay] == pytest.approx([3 * 2 * 730.0, 3 * 10 * 730.0])
    ends = replace(market, demand=replace(market.demand, ends=True))
    rented = cheapest(ends, (3, 3))
    assert [(order.rented, order.committed) for order in rented.orders] == [(3, {}), (3, {})]
    assert rented.still_to_pay == 0


def test_later_money_is_worth_less() -> None:
    """At 100 % a year, what is bought for a year of its two costs the price less half of the half that is left."""
    market = replace(bought_only(12, lifetime_months=24), discount_per_year=1.0)
    assert cheapest(market, (1,) * 12).cost == pytest.approx(800 - 800 / 2 / 2)


def test_a_search_that_ends_early_is_not_taken_for_a_lack_of_hardware() -> None:
    market = random_market(np.random.default_rng(3), 3)
    systems = [random_systems(np.random.default_rng(3))] * 3
    with pytest.raises(Infeasible, match="found within 0 s"):
        cheapest_purchases(systems, market.demand.rates(), market, FAR, NEAR, limit_s=0.0)


def test_a_line_that_comes_late_is_named() -> None:
    market = Market(schema=1, demand=Demand(months=2, rate_req_per_s=1.0), hardware=())
    with pytest.raises(Infeasible, match=r"month 1: 1\.000 req/s need a line, .* is there in month 2"):
        cheapest_purchases([[system(1, 2, THIN)]] * 2, [1.0, 1.0], market, FAR, NEAR)


def test_what_must_be_ordered_ahead_is_not_there_at_once() -> None:
    offer = HardwareOffer(hardware=NEAR, gpus=8, purchase_per_gpu=100.0, lead_months=2)
    market = Market(schema=1, demand=Demand(months=3, rate_req_per_s=1.0), hardware=(offer,))
    with pytest.raises(Infeasible, match=r"in time.*h20x8: 0 owned, more in month 3"):
        cheapest_purchases([[system(0, 2)]] * 3, [1.0] * 3, market, NEAR, NEAR)
    rented = replace(market, hardware=(replace(offer, rent_per_gpu_hour=1.0),))
    found = cheapest_purchases([[system(0, 2)]] * 3, [1.0] * 3, rented, NEAR, NEAR)
    assert [(order.month, order.rented, order.bought) for order in found.orders] == [(0, 2, 2), (1, 2, 0)]


def test_lines_are_billed_by_what_is_not_exceeded_in_most_of_the_week() -> None:
    week = (*[1.0] * 19, 4.0)
    market = Market(schema=1, demand=Demand(months=1, rate_req_per_s=8.0, week=week), hardware=())
    sending = system(1, 1, LineOffer(gbps=40, committed_gbps=1.0, per_gbps_above=100.0), 1e9)
    assert market.demand.measured_load == 0.25  # the busiest twentieth is not counted
    assert line_cost(sending, 8.0, market) == pytest.approx((16.0 - 1.0) * 100.0)  # 8 req/s · 8 Gbit · ¼

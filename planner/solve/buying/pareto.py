"""What no other system beats in cost, rate and P90 TTFT at once: what more requests, or an earlier first token, would cost."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from planner.errors import Infeasible, InputError
from planner.model.market import HardwareOffer, Market
from planner.model.site import Site
from planner.solve.buying.advice import check_size, month_price, posed, systems_of
from planner.solve.buying.program import line_cost, needs
from planner.solve.buying.systems import Contender, SizedSystem, Sought
from planner.solve.problem import SolveOptions

RATES: Final = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # of the busiest hour of all months
TARGETS: Final = (0.5, 0.75, 1.0, 1.5, 2.0)  # of the site's own for P90 TTFT


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A system that carries `rate_req_per_s` in the busiest hour with P90 TTFT within `ttft_p90_s`, and its month's cost."""

    rate_req_per_s: float
    ttft_p90_s: float
    cost_per_month: float
    system: SizedSystem

    def beats(self, other: "FrontPoint") -> bool:
        """Whether it is nowhere worse, and somewhere better."""
        mine, theirs = self.goals, other.goals
        return mine != theirs and all(one <= two for one, two in zip(mine, theirs, strict=True))

    @property
    def goals(self) -> tuple[float, float, float]:
        """What is better if it is less."""
        return self.cost_per_month, -self.rate_req_per_s, self.ttft_p90_s


def pareto_front(
    site: Site,
    market: Market,
    options: SolveOptions,
    *,
    rates: Sequence[float] = RATES,
    targets: Sequence[float] = TARGETS,
) -> list[FrontPoint]:
    """The front, over shares of the busiest hour's rate and of the target for P90 TTFT.

    Raises InputError where the site has no target, and Infeasible where nothing on offer keeps any of them.
    """
    if site.slo.ttft_p90_s is None:
        raise InputError("pareto: the site has no [slo] ttft_p90_s; give one to compare others with")
    market = market.asked_by(site.workload)
    problem, aim = posed(site, options)
    near = problem.pd.hardware
    far = problem.prfaas.hardware if problem.prfaas else near
    most = max(market.demand.rates())
    asked = [share * most for share in rates]
    check_size(problem, asked)
    found = list[FrontPoint]()
    for share in targets:
        target_s = share * site.slo.ttft_p90_s
        goals = tuple(goal.times(share) for goal in aim.goals)
        sought = Sought(problem=problem, output_tokens=site.workload.output_tokens, goals=goals, tbt_s=site.slo.tbt_s)
        for rate in asked:
            priced = [
                FrontPoint(rate_req_per_s=rate, ttft_p90_s=target_s, cost_per_month=cost, system=each)
                for each in _eligible(sought, market, rate)
                if (cost := cost_per_month(each, rate, market, far, near)) < inf
            ]
            if priced:
                found.append(min(priced, key=lambda point: point.cost_per_month))
    if not found:
        raise Infeasible("pareto: nothing on offer serves a quarter of the rate within twice the target for P90 TTFT")
    return unbeaten(found)


def unbeaten(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """Those that no other one beats, by P90 and rate; of equally good ones the first."""
    kept = {point.goals: point for point in reversed(list(points))}.values()
    front = [point for point in kept if not any(other.beats(point) for other in kept)]
    return sorted(front, key=lambda point: (point.ttft_p90_s, point.rate_req_per_s))


def cost_per_month(system: SizedSystem, rate: float, market: Market, far: str, near: str) -> float:
    """Of a month like the first, everything there in time: instances, and the line at that rate. Infinite if it cannot be had."""
    counts = needs(system, far, near)
    return line_cost(system, rate, market) + sum(
        _instances_cost(market.offer(name), count, market) for name, count in counts.items() if count
    )


def _instances_cost(offer: HardwareOffer, count: int, market: Market) -> float:
    """Of what is owned only the power is paid; the rest at the least price there is."""
    more = max(0, count - offer.owned)
    has_price = offer.rent_per_month is not None or offer.commitments or offer.purchase_price is not None
    if more and not has_price:
        return inf
    return (count - more) * offer.power_per_month + (more * month_price(offer, market) if more else 0.0)


def _eligible(sought: Sought, market: Market, rate: float) -> Iterator[SizedSystem]:
    """All that may be recommended."""
    for contender, (systems,) in systems_of(sought, market, [rate]).items():
        if contender is not Contender.BIGGER_LOCAL or market.fast_at_home:
            yield from systems

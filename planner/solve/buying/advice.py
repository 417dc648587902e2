"""Whether to offload: every way to serve at its least cost, and what would make the other one cheaper."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Final

import numpy as np

from membership.lines import BYTES_PER_S_PER_GBPS
from planner.errors import Infeasible, InputError
from planner.model.market import HOURS_PER_MONTH, MONEY, HardwareOffer, Market
from planner.model.reading import LEAST
from planner.model.site import Site
from planner.solve.aims import Aim
from planner.solve.buying.program import (
    GB,
    SECONDS_PER_HOUR,
    Purchases,
    cheapest_purchases,
    commitment_cost,
    gb_per_month,
    needs,
    purchase_cost,
)
from planner.solve.buying.replayed import ReplayedSystems, busy_at
from planner.solve.buying.systems import (
    HOME_GBPS,
    Contender,
    SizedSystem,
    Sought,
    colocated,
    even_cuts,
    homogeneous,
    with_prfaas,
)
from planner.solve.goals import Objective
from planner.solve.problem import Problem, SolveOptions, pose
from planner.solve.targets import nearest_s

STEPS: Final = 12  # towards a tariff: each is a program
CLOSE: Final = 1e-3  # share of the costs by which two ways are equally dear
LENGTHS: Final = 400  # that are compared
MOST_INSTANCES: Final = 5_000  # that are looked at
ROUNDS: Final = 12  # of larger sizes, where arrivals of a trace are not kept
LEAST_STEP, LARGEST_STEP = 1.03, 1.5  # of the rate that is sized for
HITS: Final = np.linspace(0.0, 0.99, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Where offloading ceases to pay; None: it never pays, infinite: it always does.

    `per_gb` is the tariff at which the whole way costs as much as the best other one. It needs the last month only: `months`
    says how many still offload at it. A prompt alone, at the prices of instances and bytes, is cheaper away from `tokens` on;
    one of the mean offloaded length is as long as at most `hit_ratio` of it is cached and sent all the same.
    """

    per_gb: float | None
    months: int | None  # None: no tariff is the limit
    tokens: float | None
    hit_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answer of `buy`. `ways` are in the order of their costs; of `failed` ones the reason is there."""

    rates: Sequence[float]
    ways: Mapping[Contender, Purchases]
    failed: Mapping[Contender, str]
    is_offloading: bool
    best: Contender
    saving: float | None  # against the next cheapest way, as a share; None: there is no other way
    break_even: BreakEven | None  # None without an offloading way
    headroom_months: Sequence[int]  # for how many of the following months what a month holds, and its line, is enough

    @property
    def purchases(self) -> Purchases:
        return self.ways[self.best]


def advise(site: Site, market: Market, options: SolveOptions) -> Advice:
    """What to buy for a site's workload. Raises InputError, and Infeasible where no way carries the demand within the SLO."""
    market = market.asked_by(site.workload)
    problem, aim = posed(site, options)
    rates = market.demand.rates()
    check_size(problem, rates)
    sought = Sought(
        problem=problem,
        output_tokens=site.workload.output_tokens,
        goals=aim.goals,
        tbt_s=site.slo.tbt_s,
        arrivals=aim.arrivals,
    )
    near = problem.pd.hardware
    far = problem.prfaas.hardware if problem.prfaas else near
    for name in (near, far):
        market.offer(name)
    systems = systems_of(sought, market, rates)
    ways, failed = dict[Contender, Purchases](), _left_out(problem, market)
    for contender in systems:
        try:
            ways[contender], systems[contender] = _kept(contender, systems[contender], sought, rates, market, far, near)
        except Infeasible as exc:
            failed[contender] = _why(contender, sought, market) or str(exc)
    eligible = [each for each in ways if each is not Contender.BIGGER_LOCAL or market.fast_at_home]
    if not eligible:
        local = Contender.BIGGER_LOCAL
        why = [f"{contender}: {why}" for contender, why in failed.items()]
        raise Infeasible("; ".join([*why, f"{local}: would do; say fast_at_home if it may"] if local in ways else why))
    best = min(eligible, key=lambda each: ways[each].cost)
    second = min([ways[each].cost for each in eligible if each is not best], default=None)
    break_even = None
    if Contender.PRFAAS in ways:
        least = min([ways[each].cost for each in eligible if each is not Contender.PRFAAS], default=None)
        last = ways[Contender.PRFAAS].systems[-1]
        tariff, months = _tariff(systems[Contender.PRFAAS], rates, market, far, near, least)
        break_even = BreakEven(
            per_gb=tariff,
            months=months,
            tokens=_from_tokens(problem, market, far, near, last),
            hit_ratio=_up_to_hits(problem, market, far, near, last),
        )
    return Advice(
        rates=rates,
        ways=dict(sorted(ways.items(), key=lambda item: item[1].cost)),
        failed=failed,
        is_offloading=best is Contender.PRFAAS,
        best=best,
        saving=None if second is None else 1.0 - ways[best].cost / second if second else 0.0,
        break_even=break_even,
        headroom_months=_headroom(ways[best], systems[best], far, near),
    )


def systems_of(
    sought: Sought, market: Market, rates: Sequence[float], ways: Collection[Contender] = tuple(Contender)
) -> dict[Contender, Sequence[Sequence[SizedSystem]]]:
    """What each way could run in each month. With PrfaaS nodes, months may do without them."""
    alone = [list(homogeneous(sought, rate)) for rate in rates]
    found = dict[Contender, Sequence[Sequence[SizedSystem]]]()
    if Contender.HOMOGENEOUS in ways:
        found[Contender.HOMOGENEOUS] = alone
    if Contender.COLOCATED in ways:
        found[Contender.COLOCATED] = [list(colocated(sought, rate)) for rate in rates]
    if sought.problem.prfaas is None:
        return found
    if market.lines and Contender.PRFAAS in ways:
        found[Contender.PRFAAS] = [
            [*these, *(each for line in market.lines for each in with_prfaas(sought, rate, line))]
            for these, rate in zip(alone, rates, strict=True)
        ]
    if Contender.BIGGER_LOCAL in ways:
        found[Contender.BIGGER_LOCAL] = [
            [*these, *with_prfaas(sought, rate, None, Contender.BIGGER_LOCAL)]
            for these, rate in zip(alone, rates, strict=True)
        ]
    return found


def _left_out(problem: Problem, market: Market) -> dict[Contender, str]:
    """Ways that are not looked at, and why."""
    if problem.prfaas is None:
        return dict.fromkeys((Contender.PRFAAS, Contender.BIGGER_LOCAL), "the site has no PrfaaS cluster")
    return {} if market.lines else {Contender.PRFAAS: "the market has no [[lines]]"}


def _headroom(found: Purchases, systems: Sequence[Sequence[SizedSystem]], far: str, near: str) -> list[int]:
    """For each month, how many following ones its instances and its line carry, rented or owned."""

    def is_enough(month: int, later: int) -> bool:
        held, line = found.held[month], found.systems[month].line
        return any(
            each.line in (None, line)
            and all(held.get(name, 0) >= count for name, count in needs(each, far, near).items())
            for each in systems[later]
        )

    months = range(len(systems))
    return [
        next((later - month - 1 for later in months[month + 1 :] if not is_enough(month, later)), months[-1] - month)
        for month in months
    ]


def with_all_hardware(site: Site) -> Site:
    """Instances in each cluster: how many there are does not matter, but curves are used where there are some."""
    return replace(site, clusters=tuple(replace(each, instances=max(1, each.instances)) for each in site.clusters))


def posed(site: Site, options: SolveOptions) -> tuple[Problem, Aim]:
    """The problem in as many lengths as queues are compared by, within the target for TBT."""
    objective = Objective.SLO if site.slo.ttft_targets else Objective.THROUGHPUT
    site = with_all_hardware(site)
    options = SolveOptions(
        service=options.service,
        objective=objective,
        extrapolate=options.extrapolate,
        survives_cold=options.survives_cold,
    )
    problem, aim = pose(site, options), Aim.of(site, options)
    if site.slo.tbt_s is not None:
        problem = problem.within_tbt(site.slo.tbt_s, site.workload.output_tokens)
    return aim.thinned(problem), aim


def check_size(problem: Problem, rates: Sequence[float]) -> None:
    """Raises InputError for a demand that is too large to be looked at, and probably a slip."""
    loads = problem.loads
    per_request = float((loads.local_s + loads.remote_s).min()) + loads.held_s + problem.capacity.decode_s
    for month, rate in enumerate(rates):
        if rate * per_request > MOST_INSTANCES:
            raise InputError(
                f"[demand] month {month + 1}: {rate:g} req/s need {rate * per_request:,.0f} instances at least; up to "
                f"{MOST_INSTANCES:,} are looked at; are rate_req_per_s and growth_per_month right?"
            )


def _why(contender: Contender, sought: Sought, market: Market) -> str | None:
    """Why no number of instances serves that way; None where some would."""
    problem = sought.problem
    if sought.goals:
        at_home = contender in (Contender.HOMOGENEOUS, Contender.COLOCATED)
        gbps, where = HOME_GBPS, ""
        if contender is Contender.PRFAAS:
            gbps = max(line.gbps for line in market.lines)
            where = f" on the widest line, of {gbps:g} Gbit/s"
        wired = problem.with_capacity(egress_bytes_per_s=gbps * BYTES_PER_S_PER_GBPS)
        cuts = [len(problem.lengths.tokens)] if at_home else even_cuts(problem)[:-1]
        for goal in sought.goals:
            if (least := nearest_s(wired, goal, cuts)) > goal.ttft_s:
                which = f"P{goal.target.share * 100:g}" + ("" if goal.is_of_all else f" of {goal.target.name}")
                return f"TTFT {which} is {least:.2f} s even without load{where}, {goal.ttft_s:g} s are asked for"
    if contender is Contender.COLOCATED and sought.tbt_s is not None and problem.decode.at(1) >= sought.tbt_s:
        return f"a decode step of one request takes {problem.decode.at(1):g} s, and prompts come on top"
    return None


def _kept(
    contender: Contender,
    systems: Sequence[Sequence[SizedSystem]],
    sought: Sought,
    rates: Sequence[float],
    market: Market,
    far: str,
    near: str,
) -> tuple[Purchases, Sequence[Sequence[SizedSystem]]]:
    """The cheapest way whose systems keep all goals under the arrivals of the trace, where there are any, and what it was chosen
    from. Months that miss are sized for more requests than they have, until they keep. Raises Infeasible.
    """
    found = _cheapest(contender, systems, rates, market, far, near)
    if sought.arrivals is None:
        return found, systems
    checked = ReplayedSystems(sought)
    sizes = list(rates)
    for _ in range(ROUNDS):
        missed = [at for at, rate in enumerate(rates) if not checked.keeps(found.systems[at], rate)]
        if not missed:
            return found, systems
        most = checked.highest_rate(found.systems[missed[0]], rates[missed[0]])
        factor = min(max(sqrt(rates[missed[0]] / most), LEAST_STEP), LARGEST_STEP) if most else LARGEST_STEP
        for at in missed:
            sizes[at] *= factor
        check_size(sought.problem, sizes)
        larger = systems_of(sought, market, sizes, [contender])[contender]
        systems = [busy_at(these, rate, size) for these, rate, size in zip(larger, rates, sizes, strict=True)]
        found = _cheapest(contender, systems, rates, market, far, near)
    at = missed[0]
    raise Infeasible(
        f"month {at + 1}: under the arrivals of the trace TTFT is not in time at {rates[at]:.3f} req/s, even with "
        f"{found.systems[at].num_pd + found.systems[at].num_prfaas} instances"
    )


def _cheapest(
    contender: Contender,
    systems: Sequence[Sequence[SizedSystem]],
    rates: Sequence[float],
    market: Market,
    far: str,
    near: str,
) -> Purchases:
    has_fast = contender in (Contender.PRFAAS, Contender.BIGGER_LOCAL)
    return cheapest_purchases(systems, rates, market, far, near, sends_at_last=has_fast)


def _tariff(
    systems: Sequence[Sequence[SizedSystem]],
    rates: Sequence[float],
    market: Market,
    far: str,
    near: str,
    least: float | None,
) -> tuple[float | None, int | None]:
    """The price of a gigabyte, alike on all lines, at which offloading costs as much as the best other way; and how many
    months offload at it. Infinite above all prices that a market may have, and without another way.

    The cost of the cheapest way is concave in the tariff, so that each step along its slope is too short, and the steps end.
    """
    if least is None:
        return inf, None
    tariff, sending = 0.0, 0
    for _ in range(STEPS):
        try:
            priced = [[each.at_tariff(tariff) for each in these] for these in systems]
            found = _cheapest(Contender.PRFAAS, priced, rates, market, far, near)
        except Infeasible:
            return None, None
        missing = least - found.cost
        if tariff == 0.0 and missing < 0:
            return None, None
        sending = sum(each.num_prfaas > 0 for each in found.systems)
        if missing <= CLOSE * least:
            break
        slope = sum(
            gb_per_month(each, rate, market) * market.worth(month)
            for month, (each, rate) in enumerate(zip(found.systems, rates, strict=True))
            if each.line
        )
        if missing >= slope * (MONEY.high - tariff):
            return inf, None
        tariff = min(max(tariff + missing / slope, LEAST), MONEY.high)
    return tariff, sending


def month_price(offer: HardwareOffer, market: Market) -> float:
    """The least that an instance costs a month in which it is there, all as the program counts it."""

    def there(months: int) -> float:
        return sum(map(market.worth, range(min(months, market.demand.months))))

    prices = [commitment_cost(offer, each, 0, market) / there(each.months) for each in offer.commitments]
    if offer.rent_per_month is not None:
        prices.append(offer.rent_per_month)
    if offer.purchase_price is not None:
        prices.append(purchase_cost(offer, 0, market) / there(offer.lifetime_months))
    if not prices and not offer.owned:
        raise InputError(f"hardware {offer.hardware!r}: give rent_per_gpu_hour, commitments or purchase_per_gpu")
    return min(prices, default=offer.power_per_month)


def _second_prices(market: Market, far: str, near: str) -> tuple[float, float]:
    per_month = [month_price(market.offer(name), market) for name in (far, near)]
    away, home = (each / (HOURS_PER_MONTH * SECONDS_PER_HOUR) for each in per_month)
    return away, home


def _per_gb(system: SizedSystem) -> float:
    return system.line.per_gb if system.line else 0.0


def _from_tokens(problem: Problem, market: Market, far: str, near: str, system: SizedSystem) -> float | None:
    """From which length on a prompt costs less away: GPU seconds and bytes; None: none does."""
    away, home = _second_prices(market, far, near)
    low, high = float(problem.lengths.tokens[0]), float(problem.lengths.tokens[-1])
    tokens = np.geomspace(max(1.0, low), high, LENGTHS)
    sent = problem.kv.of(tokens) / GB * _per_gb(system)
    is_cheaper = problem.remote.after(tokens, None) * away + sent < problem.local.after(tokens, None) * home
    dear = np.flatnonzero(~is_cheaper)
    if not dear.size:
        return low
    return float(tokens[dear[-1] + 1]) if dear[-1] + 1 < LENGTHS else None


def _up_to_hits(problem: Problem, market: Market, far: str, near: str, system: SizedSystem) -> float | None:
    """Up to which share that is cached, yet sent, an offloaded prompt of the mean length costs less away; None: at none."""
    away, home = _second_prices(market, far, near)
    lengths = problem.lengths
    above = lengths.tokens > system.threshold_tokens
    if not above.any():
        return None
    whole = float(np.average(lengths.tokens[above], weights=lengths.weights[above]))
    computed, cached = whole * (1 - HITS), whole * HITS
    sent = problem.kv(whole) / GB * _per_gb(system)
    is_cheaper = problem.remote.after(computed, cached) * away + sent < problem.local.after(computed, cached) * home
    dear = np.flatnonzero(~is_cheaper)
    if not dear.size:
        return 1.0
    return float(HITS[dear[0] - 1]) if dear[0] else None

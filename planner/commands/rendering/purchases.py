"""What to buy, as text and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import isfinite
from typing import Any, Final

from planner.commands.rendering.text import LABELS, tokens
from planner.model.market import HOURS_PER_MONTH, MONEY, HardwareOffer, Market
from planner.model.profile import provenance_kind
from planner.model.site import Site
from planner.solve.buying.advice import Advice, BreakEven, with_all_hardware
from planner.solve.buying.program import LineOrder, Order, Purchases, gb_per_month, line_cost, line_orders
from planner.solve.buying.systems import Contender, SizedSystem
from planner.version import tool_version

NAMES: Final[Mapping[Contender, str]] = {
    Contender.PRFAAS: "PrfaaS-PD",
    Contender.BIGGER_LOCAL: "bigger local prefill",
    Contender.HOMOGENEOUS: "homogeneous PD",
    Contender.COLOCATED: "colocated",
}
STAGES: Final = LABELS | {"nodes": "nodes"}
LOCAL_APPLIES: Final = (
    "  Bigger local prefill applies where PrfaaS hardware can be had beside the PD cluster (fast_at_home)."
)
ONLY_WAY: Final = "no other way that may be recommended serves"
ASSUMPTIONS: Final = (
    "the busiest hour of each month sets the size, by the queues of `solve`; thresholds keep even shares of the requests",
    "bigger local prefill is the PrfaaS cluster's hardware beside the PD cluster, at the same price and without a line",
    "lines are paid for by the month, and may be others in the next one",
    "the break-even tariff is one price per GB for all lines; what they cost a month stays",
    "the threshold of a month holds all week: no schedule of hours is bought",
)
MEAN_RATE: Final = (
    "the market says no rate_req_per_s: the workload's mean rate is taken for that of the first month's busiest hour"
)
WEEK_RATE: Final = "the market says no rate_req_per_s: the first month's busiest hour is that of the workload's trace"
TRACE_WEEK: Final = "the market says no week: it is that of the workload's trace, of {hours} hours"
REPLAYED: Final = (
    "each month's system keeps its TTFT targets under the arrivals of the workload's trace, replayed at its rate"
)
NO_WEEK: Final = "neither the market nor the workload says what a week looks like: all its hours are as the busiest one"


def purchases_json(site: Site, market: Market, advice: Advice) -> dict[str, Any]:
    """The answer in plain JSON types, units in the keys."""
    asked = market.asked_by(site.workload)
    return {
        "schema": 1,
        "prfaas_version": tool_version(),
        "input_hash": site.input_hash,
        "site": site.name,
        "currency": market.currency,
        "discount_per_year": market.discount_per_year,
        "offload": advice.is_offloading,
        "best": str(advice.best),
        "saving_fraction": advice.saving,
        "break_even": None if advice.break_even is None else _break_even_json(advice.break_even),
        "week": {"mean_load": asked.demand.mean_load, "load_95th_percentile": asked.demand.measured_load},
        "ways": {str(contender): _way_json(asked, advice, way) for contender, way in advice.ways.items()},
        "failed": {str(contender): why for contender, why in advice.failed.items()},
        "months": [_month_json(asked, advice, month) for month in range(len(advice.rates))],
        "orders": [_order_json(order) for order in advice.purchases.orders],
        "line_orders": [_line_order_json(market, order) for order in line_orders(advice.purchases.systems)],
        "still_to_pay": advice.purchases.still_to_pay,
        "still_worth": advice.purchases.still_worth,
        "assumptions": assumptions(site, market),
        "provenance": with_all_hardware(site).provenances() | _provenances(market),
    }


def assumptions(site: Site, market: Market) -> list[str]:
    """What the answer rests on, in sentences."""
    week, found = site.workload.week, list(ASSUMPTIONS)
    if market.demand.rate_req_per_s is None:
        found.append(WEEK_RATE if week else MEAN_RATE)
    if not market.demand.week:
        found.append(TRACE_WEEK.format(hours=len(week)) if week else NO_WEEK)
    if site.workload.arrivals is not None and site.slo.ttft_targets:
        found.append(REPLAYED)
    return [*found, _counted(market)]


def _counted(market: Market) -> str:
    ends = market.demand.ends
    counted = (
        "count in full" if ends else "count by the value that they lose, commitments by the months that are looked at"
    )
    what = "purchases and commitments" if ends else "purchases"
    rate = market.discount_per_year
    return f"{what} {counted}; {f'discounted by {rate:.1%} a year' if rate else 'nothing is discounted'}"


def _break_even_json(found: BreakEven) -> dict[str, float | str | None]:
    pays = "never" if found.per_gb is None else "up_to" if isfinite(found.per_gb) else "always"
    return {
        "pays": pays,
        "per_gb": found.per_gb if found.per_gb is None or isfinite(found.per_gb) else None,
        "months": found.months,
        "prompt_tokens": found.tokens,
        "hit_ratio": found.hit_ratio,
    }


def _way_json(market: Market, advice: Advice, way: Purchases) -> dict[str, float]:
    return {
        "cost": way.cost,
        "cost_per_1000_requests": way.cost / _requests(market, advice) * 1000,
        "sent_gb": way.sent_gb,
        "gap_fraction": way.gap,
    }


def cost_per_1000(market: Market, advice: Advice) -> float:
    """Of the recommended way."""
    return advice.purchases.cost / _requests(market, advice) * 1000


def _requests(market: Market, advice: Advice) -> float:
    """Those of all months, as late ones count less in the cost."""
    worth = sum(rate * market.worth(month) for month, rate in enumerate(advice.rates))
    return worth * market.demand.mean_load * HOURS_PER_MONTH * 3600


def _month_json(market: Market, advice: Advice, month: int) -> dict[str, Any]:
    system = advice.purchases.systems[month]
    busy = dict(system.busy)
    return {
        "month": month + 1,
        "busiest_hour_req_per_s": advice.rates[month],
        "contender": str(system.contender),
        "num_prfaas": system.num_prfaas,
        "num_prefill": system.num_prefill,
        "num_decode": system.num_decode,
        "threshold_tokens": system.threshold_tokens if isfinite(system.threshold_tokens) else None,
        "line": market.line_number(system.line) if system.line else None,
        "line_gbps": system.line.gbps if system.line else 0.0,
        "utilisation": busy,
        "utilisation_mean_of_week": {stage: share * market.demand.mean_load for stage, share in busy.items()},
        "binds": max(busy, key=lambda stage: busy[stage]),
        "held_instances": dict(advice.purchases.held[month]),
        "sent_gb": gb_per_month(system, advice.rates[month], market) if system.line else 0.0,
        "line_cost": line_cost(system, advice.rates[month], market),
        "cash": advice.purchases.cash[month],
        "headroom_months": advice.headroom_months[month],
    }


def _order_json(order: Order) -> dict[str, Any]:
    return {
        "month": order.month + 1,
        "hardware": order.hardware,
        "bought": order.bought,
        "committed": {f"{months}_months": count for months, count in order.committed.items()},
        "rented": order.rented,
    }


def _line_order_json(market: Market, order: LineOrder) -> dict[str, Any]:
    return {
        "month": order.month + 1,
        "line": market.line_number(order.line),
        "line_gbps": order.line.gbps,
        "first_month": order.first + 1,
        "last_month": order.last + 1,
    }


def _provenances(market: Market) -> dict[str, str]:
    prices = {f"prices of {each.hardware}": each.provenance for each in market.hardware}
    lines = {f"line {number} of {each.gbps:g} Gbit/s": each.provenance for number, each in enumerate(market.lines, 1)}
    return {"demand": market.demand.provenance} | prices | lines


def purchases_text(site: Site, market: Market, advice: Advice) -> str:
    """The answer for people: a verdict, all ways, the months, the orders."""
    rates, market = advice.rates, market.asked_by(site.workload)
    head = (
        f"Buy  site={site.name}  {_months_of(len(rates))}, {rates[0]:.2f} to {rates[-1]:.2f} req/s in the busiest hour"
    )
    return "\n".join(
        [
            f"{head}{_targets(site)}",
            *_week(market),
            "",
            *verdict(market, advice),
            "",
            *_ways(market, advice),
            "",
            *_months(market, advice),
            "",
            *_orders(market, advice),
            "",
            _rest(market, advice),
            *_doubts(market),
        ]
    )


def _week(market: Market) -> list[str]:
    """How busy a week is, seen from its busiest hour."""
    demand = market.demand
    if not demand.week:
        return []
    return [
        f"     week of {len(demand.week)} parts: {demand.mean_load:.0%} of the busiest one in the mean, "
        f"{demand.measured_load:.0%} in the 95th percentile"
    ]


def _months_of(count: int) -> str:
    return f"{count} month{'s' if count > 1 else ''}"


def _targets(site: Site) -> str:
    ttft, tbt = site.slo.ttft_p90_s, site.slo.tbt_s
    parts = [f"TTFT P90 {ttft:g} s" if ttft is not None else "", f"TBT {tbt:g} s" if tbt is not None else ""]
    some = [f"{each.share:.0%} of {each.name} {each.ttft_s:g} s" for each in site.slo.targets]
    return "".join(f"  {part}" for part in parts if part) + (f"\n     TTFT of {'; '.join(some)}" if some else "")


def verdict(market: Market, advice: Advice) -> list[str]:
    """The cheapest way, and where another one would be."""
    saved = f"; {ONLY_WAY}" if advice.saving is None else f", {advice.saving:.1%} cheaper than the next"
    word = "offload" if advice.is_offloading else "do not offload"
    lines = [f"Verdict: {word}; {NAMES[advice.best]} is cheapest{saved}"]
    if (found := advice.break_even) is not None:
        lines.append(f"  Offloading all in all pays {_up_to_tariff(market, advice, found)}.")
        some = "no prompt costs" if found.tokens is None else f"prompts from {tokens(found.tokens)} tokens on cost"
        hits = (
            "the mean one that is sent costs no less even if nothing of it is cached"
            if found.hit_ratio is None
            else f"of the mean one that is sent at most {found.hit_ratio:.0%} may be cached"
        )
        lines.append(f"  One by one, {some} less away; {hits}.")
    return lines


def _up_to_tariff(market: Market, advice: Advice, found: BreakEven) -> str:
    """The tariff, and how many months offload at it, if not all of them do."""
    if found.per_gb is None:
        return "at no tariff, not even 0"
    if advice.saving is None:
        return f"at every tariff: {ONLY_WAY}"
    if not isfinite(found.per_gb):
        return f"at every tariff up to {market.currency}{MONEY.high:,.0f} per GB, in the last month at least"
    total = len(advice.rates)
    then = "" if found.months == total else f"; at that price in {found.months} of {total} months only"
    return f"up to {market.currency}{found.per_gb:.4f} per GB, if all lines charge that{then}"


def _ways(market: Market, advice: Advice) -> list[str]:
    lines = [f"  {'':<22}{'cost, ' + market.currency:>14}{'per 1000 requests':>19}{'sent, TB':>11}{'gap':>9}"]
    for contender, way in advice.ways.items():
        each = _way_json(market, advice, way)
        lines.append(
            f"  {NAMES[contender]:<22}{way.cost:>14,.0f}{each['cost_per_1000_requests']:>19.3f}"
            f"{way.sent_gb / 1000:>11,.0f}{way.gap:>9.2%}{_note(market, contender)}"
        )
    lines += [f"  {NAMES[contender]:<22}{why}" for contender, why in advice.failed.items()]
    return lines if market.fast_at_home or Contender.BIGGER_LOCAL not in advice.ways else [*lines, LOCAL_APPLIES]


def _note(market: Market, contender: Contender) -> str:
    is_out = contender is Contender.BIGGER_LOCAL and not market.fast_at_home
    return "  only compared" if is_out else ""


def _months(market: Market, advice: Advice) -> list[str]:
    head = f"  {'month':>5}{'req/s':>8}{'PrfaaS':>8}{'PD-P':>6}{'PD-D':>6}{'t':>9}{'line':>6}{'Gbit/s':>8}"
    lines = [f"{head}{'busiest':>9}{'mean':>6}  {'which':<16}{'lasts, months':>13}{'cash, ' + market.currency:>12}"]
    for month, rate in enumerate(advice.rates):
        system = advice.purchases.systems[month]
        share, stage = max((share, stage) for stage, share in system.busy)
        lines.append(
            f"  {month + 1:>5}{rate:>8.2f}{system.num_prfaas:>8}{system.num_prefill:>6}{system.num_decode:>6}"
            f"{_threshold(system):>9}{market.line_number(system.line) if system.line else '-':>6}"
            f"{system.line.gbps if system.line else 0:>8g}{share:>9.0%}{share * market.demand.mean_load:>6.0%}"
            f"  {STAGES[stage]:<16}"
            f"{_headroom(advice, month):>13}{advice.purchases.cash[month]:>12,.0f}"
        )
    return lines


def _threshold(system: SizedSystem) -> str:
    return tokens(system.threshold_tokens) if system.num_prfaas else "-"


def _headroom(advice: Advice, month: int) -> str:
    """At the end of the months looked at it may be more."""
    months = advice.headroom_months[month]
    return f"{months}+" if month + months == len(advice.rates) - 1 else str(months)


def _orders(market: Market, advice: Advice) -> list[str]:
    """What is bought and committed, by the month of its order; what is rented by the hour, in runs of months; lines."""
    orders = advice.purchases.orders
    found = [
        (order.month, order.hardware, what)
        for order in orders
        if (what := ordered_text(market.offer(order.hardware), order))
    ]
    for name in {order.hardware for order in orders}:
        rented = {order.month: order.rented for order in orders if order.hardware == name}
        found += [
            (first, name, f"rent {count} by the hour{f' until month {last + 1}' if last > first else ''}")
            for first, last, count in _runs([rented.get(month, 0) for month in range(len(advice.rates))])
        ]
    lines = [f"  month {month + 1:>3}  {name:<12}{what}" for month, name, what in sorted(found)]
    wires = [_line_order(market, order) for order in line_orders(advice.purchases.systems)]
    lines = ["Orders (instances):", *lines] if lines else []
    return [*lines, *(["Orders (lines):", *wires] if wires else [])] or ["Orders: none"]


def _line_order(market: Market, order: LineOrder) -> str:
    name, first, last = f"line {market.line_number(order.line)}", order.first + 1, order.last + 1
    months = f"months {first} to {last}" if last > first else f"month {first}"
    return f"  month {order.month + 1:>3}  {name:<12}rent {order.line.gbps:g} Gbit/s for {months}"


def ordered_text(offer: HardwareOffer, order: Order) -> str:
    parts = [f"buy {order.bought}"] if order.bought else []
    parts += [f"rent {count} for {_months_of(months)}" for months, count in order.committed.items()]
    there = f" (there in month {order.month + 1 + offer.lead_months})" if offer.lead_months else ""
    return ", ".join(f"{part}{there}" for part in parts)


def _runs(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First and last month of equal counts above 0, and the count."""
    first = 0
    for count, months in groupby(counts):
        last = first + len(list(months)) - 1
        if count:
            yield first, last, count
        first = last + 1


def _rest(market: Market, advice: Advice) -> str:
    found, months = advice.purchases, len(advice.rates)
    return (
        f"Paid in {_months_of(months)}: {market.currency}{sum(found.cash):,.0f}. After them {market.currency}"
        f"{found.still_to_pay:,.0f} of commitments is still to be paid; purchases are worth "
        f"{market.currency}{found.still_worth:,.0f}{'' if not market.demand.ends else ', which is taken for lost'}."
    )


def _doubts(market: Market) -> list[str]:
    weak = doubts(market)
    return ["", f"Unverified: {', '.join(weak)}"] if weak else []


def doubts(market: Market) -> list[str]:
    """What of the market is not verified."""
    return [what for what, text in _provenances(market).items() if not text or provenance_kind(text) == "unverified"]

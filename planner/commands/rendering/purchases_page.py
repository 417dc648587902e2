"""One self-contained HTML page of what to buy: what to decide, money and instances by month, and what they rest on."""

from collections.abc import Sequence
from html import escape

from planner.commands.rendering.charts import ChartLine, line_chart
from planner.commands.rendering.front import front_text
from planner.commands.rendering.page import STYLE
from planner.commands.rendering.purchases import (
    NAMES,
    ONLY_WAY,
    STAGES,
    assumptions,
    cost_per_1000,
    doubts,
    ordered_text,
    purchases_text,
    verdict,
)
from planner.model.market import Market
from planner.model.profile import provenance_kind
from planner.model.site import Site
from planner.solve.buying.advice import Advice
from planner.solve.buying.pareto import FrontPoint
from planner.solve.buying.program import line_orders
from planner.solve.buying.systems import Contender


def purchases_page(site: Site, market: Market, advice: Advice, front: Sequence[FrontPoint] | None = None) -> str:
    """The page: charts of the months above what `purchases_text` says, and the Pareto front where one was asked for."""
    months = len(advice.rates)
    found = advice.purchases
    names = sorted({name for held in found.held for name in held})
    instances = [
        ChartLine(name, _steps([held.get(name, 0) for held in found.held]), slot) for slot, name in enumerate(names)
    ]
    busiest = [max(share for _, share in system.busy) * 100 for system in found.systems]
    mean_load = market.asked_by(site.workload).demand.mean_load
    unit, money = scaled(market.currency, found.cash)
    busy = [
        ChartLine("busiest hour", _steps(busiest), 1),
        ChartLine("mean of the week", _steps([share * mean_load for share in busiest]), 0, dashed=True),
    ]
    lines = [system.line.gbps if system.line else 0.0 for system in found.systems]
    sent = [dict(system.busy).get("egress", 0.0) * gbps for system, gbps in zip(found.systems, lines, strict=True)]
    figures = [
        _figure("Requests in the busiest hour", [ChartLine("demand", _steps(advice.rates))], "requests/s", months),
        _figure("Instances that are there", instances, "instances", months),
        _figure("How busy the fullest stage is", busy, "%", months),
        _figure("Paid in each month", [ChartLine("cash", _steps(money), 2)], unit, months),
        _figure(
            "The line in the busiest hour",
            [ChartLine("line", _steps(lines), 3, dashed=True), ChartLine("sent", _steps(sent), 0)],
            "Gbit/s",
            months,
        ),
    ]
    asked = market.asked_by(site.workload)
    text = purchases_text(site, market, advice)
    if front is not None:
        figures.append(_front_figure(market, front))
        text = f"{text}\n\n{front_text(market, front)}"
    said, *more = verdict(market, advice)
    title = escape(f"What to buy for {site.name}")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{STYLE}</style></head><body><main><h1>{title}</h1>",
            f"<p><b>{escape(said)}.</b> {escape(' '.join(each.strip() for each in more))}</p>",
            _tiles(asked, advice),
            _list("To be ordered in the first month", first_orders(asked, advice)),
            _list("Risks", risks(site, asked, advice)),
            f'<section class="grid2">{"".join(figures)}</section>',
            _list("Assumed", assumptions(site, market)),
            f'<section class="scroll"><h2>In full</h2><pre>{escape(text)}</pre></section>',
            "</main></body></html>",
        ]
    )


def _tiles(market: Market, advice: Advice) -> str:
    found, currency = advice.purchases, market.currency
    most = max(range(len(found.cash)), key=lambda month: found.cash[month])
    last = found.systems[-1]
    share, stage = max((share, stage) for stage, share in last.busy)
    others = [each for each in advice.ways if each is not advice.best and advice.saving is not None]
    other = next((each for each in others if each is not Contender.BIGGER_LOCAL or market.fast_at_home), None)
    there = " + ".join(f"{count} {name}" for name, count in sorted(found.held[-1].items()) if count)
    tiles = [
        (f"{currency}{found.cost:,.0f}", f"cost of {len(advice.rates)} months, by value lost"),
        (f"{currency}{cost_per_1000(market, advice):.2f}", "per 1000 requests"),
        (
            f"{currency}{advice.ways[other].cost:,.0f}" if other else "none",
            f"next cheapest way: {NAMES[other]}" if other else ONLY_WAY,
        ),
        (
            f"{currency}{sum(found.cash):,.0f}",
            f"paid in all; most in month {most + 1}: {currency}{found.cash[most]:,.0f}",
        ),
        (there or "none", "instances in the last month"),
        (
            f"{share:.0%}",
            f"{STAGES[stage]} busy in its busiest hour, {share * market.demand.mean_load:.0%} in the mean",
        ),
    ]
    inner = "".join(f'<div class="tile"><b>{escape(top)}</b><span>{escape(what)}</span></div>' for top, what in tiles)
    return f'<div class="tiles">{inner}</div>'


def first_orders(market: Market, advice: Advice) -> list[str]:
    """What cannot wait, in sentences."""
    first = [order for order in advice.purchases.orders if not order.month]
    rented = [f"{order.hardware}: rent {order.rented} by the hour" for order in first if order.rented]
    ordered = [
        f"{order.hardware}: {what}" for order in first if (what := ordered_text(market.offer(order.hardware), order))
    ]
    lines = [
        f"line {market.line_number(order.line)}: {order.line.gbps:g} Gbit/s, of use from month {order.first + 1} on"
        for order in line_orders(advice.purchases.systems)
        if order.month <= 0
    ]
    return [*ordered, *rented, *lines] or ["nothing"]


def risks(site: Site, market: Market, advice: Advice) -> list[str]:
    """What could make the answer wrong or dear."""
    months, found = len(advice.rates), []
    tight = sum(1 for month, spare in enumerate(advice.headroom_months) if not spare and month < months - 1)
    if tight:
        found.append(
            f"In {tight} of {months} months what is there is not enough for the next one: if demand grows faster than "
            f"{market.demand.growth_per_month:.0%} a month, orders must come sooner."
        )
    longest = max((offer.lead_months for offer in market.hardware), default=0)
    if longest:
        found.append(f"Hardware comes up to {longest} months after its order; meanwhile only rent by the hour helps.")
    if unverified := doubts(market):
        found.append(f"Not verified: {', '.join(unverified)}.")
    weak = [what for what, text in site.provenances().items() if provenance_kind(text) in ("fitted", "unverified")]
    if weak:
        found.append(f"Not measured, only fitted or unverified: {', '.join(weak)}.")
    if site.workload.arrivals is None:
        found.append("Requests are taken for independent of each other: a trace (fit) would tell bursts.")
    found.append("Failures are not counted: leave some instances in reserve for them.")
    return found


def _list(title: str, items: Sequence[str]) -> str:
    inner = "".join(f"<li>{escape(each)}</li>" for each in items)
    return f"<section><h2>{escape(title)}</h2><ul>{inner}</ul></section>"


def scaled(currency: str, values: Sequence[float]) -> tuple[str, list[float]]:
    """Money as people say it, and its unit."""
    most = max(values, default=0.0)
    for word, size in (("million ", 1e6), ("thousand ", 1e3)):
        if most >= size:
            return f"{word}{currency}", [value / size for value in values]
    return currency, list(values)


def _figure(title: str, lines: Sequence[ChartLine], unit: str, months: int) -> str:
    chart = line_chart(lines, x_label="month", y_label=unit, title=title, x_range=(0.5, months + 0.5))
    return f"<figure><h2>{escape(title)}</h2>{chart}</figure>"


def _front_figure(market: Market, front: Sequence[FrontPoint]) -> str:
    """Cost by rate, a curve for each target that has points of its own."""
    targets = sorted({point.ttft_p90_s for point in front})
    unit, money = scaled(market.currency, [point.cost_per_month for point in front])
    lines = [
        ChartLine(
            f"P90 {target:g} s",
            [
                (point.rate_req_per_s, cost)
                for point, cost in zip(front, money, strict=True)
                if point.ttft_p90_s == target
            ],
            slot,
        )
        for slot, target in enumerate(targets)
    ]
    rates = [point.rate_req_per_s for point in front]
    title = "Pareto front: what a month costs"
    chart = line_chart(
        lines, x_label="requests/s in the busiest hour", y_label=unit, title=title,
        x_range=(0.0, max(rates) * 1.05), is_dotted=True,
    )  # fmt: skip
    return f"<figure><h2>{escape(title)}</h2>{chart}</figure>"


def _steps(values: Sequence[float]) -> list[tuple[float, float]]:
    """A flat piece for each month."""
    return [(month + side, value) for month, value in enumerate(values, 1) for side in (-0.5, 0.5)]

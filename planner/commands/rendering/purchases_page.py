"""One self-contained HTML page of what to buy: the verdict, money and instances by month, and what they rest on."""

from collections.abc import Sequence
from html import escape

from planner.commands.rendering.charts import ChartLine, line_chart
from planner.commands.rendering.front import front_text
from planner.commands.rendering.page import STYLE
from planner.commands.rendering.purchases import assumptions, purchases_text, verdict
from planner.model.market import Market
from planner.model.site import Site
from planner.solve.buying.advice import Advice
from planner.solve.buying.pareto import FrontPoint


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
        _figure("Paid in each month", [ChartLine("cash", _steps(found.cash), 2)], market.currency, months),
        _figure(
            "The line in the busiest hour",
            [ChartLine("line", _steps(lines), 3, dashed=True), ChartLine("sent", _steps(sent), 0)],
            "Gbit/s",
            months,
        ),
    ]
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
            f'<div class="grid2">{"".join(figures)}</div>',
            f'<section class="scroll"><pre>{escape(text)}</pre></section>',
            "<section><h2>Assumed</h2><ul>",
            *(f"<li>{escape(each)}</li>" for each in assumptions(site, market)),
            "</ul></section></main></body></html>",
        ]
    )


def _figure(title: str, lines: Sequence[ChartLine], unit: str, months: int) -> str:
    chart = line_chart(lines, x_label="month", y_label=unit, title=title, x_range=(0.5, months + 0.5))
    return f"<figure><h2>{escape(title)}</h2>{chart}</figure>"


def _front_figure(market: Market, front: Sequence[FrontPoint]) -> str:
    """Cost by rate, a curve for each target that has points of its own."""
    targets = sorted({point.ttft_p90_s for point in front})
    lines = [
        ChartLine(
            f"P90 {target:g} s",
            [(point.rate_req_per_s, point.cost_per_month) for point in front if point.ttft_p90_s == target],
            slot,
        )
        for slot, target in enumerate(targets)
    ]
    rates = [point.rate_req_per_s for point in front]
    title = "Pareto front: what a month costs"
    chart = line_chart(
        lines, x_label="requests/s in the busiest hour", y_label=market.currency, title=title,
        x_range=(0.0, max(rates) * 1.05), is_dotted=True,
    )  # fmt: skip
    return f"<figure><h2>{escape(title)}</h2>{chart}</figure>"


def _steps(values: Sequence[float]) -> list[tuple[float, float]]:
    """A flat piece for each month."""
    return [(month + side, value) for month, value in enumerate(values, 1) for side in (-0.5, 0.5)]

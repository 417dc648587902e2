"""One self-contained HTML page about a plan: what it is, how sure it is, how it fares in simulation."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

import numpy as np

from membership.lines import BYTES_PER_S_PER_GBPS
from planner.commands.rendering.charts import ChartLine, ChartMark, Swing, heat_map, line_chart, tornado
from planner.commands.rendering.text import LABELS
from planner.model.site import Site
from planner.simulator.outcome import SimulationOutcome, over_seeds
from planner.solve.plan import Plan
from planner.solve.problem import Problem, SolveOptions, best_cut, pose
from planner.solve.search import Bottleneck, cuts_of, stage_rates
from planner.solve.sensitivity.sweeps import heat_map as rate_grid
from planner.version import tool_version

STYLE: Final = """
:root{--ink:#1b2430;--soft:#5b6776;--line:#d8dde4;--page:#fff;--card:#f7f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa5b3;--line:#3a4350;--page:#14181e;--card:#1c222a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1220px;margin:0 auto;padding:28px 22px 60px}h1{font-size:25px;margin:0 0 2px}
h2{font-size:17px;margin:0 0 4px}p{margin:4px 0 10px}.soft{color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:18px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:19px;font-variant-numeric:tabular-nums}.tile span{color:var(--soft);font-size:13px}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:18px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px}
figcaption{color:var(--soft);font-size:13px;margin-top:6px}svg{width:100%;height:auto;display:block}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 10px;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:500}td.text{text-align:left}
ul{margin:6px 0;padding-left:20px}section{margin-top:26px}.scroll{overflow-x:auto}
"""


def html_report(
    site: Site, options: SolveOptions, plan: Plan, outcomes: Mapping[str, Sequence[SimulationOutcome]]
) -> str:
    """The page. `outcomes` are simulations by contender name; the one called prfaas is the plan."""
    problem = pose(site, options)
    figures = [
        _figure(
            "Split at the plan's threshold",
            _by_split(problem, plan),
            "As Fig. 5a of the paper: Λ is the lower of the two.",
        ),
        _figure(
            "Threshold at the plan's split",
            _by_threshold(problem, plan),
            "As Fig. 5b: the bounds cross at the optimum.",
        ),
        _figure("Λ over threshold and split", _heat(site, options, plan), "Darker serves more; the ring is the plan."),
        _figure("If an input is 10 % off", _tornado(plan), "Broad: the plan as it is. Narrow: solved again."),
        _figure("Egress needed", _break_even(problem, plan, options), "Λ of the best plan for each link."),
        _figure("Egress over time", _egress(outcomes), "Simulated, 10 s windows, first seed."),
        _figure("Time to first token", _cdfs(outcomes), "Simulated, all contenders under the same arrivals."),
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Plan for {escape(site.name)}</title><style>{STYLE}</style></head><body><main>",
            f"<h1>Plan for {escape(site.name)}</h1>",
            f'<p class="soft">{escape(plan.workload)} · {escape(plan.objective)} · '
            f"{'E[T(L)]' if plan.service == 'exact' else 'T(E[L])'} · input {plan.input_hash} · prfaas {tool_version()}</p>",
            _tiles(plan),
            f"<p><b>Bottleneck: {LABELS[plan.bottleneck]}.</b> {escape(_next_step(plan))}</p>",
            f'<div class="grid2">{"".join(figures)}</div>',
            _simulated(outcomes),
            _kept_targets(outcomes),
            _footnotes(plan),
            "</main></body></html>",
        ]
    )


def _figure(title: str, chart: str, caption: str) -> str:
    return f"<figure><h2>{escape(title)}</h2>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _tiles(plan: Plan) -> str:
    tiles = [
        (f"{plan.lambda_max:.3f}", "Λmax, requests/s"),
        (f"{plan.threshold_tokens:,.0f}", "threshold t, uncached tokens"),
        (f"{plan.num_prfaas} / {plan.num_prefill} / {plan.num_decode}", "PrfaaS / PD-P / PD-D instances"),
        (f"{plan.offload_fraction:.1%}", "of requests offloaded"),
        (f"{plan.egress_gbps:.1f} Gbit/s", f"egress, of {plan.egress_capacity_gbps:g}"),
        (f"{plan.ttft_mean_s:.2f} / {plan.ttft_p90_s:.2f}", "s, TTFT mean / P90, empty"),
        (f"{plan.loaded_ttft_mean_s:.2f} / {plan.loaded_ttft_p90_s:.2f}", "s, TTFT mean / P90 at 80 % of Λ"),
    ]
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{v}</b><span>{n}</span></div>' for v, n in tiles)
        + "</div>"
    )


def _next_step(plan: Plan) -> str:
    what, gain = max(plan.shadow_prices.items(), key=lambda item: item[1], default=("nothing", 0.0))
    return f"One more {what.replace('_', ' ')} would bring most: {gain:+.3f} requests/s."


def _by_split(problem: Problem, plan: Plan) -> str:
    cut = int(cuts_of(problem.loads, np.array([plan.threshold_tokens]))[0])
    prefill, decode, best = [], [], []
    for split in range(problem.capacity.num_pd + 1):
        limits = stage_rates(problem.loads, problem.capacity, split, cut)
        prefill.append((float(split), min(limit for stage, limit in limits.items() if stage is not Bottleneck.PD_D)))
        decode.append((float(split), limits[Bottleneck.PD_D]))
        best.append((float(split), min(prefill[-1][1], decode[-1][1])))
    top = max(rate for _, rate in best) * 1.6
    lines = [
        ChartLine("prefill bound", prefill, 0),
        ChartLine("decode bound", decode, 1),
        ChartLine("Λ", best, 2, dashed=True),
    ]
    mark = ChartMark(
        plan.num_prefill, dict(best)[plan.num_prefill], f"Np = {plan.num_prefill}, Λ = {plan.lambda_max:.2f}"
    )
    return line_chart(
        lines, x_label="PD prefill instances", y_label="requests/s", title="Λ by split", marks=[mark], y_range=(0, top)
    )


def _by_threshold(problem: Problem, plan: Plan) -> str:
    tokens = problem.lengths.tokens
    high = min(float(tokens[-1]), max(3 * plan.threshold_tokens, float(np.quantile(tokens, 0.5))))
    thresholds = np.linspace(0, high, 160)
    cuts = cuts_of(problem.loads, thresholds)
    stages: dict[Bottleneck, list[tuple[float, float]]] = {stage: [] for stage in Bottleneck}
    for t, cut in zip(thresholds.tolist(), cuts.tolist(), strict=True):
        for stage, limit in stage_rates(problem.loads, problem.capacity, plan.num_prefill, cut).items():
            stages[stage].append((t, limit))
    lines = [
        ChartLine(LABELS[stage], points, slot, dashed=slot > 1) for slot, (stage, points) in enumerate(_ordered(stages))
    ]
    mark = ChartMark(plan.threshold_tokens, plan.lambda_max, f"t = {plan.threshold_tokens:,.0f}")
    return line_chart(
        lines, x_label="threshold t, tokens", y_label="requests/s", title="Λ by threshold", marks=[mark],
        y_range=(0, 2 * plan.lambda_max), x_range=(0, high),
    )  # fmt: skip


def _ordered(stages: Mapping[Bottleneck, Any]) -> list[tuple[Bottleneck, Any]]:
    return [
        (stage, stages[stage])
        for stage in (Bottleneck.PRFAAS, Bottleneck.PD_P, Bottleneck.PD_D, Bottleneck.EGRESS, Bottleneck.COLD)
        if stages[stage]
    ]


def _heat(site: Site, options: SolveOptions, plan: Plan) -> str:
    grid = rate_grid(site, options, 80)
    best = (plan.threshold_tokens, plan.num_prefill) if plan.num_prfaas else None
    return heat_map(
        grid["thresholds_tokens"], grid["num_prefill"], grid["rates"], x_label="threshold t, tokens",
        y_label="PD prefill instances", value_label="Λ, requests/s", title="Λ over threshold and split", best=best,
    )  # fmt: skip


def _tornado(plan: Plan) -> str:
    names = dict.fromkeys(row.what for row in plan.sensitivity)
    swings = []
    for name in names:
        rows = [row for row in plan.sensitivity if row.what == name]
        swings.append(
            Swing(name, (rows[0].kept_rate, rows[-1].kept_rate), (rows[0].resolved_rate, rows[-1].resolved_rate))
        )
    swings.sort(key=lambda swing: -abs(swing.kept[0] - swing.kept[1]))
    return tornado(swings, plan.lambda_max, x_label="Λ, requests/s", title="Sensitivity")


def _break_even(problem: Problem, plan: Plan, options: SolveOptions) -> str:
    top = max(2.5 * plan.egress_gbps, 1.0)
    points = []
    for gbps in np.linspace(0, top, 40).tolist():
        smaller = problem.with_capacity(egress_bytes_per_s=gbps * BYTES_PER_S_PER_GBPS)
        points.append((gbps, best_cut(smaller, options).rate))
    mark = ChartMark(plan.egress_gbps, plan.lambda_max, f"needs {plan.egress_gbps:.1f} Gbit/s")
    alone = ChartLine("without PrfaaS", [(0.0, points[0][1]), (top, points[0][1])], 1, dashed=True)
    return line_chart(
        [ChartLine("best plan", points, 0), alone], x_label="egress, Gbit/s", y_label="Λ, requests/s", title="Λ by egress",
        marks=[mark],
    )  # fmt: skip


def _egress(outcomes: Mapping[str, Sequence[SimulationOutcome]]) -> str:
    lines = []
    for slot, (name, runs) in enumerate(outcomes.items()):
        sent = runs[0].egress_bytes[10.0] * 8e-10
        if sent.any():
            stride = max(1, len(sent) // 400)
            lines.append(ChartLine(name, [(10.0 * i, float(sent[i])) for i in range(0, len(sent), stride)], slot))
    if not lines:
        lines = [ChartLine("no egress", [(0.0, 0.0), (1.0, 0.0)], 0)]
    return line_chart(lines, x_label="time, s", y_label="Gbit/s", title="Egress over time")


def _cdfs(outcomes: Mapping[str, Sequence[SimulationOutcome]]) -> str:
    lines, longest = [], 0.0
    shares = np.linspace(0, 0.995, 200)
    for slot, (name, runs) in enumerate(outcomes.items()):
        values = np.concatenate([run.ttft_s[~np.isnan(run.ttft_s)] for run in runs])
        if len(values):
            found = np.quantile(values, shares)
            longest = max(longest, float(np.quantile(values, 0.97)))
            lines.append(ChartLine(name, list(zip(found.tolist(), shares.tolist(), strict=True)), slot))
    return line_chart(
        lines, x_label="TTFT, s", y_label="share of requests", title="TTFT distribution", x_range=(0, longest or 1.0),
        y_range=(0, 1.0),
    )  # fmt: skip


def _simulated(outcomes: Mapping[str, Sequence[SimulationOutcome]]) -> str:
    columns = [
        ("ttft_mean_s", "TTFT mean, s"), ("ttft_p90_s", "P90, s"), ("ttft_p99_s", "P99, s"), ("tbt_p99_s", "TBT P99, s"),
        ("throughput_req_per_s", "req/s"), ("goodput_req_per_s", "goodput, req/s"), ("egress_p99_gbps", "egress P99, Gbit/s"),
        ("rejected", "rejected"),
    ]  # fmt: skip
    rows = []
    for name, runs in outcomes.items():
        report = over_seeds([run.report() for run in runs])
        cells = []
        for key, _ in columns:
            width = report["ci95"].get(key)
            cells.append(f"<td>{report[key]:.4g}{f' ± {width:.2g}' if width else ''}</td>")
        rows.append(f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>")
    head = "".join(f"<th>{escape(text)}</th>" for _, text in columns)
    return (
        f'<section><h2>Simulated side by side</h2><div class="scroll"><table><tr><th></th>{head}</tr>'
        f"{''.join(rows)}</table></div>"
        f'<p class="soft">Same arrivals for all, {_seeds(len(next(iter(outcomes.values()))))}.</p>'
        "</section>"
    )


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds; ± is a 95 % interval over seeds"


def _kept_targets(outcomes: Mapping[str, Sequence[SimulationOutcome]]) -> str:
    """How targets of some requests were kept, where the site has any."""
    rows = []
    for name, runs in outcomes.items():
        for requests, row in over_seeds([run.report() for run in runs]).get("by_target", {}).items():
            share = f"{row['share_in_time']:.1%}" if "share_in_time" in row else "no request"
            cells = (f"{row['target_s']:g}", f"{row['asked_share']:.0%}", share)
            rows.append(
                f"<tr><td>{escape(f'{name}: {requests}')}</td>{''.join(f'<td>{each}</td>' for each in cells)}</tr>"
            )
    if not rows:
        return ""
    return (
        '<section><h2>Targets of some requests</h2><div class="scroll"><table><tr><th></th><th>TTFT, s</th>'
        f"<th>asked to be in time</th><th>in time</th></tr>{''.join(rows)}</table></div></section>"
    )


def _footnotes(plan: Plan) -> str:
    warnings = "".join(f"<li>{escape(text)}</li>" for text in plan.warnings)
    rows = "".join(
        f'<tr><td>{escape(what)}</td><td class="text">{escape(text)}</td></tr>'
        for what, text in plan.provenance.items()
    )
    return (
        f"<section><h2>Read with care</h2><ul>{warnings}</ul></section>"
        f'<section><h2>Where the numbers come from</h2><div class="scroll"><table>{rows}</table></div></section>'
    )

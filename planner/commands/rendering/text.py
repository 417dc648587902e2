"""Plans and results as text: at most 40 lines, aligned, no colour."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.model.profile import provenance_kind
from planner.solve.decode_memory import BatchLimit
from planner.solve.goals import Objective, ServiceTime
from planner.solve.plan import Plan
from planner.solve.search import RECOMMENDED_LOAD, Bottleneck

LABELS = {
    "prfaas_compute": "PrfaaS compute",
    "egress": "the egress link",
    "pd_prefill": "PD prefill",
    "pd_decode": "PD decode",
    "cold_caches": "cold caches",
}
SOURCES = ("S_kv", "T_prefill", "decode")


def tokens(value: float) -> str:
    return f"{value:,.0f}" if value < 1e9 else "∞"


def plan_text(plan: Plan, current: Plan | None = None) -> str:
    """A plan, next to what it would replace."""
    head = [
        f"Plan  site={plan.site}  deployment={plan.deployment}  workload={plan.workload}",
        f"      objective={plan.objective}  service={_service(plan.service)}  {_sources(plan.provenance)}",
        "",
    ]
    return "\n".join([*head, *_columns(_rows(plan), _rows(current) if current else None), "", *_judgement(plan)])


def _service(service: ServiceTime) -> str:
    return "E[T(L)]" if service is ServiceTime.EXACT else "T(E[L]) as in the paper"


def _sources(provenance: Mapping[str, str]) -> str:
    parts = []
    for what, text in provenance.items():
        if what.startswith(SOURCES):
            kind = provenance_kind(text)
            parts.append(f"{what}={kind}{'(!)' if kind in ('fitted', 'unverified') else ''}")
    return "  ".join(parts)


def _rows(plan: Plan) -> dict[str, str]:
    remote = plan.offload_fraction > 0
    return {
        "t (tokens)": tokens(plan.threshold_tokens) if plan.num_prfaas else "-",
        "PrfaaS / PD-P / PD-D": f"{plan.num_prfaas} / {plan.num_prefill} / {plan.num_decode}",
        "Λmax (req/s)": f"{plan.lambda_max:.3f}",
        "Θ prfaas/pd-p/pd-d": f"{plan.theta_prfaas:.2f} / {plan.theta_pd_p:.2f} / {plan.theta_pd_d:.2f}",
        "offloaded": f"{plan.offload_fraction:.1%}, mean {tokens(plan.mean_offloaded_tokens)}" if remote else "-",
        **({"on decode nodes": f"{plan.held_fraction:.1%}"} if plan.held_fraction else {}),
        **({"decode batch": f"{plan.decode_batch}, by memory"} if plan.decode_batch_limit is BatchLimit.MEMORY else {}),
        "TTFT empty mean/p90": f"{plan.ttft_mean_s:.2f} / {plan.ttft_p90_s:.2f} s",
        "TTFT at 80 % Λ": f"{plan.loaded_ttft_mean_s:.2f} / {plan.loaded_ttft_p90_s:.2f} s",
        "egress": f"{plan.egress_gbps:.2f} of {plan.egress_capacity_gbps:g} Gbit/s" if remote else "-",
        "cost per 1000 req": _cost(plan),
    }


def _cost(plan: Plan) -> str:
    if not plan.cost_per_hour or plan.cost_per_1000_requests is None:
        return "-"
    return f"{plan.cost_per_1000_requests:.3f} at {plan.paid_rate:.3f} req/s, {plan.cost_per_hour:.2f} an hour"


def _columns(rows: Mapping[str, str], current: Mapping[str, str] | None) -> list[str]:
    if current is None:
        return [f"  {name:<22}{value}" for name, value in rows.items()]
    width = max(28, *(len(value) + 2 for value in current.values()))
    head = f"  {'':<22}{'homogeneous':<{width}}plan"
    return [head, *(f"  {name:<22}{current[name]:<{width}}{value}" for name, value in rows.items())]


def _judgement(plan: Plan) -> list[str]:
    prices = ", ".join(f"{gain:+.3f} per {what.replace('_', ' ')}" for what, gain in plan.shadow_prices.items())
    busy = ", ".join(f"{LABELS[stage]} {share:.0%}" for stage, share in plan.utilisation.items() if share)
    gain = "ΔΛ" if plan.lambda_slo is None else "within the target,"
    lines = [f"Bottleneck: {LABELS[plan.bottleneck]} ({gain} {prices})", f"Busy at Λmax: {busy}"]
    if plan.bottleneck is Bottleneck.COLD:
        lines.append(_cold(plan))
    if plan.rate_req_per_s is not None:
        lines.append(
            f"At {plan.rate_req_per_s:.3f} req/s: {plan.rate_req_per_s / plan.lambda_max:.0%} of Λmax, "
            f"TTFT mean/p90 {plan.asked_ttft_mean_s:.2f} / {plan.asked_ttft_p90_s:.2f} s"
        )
    if plan.tie_share:
        lines.append(f"Of requests with exactly t tokens, {plan.tie_share:.1%} stay local (by hash)")
    low, high = plan.threshold_interval_tokens
    if plan.num_prfaas and high - low > 2:
        lines.append(f"Any t in [{tokens(low)}, {tokens(high)}) is as good; this one sends least over the link")
    target = "TTFT targets" if plan.targets else "P90 TTFT target"
    if plan.rehearsed_requests:
        lines.append(f"Times and shares at a rate: rehearsed with {plan.rehearsed_requests:,} requests of the workload")
    if plan.lambda_slo is not None and plan.rehearsed_requests:
        lines.append(f"Rate that meets the {target}: {plan.lambda_slo:.3f} req/s, by the same rehearsal")
    elif plan.lambda_slo is not None:
        lines.append(
            f"Rate that meets the {target}, queues included: {plan.lambda_slo:.3f} req/s, if nodes are chosen by "
            "their true queues; saturate says what learned ones leave of it"
        )
    lines += [
        f"Target of {row.requests} ({row.of_all:.0%} of requests): {row.share_in_time:.1%} within {row.ttft_s:g} s at "
        f"{row.at_req_per_s:.3f} req/s, {row.asked_share:.0%} asked"
        f"{'' if row.share_in_time >= row.asked_share else ': MISSED'}"
        for row in plan.targets
    ]
    if plan.alternative is not None:
        other = plan.alternative
        lines.append(
            f"Robust alternative: Np/Nd={other.num_prefill}/{other.num_decode}, any t in "
            f"{tokens(other.low_tokens)}–{tokens(other.high_tokens)}, Λ={other.lambda_max:.3f} "
            f"({other.lambda_max / plan.lambda_max - 1:+.1%})"
        )
    lines.append(
        f"Λ with {'T(E[L])' if plan.service is ServiceTime.EXACT else 'E[T(L)]'}: {plan.lambda_other_service:.3f}"
    )
    if plan.sensitivity:
        rate = "  Λ" if plan.lambda_slo is None else "SLO"
        lines.append(f"If an input is off by 10 %:      {rate} kept {rate} re-solved")
        lines += [
            f"  {row.what:<20} ×{row.factor:<9}{row.kept_rate:8.3f}   {row.resolved_rate:8.3f}"
            f"   (t {tokens(row.resolved_threshold_tokens)}, Np {row.resolved_num_prefill})"
            for row in plan.sensitivity
        ]
    return lines


def _cold(plan: Plan) -> str:
    assert plan.lambda_warm is not None
    stage, busy = max(plan.cold_utilisation.items(), key=lambda item: item[1])
    load = RECOMMENDED_LOAD if plan.objective is Objective.THROUGHPUT else 1.0
    return (
        f"Cold caches: while decode nodes hold nothing, {LABELS[stage]} is {load * busy:.0%} busy at {load:.0%} of Λ; "
        f"a plan that counts on warm ones (--warm-caches) would say Λ={plan.lambda_warm:.3f}"
    )


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned columns; numbers with four significant digits."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    lines = ["  ".join(column.rjust(width) for column, width in zip(columns, widths, strict=True))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def outcome_text(report: Mapping[str, Any], title: str) -> str:
    """The numbers of a simulation."""
    widths = report.get("ci95", {})

    def shown(key: str, unit: str) -> str:
        value = report.get(key)
        if value is None:
            return "-"
        width = f" ±{widths[key]:.2g}" if key in widths else ""
        return f"{value:.4g}{width} {unit}"

    lines = [title, f"  requests {report['requests']}, completed {report['completed']}, rejected {report['rejected']}"]
    for reason, count in report["rejected_by_reason"].items():
        lines.append(f"    {reason}: {count:g}")
    for name in ("ttft", "tbt", "e2e"):
        values = ", ".join(f"{what} {shown(f'{name}_{what}_s', 's')}" for what in ("mean", "p50", "p90", "p99"))
        lines.append(f"  {name.upper():<5} {values}")
    lines.append(f"  goodput {shown('goodput_req_per_s', 'req/s')} of {shown('throughput_req_per_s', 'req/s')}")
    lines += targets_lines(report.get("by_target", {}))
    lines.append(f"  hit ratio {shown('hit_ratio', '')}, offloaded {shown('offload_fraction', '')}")
    lines.append(
        f"  egress mean {shown('egress_mean_gbps', 'Gbit/s')}, P99 {shown('egress_p99_gbps', '(1 s)')}, "
        f"{shown('egress_p99_10s_gbps', '(10 s)')}"
    )
    lines.append("  busy " + ", ".join(f"{stage} {share:.1%}" for stage, share in report["utilisation"].items()))
    if "conversions" in report:
        lines.append("  conversions " + ", ".join(f"{how} {count:g}" for how, count in report["conversions"].items()))
    for key, what in (
        ("link_failures", "links that failed"),
        ("fallbacks", "not as routed"),
        ("moved_bytes", "moved bytes"),
    ):
        if key in report:
            lines.append(f"  {what} " + ", ".join(f"{name} {count:g}" for name, count in report[key].items()))
    lines.append("  routes " + ", ".join(f"{route} {count:g}" for route, count in report["routes"].items()))
    if "clusters" in report:
        lines += ["", *_by_cluster(report)]
    return "\n".join(lines)


def targets_lines(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How targets of some requests were kept."""
    lines = []
    for name, row in rows.items():
        if not row["requests"]:
            lines.append(f"    {name}: no request")
            continue
        word = "kept" if row["share_in_time"] >= row["asked_share"] else "MISSED"
        reached = f", {row['asked_share']:.0%} within {row['ttft_s']:.4g} s" if "ttft_s" in row else ""
        lines.append(
            f"    {name}: {row['share_in_time']:.1%} of {row['requests']:g} within {row['target_s']:g} s, "
            f"{row['asked_share']:.0%} asked: {word}{reached}; goodput {row['goodput_req_per_s']:.4g} req/s"
        )
    return lines


def _by_cluster(report: Mapping[str, Any]) -> list[str]:
    columns = [
        "cluster", "prfaas_compute_busy", "pd_prefill_busy", "pd_decode_busy", "computed", "answered", "offloaded",
        "ttft_mean_s", "ttft_p90_s",
    ]  # fmt: skip
    clusters = [{"cluster": name, **row} for name, row in report["clusters"].items()]
    links = [{"link": name, **row, "requests": report["ways"].get(name, 0)} for name, row in report["links"].items()]
    return [table(clusters, columns), "", table(links, ["link", "egress_gbps", "capacity_gbps", "requests"])]

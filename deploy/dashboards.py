"""Writes the Grafana dashboards beside it: `python -m deploy.dashboards`. Panels are said here once; Grafana reads JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "grafana"
WIDTH: Final = 24  # Grafana's grid
HEIGHT: Final = 8
REMOTE: Final = 'prfaas_requests_total{route="remote"}'
ROUTED: Final = 'prfaas_requests_total{route!="none"}'
FROM_CACHE: Final = 'prfaas_prompt_tokens_total{source="cache"}'
CODED: Final = "prfaas_codec_coded_bytes_total"
PLAIN: Final = "prfaas_codec_plain_bytes_total"
CODEC: Final = "link, codec"
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: queries with their legends, and the unit of its axis as Grafana names it."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    about: str = ""
    limits: tuple[float, ...] = ()  # yellow from the first on, red from the second
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Rows of panels under headings."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def quantile(q: float, metric: str, by: str) -> str:
    """A quantile of a histogram over five minutes."""
    return f"histogram_quantile({q}, sum by (le, {by}) (rate({metric}_bucket[5m])))"


def rate(counter: str, by: str = "") -> str:
    """Per second over five minutes, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({counter}[5m]))"


OPERATIONS: Final = Dashboard(
    "prfaas-operations",
    "PrfaaS / Operations",
    (
        (
            "Requests",
            (
                Panel(
                    "By route and reason",
                    (("sum by (route, reason) (rate(prfaas_requests_total[5m]))", "{{route}}: {{reason}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel("By status", (("sum by (status) (rate(prfaas_requests_total[5m]))", "{{status}}"),), "reqps"),
                Panel(
                    "In flight and waiting",
                    (
                        ("sum(prfaas_requests_in_flight)", "in flight"),
                        ("sum(prfaas_requests_waiting)", "waiting for room"),
                    ),
                ),
            ),
        ),
        (
            "What clients feel",
            (
                Panel(
                    "Time to first token, P90",
                    ((quantile(0.9, "prfaas_time_to_first_token_seconds", "route"), "{{route}}"),),
                    "s",
                ),
                Panel(
                    "Time between tokens, P90",
                    ((quantile(0.9, "prfaas_inter_token_latency_seconds", "route"), "{{route}}"),),
                    "s",
                ),
                Panel(
                    "Promises by class",
                    (
                        (
                            "sum by (service_class, outcome) (rate(prfaas_promises_total[5m]))",
                            "{{service_class}}: {{outcome}}",
                        ),
                    ),
                    "reqps",
                    stacked=True,
                ),
            ),
        ),
        (
            "What goes wrong",
            (
                Panel("Fallbacks", (("sum by (reason) (rate(prfaas_fallbacks_total[5m]))", "{{reason}}"),), "ops"),
                Panel(
                    "Refused for load",
                    (
                        (
                            "sum by (service_class, reason) (rate(prfaas_refusals_total[5m]))",
                            "{{service_class}}: {{reason}}",
                        ),
                    ),
                    "reqps",
                ),
                Panel(
                    "Streams that broke off",
                    (("sum by (reason) (rate(prfaas_streams_broken_total[5m]))", "{{reason}}"),),
                    "reqps",
                    "Answers of which the client had a part and not the rest. Takeovers that succeed are none of them.",
                ),
                Panel(
                    "Failures not tried elsewhere",
                    (("sum by (stage) (rate(prfaas_retries_refused_total[5m]))", "{{stage}}"),),
                    "ops",
                    "More failed of late than retry_share allows to be repeated.",
                ),
                Panel(
                    "Prefill computed for nobody",
                    (("sum by (reason) (rate(prfaas_wasted_prefill_seconds_total[5m]))", "{{reason}}"),),
                    "s",
                    "Seconds of prefill per second whose request had no answer.",
                ),
            ),
        ),
        (
            "Nodes and gateways",
            (
                Panel(
                    "Nodes by role and state",
                    (("max by (cluster, role, state) (prfaas_nodes)", "{{cluster}} {{role}}: {{state}}"),),
                ),
                Panel("Engine restarts", (("increase(prfaas_engine_restarts_total[15m])", "{{instance}}"),)),
                Panel(
                    "Event-loop lag, P99",
                    ((quantile(0.99, "prfaas_event_loop_lag_seconds", "instance"), "{{instance}}"),),
                    "s",
                    limits=(0.02, 0.1),
                ),
            ),
        ),
    ),
)

NETWORK: Final = Dashboard(
    "prfaas-network",
    "PrfaaS / Network",
    (
        (
            "Links between clusters",
            (
                Panel(
                    "Sent, five-minute averages",
                    (
                        (
                            "8 * sum by (cluster, link) (rate(prfaas_link_sent_bytes_total[5m]))",
                            "{{cluster}} → {{link}}",
                        ),
                    ),
                    "bps",
                    "What a carrier counts.",
                ),
                Panel(
                    "95th percentile over 30 days",
                    (("prfaas:link_sent:bits_rate5m_p95_30d", "{{cluster}} → {{link}}"),),
                    "bps",
                    "What a carrier bills. By the recording rules of deploy/prometheus.",
                ),
                Panel(
                    "Utilisation",
                    (
                        ("prfaas:line_utilisation:ratio5m", "{{cluster}} → {{link}}"),
                        ("prfaas:sender_utilisation:ratio5m", "{{instance}} → {{link}}"),
                    ),
                    "percentunit",
                    "Sent over the budget, of the line and of each sender that has one; without, over what the line gives.",
                    (0.65, 0.8),
                ),
            ),
        ),
        (
            "How well they carry",
            (
                Panel(
                    "Round trip",
                    (
                        ("max by (cluster, link) (prfaas_link_rtt_seconds)", "{{cluster}} → {{link}}"),
                        ("min by (cluster, link) (prfaas_link_min_rtt_seconds)", "{{cluster}} → {{link}}, smallest"),
                    ),
                    "s",
                ),
                Panel(
                    "Retransmitted",
                    (("max by (cluster, link) (prfaas_link_retransmit_ratio)", "{{cluster}} → {{link}}"),),
                    "percentunit",
                    limits=(0.001, 0.01),
                ),
                Panel(
                    "Waiting to leave",
                    (("sum by (cluster, link) (prfaas_link_queued_bytes)", "{{cluster}} → {{link}}"),),
                    "bytes",
                ),
            ),
        ),
        (
            "Why it travels",
            (
                Panel(
                    "KVCache for requests, by destination",
                    (
                        (
                            "8 * sum by (link, transport) (rate(prfaas_kv_transfer_bytes_total[5m]))",
                            "to {{link}} over {{transport}}",
                        ),
                    ),
                    "bps",
                    stacked=True,
                ),
                Panel(
                    "Prefixes moved",
                    (("8 * sum by (reason) (rate(prfaas_prefix_moved_bytes_total[5m]))", "{{reason}}"),),
                    "bps",
                    stacked=True,
                ),
                Panel(
                    "Saved by coding",
                    (
                        (
                            f"1 - {rate(CODED, CODEC)} / {rate(PLAIN, CODEC)}",
                            "{{link}}: {{codec}}",
                        ),
                    ),
                    "percentunit",
                ),
            ),
        ),
        (
            "Who may send",
            (
                Panel(
                    "Breakers",
                    (
                        (
                            "sum by (source, destination, state) (prfaas_link_senders)",
                            "{{source}} → {{destination}}: {{state}}",
                        ),
                    ),
                ),
                Panel(
                    "Egress budget",
                    (
                        (
                            "prfaas:line_budget:bits",
                            "budget {{cluster}} → {{link}}",
                        ),
                        (
                            "8 * sum by (cluster, link) (rate(prfaas_link_sent_bytes_total[5m]))",
                            "sent {{cluster}} → {{link}}",
                        ),
                    ),
                    "bps",
                ),
                Panel(
                    "Failures on the way, by layer",
                    (
                        (
                            "sum by (link, reason) (rate(prfaas_link_refusals_total[5m]))",
                            "refused by {{link}}: {{reason}}",
                        ),
                        (
                            'sum by (event) (rate(prfaas_landing_events_total{event=~"(failed|rejected).*"}[5m]))',
                            "{{event}}",
                        ),
                        ("sum by (outcome) (rate(prfaas_pushes_total[5m]))", "push {{outcome}}"),
                    ),
                    "ops",
                ),
            ),
        ),
    ),
)

CAPACITY: Final = Dashboard(
    "prfaas-capacity",
    "PrfaaS / Capacity",
    (
        (
            "Plan",
            (
                Panel("Version followed", (("prfaas_plan_version", "{{instance}}"),)),
                Panel(
                    "Plans and what came of them",
                    (("sum by (outcome) (increase(prfaas_plans_total[1h]))", "{{outcome}}"),),
                ),
                Panel(
                    "Predictions, error at P90",
                    (('max by (what, of) (prfaas_estimate_error_ratio{stat="p90"})', "{{what}} of {{of}}"),),
                    "percentunit",
                ),
            ),
        ),
        (
            "Load",
            (
                Panel(
                    "Prompt tokens",
                    (("sum by (source) (rate(prfaas_prompt_tokens_total[5m]))", "{{source}}"),),
                    "short",
                    "Tokens per second, from a cache or computed.",
                    stacked=True,
                ),
                Panel(
                    "Uncached tokens of a prompt",
                    (
                        (quantile(0.5, "prfaas_uncached_prompt_tokens", "job"), "median"),
                        (quantile(0.9, "prfaas_uncached_prompt_tokens", "job"), "P90"),
                    ),
                ),
                Panel(
                    "Offloaded",
                    (
                        (
                            f"{rate(REMOTE)} / {rate(ROUTED)}",
                            "share of requests",
                        ),
                    ),
                    "percentunit",
                ),
            ),
        ),
        (
            "Nodes",
            (
                Panel(
                    "Prefill queued",
                    (("sum by (cluster) (prfaas_node_queued_tokens)", "{{cluster}}"),),
                    "short",
                    "Uncached prompt tokens not computed yet.",
                ),
                Panel(
                    "Decode batch against slots",
                    (
                        ('sum by (cluster) (prfaas_node_requests{state="running"})', "{{cluster}} running"),
                        ("sum by (cluster) (prfaas_node_slots)", "{{cluster}} slots"),
                    ),
                ),
                Panel(
                    "Decode step by batch",
                    (("max by (cluster, batch) (prfaas_node_step_seconds)", "{{cluster}}, batch {{batch}}"),),
                    "s",
                ),
            ),
        ),
        (
            "Caches",
            (
                Panel(
                    "Pages by use",
                    (('sum by (cluster, state) (prfaas_pool_pages{state!="total"})', "{{cluster}} {{state}}"),),
                ),
                Panel(
                    "Hit share of prompt tokens",
                    (
                        (
                            f"{rate(FROM_CACHE)} / {rate('prfaas_prompt_tokens_total')}",
                            "cached",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "Disk tier",
                    (
                        ("sum by (cluster, state) (prfaas_ssd_bytes)", "{{cluster}} {{state}}"),
                        (
                            "sum by (cluster, outcome) (rate(prfaas_ssd_promotions_total[5m]))",
                            "{{cluster}} back: {{outcome}}",
                        ),
                    ),
                    "bytes",
                ),
            ),
        ),
    ),
)

DASHBOARDS: Final = {"operations.json": OPERATIONS, "network.json": NETWORK, "capacity.json": CAPACITY}


def document(dashboard: Dashboard) -> dict[str, Any]:
    """What Grafana imports."""
    panels: list[dict[str, Any]] = []
    top = 0
    for heading, row in dashboard.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": heading,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1},
            }
        )
        width = WIDTH // len(row)
        for place, panel in enumerate(row):
            grid = {"x": place * width, "y": top + 1, "w": width, "h": HEIGHT}
            panels.append(_graph(len(panels) + 1, panel, grid))
        top += HEIGHT + 1
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["prfaas"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}]
        },
        "panels": panels,
    }


def _graph(number: int, panel: Panel, grid: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": grid,
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for place, (query, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 20 if panel.stacked else 0,
                    "stacking": {"mode": "normal" if panel.stacked else "none"},
                    "thresholdsStyle": {"mode": "line" if panel.limits else "off"},
                },
                "thresholds": {"mode": "absolute", "steps": _steps(panel.limits)},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _steps(limits: Sequence[float]) -> list[dict[str, Any]]:
    first: list[dict[str, Any]] = [{"color": "green", "value": None}]
    return first + [{"color": colour, "value": limit} for colour, limit in zip(("yellow", "red"), limits, strict=False)]


def texts() -> dict[str, str]:
    """File names and what belongs into them."""
    return {name: json.dumps(document(each), indent=1, ensure_ascii=False) + "\n" for name, each in DASHBOARDS.items()}


def main() -> None:
    """Writes all of them."""
    for name, text in texts().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()

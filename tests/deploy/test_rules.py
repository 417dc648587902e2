"""What deploy/ ships: every metric that it names is served, every alert has a runbook, and fires on its cause and clears."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from transport.metrics import LINK_METRICS

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
PROMTOOL = shutil.which("promtool") or str(ROOT / ".prometheus" / "usr" / "bin" / "promtool")
SUFFIXES = ("_total", "_bucket", "_sum", "_count")
NAME = re.compile(r"\bprfaas_\w+")


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def served() -> set[str]:
    """Names of metrics that our sources declare."""
    modules = (
        "gateway/telemetry/metrics.py",
        "gateway/telemetry/process_metrics.py",
        "node/metrics.py",
        "transport/metrics.py",
    )
    declared = {name for module in modules for name in NAME.findall((ROOT / module).read_text())}
    declared.discard("prfaas_link_")  # what a name begins with
    return declared | {f"prfaas_link_{name}".removesuffix("_total") for name in LINK_METRICS}


def is_served(name: str) -> bool:
    known = served()
    return name in known or any(name.removesuffix(suffix) in known for suffix in SUFFIXES)


def queries() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    for file in DASHBOARDS:
        yield from (target["expr"] for panel in panels_of(file) for target in panel.get("targets", []))


def panels_of(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["panels"]
    return found


def test_every_metric_that_is_asked_for_is_served() -> None:
    asked = {name for query in queries() for name in NAME.findall(query)}
    assert len(asked) > 40
    assert sorted(name for name in asked if not is_served(name)) == []


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert sorted(name for name in served() if f"| `{name}` |" not in text) == []


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_can_be_imported_anywhere(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    assert dashboard["uid"] == f"prfaas-{file.stem}"
    assert [variable["type"] for variable in dashboard["templating"]["list"]] == ["datasource"]
    graphs = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in graphs} == {"${datasource}"}
    assert {target["datasource"]["uid"] for panel in graphs for target in panel["targets"]} == {"${datasource}"}


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_panels_have_numbers_and_room_of_their_own(file: Path) -> None:
    panels = panels_of(file)
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24  # the width of Grafana's grid


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    headings = re.findall(r"^### (Prfaas\w+)$", (ROOT / "docs" / "guides" / "operations.md").read_text(), re.MULTILINE)
    assert headings == list(alerts())
    assert all(rule["labels"]["severity"] in ("page", "ticket") for rule in alerts().values())


@pytest.mark.parametrize("why", ["address", "kind", "named", "truncated", "many", "at_end", "400"])
def test_what_a_client_writes_about_its_images_fires_nothing(why: str) -> None:
    (left_out,) = re.findall(r'reason!~"([^"]+)"', alerts()["PrfaasFallbacks"]["expr"])
    assert re.fullmatch(left_out, f"media_{why}")
    assert not any(
        re.fullmatch(left_out, f"media_{other}") for other in ("differs", "500", "404", "timeout", "unnamed")
    )


GATEWAY = 'job="prfaas-gateway", instance="g"'
NODE = 'instance="n", cluster="east"'
LINK = f'{NODE}, link="west", peer="p"'
FIRES, CLEARS = "55m", "150m"

LINE = f'{GATEWAY}, line="carrier-a", cluster="east", link="west"'


def described_line(bytes_per_s: int) -> dict[str, str]:
    """What a gateway tells of a line that takes all that goes from east to west."""
    told = {"rate_bytes_per_second": bytes_per_s, "share": 1, "warn_ratio": 0.65, "critical_ratio": 0.8}
    return {f"prfaas_described_line_{name}{{{LINE}}}": f"{value}x180" for name, value in told.items()}


CAUSES: dict[str, dict[str, str]] = {
    "PrfaasGatewayDown": {f"up{{{GATEWAY}}}": "0x60 1x120"},
    "PrfaasNoDecodeNode": {
        f"up{{{GATEWAY}}}": "1x180",
        f'prfaas_nodes{{{GATEWAY}, cluster="west", role="decode", state="ready"}}': "_x60 1x120",
    },
    "PrfaasErrors": {
        f'prfaas_requests_total{{{GATEWAY}, status="502"}}': "0+6x60 360x120",
        f'prfaas_requests_total{{{GATEWAY}, status="200"}}': "0+60x180",
    },
    "PrfaasStreamsBreak": {  # one in a hundred: too few for PrfaasErrors
        f'prfaas_streams_broken_total{{{GATEWAY}, reason="stream_broken"}}': "0+6x60 360x120",
        f'prfaas_streams_broken_total{{{GATEWAY}, reason="client_stalled"}}': "0+60x180",
        f'prfaas_requests_total{{{GATEWAY}, status="502"}}': "0+6x60 360x120",
        f'prfaas_requests_total{{{GATEWAY}, status="200"}}': "0+600x180",
    },
    "PrfaasRefusing": {
        f'prfaas_requests_total{{{GATEWAY}, status="429"}}': "0+6x60 360x120",
        f'prfaas_requests_total{{{GATEWAY}, status="200"}}': "0+60x180",
    },
    "PrfaasPromisesBroken": {
        f'prfaas_promises_total{{{GATEWAY}, service_class="chat", outcome="late_first_token"}}': "0+20x60 1200x120",
        f'prfaas_promises_total{{{GATEWAY}, service_class="chat", outcome="kept"}}': "0+60x180",
    },
    "PrfaasFallbacks": {
        f'prfaas_fallbacks_total{{{GATEWAY}, reason="prefill_timeout"}}': "0+20x60 1200x120",
        f'prfaas_requests_total{{{GATEWAY}, status="200"}}': "0+60x180",
    },
    "PrfaasRetriesRefused": {f'prfaas_retries_refused_total{{{GATEWAY}, stage="prefill"}}': "0+3x60 180x120"},
    "PrfaasEventLoopLag": {
        f'prfaas_event_loop_lag_seconds_bucket{{{GATEWAY}, le="0.1"}}': "0+10x60 600+600x120",
        f'prfaas_event_loop_lag_seconds_bucket{{{GATEWAY}, le="0.5"}}': "0+600x180",
        f'prfaas_event_loop_lag_seconds_bucket{{{GATEWAY}, le="+Inf"}}': "0+600x180",
    },
    "PrfaasWorkerRestarts": {f"prfaas_worker_restarts_total{{{GATEWAY}}}": "0+1x60 60x120"},
    "PrfaasInternalErrors": {f'prfaas_node_internal_errors_total{{{NODE}, task="links"}}': "0+1x60 60x120"},
    "PrfaasNodeDown": {'up{job="prfaas-node", instance="n"}': "0x60 1x120"},
    "PrfaasNodeNotReady": {f"prfaas_node_ready{{{NODE}}}": "0x60 1x120"},
    "PrfaasEngineRestarts": {f"prfaas_engine_restarts_total{{{NODE}}}": "0+1x60 60x120"},
    "PrfaasNodeWatchFails": {f'prfaas_node_watch_failures_total{{{GATEWAY}, reason="silent"}}': "0+3x60 180x120"},
    "PrfaasMembersFrozen": {f'prfaas_membership_frozen_seconds{{{GATEWAY}, source="file"}}': "0+60x60 0x120"},
    "PrfaasArenaFull": {
        f'prfaas_pool_pages{{{NODE}, state="locked"}}': "95x60 10x120",
        f'prfaas_pool_pages{{{NODE}, state="total"}}': "100x180",
    },
    "PrfaasReservationsHeld": {
        f"prfaas_pool_reservations{{{NODE}}}": "2x60 0x120",
        f'prfaas_node_requests{{{NODE}, state="running"}}': "0x180",
    },
    "PrfaasDiskTierClosed": {f"prfaas_ssd_open{{{NODE}}}": "0x60 1x120"},
    "PrfaasCorruptBlocks": {f'prfaas_ssd_events_total{{{NODE}, event="corrupt"}}': "0+1x60 60x120"},
    "PrfaasCertificateExpires": {
        f"prfaas_certificate_expiry_timestamp_seconds{{{NODE}}}": "864000x60 31536000x120",
    },
    "PrfaasLinkDead": {
        f'prfaas_link_senders{{{GATEWAY}, source="east", destination="west", state="open"}}': "1x60 0x120",
        f'prfaas_link_senders{{{GATEWAY}, source="east", destination="west", state="closed"}}': "3x180",
        # No sender is heard of; the same while it is drained, which an operator asked for.
        f'prfaas_link_up{{{GATEWAY}, source="north", destination="west"}}': "0x60 1x120",
        f'prfaas_link_up{{{GATEWAY}, source="south", destination="west"}}': "0x180",
        f'prfaas_link_drained{{{GATEWAY}, source="south", destination="west"}}': "1x180",
    },
    # 7 of 10 MB/s of two senders, one silent, to two receivers; then 5. Each sender has half of them.
    "PrfaasLinkBusy": {
        f"prfaas_link_sent_bytes_total{{{LINK}}}": "0+210000000x60 12600000000+150000000x120",
        f"prfaas_link_sent_bytes_total{{{LINK.replace('peer', 'other')}}}": "0+210000000x60 12600000000+150000000x120",
        f'prfaas_line_budget_bytes_per_second{{{GATEWAY}, cluster="east", link="west"}}': "10000000x180",
    },
    "PrfaasLinkSaturated": {
        f"prfaas_link_sent_bytes_total{{{LINK}}}": "0+510000000x60 30600000000+300000000x120",
        f'prfaas_line_budget_bytes_per_second{{{GATEWAY}, cluster="east", link="west"}}': "10000000x180",
    },
    "PrfaasSenderBusy": {
        f"prfaas_link_sent_bytes_total{{{LINK}}}": "0+210000000x60 12600000000+150000000x120",
        f"prfaas_link_budget_bytes_per_second{{{LINK}}}": "5000000x180",
        f'prfaas_line_budget_bytes_per_second{{{GATEWAY}, cluster="east", link="west"}}': "10000000x180",
    },
    "PrfaasSenderSaturated": {
        f"prfaas_link_sent_bytes_total{{{LINK}}}": "0+255000000x60 15300000000+150000000x120",
        f"prfaas_link_budget_bytes_per_second{{{LINK}}}": "5000000x180",
        f'prfaas_line_budget_bytes_per_second{{{GATEWAY}, cluster="east", link="west"}}': "10000000x180",
    },
    "PrfaasLineBusy": {
        f"prfaas_link_sent_bytes_total{{{LINK}}}": "0+420000000x60 25200000000+300000000x120",
        **described_line(10_000_000),
    },
    "PrfaasLineSaturated": {
        f"prfaas_link_sent_bytes_total{{{LINK}}}": "0+510000000x60 30600000000+300000000x120",
        **described_line(10_000_000),
    },
    # Of 1000 a month, 50 are rent and 600 what was sent; then the budget is raised.
    "PrfaasLineSpend": {
        f"prfaas_link_sent_bytes_total{{{LINK}}}": "0+400000000000x180",
        **described_line(20_000_000_000),
        f"prfaas_described_line_price_per_gb{{{LINE}}}": "0.05x180",
        f"prfaas_described_line_rent_per_month{{{LINE}}}": "50x180",
        f"prfaas_described_line_budget_per_month{{{LINE}}}": "1000x60 100000x120",
    },
    "PrfaasLinkLossy": {f"prfaas_link_retransmit_ratio{{{LINK}}}": "0.02x60 0.001x120"},
    "PrfaasLinkCongested": {f"prfaas_link_congested{{{LINK}}}": "1x60 0x120"},
    "PrfaasUsageNotShared": {
        f'prfaas_fleet_failures_total{{{GATEWAY}, about="usage", reason="too_many_tenants"}}': "0+1x60 60x120"
    },
    # Nothing is read for an hour.
    "PrfaasUsageIncomplete": {f"prfaas_fleet_usage_read_timestamp_seconds{{{GATEWAY}}}": "60x60 3660+60x120"},
    "PrfaasPlanServiceAway": {
        f'prfaas_plan_polls_total{{{GATEWAY}, outcome="unreachable"}}': "0+1x60 60x120",
        f'prfaas_plan_polls_total{{{GATEWAY}, outcome="unchanged"}}': "5x60 5+1x120",
    },
    "PrfaasPlanRefused": {f'prfaas_plans_total{{{GATEWAY}, outcome="stale_term"}}': "0+1x60 60x120"},
    "PrfaasPredictionsWrong": {
        f'prfaas_estimate_error_ratio{{{GATEWAY}, what="ttft", of="remote", stat="p90"}}': "1.5x60 0.3x120",
    },
}
"""What each alert is about, for an hour; then all is well for two."""


def test_every_alert_has_a_cause_to_fire_on() -> None:
    assert list(CAUSES) == list(alerts())


@pytest.mark.skipif(not shutil.which(PROMTOOL), reason="no promtool: `make test-deploy` fetches one")
def test_alerts_fire_on_their_cause_and_clear_after_it(tmp_path: Path) -> None:
    """All at once, by Prometheus' own tool: each in a world in which nothing else is wrong."""
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [_case(*case) for case in (*CAUSES.items(), *NEWS.items())],
    }
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(document))
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(tmp_path / "cases.yml")]):
        done = subprocess.run([PROMTOOL, *command], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


NEWS: dict[str, dict[str, str]] = {
    # A fold is rare: the first one makes the series.
    "PrfaasUsageNotShared": {
        f'prfaas_fleet_failures_total{{{GATEWAY}, about="usage", reason="too_many_tenants"}}': "_x50 1x130"
    },
    # Nothing has ever been read.
    "PrfaasUsageIncomplete": {
        f'prfaas_fleet_failures_total{{{GATEWAY}, about="usage", reason="unreadable"}}': "0+1x60 60x120",
        f"prfaas_fleet_usage_read_timestamp_seconds{{{GATEWAY}}}": "0x180",
    },
}
"""What else some of them fire on."""


# What is above the higher of two limits is above the lower one.
IMPLIED = {
    "PrfaasLinkSaturated": "PrfaasLinkBusy",
    "PrfaasSenderSaturated": "PrfaasSenderBusy",
    "PrfaasLineSaturated": "PrfaasLineBusy",
}


def test_a_dead_link_is_told_once_though_both_of_its_signs_are_seen() -> None:
    """`or` keeps a series twice where its labels differ, as those of a sum and of what was scraped do."""
    signs, _, _ = alerts()["PrfaasLinkDead"]["expr"].partition(" unless ")
    assert [re.match(r"\(?(?:sum|max) by \((.*?)\)", sign)[1] for sign in signs.split(" or ")] == [
        "instance, source, destination"
    ] * 2


def _case(alert: str, series: dict[str, str]) -> dict[str, Any]:
    firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) > bool 0'
    others = f'count(ALERTS{{alertname!~"{alert}|{IMPLIED.get(alert, alert)}", alertstate="firing"}})'
    return {
        "name": alert,
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": FIRES, "exp_samples": [{"labels": "{}", "value": 1}]},
            {"expr": firing, "eval_time": CLEARS, "exp_samples": []},
            {"expr": others, "eval_time": FIRES, "exp_samples": []},
        ],
    }

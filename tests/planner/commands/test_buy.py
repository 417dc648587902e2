"""`prfaas-plan buy`: what it prints, its exit codes, and errors that name the file, the place and the value."""

import json
import random
import sys
import tomllib
from html import escape
from math import isfinite

import numpy as np
import pytest

from planner.commands.cli import main
from planner.errors import InputError
from planner.model.market import load_market
from planner.model.site import Workload
from planner.model.traffic import Lengths
from tests.planner.commands.inputs import CONFIGS, ROWS, SITE, WORST, jsonl, spoiled, toml, written

LENGTHS = {"kind": "lengths", "tokens": [1000, 2000, 8000, 40_000], "output_tokens": 100}
SMALL = SITE | {"workload": LENGTHS, "slo": {"ttft_p90_s": 14.0, "tbt_s": 0.5}}
EXAMPLE = tomllib.loads((CONFIGS / "market.toml").read_text())
DEMAND = {"months": 3, "rate_req_per_s": 2.0, "growth_per_month": 0.3}
MARKET = EXAMPLE | {"demand": DEMAND, "discount_per_year": 0.0}


ASKED = Workload(name="one a second", lengths=Lengths.of(np.array([1000.0])), output_tokens=1.0, rate_req_per_s=1.0)


def market_file(folder, market=MARKET):
    path = folder / "market.toml"
    path.write_text("".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in market.items()))
    return path


def bought(capsys, folder, market=MARKET, site=SMALL, *more):
    """(exit status, stdout, stderr)"""
    argv = ["buy", "-c", written(folder, site), "-m", market_file(folder, market), *more]
    return main([str(each) for each in argv]), *capsys.readouterr()


def test_the_example_is_read_and_says_where_its_numbers_come_from():
    market = load_market(CONFIGS / "market.toml")
    assert market.demand.months == 24
    assert {offer.hardware for offer in market.hardware} == {each["hardware"] for each in SITE["clusters"]}
    assert all(each.provenance for each in (market.demand, *market.hardware, *market.lines))


def test_people_read_a_verdict_all_ways_the_months_and_the_orders_or_a_page_of_them(capsys, tmp_path):
    page = tmp_path / "buy.html"
    code, out, err = bought(capsys, tmp_path, MARKET, SMALL, "-o", page)
    assert code == 0
    for text in (
        "Buy  site=case-study  3 months, 2.00 to 3.38 req/s in the busiest hour  TTFT P90 14 s  TBT 0.5 s",
        "Verdict: ", "bigger local prefill", "homogeneous PD", "colocated", "PrfaaS-PD", "lasts, months", "cash, $",
        "Orders (instances):", "Paid in 3 months: $", "of commitments is still to be paid", "Unverified: ",
    ):  # fmt: skip
        assert text in out, text
    assert "assumed: " in err
    assert max(map(len, out.splitlines())) <= 130
    html = page.read_text()
    assert html.count("<svg") == 5
    assert escape(out.strip()) in html
    for text in ("To be ordered in the first month", "h20x8: ", "Risks", "Failures are not counted", "paid in all"):
        assert text in html, text
    assert "src=" not in html


def test_machines_read_numbers_that_agree(capsys, tmp_path):
    code, out, err = bought(capsys, tmp_path, MARKET, SMALL, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    costs = {name: way["cost"] for name, way in found["ways"].items() if name != "bigger_local_prefill"}
    assert found["best"] == min(costs, key=lambda name: costs[name])
    assert found["offload"] == (found["best"] == "prfaas")
    spent = sum(month["cash"] for month in found["months"]) - found["still_worth"]
    assert spent == pytest.approx(found["ways"][found["best"]]["cost"])
    assert found["break_even"]["pays"] in {"up_to", "never"}
    assert (found["break_even"]["per_gb"] is not None) == (found["break_even"]["pays"] == "up_to")
    for month in found["months"]:
        near, far = month["num_prefill"] + month["num_decode"], month["num_prfaas"]
        assert month["held_instances"].get("h20x8", 0) >= near
        assert month["held_instances"].get("h200x8", 0) >= far
        assert all(share <= 1 for share in month["utilisation"].values())
        assert month["utilisation"].get("egress", 0) <= 0.8


def day_of_requests(days):
    """A request each minute, and three of them from 10 to 16 o'clock."""
    at = (
        minute * 60_000 + more
        for minute in range(days * 1440)
        for more in range(3 if 600 <= minute % 1440 < 960 else 1)
    )
    return [{"timestamp": ms, "input_length": 5000, "output_length": 50} for ms in at]


def test_the_week_of_a_trace_sets_the_busiest_hour_and_what_a_month_sends(capsys, tmp_path):
    trace, workload = tmp_path / "week.jsonl", tmp_path / "workload.json"
    trace.write_text(jsonl(day_of_requests(8)))
    assert main(["fit", "--trace", str(trace), "-o", str(workload)]) == 0
    assert "busiest hour 0.050 req/s" in capsys.readouterr().out
    site = SMALL | {"workload": {"kind": "fitted", "path": str(workload)}}
    code, out, _ = bought(capsys, tmp_path, MARKET | {"demand": {"months": 2}}, site, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["months"][0]["busiest_hour_req_per_s"] == pytest.approx(0.05)
    assert found["week"] == pytest.approx({"mean_load": (18 + 6 * 3) / 24 / 3, "load_95th_percentile": 1.0})
    month = found["months"][0]
    for stage, busy in month["utilisation"].items():
        assert month["utilisation_mean_of_week"][stage] == pytest.approx(busy / 2)
    assert any("week: it is that of the workload's trace, of 168 hours" in each for each in found["assumptions"])
    assert any("busiest hour is that of the workload's trace" in each for each in found["assumptions"])


def test_a_week_may_be_a_file_and_only_one_is_said(capsys, tmp_path):
    (tmp_path / "week.csv").write_text("load\n1\n3\n")
    code, out, _ = bought(capsys, tmp_path, MARKET | {"demand": DEMAND | {"week_file": "week.csv"}})
    assert (code, "week of 2 parts: 67% of the busiest one in the mean, 100% in the 95th percentile" in out) == (
        0,
        True,
    )
    code, _, err = bought(capsys, tmp_path, MARKET | {"demand": DEMAND | {"week_file": "week.csv", "week": [1, 2]}})
    assert (code, "week and week_file: give one of them" in err) == (2, True)
    for text, why in (
        ("load\n-1\n", "row 1: load = -1"),
        ("load\n0\n", "one is above 0"),
        ("hour\n1\n", "missing: load"),
    ):
        (tmp_path / "week.csv").write_text(text)
        code, _, err = bought(capsys, tmp_path, MARKET | {"demand": DEMAND | {"week_file": "week.csv"}})
        assert (code, why in err, "week.csv" in err) == (2, True, True), err


def test_a_fitted_workload_is_bought_for(capsys, tmp_path):
    """As `fit` writes it: decode nodes hold some of its prompts."""
    trace, workload = tmp_path / "trace.jsonl", tmp_path / "fitted.json"
    trace.write_text(jsonl(ROWS))
    assert main(["fit", "--trace", str(trace), "-o", str(workload)]) == 0
    assert "held" in json.loads(workload.read_text())["uncached_tokens"]
    capsys.readouterr()
    market = MARKET | {"demand": {"months": 1}}
    code, out, err = bought(capsys, tmp_path, market, SITE, "-w", workload, "--extrapolate")
    assert (code, "Verdict: " in out) == (0, True)
    assert "assumed: the market says no rate_req_per_s: the workload's mean rate is taken" in err
    for text in (
        "  1 month, 1.03 to 1.03 req/s",
        "no prompt costs less away; the mean one that is sent",
        "Paid in 1 month: ",
    ):
        assert text in out, text


def test_what_is_bought_keeps_the_target_in_simulation(capsys, tmp_path):
    """In the busiest hour, by the instances and the line that are there; so few requests tell a P90 to a tenth."""
    market = MARKET | {"demand": DEMAND | {"months": 1}}
    found = json.loads(bought(capsys, tmp_path, market, SITE, "--json")[1])
    (month,) = found["months"]
    plan = {key: month[key] for key in ("threshold_tokens", "num_prefill", "num_decode")}
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"lambda_max_req_per_s": month["busiest_hour_req_per_s"]}))
    counts = {"prfaas": month["num_prfaas"], "pd": month["num_prefill"] + month["num_decode"]}
    clusters = [each | {"instances": counts[each["name"]]} for each in SITE["clusters"]]
    links = [each | {"capacity_gbps": month["line_gbps"]} for each in SITE["links"]]
    site = written(tmp_path, {key: value for key, value in SITE.items() if key != "deployments"} | {
        "clusters": clusters, "links": links,
    })  # fmt: skip
    argv = ["simulate", "-c", site, "--plan", tmp_path / "plan.json", "--load", "1", "--requests", "6000", "--json"]
    assert main([str(each) for each in argv]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ttft_p90_s"] == pytest.approx(5.0, rel=0.1)
    for stage, share in month["utilisation"].items():
        assert report["utilisation"][stage] == pytest.approx(share, abs=0.05), stage


def test_rents_of_several_months_are_one_line(capsys, tmp_path):
    offers = [{"hardware": name, "gpus": 8, "rent_per_gpu_hour": 2.0} for name in ("h200x8", "h20x8")]
    same = {"months": 5, "rate_req_per_s": 2.0}
    out = bought(capsys, tmp_path, {"schema": 1, "demand": same, "hardware": offers})[1]
    assert "by the hour until month 5" in out
    assert out.count("by the hour") == 1
    assert "Unverified: demand, prices of h200x8, prices of h20x8" in out


def test_lines_of_the_same_rate_are_told_apart_and_ordered(capsys, tmp_path):
    """The metered one comes later, and its price is from nowhere."""
    offers = [{"hardware": name, "gpus": 8, "rent_per_gpu_hour": 2.0} for name in ("h200x8", "h20x8")]
    lines = [
        {"gbps": 100, "per_month": 9000, "provenance": "quoted: an offer"},
        {"gbps": 100, "per_gb": 0.0001, "lead_months": 1},
        {"gbps": 100, "per_month": 90_000, "provenance": "quoted: an offer"},
    ]
    market = {"schema": 1, "demand": {"months": 3, "rate_req_per_s": 2.0}, "hardware": offers, "lines": lines}
    found = json.loads(bought(capsys, tmp_path, market, SMALL, "--json")[1])
    assert [month["line"] for month in found["months"]] == [1, 2, 2]
    assert found["line_orders"] == [
        {"month": 1, "line": 1, "line_gbps": 100.0, "first_month": 1, "last_month": 1},
        {"month": 1, "line": 2, "line_gbps": 100.0, "first_month": 2, "last_month": 3},
    ]
    assert [found["provenance"][f"line {number} of 100 Gbit/s"] for number in (1, 2)] == ["quoted: an offer", ""]
    out = bought(capsys, tmp_path, market, SMALL)[1]
    orders = "Orders (lines):\n  month   1  line 1      rent 100 Gbit/s for month 1\n  month   1  line 2      rent 100 Gbit/s"
    assert f"{orders} for months 2 to 3\n" in out
    assert "Unverified: demand, prices of h200x8, prices of h20x8, line 2 of 100 Gbit/s" in out


def test_a_page_without_matplotlib_names_the_extra_before_it_searches(capsys, tmp_path, monkeypatch):
    for name in ("charts", "page", "purchases_page"):
        monkeypatch.delitem(sys.modules, f"planner.commands.rendering.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = bought(capsys, tmp_path, MARKET, SMALL, "-o", tmp_path / "buy.html")
    assert (code, "pip install 'prfaas[plots]'" in err) == (2, True)


def test_where_a_page_goes_is_checked_before_the_search(capsys, tmp_path):
    """The search would find that nothing keeps the target."""
    hopeless = SMALL | {"slo": {"ttft_p90_s": 0.1}}
    for output, message in ((tmp_path / "none" / "buy.html", "there is no folder"), (tmp_path, "is a folder")):
        code, out, err = bought(capsys, tmp_path, MARKET, hopeless, "-o", output)
        assert (code, out, f"error: --output {output}: {message}" in err) == (2, "", True)


def test_the_answer_is_printed_even_if_its_page_cannot_be_written(capsys, tmp_path):
    code, out, err = bought(capsys, tmp_path, MARKET | {"demand": DEMAND | {"months": 1}}, SMALL, "-o", "/dev/full")
    assert (code, "Verdict: " in out, "error: /dev/full: No space left" in err) == (1, True, True)


def changed(table, *path_and_value):
    *path, last, value = path_and_value
    copy = json.loads(json.dumps(table))
    inside = copy
    for key in path:
        inside = inside[key]
    inside[last] = value
    return copy


def test_the_pareto_front_is_a_table_json_and_a_chart(capsys, tmp_path):
    page = tmp_path / "buy.html"
    code, out, _ = bought(capsys, tmp_path, MARKET, SMALL, "--pareto", "-o", page)
    assert code == 0
    table = out[out.index("Pareto front") :]
    html = page.read_text()
    assert html.count("<svg") == 6
    assert escape(table.strip()) in html
    code, out, _ = bought(capsys, tmp_path, MARKET, SMALL, "--pareto", "--json")
    rows = json.loads(out)["pareto"]
    assert code == 0
    assert len(rows) == len(table.strip().splitlines()) - 2
    for row in rows:
        assert f"{row['cost_per_month']:,.0f}" in table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("schema", 2), "market.toml: schema = 2: must be 1"),
        (("demand", "months", 0), "market.toml: [demand]: months = 0: must be a whole number of months, 1 to 120"),
        (("demand", "week", [1.0, -2.0]), "[demand]: week[1] = -2.0: must be a number, 0 to 1000000000"),
        (("demand", "week", [0.0, 0.0]), "of which one is above 0"),
        (("demand", "grows", 0.1), "[demand]: unknown key 'grows'"),
        (("hardware", 1, "gpus", 0), "hardware[1]: gpus = 0: must be a whole number of GPUs, 1 to 100000"),
        (("hardware", 0, "rent_per_gpu_hour", -1.0), "hardware[0]: rent_per_gpu_hour = -1.0: must be a number, 0 to"),
        (("hardware", 0, "rent_per_gpu_hour", "4"), "hardware[0]: rent_per_gpu_hour = '4'"),
        (("hardware", 0, "commitments", 0, "months", 0), "hardware[0].commitments[0]: months = 0"),
        (("hardware", 0, "commitments", [{"months": 3, "per_gpu_hour": 1.0}] * 2), "commitments = [3, 3]: must be of"),
        (("hardware", 0, "hardware", "h20x8"), "hardware = ['h20x8', 'h20x8']: must be kinds of hardware that differ"),
        (("hardware", 0, "hardware", "moon"), "hardware 'h200x8' has no [[hardware]] table; there are: moon, h20x8"),
        (("lines", 0, "gbps", 0), "lines[0]: gbps = 0.0: must be above 0"),
        (("lines", 2, "per_mb", 1.0), "lines[2]: unknown key 'per_mb' (did you mean 'per_gb'?)"),
        (("currency", "a\nb"), "market.toml: currency = 'a\\nb': must be printable"),
        (("discount_per_year", 8), "discount_per_year = 8.0: must be a number, 0 to 1"),
        (("lines", 1, "provenance", "a guess"), "lines[1]: provenance = 'a guess': must be one of quoted, measured"),
        (("demand", {"months": 3}), "[demand] rate_req_per_s is missing"),
        (("demand", "rate_req_per_s", 1e9), "[demand] month 1: 1e+09 req/s need"),
        (("demand", DEMAND | {"months": 60, "growth_per_month": 1.0}), "are rate_req_per_s and growth_per_month right?"),
        (("hardware", 1, {"hardware": "h20x8", "gpus": 8}), "h20x8: 0 owned, no price for more"),
    ],
)  # fmt: skip
def test_errors_name_the_file_the_place_and_the_value(capsys, tmp_path, change, message):
    code, _, err = bought(capsys, tmp_path, changed(MARKET, *change))
    assert code in (2, 3)
    assert message in err


def test_files_that_are_none_are_named(capsys, tmp_path):
    site = str(written(tmp_path, SMALL))
    assert main(["buy", "-c", site, "-m", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: no such file" in capsys.readouterr().err
    (tmp_path / "bad.toml").write_text("schema = ")
    assert main(["buy", "-c", site, "-m", str(tmp_path / "bad.toml")]) == 2
    assert "bad.toml: not valid TOML" in capsys.readouterr().err


def test_hardware_that_the_site_does_not_have_is_told(capsys, tmp_path):
    more = [*MARKET["hardware"], {"hardware": "b300x8", "gpus": 8, "rent_per_gpu_hour": 1.0}]
    code, _, err = bought(capsys, tmp_path, MARKET | {"hardware": more})
    assert (code, "'b300x8' is in no cluster of the site" in err) == (0, True)


def test_a_demand_that_nothing_carries_is_told_with_the_reason(capsys, tmp_path):
    code, _, err = bought(capsys, tmp_path, MARKET, SMALL | {"slo": {"ttft_p90_s": 0.1}})
    assert code == 3
    for contender in ("homogeneous", "colocated", "prfaas", "bigger_local_prefill"):
        assert f"{contender}: TTFT P90 is " in err
    assert "0.1 s are asked for" in err
    late = [offer | {"lead_months": 2, "rent_per_gpu_hour": 0.0} for offer in MARKET["hardware"]]
    late = [{key: value for key, value in offer.items() if key != "rent_per_gpu_hour"} for offer in late]
    code, _, err = bought(capsys, tmp_path, MARKET | {"hardware": late})
    assert (code, "h20x8: 0 owned, more in month 3" in err) == (3, True)
    code, _, err = bought(capsys, tmp_path, MARKET, SMALL | {"slo": {"tbt_s": 0.001}})
    assert (code, "tbt_s=0.001" in err) == (3, True)


def read_or_told(path):
    """(what the file says, None) or (None, why not)"""
    try:
        return load_market(path), ""
    except InputError as error:
        return None, str(error)


def test_whatever_is_wrong_in_a_market_is_told_or_is_a_number(tmp_path):
    for seed in range(100):
        table = spoiled(random.Random(seed), EXAMPLE, [each for each in WORST if each is not None and each != [None]])
        market, error = read_or_told(market_file(tmp_path, table))
        if market is None:
            assert "market.toml: " in error, f"number {seed}"
            continue
        assert all(map(isfinite, market.asked_by(ASKED).demand.rates())), f"number {seed}"
        assert 0 < market.demand.mean_load <= 1 >= market.demand.measured_load, f"number {seed}"

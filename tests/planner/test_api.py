"""The planner in Python: the example of its page runs, and tables and figures have what they say."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner import api
from planner.commands.cli import main
from planner.errors import MissingExtra
from planner.model.market import load_market
from planner.solve.buying.advice import Advice
from planner.solve.buying.program import Purchases
from planner.solve.buying.systems import Contender, SizedSystem

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example() -> dict:
    """What the example of docs/reference/planner-python.md leaves."""
    text = (ROOT / "docs/reference/planner-python.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    found: dict = {}
    exec(code.replace('"configs', f'"{ROOT}/configs').replace('"prfaas', f'"{ROOT}/prfaas'), found)
    return found


def test_the_example_simulates_every_request(example):
    table = example["table"]
    assert len(table) == len(example["run"].ttft_s)
    assert {row["is_offloaded"] for row in table} <= {True, False}
    assert all(row["e2e_s"] >= row["ttft_s"] > 0 for row in table)


def test_the_example_is_what_the_command_prints(example, capsys):
    config, trace = f"{ROOT}/configs/case_study.toml", f"{ROOT}/prfaas/data/conversation_slice.jsonl"
    assert main(["simulate", "-c", config, "--extrapolate", "--trace", trace, "--json"]) == 0
    printed, report = json.loads(capsys.readouterr().out), example["run"].report()
    assert printed["setting"]["threshold_tokens"] == example["plan"].threshold_tokens
    for name in ("requests", "routes", "ttft_mean_s", "ttft_p90_s", "hit_ratio", "egress_mean_gbps", "utilisation"):
        assert printed[name] == pytest.approx(report[name]), name


def test_a_plan_has_a_row_for_each_stage(example):
    plan = example["plan"]
    assert {row["stage"]: row["busy_at_lambda_max"] for row in api.rows(plan)} == plan.utilisation


def test_without_a_trace_requests_arrive_at_a_share_of_the_largest_rate(example):
    run = api.simulate(example["site"], example["plan"], requests=300, load=0.5)
    report = run.report()
    assert report["completed"] == 300
    assert 300 / report["horizon_s"] == pytest.approx(0.5 * example["plan"].lambda_max, rel=0.2)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_are_of_the_library_that_there_is(example, library, monkeypatch):
    for name in api.FRAMES:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(DataFrame=tuple) if name == library else None)
    assert api.frame(example["plan"]) == tuple(api.rows(example["plan"]))


def test_without_such_a_library_frames_say_what_to_install(example, monkeypatch):
    for name in api.FRAMES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match="pip install pandas"):
        api.frame(example["plan"])


def test_figures_name_their_axes(example):
    pytest.importorskip("matplotlib")
    assert api.plot(example["plan"]).axes[0].get_xlabel() == "busy at Λmax"
    assert api.plot(example["run"]).axes[0].get_xlabel() == "TTFT, s"


def test_purchases_have_a_row_for_each_month():
    system = SizedSystem(
        contender=Contender.HOMOGENEOUS, num_prfaas=0, num_prefill=2, num_decode=1, line=None, threshold_tokens=0.0,
        sent_bytes=0.0, busy=(("pd_prefill", 0.8), ("pd_decode", 0.6)),
    )  # fmt: skip
    bought = Purchases(
        systems=[system] * 2, held=[], orders=[], cost=9.0, cash=[5.0, 4.0], still_to_pay=0.0, still_worth=0.0,
        sent_gb=0.0, gap=0.0,
    )  # fmt: skip
    advice = Advice(
        rates=[1.0, 1.5], ways={Contender.HOMOGENEOUS: bought}, failed={}, is_offloading=False,
        best=Contender.HOMOGENEOUS, saving=None, break_even=None, headroom_months=[1, 0],
    )  # fmt: skip
    table = api.rows(api.Advised(load_market(ROOT / "configs/market.toml"), advice))
    assert [row["month"] for row in table] == [1, 2]
    assert table[1]["cash"] == 4.0
    assert table[0]["busiest"] == 0.8
    assert table[0]["line_gbps"] == 0.0

"""The command line: keys, exit codes, errors that name the input."""

import csv
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

import pytest

from planner.commands.arguments import COMMANDS
from planner.commands.cli import main, parser
from planner.commands.simulation.trial import trace_of
from tests.command_lines import unexplained
from tests.planner.conftest import CONFIGS
from tests.planner.traces import MOONCAKE

CASE = str(CONFIGS / "case_study.toml")
KEYS = {
    "threshold_tokens",
    "num_prfaas",
    "num_prefill",
    "num_decode",
    "theta_prfaas_req_per_s",
    "theta_pd_p_req_per_s",
    "theta_pd_d_req_per_s",
    "lambda_max_req_per_s",
    "offload_fraction",
    "mean_offloaded_tokens",
    "egress_gbps",
    "ttft_mean_s",
    "ttft_p90_s",
    "bottleneck",
}
SIMULATION_KEYS = {
    "requests",
    "completed",
    "rejected",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "tbt_p99_s",
    "goodput_req_per_s",
    "hit_ratio",
    "egress_mean_gbps",
    "egress_p99_gbps",
    "utilisation",
    "seed",
}


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_solve_as_in_the_paper(capsys):
    code, out, _ = run(capsys, "solve", "-c", CASE, "--as-in-paper", "--json")
    plan = json.loads(out)
    assert code == 0
    assert set(plan) >= KEYS
    assert 19_300 <= plan["threshold_tokens"] <= 19_500
    assert (plan["num_prefill"], plan["num_decode"]) == (3, 5)
    assert plan["offload_fraction"] == pytest.approx(0.496, abs=5e-4)
    assert plan["input_hash"]
    assert plan["prfaas_version"]
    assert plan["provenance"]["T_prefill h20x8"].startswith("fitted")


def test_a_plan_fits_a_screen_without_colour(capsys):
    code, out, err = run(capsys, "solve", "-c", CASE)
    assert code == 0
    assert len(out.splitlines()) <= 40
    assert "\x1b" not in out
    assert "fitted(!)" in out
    assert "warning:" in err


def test_the_same_input_gives_the_same_plan_file(capsys, tmp_path):
    for name in ("a.json", "b.json"):
        assert run(capsys, "solve", "-c", CASE, "-o", str(tmp_path / name))[0] == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_simulate_prints_its_keys_and_repeats_itself(capsys):
    argv = ["simulate", "-c", CASE, "--trace", str(MOONCAKE), "--requests", "100", "--json", "--seed", "3"]
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert set(json.loads(out)) >= SIMULATION_KEYS
    assert run(capsys, *argv)[1] == out


def test_seeds_come_with_intervals(capsys):
    code, out, _ = run(capsys, "simulate", "-c", CASE, "--requests", "300", "--seeds", "3", "--json")
    report = json.loads(out)
    assert (code, report["seeds"]) == (0, 3)
    assert 0 < report["ci95"]["ttft_mean_s"] < report["ttft_mean_s"]
    assert "±" in run(capsys, "simulate", "-c", CASE, "--requests", "300", "--seeds", "3")[1]


def test_links_fail_at_given_times(capsys):
    argv = ["simulate", "-c", CASE, "--requests", "300", "--link-thin", "5:20:0.5", "--link-down"]
    out = run(capsys, *argv, "20:50")[1]
    assert "links that failed prfaas to pd 1\n  not as routed prefill_peer_lost" in out
    assert "links that failed" not in run(capsys, *argv, "20:24:prfaas:pd")[1]  # shorter than the patience
    for wrong in ("20", "20:x", "50:20", "20:50:prfaas", "20:50:prfaas:else"):
        code, _, error = run(capsys, *argv, wrong)
        assert code == 2
        assert "link" in error or "until" in error


def test_a_day_with_the_controller(capsys):
    argv = ["simulate", "-c", CASE, "--day", "0.2,0.7", "--bin", "300", "--controller", "model", "--tick", "60"]
    code, out, _ = run(capsys, *argv, "--json")
    report = json.loads(out)
    assert code == 0
    assert len(report["timeline"]) >= 9
    assert "num_prefill" in run(capsys, *argv)[1]
    assert "day='x'" in run(capsys, "simulate", "-c", CASE, "--day", "x")[2]


def requests_in(capsys, *argv: str) -> int:
    return json.loads(run(capsys, "simulate", "-c", CASE, "--trace", str(MOONCAKE), "--json", *argv)[1])["requests"]


def test_requests_cut_a_trace_whatever_their_number(capsys, tmp_path):
    long = tmp_path / "long.jsonl"
    row = {"timestamp": 0, "input_length": 100, "output_length": 1}
    long.write_text("".join(json.dumps(row | {"timestamp": 3_001 * at}) + "\n" for at in range(20_005)))
    cut = trace_of(parser().parse_args(["simulate", "-c", CASE, "--trace", str(long), "--requests", "20000"]))
    assert cut is not None
    assert len(cut) == 20_000
    assert requests_in(capsys, "--requests", "25") == 25
    assert requests_in(capsys) == 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan.json: not JSON: Expecting property name"),
        ("[1]", "plan.json: the file = [1]: must be an object"),
        ("{}", "plan.json: missing: threshold_tokens"),
        ('{"threshold_tokens": null, "num_prefill": 3, "num_decode": 5, "lambda_max_req_per_s": 3}', "plan.json: "),
        (
            '{"threshold_tokens": 1, "num_prefill": 1.5, "num_decode": 5, "lambda_max_req_per_s": 3}',
            "num_prefill = 1.5: must be a whole number",
        ),
        ('{"threshold_tokens": 1, "num_prefill": 3, "num_decode": 5, "lambda_max_req_per_s": 0}', "must be above 0"),
    ],
)
def test_plan_files_that_are_none_are_named(capsys, tmp_path, text, message):
    plan = tmp_path / "plan.json"
    plan.write_text(text)
    for argv in (["simulate", "-c", CASE, "--plan", str(plan)], ["compare", "-c", CASE, "--plans", str(plan)]):
        code, _, err = run(capsys, *argv)
        assert (code, message in err) == (2, True)
    assert "no such file" in run(capsys, "simulate", "-c", CASE, "--plan", str(tmp_path / "none.json"))[2]


@pytest.mark.parametrize(
    "argv", [["--seeds", "0"], ["--requests", "0"], ["--load", "-1"], ["--tail-share", "2"], ["--fetch-gbps", "nan"]]
)
def test_numbers_that_make_no_sense_are_refused_as_usage(capsys, argv):
    with pytest.raises(SystemExit) as exited:
        main(["simulate", "-c", CASE, *argv])
    assert exited.value.code == 2
    assert f"argument {argv[0]}" in capsys.readouterr().err


def loaded_by(*commands: Sequence[str]) -> list[set[str]]:
    """Top-level packages that one process has loaded when each of its commands is done."""
    code = (
        "import json, sys\nfrom planner.commands.cli import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    try: main(argv)\n    except SystemExit: pass\n"
        "    print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, check=True
    )
    return [set(line.split()) for line in done.stderr.splitlines()[-len(commands) :]]


HEAVY = {"numpy", "scipy", "rich", "hybrid_cache", "statistics"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example_that_is_one(command: str) -> None:
    name, *arguments = shlex.split(COMMANDS[command].example)
    assert (name, parser().parse_args(arguments).command) == ("prfaas-plan", command)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_explains_each_argument(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert unexplained(capsys.readouterr().out) == []


def test_help_loads_no_number_crunching():
    commands = ["", *COMMANDS]
    loaded = loaded_by(*([*command.split(), "--help"] for command in commands))
    heavy = {command: found & HEAVY for command, found in zip(commands, loaded, strict=True) if found & HEAVY}
    assert heavy == {}, "the first of them loads it"


def test_what_only_some_commands_need_is_not_loaded_by_others():
    for found in loaded_by(["solve", "-c", CASE], ["simulate", "-c", CASE, "--requests", "50"]):
        assert not found & {"scipy", "rich"}


def planned_with_only(packages: set[str], *argv: str) -> subprocess.CompletedProcess[str]:
    """A command where, of all that is installed, only `packages` can be imported."""
    code = (
        "import sys\n"
        f"allowed = {packages!r}\n"
        "class Bare:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        top = name.split('.')[0]\n"
        "        if top not in allowed | sys.stdlib_module_names: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Bare())\n"
        "from planner.commands.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)


BARE = {"planner", "membership", "hybrid_cache", "transport", "node", "prfaas", "numpy", "msgspec"}


@pytest.mark.parametrize("argv", [["solve", "-c", CASE], ["simulate", "-c", CASE, "--requests", "50"]])
def test_planning_needs_no_grpc_and_no_tokenizer(argv):
    assert planned_with_only(BARE, *argv).returncode == 0


def test_plans_of_several_pd_clusters_name_the_extra_that_they_need():
    done = planned_with_only(BARE, "solve", "-c", "configs/pairs.toml")
    assert done.returncode == 2
    assert "pip install 'prfaas[planner]'" in done.stderr


def test_diff_exits_by_verdict(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    run(capsys, "solve", "-c", CASE, "-o", str(plan))
    table = json.loads(plan.read_text())
    current = tmp_path / "current.json"

    def verdict(**changes) -> int:
        current.write_text(json.dumps(table | changes))
        return run(capsys, "diff", str(plan), "--current", str(current))[0]

    assert verdict() == 0
    assert verdict(threshold_tokens=table["threshold_tokens"] + 20) == 0
    assert verdict(num_prefill=4, num_decode=4) == 1
    assert verdict(num_pd=6) == 3
    assert verdict(num_prfaas=2) == 3


def test_fit_feeds_solve(capsys, tmp_path):
    workload = tmp_path / "w.json"
    assert run(capsys, "fit", "--trace", str(MOONCAKE), "-o", str(workload))[0] == 0
    code, out, _ = run(capsys, "solve", "-c", CASE, "-w", str(workload), "--json")
    assert code == 0
    assert json.loads(out)["workload"] == "mooncake_conversation_400"
    assert "burst index" in run(capsys, "fit", "--trace", str(MOONCAKE), "--tokens", "total")[1]


def test_fit_says_when_blocks_are_used_again(capsys, tmp_path):
    _, out, _ = run(capsys, "fit", "--trace", str(MOONCAKE))
    assert "category: turns, inferred from prompts" in out
    table = out[out.index("reuse p50") :].splitlines()
    assert [line.split("  ")[0].strip() or line.split()[0] for line in table[1:]] == [
        "first turn",
        "later turns",
        "all",
    ]
    found = json.loads(run(capsys, "fit", "--trace", str(MOONCAKE), "--json")[1])["block_reuse"]
    assert table[-1].split()[3:6] == [f"{found['by_category'][-1]['reuse_s'][at]:.4g}" for at in ("p50", "p90", "p99")]
    nameless = tmp_path / "azure.jsonl"
    nameless.write_text('{"timestamp": 1, "input_length": 10, "output_length": 5}\n')
    assert "reuse of blocks is not known: the trace names no blocks" in run(capsys, "fit", "--trace", str(nameless))[1]


def test_whatif_writes_csv(capsys, tmp_path):
    table = tmp_path / "sweep.csv"
    argv = ["whatif", "-c", CASE, "--sweep", "b_out=2,10,100", "--sweep", "n_prfaas=2:4:3", "-o", str(table)]
    assert run(capsys, *argv)[0] == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 9
    best = [float(row["lambda_max_req_per_s"]) for row in rows if row["n_prfaas"] == "4.0"]
    assert best == sorted(best)
    code, out, _ = run(capsys, "whatif", "-c", CASE, "--heat-map")
    assert (code, out.splitlines()[0]) == (0, "threshold_tokens,num_prefill,lambda_max_req_per_s")


def test_saturate_asks_for_the_sites_slo_and_for_added_targets(capsys):
    argv = [
        "saturate",
        "-c",
        CASE,
        "--requests",
        "300",
        "--tolerance",
        "0.5",
        "--target",
        "ttft_s=30,up_to_tokens=8000",
    ]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slo"] == "ttft_p90<=5,tbt_p99<=0.05,target_margin>=0"
    assert found["report"]["target_margin"] >= 0


def test_people_read_how_targets_are_kept(capsys):
    target = ["--target", "ttft_s=0.01,up_to_tokens=8000", "--target", "ttft_s=60,above_tokens=60000"]
    assert main(["simulate", "-c", CASE, "--requests", "300", *target]) == 0
    out = capsys.readouterr().out
    assert "up to 8,000 tokens: 0.0% of" in out
    assert "within 0.01 s, 90% asked: MISSED" in out
    assert "above 60,000 tokens, in time" in out
    assert main(["solve", "-c", CASE, *target]) == 0
    assert "Target of above 60,000 tokens (11% of requests): 100.0% within 60 s" in capsys.readouterr().out
    category = ["--target", "ttft_s=5,category=chat"]
    assert main(["simulate", "-c", CASE, "--requests", "50", *category]) == 0
    assert "targets chat are left out; see --trace" in capsys.readouterr().err


def test_saturate_stays_below_the_closed_form(capsys):
    argv = ["saturate", "-c", CASE, "--requests", "3000", "--slo", "ttft_p90<5", "--tolerance", "0.1", "--json"]
    code, out, _ = run(capsys, *argv)
    found = json.loads(out)
    assert code == 0
    assert 0.5 < found["rate_req_per_s"] / found["lambda_max_req_per_s"] < 1
    assert found["report"]["ttft_p90_s"] < 5
    assert found["broken"] == ["ttft_p90_s < 5"]


def test_compare_and_its_policies(capsys):
    code, out, _ = run(capsys, "compare", "-c", CASE, "--requests", "800", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["name"] for row in rows] == ["homogeneous", "naive", "prfaas"]
    assert rows[2]["ttft_mean_s"] < rows[0]["ttft_mean_s"]
    code, _, err = run(capsys, "compare", "-c", CASE, "--policies", "magic")
    assert (code, "policy 'magic': must be one of" in err) == (2, True)


def test_profile_commands(capsys, tmp_path):
    profile = str(CONFIGS / "profiles" / "internal-1t.json")
    code, out, _ = run(capsys, "profile", "show", profile)
    assert code == 0
    assert "fitted" in out
    points = tmp_path / "points.csv"
    points.write_text("tokens,seconds\n1000,0.9\n8000,1.3\n32000,2.6\n")
    better = tmp_path / "better.json"
    argv = [
        "profile",
        "calibrate",
        profile,
        "--hardware",
        "h200x8",
        "--points",
        str(points),
        "-o",
        str(better),
        "--json",
    ]
    code, out, _ = run(capsys, *argv)
    assert code == 0
    assert max(abs(row["error"]) for row in json.loads(out)["residuals"]) < 0.05
    assert run(capsys, "profile", "check", str(better), "--points", str(points))[0] == 0
    assert run(capsys, "profile", "check", profile)[0] == 0
    code, _, err = run(capsys, "profile", "import-aic", profile, "--model-path", "x")
    assert (code, "aiconfigurator is not installed" in err) == (2, True)


def test_report_is_one_self_contained_page_of_the_trace_that_was_given(capsys, tmp_path):
    page = tmp_path / "report.html"
    code, out, _ = run(capsys, "report", "-c", CASE, "--trace", str(MOONCAKE), "-o", str(page), "--json")
    found = json.loads(out)
    assert (code, found["plan"]["workload"]) == (0, "mooncake_conversation_400")
    assert found["simulated"]["prfaas"]["requests"] == 400
    html = page.read_text()
    assert html.startswith("<!doctype html>")
    assert html.count("<svg") == 7
    for text in ("PD prefill instances", "threshold t, tokens", "plan kept", "without PrfaaS", "homogeneous"):
        assert f">{text}</text>" in html
    assert "src=" not in html
    assert set(re.findall('http[^"< ]+', html)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_a_report_without_matplotlib_names_the_extra_before_it_simulates(capsys, tmp_path, monkeypatch):
    for name in ("rendering.charts", "rendering.page", "simulation.report"):
        monkeypatch.delitem(sys.modules, f"planner.commands.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "report", "-c", CASE, "-o", str(tmp_path / "report.html"))
    assert (code, "charts need the plots extra (pip install 'prfaas[plots]')" in err) == (2, True)


def site(tmp_path, text: str):
    path = tmp_path / "site.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("schema = 1", "schema = 7"), "site.toml: schema = 7: must be 1"),
        (('kind = "pd"', 'kind = "gpu"'), "clusters[1]: kind = 'gpu': must be 'prfaas' or 'pd'"),
        (
            ("instances = 8", "instances = -1"),
            "clusters[1]: instances = -1: must be a whole number of instances, 0 to 100000",
        ),
        (('destination = "pd"', 'destination = "moon"'), "'moon' is not a cluster; known: prfaas, pd"),
        (("sigma = 1.00", "sigma = 0.0"), "sigma=0.0: must be 0.001 to 20"),
        (("output_tokens = 1024", "output_tokens = 0"), "output_tokens=0"),
        (
            ("capacity_gbps = 100", "capacity_mbps = 100"),
            "links[0]: unknown key 'capacity_mbps' (did you mean 'capacity_gbps'?)",
        ),
        (("output_tokens = 1024", 'output_tokens = "many"'), "[workload]: output_tokens = 'many': must be a number"),
        (("instances = { prfaas = 0, pd = 12 }", "instances = { prfaas = -1 }"), "instances.prfaas = -1: must be"),
        (('"quoted: §4.1"', '"guess"'), "provenance='guess'"),
        (("max_tokens = 131072", "max_tokens = 400000"), "pass --extrapolate"),
        (('hardware = "h20x8"', 'hardware = "abacus"'), "not profiled on 'abacus'; known: h200x8, h20x8"),
    ],
)
def test_errors_name_the_input_and_what_would_do(capsys, tmp_path, change, message):
    text = (CONFIGS / "case_study.toml").read_text().replace("profiles/", f"{CONFIGS}/profiles/")
    assert change[0] in text
    code, _, err = run(capsys, "solve", "-c", site(tmp_path, text.replace(*change)))
    assert code == 2
    assert message in err


def test_missing_files_and_unknown_deployments(capsys, tmp_path):
    assert "no such file" in run(capsys, "solve", "-c", str(tmp_path / "none.toml"))[2]
    code, _, err = run(capsys, "solve", "-c", CASE, "--deployment", "moon")
    assert (code, "known: homogeneous, naive" in err) == (2, True)


def test_infeasible_exits_3(capsys):
    code, _, err = run(capsys, "solve", "-c", CASE, "--objective", "cost", "--rate", "50")
    assert code == 3
    assert "rate_req_per_s=50" in err


def test_robust_and_fleet(capsys, tmp_path):
    code, out, _ = run(capsys, "solve", "-c", CASE, "--robust", "--json")
    assert code == 0
    assert json.loads(out)["worst_ratio"] > 0.8
    text = (CONFIGS / "case_study.toml").read_text().replace("profiles/", f"{CONFIGS}/profiles/")
    more = text + (
        '[[clusters]]\nname = "pd-2"\nkind = "pd"\nhardware = "h20x8"\ninstances = 2\n'
        '[[links]]\nsource = "prfaas"\ndestination = "pd-2"\ncapacity_gbps = 10\n'
    )
    more = more.replace("[deployments.homogeneous]\ninstances = { prfaas = 0, pd = 12 }\n", "")
    code, out, _ = run(capsys, "solve", "-c", site(tmp_path, more), "--bins", "15", "--json")
    assert code == 0
    assert [cluster["name"] for cluster in json.loads(out)["pd_clusters"]] == ["pd", "pd-2"]


def test_several_clusters_are_solved_and_simulated(capsys, tmp_path):
    pairs, plan = str(CONFIGS / "pairs.toml"), str(tmp_path / "plan.json")
    assert "with one threshold for all" in run(capsys, "solve", "-c", pairs, "--bins", "12", "-o", plan)[1]
    code, out, _ = run(capsys, "simulate", "-c", pairs, "--plan", plan, "--requests", "300", "--json")
    assert code == 0
    report = json.loads(out)
    assert set(report["clusters"]) == {"prfaas-east", "prfaas-west", "pd-east", "pd-west"}
    assert report["setting"]["num_prefill"] + report["setting"]["num_decode"] == 8
    out = run(capsys, "simulate", "-c", pairs, "--requests", "300")[1]
    assert "prfaas-west to pd-west" in out
    assert (
        "--deployment and --as-in-paper are not supported"
        in run(capsys, "simulate", "-c", pairs, "--deployment", "x")[2]
    )

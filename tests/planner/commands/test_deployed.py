"""What commands take for granted: what deployments do, unless the paper's assumptions are asked for."""

import json

import pytest

from gateway.config.gateway import RoutingConfig
from planner.commands.cli import main, parser
from planner.commands.simulation.trial import site_for_trial, trace_of, trial_of
from planner.decisions.defaults import DEPLOYED
from planner.decisions.routing.policy import RoutingPolicy
from planner.model.queueing import erlang_b
from planner.model.site import load_site
from planner.model.traces import read_requests
from planner.simulator.trials.hits import finite_cache_hits, pd_prefixes
from planner.simulator.trials.trial import DEPLOYED_TRIAL, Trial
from tests.planner.commands.inputs import CONFIGS, SITE, jsonl, written

CASE = str(CONFIGS / "case_study.toml")
LENGTHS = {"kind": "lengths", "tokens": [1000, 2000, 8000, 40_000], "output_tokens": 100}
SHARED = [
    {"timestamp": 20_000 * at, "input_length": 8_192 + 512 * at, "output_length": 20, "hash_ids": list(range(16 + at))}
    for at in range(12)
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(jsonl(SHARED))
    return path


def with_caches(folder, cache_gb):
    clusters = [cluster | ({"cache_gb": cache_gb} if cluster["kind"] == "pd" else {}) for cluster in SITE["clusters"]]
    return written(folder, SITE | {"workload": LENGTHS, "clusters": clusters})


def trial(*argv):
    return trial_of(parser().parse_args(["simulate", "-c", CASE, *argv]))


def test_gateways_and_simulations_have_one_set_of_defaults():
    config, policy = RoutingConfig(), RoutingPolicy(threshold_tokens=1.0)
    for name in ("tie_share", "decode_prefill_share", "cross_cluster_cache"):
        assert getattr(config, name) == getattr(policy, name) == getattr(DEPLOYED, name)
    assert config.increment_tokens == trial().increment_tokens == DEPLOYED.increment_tokens
    assert config.fetch_bytes_per_s == trial().unsaid_fetch_gbps * 1e9 / 8 == DEPLOYED.fetch_bytes_per_s
    assert config.placement == trial().placer == DEPLOYED.placement
    assert config.decode_load_slack == policy.placement.decode_load_slack == DEPLOYED.decode_load_slack


def test_ideal_is_the_papers_and_both_take_what_is_asked_for():
    assert trial() == DEPLOYED_TRIAL
    assert trial("--ideal") == Trial()
    assert trial("--ideal", "--cache-gb", "5").cache_gb == trial("--cache-gb", "5").cache_gb == 5.0
    assert trial("--increment", "0").increment_tokens == 0


def test_nodes_have_caches_unless_nothing_is_to_be_cached(capsys, trace):
    def report(*argv):
        assert main(["simulate", "-c", CASE, "--trace", str(trace), "--json", *argv]) == 0
        return json.loads(capsys.readouterr().out)

    assert report()["hit_ratio"] > 0.8
    assert report()["routes"]["decode held"] >= 10
    assert report("--ideal")["hit_ratio"] == report("--cache-gb", "0")["hit_ratio"] == 0


def test_a_simulation_stands_beside_its_plan(capsys, trace):
    assert main(["simulate", "-c", CASE, "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "simulated" in out
    assert "computed on decode nodes, which hold the rest of them" in out
    assert "TTFT P90, s" in out


def test_a_cache_is_a_nodes_wherever_it_is_asked_for(capsys, tmp_path, trace):
    site, requests = load_site(with_caches(tmp_path, 3)), read_requests(trace)
    kv = site.profile.kv_size()

    def hits(cache_gb=None):
        return pd_prefixes(requests, site, 0, cache_gb).cached_tokens

    assert (hits() == finite_cache_hits(requests, kv, 8 * 3)).all()
    assert (hits(1.0) == finite_cache_hits(requests, kv, 8 * 1)).all()
    assert hits(0.0).sum() == 0 < hits(900.0).sum()


def test_a_workload_is_solved_with_the_caches_that_it_was_fitted_for(capsys, tmp_path, trace):
    site, workload = str(with_caches(tmp_path, 3)), str(tmp_path / "w.json")
    assert main(["fit", "--trace", str(trace), "-c", site, "-o", workload]) == 0
    assert main(["solve", "-c", site, "-w", workload]) == 0
    assert json.loads((tmp_path / "w.json").read_text())["caches_gb"] == {"pd": 3.0}
    capsys.readouterr()
    with_caches(tmp_path, 50)
    assert main(["solve", "-c", site, "-w", workload]) == 2
    assert "fitted for a cache of 3 GB per node, cluster 'pd' has one of 50 GB" in capsys.readouterr().err


def test_plans_know_what_decode_nodes_compute(capsys, tmp_path, trace):
    """All but the first prompt end with a block, so decode nodes hold what is before the next ones' increments of 512 tokens."""
    workload = str(tmp_path / "w.json")
    assert main(["fit", "--trace", str(trace), "-c", CASE, "-o", workload]) == 0
    capsys.readouterr()
    assert main(["solve", "-c", CASE, "-w", workload, "--rate", "0.01", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["held_fraction_at_rate"] == pytest.approx(11 / 12)
    assert plan["held_fraction"] == pytest.approx(11 / 12 * (1 - erlang_b(20, 20)))  # decode nodes are full at Λ
    assert not any("decode nodes that hold the rest" in warning for warning in plan["warnings"])
    assert main(["simulate", "-c", CASE, "--trace", str(trace), "--json"]) == 0
    routes = json.loads(capsys.readouterr().out)["routes"]
    assert routes["decode held"] == 11
    assert main(["solve", "-c", CASE, "-w", workload]) == 0
    assert "on decode nodes       77.1%" in capsys.readouterr().out


def test_lengths_alone_are_planned_and_simulated_without_decode_nodes(capsys, tmp_path, trace):
    """Requests that are made up of lengths have no prefixes: the plan beside them has none either."""
    workload = str(tmp_path / "w.json")
    assert main(["fit", "--trace", str(trace), "-c", CASE, "-o", workload]) == 0
    capsys.readouterr()
    assert main(["simulate", "-c", CASE, "-w", workload, "--requests", "50"]) == 0
    said = capsys.readouterr()
    assert "without what is cached before them" in said.err
    row = next(line for line in said.out.splitlines() if "on decode nodes" in line)
    assert row.split()[3:5] == ["0", "0"]


def test_the_plan_of_an_increment_is_that_of_the_simulation(capsys, trace):
    """What decode nodes may not compute is for prefill nodes, in the plan, too."""
    assert main(["simulate", "-c", CASE, "--trace", str(trace), "--increment", "0"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "on decode nodes" in line)
    assert row.split()[3:5] == ["0", "0"]


def test_turns_that_come_sooner_find_fewer_answers_in_the_plan_too(tmp_path):
    """The answer of 500 tokens takes 13 s, and after 20 s the next turn comes, or after 2."""
    rows = [
        {"timestamp": 20_000 * at, "input_length": 1100 + 600 * at, "output_length": 500, "hash_ids": ids}
        for at, ids in enumerate(([1, 2, 9], [1, 2, 3, 4]))
    ]
    (tmp_path / "t.jsonl").write_text(jsonl(rows))
    for scale, held in ((1.0, 0.5), (10.0, 0.0)):
        argv = ["simulate", "-c", CASE, "--trace", str(tmp_path / "t.jsonl"), "--rate-scale", str(scale)]
        args = parser().parse_args(argv)
        assert site_for_trial(args, trace_of(args)).workload.lengths.held_share == held

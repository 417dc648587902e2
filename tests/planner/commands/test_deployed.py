"""What commands take for granted: what deployments do, unless the paper's assumptions are asked for."""

import json

import pytest

from gateway.config.gateway import RoutingConfig
from planner.commands.cli import main, parser
from planner.commands.simulation.trial import trial_of
from planner.decisions.defaults import DEPLOYED
from planner.decisions.routing.policy import RoutingPolicy
from planner.model.site import load_site
from planner.model.traces import read_requests
from planner.simulator.trials.hits import finite_cache_hits, pd_hits
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
    assert (pd_hits(requests, site) == finite_cache_hits(requests, kv, 8 * 3)).all()
    assert (pd_hits(requests, site, 1.0) == finite_cache_hits(requests, kv, 8 * 1)).all()
    assert pd_hits(requests, site, 0.0).sum() == 0 < pd_hits(requests, site, 900.0).sum()


def test_a_workload_is_solved_with_the_caches_that_it_was_fitted_for(capsys, tmp_path, trace):
    site, workload = str(with_caches(tmp_path, 3)), str(tmp_path / "w.json")
    assert main(["fit", "--trace", str(trace), "-c", site, "-o", workload]) == 0
    assert main(["solve", "-c", site, "-w", workload]) == 0
    assert json.loads((tmp_path / "w.json").read_text())["caches_gb"] == {"pd": 3.0}
    capsys.readouterr()
    with_caches(tmp_path, 50)
    assert main(["solve", "-c", site, "-w", workload]) == 1
    assert "fitted for a cache of 3 GB per node, cluster 'pd' has one of 50 GB" in capsys.readouterr().err

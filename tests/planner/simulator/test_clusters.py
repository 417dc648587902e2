"""Several PrfaaS and PD clusters: every pair has a link of its own, requests have a home, and results are by cluster."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.errors import InputError
from planner.model.site import Site, load_site
from planner.simulator.outcome import over_seeds
from planner.simulator.scenario import Outage, Scenario
from planner.simulator.trials.trial import Trial, TrialSetting, from_workload, scenario_of
from planner.simulator.world import simulate
from planner.solve.control.controller import ControllerConfig
from planner.solve.fleet import fleet_json, fleet_of, solve_fleet
from tests.planner.conftest import CONFIGS

SPLITS = {"pd-east": (2, 3), "pd-west": (1, 2)}
SETTING = TrialSetting(18_815.0, 0.0, 3, 5, SPLITS)


@pytest.fixture(scope="module")
def pairs() -> Site:
    return load_site(CONFIGS / "pairs.toml")


def scenario(site: Site, **trial) -> Scenario:
    return scenario_of(site, SETTING, Trial(**trial))


def test_requests_are_answered_at_home_and_every_number_adds_up(pairs):
    trace = from_workload(pairs, 1.5, 1500)(0)
    report = simulate(scenario(pairs), trace).report()
    rows, ways = report["clusters"], report["ways"]
    assert rows["pd-east"]["answered"] / 1500 == pytest.approx(0.6, abs=0.05)
    assert rows["pd-east"]["answered"] + rows["pd-west"]["answered"] == sum(ways.values()) == 1500
    assert sum(row["computed"] for row in rows.values()) == 1500
    assert "pd-east to pd-west" not in ways
    assert sum(link["egress_gbps"] for link in report["links"].values()) == pytest.approx(
        report["egress_mean_gbps"], rel=1e-2
    )
    kept = np.average(
        [rows[name]["offloaded"] for name in SPLITS], weights=[rows[name]["answered"] for name in SPLITS]
    )  # fmt: skip
    assert kept == pytest.approx(report["offload_fraction"])


def test_a_link_that_takes_longer_than_the_prefill_is_left_to_near_pairs(pairs):
    """One that takes less is as good as a quick one: layers leave while later ones are computed."""
    thin = tuple(
        replace(link, capacity_gbps=min(link.capacity_gbps, 1.0 if link.rtt_ms > 5 else 100)) for link in pairs.links
    )
    found = simulate(scenario(replace(pairs, links=thin)), from_workload(pairs, 0.05, 400)(0)).ways
    near = found["prfaas-east to pd-east"] + found["prfaas-west to pd-west"]
    far = found.get("prfaas-east to pd-west", 0) + found.get("prfaas-west to pd-east", 0)
    assert near > 150
    assert far < 0.05 * near


def test_a_dead_link_is_of_one_pair_and_the_other_cluster_takes_over(pairs):
    outage = Outage(from_s=100.0, until_s=1e9, source="prfaas-east", destination="pd-east")
    trace = from_workload(pairs, 0.5, 400)(0)
    found = simulate(scenario(pairs, outages=[outage]), trace)
    assert found.link_failures == {"prfaas-east to pd-east": 1}
    assert found.fallbacks.keys() == {"prefill_peer_lost"}
    assert found.ways["prfaas-west to pd-east"] > 50
    assert found.routes.get("local link_down", 0) == 0


def test_where_nobody_is_at_home_load_decides(pairs):
    anywhere = tuple(replace(cluster, home_share=0.0) for cluster in pairs.clusters)
    found = simulate(scenario(replace(pairs, clusters=anywhere)), from_workload(pairs, 1.5, 800)(0)).clusters
    assert found["pd-east"]["answered"] / 800 == pytest.approx(3 / 5, abs=0.1)  # as they have decode nodes


def test_the_programs_shares_are_what_is_simulated_below_saturation(pairs):
    plan = fleet_json(pairs, fleet := fleet_of(pairs), solve_fleet(fleet))
    setting, rate = TrialSetting.of_fleet(plan), plan["one_threshold"]["lambda_max_req_per_s"]
    assert rate == pytest.approx(3.054, abs=0.01)
    assert rate <= plan["lambda_max_req_per_s"]
    report = simulate(scenario_of(pairs, setting, Trial()), from_workload(pairs, 0.6 * rate, 3000)(1)).report()
    assert report["throughput_req_per_s"] == pytest.approx(0.6 * rate, rel=0.05)
    # Each of the program's compute limits binds at its own Λ, so at 0.6 of it no cluster's stage is busier than that by much.
    assert all(
        row.get("prfaas_compute_busy", 0.6) == pytest.approx(0.6, rel=0.12) for row in report["clusters"].values()
    )


def test_reports_of_several_seeds_are_means_by_cluster(pairs):
    reports = [simulate(scenario(pairs), from_workload(pairs, 1.0, 100)(seed), seed).report() for seed in (0, 1)]
    merged = over_seeds(reports)
    answered = [report["clusters"]["pd-west"]["answered"] for report in reports]
    assert merged["clusters"]["pd-west"]["answered"] == pytest.approx(np.mean(answered))


def test_what_cannot_be_is_refused(pairs, tmp_path: Path):
    with pytest.raises(InputError, match="2 of kind pd, but the plan is for one"):
        scenario_of(pairs, TrialSetting(1.0, 0.0, 3, 5), Trial())
    with pytest.raises(InputError, match="'pd-west' is not in it; it has pd-east"):
        scenario_of(pairs, replace(SETTING, splits={"pd-east": (2, 3)}), Trial())
    with pytest.raises(InputError, match="2 PD clusters; it plans the split of one"):
        simulate(scenario(pairs, controller=ControllerConfig()), from_workload(pairs, 1.0, 10)(0))
    with pytest.raises(InputError, match="no node decodes in moon"):
        replace(scenario(pairs), homes={"moon": 1.0})
    file = tmp_path / "site.toml"
    text = (CONFIGS / "pairs.toml").read_text().replace("profiles/", f"{CONFIGS}/profiles/")
    file.write_text(text.replace("home_share = 0.6", "home_share = 0.5"))
    with pytest.raises(InputError, match=r"home_share adds up to 0\.9"):
        load_site(file)

"""What is paid for what: the cheapest part of a site, at the rate that was asked for, within the target."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner.counts import Calls
from planner.commands.rendering.text import plan_text
from planner.errors import Infeasible
from planner.model.profile import DecodeProfile
from planner.model.site import Deployment
from planner.model.traffic import Lengths
from planner.solve.aims import Aim
from planner.solve.goals import Objective
from planner.solve.objectives import cost_per_hour, spend_per_hour
from planner.solve.plan import make_plan, outline
from planner.solve.problem import SolveOptions, pose

SLO = SolveOptions(objective=Objective.SLO)


@pytest.fixture(scope="module")
def coarse(case_study):
    """The case study in 400 lengths, with a line that costs something."""
    workload = replace(case_study.workload, lengths=case_study.workload.lengths.thinned(400))
    link = replace(case_study.links[0], price_per_hour_per_gbps=0.01)
    return replace(case_study, workload=workload, links=(link,))


@pytest.fixture(scope="module")
def within(coarse):
    """The site's best plan within its target."""
    return make_plan(coarse, SLO)


def at_cost(site, rate):
    return outline(site, SolveOptions(objective=Objective.COST, rate_req_per_s=rate))


def test_no_line_is_paid_for_without_prfaas(coarse):
    assert outline(coarse, SolveOptions(), "homogeneous").cost_per_hour == pytest.approx(12.0)
    assert outline(coarse, SolveOptions()).cost_per_hour == pytest.approx(4 * 2.02 + 8.0 + 1.0)


def test_cost_has_a_plan_at_every_rate_that_slo_finds(coarse, within):
    for short_of in (0.3, 0.05, 0.001):
        found = at_cost(coarse, within.lambda_slo - short_of)
        assert found.lambda_slo >= within.lambda_slo - short_of
        assert found.cost_per_hour <= within.cost_per_hour
    served = math.floor(within.lambda_slo * 1000) / 1000  # what is asked for next is served
    with pytest.raises(Infeasible, match=f"the whole site serves {served:.3f} req/s"):
        at_cost(coarse, within.lambda_slo + 0.01)


def test_most_parts_of_a_site_are_found_wanting_with_little_work(coarse):
    """Counted, as seconds of a busy machine say nothing: calls of functions, with and without a rate."""
    calls = Calls()
    with calls.counted():
        outline(coarse, SolveOptions(objective=Objective.COST))
        at_cost(coarse, 2.0)
    assert calls.count < 800_000


def test_no_part_of_the_site_is_cheaper_than_the_cheapest(coarse):
    clusters = (replace(coarse.clusters[0], instances=2), replace(coarse.clusters[1], instances=4))
    small = replace(coarse, clusters=clusters)
    options = SolveOptions(objective=Objective.COST, rate_req_per_s=0.8)
    aim = Aim.of(small, options)
    thin = aim.thinned(pose(small, options))
    parts = [thin.with_capacity(num_prfaas=far, num_pd=near) for far, near in itertools.product(range(3), range(1, 5))]
    rates = [(cost_per_hour(part), found.rate) for part in parts if (found := aim.best(part))]
    assert at_cost(small, 0.8).cost_per_hour == pytest.approx(min(cost for cost, rate in rates if rate >= 0.8))
    least = outline(small, SolveOptions(objective=Objective.COST))
    assert least.cost_per_1000_requests == pytest.approx(min(cost / 3.6 / rate for cost, rate in rates))


def test_a_threshold_between_two_lengths_that_most_requests_have_is_found(coarse):
    """It lies between two steps of the ladder, which are worth two thirds as much at most."""
    tokens = np.geomspace(400.0, 120_000.0, 250)
    weights = np.full(250, 0.2 / 250)
    weights[218:220] += (0.3, 0.5)
    workload = replace(coarse.workload, lengths=Lengths(tokens=tokens, weights=weights))
    site = replace(coarse, workload=workload, slo=replace(coarse.slo, ttft_p90_s=40.0))
    options = SolveOptions(objective=Objective.COST, rate_req_per_s=0.1)
    aim = Aim.of(site, options)
    part = aim.thinned(pose(site, options)).with_capacity(num_prfaas=1, num_pd=3)
    best = aim.best(part)
    assert (best.cut, best.rate > 0.5) == (219, True)
    assert aim.best(part, above=0.99 * best.rate) == best


def metered(site, price_per_gb, instances=(2, 4)):
    """A small part of the site whose line bills each gigabyte."""
    clusters = tuple(replace(each, instances=count) for each, count in zip(site.clusters, instances, strict=True))
    return replace(site, clusters=clusters, links=(replace(site.links[0], price_per_gb=price_per_gb),))


@pytest.mark.parametrize("price_per_gb", [0.005, 0.2])
def test_a_gigabyte_is_paid_for_where_it_is_sent(coarse, price_per_gb):
    small = metered(coarse, price_per_gb)
    options = SolveOptions(objective=Objective.COST, rate_req_per_s=0.8)
    aim = Aim.of(small, options)
    thin = aim.thinned(pose(small, options))
    parts = [thin.with_capacity(num_prfaas=far, num_pd=near) for far, near in itertools.product(range(3), range(1, 5))]
    found = [(part, best) for part in parts if (best := aim.best(part)) and best.rate >= 0.8]
    chosen = at_cost(small, 0.8)
    assert chosen.cost_per_hour == pytest.approx(min(spend_per_hour(*each, 0.8) for each in found), rel=1e-3)
    least = outline(small, SolveOptions(objective=Objective.COST))
    rates = [(part, best) for part in parts if (best := aim.best(part))]
    costs = [spend_per_hour(part, best, best.rate) / 3.6 / best.rate for part, best in rates]
    assert least.cost_per_1000_requests == pytest.approx(min(costs), rel=1e-3)


def test_dear_traffic_has_less_bought_at_its_far_end(coarse):
    assert [at_cost(metered(coarse, price_per_gb), 0.4).num_prfaas for price_per_gb in (0.0, 10.0)] == [2, 1]


def test_a_plan_says_what_its_traffic_costs(coarse):
    free, billed = (outline(metered(coarse, price, (4, 8)), SolveOptions()) for price in (0.0, 0.02))
    assert billed.egress_gbps == free.egress_gbps > 0
    gb_per_hour = billed.egress_gbps / 8 * 3600
    assert billed.cost_per_hour - free.cost_per_hour == pytest.approx(0.02 * gb_per_hour)


def test_costs_are_those_of_the_rate_asked_for(coarse, within):
    asked = at_cost(coarse, 1.0)
    assert asked.to_json()["cost_per_1000_requests"] == pytest.approx(asked.cost_per_hour / 3.6)
    assert "at 1.000 req/s" in plan_text(asked)
    assert within.cost_per_1000_requests == pytest.approx(within.cost_per_hour / 3.6 / within.lambda_slo)
    unasked = outline(coarse, SolveOptions())
    assert unasked.cost_per_1000_requests == pytest.approx(unasked.cost_per_hour / 3.6 / unasked.lambda_max)


def test_what_one_more_brings_an_slo_plan_is_what_it_serves_more_within_its_target(coarse, within):
    more = replace(coarse, clusters=(replace(coarse.clusters[0], instances=5), coarse.clusters[1]))
    gain = make_plan(more, SLO).lambda_slo - within.lambda_slo
    assert within.shadow_prices["prfaas_instance"] == pytest.approx(gain, abs=0.02)


def test_sensitivity_beside_an_slo_plan_is_of_the_rate_within_the_target(within):
    for row in within.sensitivity:
        assert row.kept_rate <= row.resolved_rate + 1e-9
        assert row.resolved_rate < within.lambda_slo + (0.35 if "egress" not in row.what else 0.03)
    slower = next(row for row in within.sensitivity if (row.what, row.factor) == ("T_prefill PD", 1.1))
    assert slower.kept_rate < within.lambda_slo - 0.05
    assert "SLO kept" in plan_text(within)


def test_a_rate_counts_whatever_the_objective(coarse):
    plan = outline(coarse, SolveOptions(rate_req_per_s=2.0))
    assert plan.asked_ttft_mean_s < plan.loaded_ttft_mean_s
    assert "At 2.000 req/s: 63% of Λmax" in plan_text(plan)
    with pytest.raises(Infeasible, match=r"rate_req_per_s=4.*serves 3.18"):
        outline(coarse, SolveOptions(rate_req_per_s=4.0))
    with pytest.raises(Infeasible, match="rate_req_per_s=3"):
        outline(coarse, replace(SLO, rate_req_per_s=3.0))


def test_no_plan_keeps_a_tbt_shorter_than_a_decode_step(coarse):
    hasty = replace(coarse, slo=replace(coarse.slo, tbt_s=0.001))
    for objective in (Objective.SLO, Objective.COST):
        with pytest.raises(Infeasible, match=r"tbt_s=0.001: a decode step of one request takes"):
            outline(hasty, SolveOptions(objective=objective))
    assert any("longer than tbt_s=0.001" in warning for warning in make_plan(hasty, SolveOptions()).warnings)


def test_a_plan_that_offloads_what_decode_nodes_compute_says_so(coarse):
    lengths = Lengths.of(np.array([100.0, 500.0, 900.0, 50_000.0]))
    pinned = {
        "low": Deployment(threshold_tokens=200, num_prefill=1),
        "high": Deployment(threshold_tokens=2000, num_prefill=1),
    }
    workload = replace(coarse.workload, lengths=lengths, hit_ratio=0.5)
    site = replace(coarse, workload=workload, deployments=pinned)
    low, high = (make_plan(site, SolveOptions(), name).warnings for name in pinned)
    assert any(warning.startswith("50% of the requests are offloaded with at most 1024") for warning in low)
    assert not any("are offloaded with" in warning for warning in high)


def test_batches_are_as_large_as_a_tbt_allows():
    decode = DecodeProfile(max_running=20, step_s=0.01, step_s_per_request=0.001)
    assert [found and found.max_running for found in map(decode.within, (0.005, 0.02, 0.03, 1.0))] == [None, 10, 20, 20]

"""Table 6, and what a plan says about itself."""

from dataclasses import replace

import numpy as np
import pytest

from planner.commands.rendering.text import plan_text
from planner.decisions.views import ClusterKind
from planner.errors import Infeasible, InputError
from planner.model.site import Deployment
from planner.model.traffic import Lengths
from planner.solve.goals import Objective, TieBreak, Worst
from planner.solve.loaded import loaded_ttft
from planner.solve.plan import make_plan, outline
from planner.solve.problem import SolveOptions, pose
from planner.solve.search import Bottleneck, Cut
from planner.solve.sensitivity.corners import robust_report

TABLE_6 = {
    None: {
        "threshold_tokens": 19_400, "num_prfaas": 4, "num_prefill": 3, "num_decode": 5, "theta_prfaas_req_per_s": 1.61,
        "theta_pd_p_req_per_s": 1.64, "theta_pd_d_req_per_s": 3.91, "lambda_max_req_per_s": 3.24,
        "offload_fraction": 0.496, "ttft_mean_s": 2.22, "ttft_p90_s": 3.51,
    },
    "homogeneous": {
        "num_prfaas": 0, "num_prefill": 9, "num_decode": 3, "theta_pd_p_req_per_s": 2.11, "theta_pd_d_req_per_s": 2.35,
        "lambda_max_req_per_s": 2.11, "ttft_mean_s": 4.44, "ttft_p90_s": 9.73,
    },
    "naive": {
        "num_prfaas": 4, "num_prefill": 0, "num_decode": 8, "theta_prfaas_req_per_s": 2.45, "theta_pd_d_req_per_s": 6.25,
        "lambda_max_req_per_s": 2.45, "ttft_mean_s": 1.74, "ttft_p90_s": 3.51,
    },
}  # fmt: skip


@pytest.mark.parametrize("deployment", TABLE_6)
def test_table_6(case_study, deployment):
    plan = make_plan(case_study, SolveOptions.as_in_paper(), deployment).to_json()
    for key, value in TABLE_6[deployment].items():
        assert plan[key] == pytest.approx(value, rel=0.007), key


@pytest.fixture(scope="module")
def coarse(case_study):
    """The case study in 4,000 lengths: as good for everything but the digits of Table 6, and quicker."""
    return replace(case_study, workload=replace(case_study.workload, lengths=case_study.workload.lengths.thinned(4000)))


def test_egress_lies_between_the_papers_two_numbers(case_study):
    plan = make_plan(case_study, SolveOptions.as_in_paper())
    assert 12 <= plan.egress_gbps <= 13
    assert plan.mean_offloaded_tokens == pytest.approx(45_046, rel=1e-4)
    assert str(plan.bottleneck) == "prfaas_compute"


def test_ratios_of_table_6(case_study):
    rates = [make_plan(case_study, SolveOptions.as_in_paper(), name).lambda_max for name in TABLE_6]
    assert rates[0] / rates[1] == pytest.approx(1.54, rel=0.01)
    assert rates[2] / rates[1] == pytest.approx(1.16, rel=0.01)


def test_both_service_models_are_reported(case_study):
    paper, exact = make_plan(case_study, SolveOptions.as_in_paper()), make_plan(case_study, SolveOptions())
    assert paper.lambda_other_service == pytest.approx(3.163, rel=1e-3)
    assert exact.lambda_max == pytest.approx(3.182, rel=1e-3)
    homogeneous = make_plan(case_study, SolveOptions(), "homogeneous")
    assert homogeneous.lambda_max == pytest.approx(2.025, rel=1e-3)


def test_shadow_prices_and_the_flat_alternative(case_study):
    plan = make_plan(case_study, SolveOptions.as_in_paper())
    assert plan.shadow_prices["prfaas_instance"] == pytest.approx(0.63, abs=0.01)
    assert plan.shadow_prices["pd_instance"] == pytest.approx(0.24, abs=0.01)
    assert plan.shadow_prices["egress_gbps"] == pytest.approx(0.0, abs=1e-3)
    other = plan.alternative
    assert (other.num_prefill, other.num_decode) == (4, 4)
    assert other.lambda_max == pytest.approx(3.127, rel=1e-3)


def test_what_was_fitted_is_said(case_study):
    plan = make_plan(case_study, SolveOptions())
    assert plan.provenance["T_prefill h20x8"].startswith("fitted")
    assert plan.provenance["T_prefill h200x8"].startswith("derived")
    assert any("T_prefill h20x8" in warning for warning in plan.warnings)
    assert all(plan.provenance.values())


def test_lengths_outside_the_profile_are_refused(case_study):
    workload = replace(case_study.workload, lengths=Lengths.of(np.array([100.0, 500_000.0])))
    site = replace(case_study, workload=workload)
    with pytest.raises(InputError, match=r"length 500000 tokens .* 1–131072"):
        make_plan(site, SolveOptions())
    assert make_plan(site, SolveOptions(extrapolate=True)).lambda_max > 0


def test_an_slo_plan_meets_its_target(coarse):
    plan = make_plan(coarse, SolveOptions(objective=Objective.SLO))
    assert 0.6 * plan.lambda_max < plan.lambda_slo < plan.lambda_max
    problem = pose(coarse, SolveOptions())
    tokens = problem.lengths.tokens
    cut = Cut(
        rate=plan.lambda_max, num_prefill=plan.num_prefill, num_decode=plan.num_decode,
        cut=int(np.searchsorted(tokens, plan.threshold_tokens, side="right")),
    )  # fmt: skip
    queues = loaded_ttft(problem, cut, 1024)
    assert queues.at(plan.lambda_slo).p90_s == pytest.approx(5.0, rel=0.02)


def test_answers_of_many_lengths_and_bursts_make_requests_wait_longer_for_decode(coarse):
    """A place in decode is free later, and a plan promises less."""
    rates = []
    for spread, burst_index in ((0.0, 1.0), (1.5, 1.0), (1.5, 3.0)):
        workload = replace(coarse.workload, output_spread=spread, burst_index=burst_index)
        problem = pose(replace(coarse, workload=workload), SolveOptions())
        cut = Cut(rate=4.0, num_prefill=7, num_decode=1, cut=len(problem.lengths.tokens))
        near = problem.with_capacity(num_prfaas=0)
        queues = loaded_ttft(near, cut, 1024)
        rates.append(queues.at(0.75).mean_s)
    assert rates[0] < rates[1] < rates[2]


def test_an_impossible_slo_says_what_is_possible(coarse):
    site = replace(coarse, slo=replace(coarse.slo, ttft_p90_s=1.0))
    with pytest.raises(Infeasible, match=r"ttft_p90_s=1.0.*nearest is 3.5"):
        make_plan(site, SolveOptions(objective=Objective.SLO))


def test_cost_buys_no_more_than_needed(coarse):
    whole = make_plan(coarse, SolveOptions())
    plan = make_plan(coarse, SolveOptions(objective=Objective.COST, rate_req_per_s=1.5))
    assert plan.cost_per_hour < whole.cost_per_hour
    assert plan.lambda_max >= 1.5
    with pytest.raises(Infeasible, match=r"rate_req_per_s=9"):
        make_plan(coarse, SolveOptions(objective=Objective.COST, rate_req_per_s=9))


def test_nothing_decodes(coarse):
    pd = replace(coarse.clusters[1], instances=0)
    with pytest.raises(Infeasible, match="instances=0"):
        make_plan(replace(coarse, clusters=(coarse.clusters[0], pd)), SolveOptions())


def test_the_robust_plan_has_the_better_worst_case(coarse):
    found = robust_report(coarse, SolveOptions(), 0.1, Worst.RATIO, None)
    assert found["scenarios"] == 8
    assert found["worst_ratio"] > found["plan_worst_ratio"]
    assert min(row["robust"] / row["optimum"] for row in found["regret"]) == pytest.approx(found["worst_ratio"])
    rate = robust_report(coarse, SolveOptions(), 0.1, Worst.RATE, None)
    assert rate["worst_lambda_req_per_s"] >= found["worst_lambda_req_per_s"] - 1e-9


def test_robust_plans_take_link_quantiles_and_slices(coarse):
    link = replace(coarse.links[0], quantiles_gbps=(8.0,))
    shorter = coarse.workload.lengths.thinned(500)
    workload = replace(coarse.workload, slices=(Lengths(shorter.tokens / 2, shorter.weights),))
    found = robust_report(replace(coarse, links=(link,), workload=workload), SolveOptions(), 0.1, Worst.RATE, None)
    assert found["scenarios"] == 32


def test_the_second_goal_is_the_callers(coarse):
    pinned = replace(coarse.deployments["naive"], num_prefill=4, threshold_tokens=None)
    site = replace(coarse, deployments={"flat": pinned})
    egress = make_plan(site, SolveOptions(tie_break=TieBreak.EGRESS), "flat")
    ttft = make_plan(site, SolveOptions(tie_break=TieBreak.TTFT), "flat")
    assert egress.lambda_max == pytest.approx(ttft.lambda_max)
    assert egress.egress_gbps < ttft.egress_gbps
    assert ttft.ttft_mean_s < egress.ttft_mean_s


def chatting(case_study, held):
    """A site whose decode nodes hold some of the short prompts, and its plan pinned to one prefill node."""
    lengths = Lengths(
        np.array([900.0, 30_000.0]), np.array([0.8, 0.2]), held=np.array([held, 0.0]), cached=np.array([9_000.0, 0.0])
    )
    pins = {"pinned": Deployment(threshold_tokens=5_000, num_prefill=1)}
    return replace(case_study, workload=replace(case_study.workload, lengths=lengths), deployments=pins)


def test_cold_caches_limit_a_plan_that_depends_on_what_decode_nodes_hold(case_study):
    """Nine of ten short prompts are theirs. At 80 % of Λ one prefill node computes all of them, and is 90 % busy."""
    site = chatting(case_study, 0.9)
    plan = make_plan(site, SolveOptions(), "pinned")
    local = site.profile.prefill_on(site.of_kind(ClusterKind.PD)[0].hardware)
    assert 0.8 * plan.lambda_max * 0.8 * local.with_prefix(9_900, 9_000) == pytest.approx(0.9)
    assert plan.bottleneck is Bottleneck.COLD
    assert 0.8 * plan.cold_utilisation["pd_prefill"] == pytest.approx(0.9)
    assert plan.utilisation["pd_prefill"] < 0.5
    assert "Bottleneck: cold caches" in plan_text(plan)
    assert "PD prefill is 90% busy at 80% of Λ" in plan_text(plan)
    warm = make_plan(site, SolveOptions(survives_cold=False), "pinned")
    assert plan.lambda_warm == pytest.approx(warm.lambda_max)
    assert warm.lambda_max > 1.5 * plan.lambda_max
    assert (warm.lambda_warm, warm.cold_utilisation) == (None, {})


def test_a_plan_that_holds_nothing_has_nothing_to_recover(case_study):
    site = chatting(case_study, 0.0)
    plans = [make_plan(site, SolveOptions(survives_cold=survives), "pinned") for survives in (True, False)]
    assert plans[0].lambda_max == plans[1].lambda_max
    assert plans[0].bottleneck is plans[1].bottleneck is Bottleneck.PD_P


def test_without_pins_the_split_moves_until_cold_caches_are_survived(case_study):
    site = replace(chatting(case_study, 0.9), deployments={})
    site = replace(site, workload=replace(site.workload, output_tokens=300.0))  # else decode is the limit
    plan, warm = (outline(site, SolveOptions(survives_cold=survives)) for survives in (True, False))
    assert (plan.num_prefill, warm.num_prefill) == (3, 2)
    assert 0.8 * max(plan.cold_utilisation.values()) == pytest.approx(0.9)
    assert plan.lambda_max == pytest.approx(10.077, rel=1e-3)
    assert plan.lambda_warm == pytest.approx(warm.lambda_max) == pytest.approx(12.138, rel=1e-3)


def test_a_rate_that_is_run_as_it_is_survives_cold_caches_whole(case_study):
    """A plan within a target for TTFT is run at its rate, not at 80 % of it."""
    site = replace(chatting(case_study, 0.9), slo=replace(case_study.slo, ttft_p90_s=20.0))
    plan = make_plan(site, SolveOptions(objective=Objective.SLO), "pinned")
    assert plan.lambda_slo <= plan.lambda_max
    assert plan.cold_utilisation["pd_prefill"] == pytest.approx(0.9)

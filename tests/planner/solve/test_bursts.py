"""What is bought for a trace keeps its targets under the trace's own arrivals."""

from dataclasses import replace

import numpy as np
import pytest

from planner.errors import Infeasible
from planner.model.fitting import workload_of
from planner.model.market import Demand, HardwareOffer, LineOffer, Market
from planner.model.workload import Trace
from planner.simulator.policies import Estimates
from planner.simulator.trials.trial import DEPLOYED_TRIAL, TrialSetting, scenario_of
from planner.simulator.world import simulate
from planner.solve.buying.advice import advise
from planner.solve.buying.systems import Contender
from planner.solve.goals import Objective
from planner.solve.plan import outline
from planner.solve.problem import SolveOptions

TARGET_S = 11.8
MARKET = Market(
    schema=1,
    demand=Demand(months=1, rate_req_per_s=0.5),
    hardware=tuple(HardwareOffer(hardware=name, gpus=8, rent_per_gpu_hour=1.0) for name in ("h200x8", "h20x8")),
    lines=(LineOffer(gbps=100, per_month=1e6),),
)


@pytest.fixture(scope="module")
def bursts():
    """Twelve prompts at once, every 24 seconds."""
    count = 1200
    return Trace(
        name="bursts",
        arrival_s=np.repeat(np.arange(count / 12) * 24.0, 12) + np.tile(np.arange(12) * 0.01, count // 12),
        prompt_tokens=np.tile(np.linspace(8_000, 16_000, 12), count // 12),
        output_tokens=np.full(count, 200.0),
    )


@pytest.fixture(scope="module")
def site(case_study, bursts):
    return replace(
        case_study, workload=workload_of(bursts, None), slo=replace(case_study.slo, ttft_p90_s=TARGET_S, tbt_s=None)
    )


def without_arrivals(site):
    return replace(site, workload=replace(site.workload, arrivals=None))


def simulated_p90_s(site, system, trace):
    pd = replace(site.clusters[1], instances=system.num_pd)
    prfaas = replace(site.clusters[0], instances=system.num_prfaas)
    setting = TrialSetting(min(system.threshold_tokens, 1e6), 0.0, system.num_prefill, system.num_decode)
    trial = replace(DEPLOYED_TRIAL, estimates=Estimates.EXACT)
    scenario = scenario_of(replace(site, clusters=(prfaas, pd)), setting, trial)
    return simulate(scenario, trace, 0).report()["ttft_p90_s"]


def test_bursts_need_more_than_queues_of_independent_requests_say(site, bursts):
    found, taken_lightly = (advise(each, MARKET, SolveOptions()) for each in (site, without_arrivals(site)))
    for contender, way in found.ways.items():
        assert way.cost >= taken_lightly.ways[contender].cost
    trace = bursts.faster(0.5 * bursts.span_s / len(bursts))
    enough, too_few = (each.ways[Contender.HOMOGENEOUS].systems[0] for each in (found, taken_lightly))
    assert too_few.num_pd < enough.num_pd
    assert simulated_p90_s(site, enough, trace) <= TARGET_S * 1.03
    assert simulated_p90_s(site, too_few, trace) > TARGET_S
    assert 0 < max(share for _, share in enough.busy) < max(share for _, share in too_few.busy)


def test_the_cheapest_part_carries_its_rate_under_the_arrivals(site):
    options = SolveOptions(objective=Objective.COST, rate_req_per_s=0.5)
    found, taken_lightly = (outline(each, options) for each in (site, without_arrivals(site)))
    assert found.cost_per_hour > taken_lightly.cost_per_hour
    assert found.lambda_slo >= 0.5
    assert found.asked_ttft_p90_s <= TARGET_S
    with pytest.raises(Infeasible, match=r"rate_req_per_s=20: the whole site serves \d+\.\d+ req/s"):
        outline(site, replace(options, rate_req_per_s=20))

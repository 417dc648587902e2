"""Plans under the arrivals of their trace."""

from dataclasses import replace

import numpy as np
import pytest

from planner.model.fitting import workload_of
from planner.model.trace_files.arrivals import KeptArrivals
from planner.model.workload import Trace
from planner.simulator.policies import Estimates
from planner.simulator.trials.trial import DEPLOYED_TRIAL, TrialSetting, scenario_of
from planner.simulator.world import simulate
from planner.solve.goals import Objective
from planner.solve.plan import outline
from planner.solve.problem import SolveOptions, pose
from planner.solve.replay import Replay
from planner.solve.search import Cut

TARGET_S = 5.0


def arrivals(times, tokens, output=1.0, held=0.0):
    zeros, tokens = np.zeros(len(times)), np.full(len(times), float(tokens))
    return KeptArrivals(
        rate_req_per_s=len(times) / float(times[-1] - times[0]), arrival_s=times, tokens=tokens, computed=tokens,
        held=zeros + held, cached=zeros, landed=zeros, output=zeros + output,
    )  # fmt: skip


def replayed(site, kept, num_prefill=1, num_decode=7, cut=None):
    problem = pose(site, SolveOptions())
    cut = len(problem.lengths.tokens) if cut is None else cut
    return problem, Replay.of(problem, Cut(rate=1.0, num_prefill=num_prefill, num_decode=num_decode, cut=cut), kept)


def test_one_prefill_node_is_a_queue_of_fixed_service(case_study):
    """M/D/1: the mean wait is ρ·s / 2(1 − ρ)."""
    times = np.cumsum(np.random.default_rng(1).exponential(1.0, 20_000))
    problem, replay = replayed(case_study, arrivals(times, 8_000))
    service_s = problem.local(8_000)
    busy = 0.6
    found = replay.at(busy / service_s)
    assert found.mean_s == pytest.approx(service_s + busy * service_s / (2 * (1 - busy)), rel=0.05)


def test_prompts_beyond_the_threshold_cross_the_line(case_study):
    times = np.arange(100.0) * 100
    problem, replay = replayed(case_study, arrivals(times, 50_000), cut=0)
    line_s = float(problem.kv.of(np.array([50_000.0]))[0]) / problem.capacity.egress_bytes_per_s
    alone_s = problem.remote(50_000)
    assert alone_s < replay.at(0.01).mean_s <= alone_s + line_s
    assert replayed(case_study, arrivals(times, 50_000))[1].at(0.01).mean_s == pytest.approx(problem.local(50_000))


def test_places_in_decode_are_waited_for(case_study):
    """All but one come at once: 7 nodes of 20 places start 140 answers, and the rest waits for an answer's time."""
    times = np.append(np.linspace(0, 1e-3, 279), 1e6)
    problem, replay = replayed(case_study, arrivals(times, 1_000, output=100_000), num_prefill=1, cut=0)
    waits = np.sort(replay.ttfts_s(len(times) / 1e6))
    assert waits[140] < 100_000 * problem.decode.full_step_s
    assert waits[141] >= 100_000 * problem.decode.full_step_s


def test_prompts_that_decode_nodes_hold_ask_nothing_of_prefill_nodes(case_study):
    times = np.arange(200.0)
    _, replay = replayed(case_study, arrivals(times, 500, held=1.0))
    problem, other = replayed(case_study, arrivals(times, 500))
    assert replay.at(0.1).mean_s == pytest.approx(problem.local(500), rel=1e-6)
    assert other.at(0.1).mean_s == pytest.approx(problem.local(500), rel=1e-6)
    assert replay.at(5.0).mean_s < other.at(5.0).mean_s


def bursty(count=1_500):
    """Every 100 s, 50 requests come within 10 s, and none after them."""
    rng = np.random.default_rng(2)
    times = np.sort(np.concatenate([at * 100 + rng.random(50) * 10 for at in range(count // 50)]))
    prompts = np.maximum(200.0, np.minimum(100_000, np.round(rng.lognormal(9.5, 1.0, count))))
    return Trace(
        name="bursts", arrival_s=times - times[0], prompt_tokens=prompts, output_tokens=rng.integers(50, 400, count) * 1.0
    )  # fmt: skip


def test_what_is_promised_within_a_target_is_what_a_bursty_trace_gets(case_study):
    """A closed form of independent arrivals promises far too much. Deciders know the profiles, as the plan does."""
    trace = bursty()
    fitted = replace(case_study, workload=workload_of(trace, None))
    options = SolveOptions(objective=Objective.SLO)
    plan = outline(fitted, options)
    blind = outline(replace(fitted, workload=replace(fitted.workload, arrivals=None)), options)
    assert plan.lambda_slo is not None
    assert blind.lambda_slo is not None
    assert blind.lambda_slo > 1.2 * plan.lambda_slo
    scenario = scenario_of(fitted, TrialSetting.of(plan), replace(DEPLOYED_TRIAL, estimates=Estimates.EXACT))

    def p90_s(rate):
        return simulate(scenario, trace.faster(rate * trace.span_s / len(trace)), 0).report()["ttft_p90_s"]

    assert p90_s(0.97 * plan.lambda_slo) <= TARGET_S < p90_s(1.03 * plan.lambda_slo)

"""Plans that have been run with their own requests before they promise anything."""

from dataclasses import replace

import numpy as np
import pytest

from planner.model.demand.slo import Slo, TtftTarget
from planner.model.fitting import workload_of
from planner.model.sessions import at_factor
from planner.model.trace_files.categories import CategorySource, RequestCategories
from planner.model.workload import Trace, read_trace
from planner.simulator.trials.hits import pd_prefixes
from planner.simulator.trials.rehearsal import TraceRehearsal, kept_trace
from planner.simulator.trials.trial import DEPLOYED_TRIAL, TrialSetting, scenario_of
from planner.simulator.world import simulate
from planner.solve.goals import Objective
from planner.solve.plan import outline
from planner.solve.problem import SolveOptions
from tests.planner.traces import MOONCAKE

SLO = SolveOptions(objective=Objective.SLO, extrapolate=True)
SIZE = 512
NEAR = 0.03  # of what is promised
TARGET_S = 5.0


def fitted(site, trace):
    return replace(site, workload=workload_of(trace, pd_prefixes(trace, site, DEPLOYED_TRIAL.increment_tokens)))


def report_of(site, plan, trace, rate):
    scenario = scenario_of(site, TrialSetting.of(plan), DEPLOYED_TRIAL)
    return simulate(scenario, at_factor(trace, rate * trace.span_s / len(trace), 0), 0).report()


def p90_s(site, plan, trace, rate):
    return report_of(site, plan, trace, rate)["ttft_p90_s"]


def rehearsed(site, options=SLO):
    return outline(site, options, rehearse=TraceRehearsal.of)


def with_targets(site, *targets):
    return replace(site, slo=Slo(ttft_p90_s=TARGET_S, targets=targets))


def of_categories(trace, codes, names=("chat", "batch")):
    return replace(trace, categories=RequestCategories(names, np.array(codes, dtype=np.uint8), CategorySource.TRACE))


def keeps_its_promise(site, plan, trace):
    """Whether 3 % less than the promised rate keeps the target, and 3 % more does not."""
    found = [p90_s(site, plan, trace, rate * plan.lambda_slo) for rate in (1 - NEAR, 1 + NEAR)]
    return found[0] <= TARGET_S < found[1]


def documents(count=600, of=12):
    """Short questions about a few long documents: while caches are cold, prefill nodes have far more to do than later."""
    rng = np.random.default_rng(3)
    which = rng.integers(of, size=count)
    return Trace(
        name="documents",
        arrival_s=np.cumsum(rng.exponential(0.1, count)),
        prompt_tokens=np.full(count, 8.0 * SIZE + 200),
        output_tokens=rng.integers(100, 700, count) * 1.0,
        blocks=[(*range(each * 10, each * 10 + 8), 1_000 + at) for at, each in enumerate(which)],
    )


def crowds(count=30, size=10):
    """Each document is sent once, and at once many ask about it: no decode node has its state yet."""
    blocks = [
        (*range(each * 10, each * 10 + 8), *((1_000 + each * size + at,) if at else ()))
        for each in range(count)
        for at in range(size)
    ]
    return Trace(
        name="crowds",
        arrival_s=np.array([each * 5.0 + at / 1_000 for each in range(count) for at in range(size)]),
        prompt_tokens=np.array([8.0 * SIZE + (200 if at else 0) for _ in range(count) for at in range(size)]),
        output_tokens=np.full(count * size, 20.0),
        blocks=blocks,
    )


def chats(count=60, turns=4):
    """Sessions whose users think for 20 seconds: a prompt goes on from the one before it, 6 blocks longer."""
    starts = np.random.default_rng(4).random(count) * 200
    rows = sorted((start + 20.0 * turn, which, turn) for which, start in enumerate(starts) for turn in range(turns))
    return Trace(
        name="chats",
        arrival_s=np.array([at for at, _, _ in rows]) - rows[0][0],
        prompt_tokens=np.array([(turn + 1) * 6.0 * SIZE for _, _, turn in rows]),
        output_tokens=np.full(len(rows), 200.0),
        blocks=[tuple(range(which * 100, which * 100 + (turn + 1) * 6)) for _, which, turn in rows],
        sessions=np.array([float(which) for _, which, _ in rows]),
    )


def test_what_a_workload_keeps_is_run_as_the_trace_is(case_study):
    trace = read_trace(MOONCAKE).spread(np.random.default_rng(0))
    site = fitted(case_study, trace)
    kept = kept_trace(site.workload.arrivals, trace.name)
    scenario = scenario_of(site, TrialSetting(9_000, 0.0, 4, 4), DEPLOYED_TRIAL)
    assert kept is not None
    report, wanted = (simulate(scenario, each, 0).report() for each in (kept, trace))
    assert report["routes"] == wanted["routes"]
    assert report["ttft_mean_s"] == pytest.approx(wanted["ttft_mean_s"], rel=1e-3)


def test_nothing_is_run_that_is_not_known(case_study):
    """Of a log without blocks, cached tokens are known, but not whose they are."""
    trace = replace(read_trace(MOONCAKE), blocks=None, cached_tokens=np.full(400, 512.0))
    assert kept_trace(fitted(case_study, trace).workload.arrivals, "log") is None
    assert outline(fitted(case_study, trace), SLO, rehearse=TraceRehearsal.of).rehearsed_requests == 0


def test_shares_at_a_rate_are_what_nodes_hold_at_that_moment(case_study):
    """In closed forms all that was asked before is held."""
    trace = crowds()
    site = fitted(case_study, trace)
    options = SolveOptions(rate_req_per_s=len(trace) / trace.span_s, extrapolate=True)
    plan, blind = outline(site, options, rehearse=TraceRehearsal.of), outline(site, options)
    report = simulate(scenario_of(site, TrialSetting.of(plan), DEPLOYED_TRIAL), trace, 0).report()
    held = report["routes"].get("decode held", 0) / len(trace)
    assert plan.asked_held_fraction == pytest.approx(held, abs=0.01)
    assert plan.asked_offload_fraction == pytest.approx(report["offload_fraction"], abs=0.01)
    assert plan.asked_egress_gbps == pytest.approx(report["egress_mean_gbps"], rel=0.02)
    assert abs(blind.asked_held_fraction - held) > 0.05


def test_a_promise_is_kept_and_no_more_is(case_study):
    trace = documents()
    site = fitted(case_study, trace)
    plan, blind = outline(site, SLO, rehearse=TraceRehearsal.of), outline(site, SLO)
    assert plan.rehearsed_requests == len(trace)
    assert keeps_its_promise(site, plan, trace)
    assert not keeps_its_promise(site, blind, trace)


def test_more_load_is_more_sessions(case_study):
    trace = chats()
    site = fitted(case_study, trace)
    plan = outline(site, SLO, rehearse=TraceRehearsal.of)
    assert keeps_its_promise(site, plan, trace)
    assert not keeps_its_promise(site, outline(site, SLO), trace)


def test_a_part_speaks_for_a_long_trace(case_study):
    trace = documents()
    site = fitted(case_study, trace)
    arrivals = site.workload.arrivals
    kept = kept_trace(arrivals, "documents", 100)
    assert kept is not None
    assert len(kept) == 100
    assert kept.span_s == pytest.approx(float(trace.arrival_s[99] - trace.arrival_s[0]))


FIRST_TURNS = TtftTarget(ttft_s=2.0, category="first turn")
LONG = TtftTarget(ttft_s=1.5, above_tokens=15 * SIZE, share=0.8)


@pytest.mark.parametrize("target", [FIRST_TURNS, LONG])
def test_a_promise_keeps_targets_of_some_requests_too(case_study, target):
    """As `simulate` counts them, where a higher rate is more sessions."""
    trace = chats()
    site = with_targets(fitted(case_study, trace), target)
    plan = rehearsed(site)
    (row,) = plan.targets
    counted = report_of(site, plan, trace, plan.lambda_slo)
    assert counted["target_margin"] >= 0
    assert counted["ttft_p90_s"] <= TARGET_S
    assert row.share_in_time == pytest.approx(counted["by_target"][target.name]["share_in_time"])
    assert row.at_req_per_s == plan.lambda_slo
    assert report_of(site, plan, trace, plan.lambda_slo * (1 + NEAR))["target_margin"] < 0
    assert plan.lambda_slo < rehearsed(fitted(case_study, trace)).lambda_slo


def test_targets_at_a_rate_are_rehearsed(case_study):
    trace = crowds()
    site = with_targets(fitted(case_study, trace), TtftTarget(ttft_s=0.5, up_to_tokens=8 * SIZE, share=0.1))
    rate = len(trace) / trace.span_s
    plan = rehearsed(site, SolveOptions(rate_req_per_s=rate, extrapolate=True))
    counted = report_of(site, plan, trace, rate)["by_target"]
    assert [row.share_in_time for row in plan.targets] == pytest.approx(
        [counted[row.requests]["share_in_time"] for row in plan.targets], abs=0.01
    )


def test_categories_that_a_trace_says_are_those_of_its_rehearsal(case_study):
    trace = of_categories(documents(), [at % 3 == 0 for at in range(600)])
    site = fitted(case_study, trace)
    kept = kept_trace(site.workload.arrivals, "documents", 100, site.workload.categories)
    assert kept.categories.of_requests.tolist() == trace.categories.of_requests[:100].tolist()


def test_a_target_of_requests_that_are_not_run_is_left_to_the_replay(case_study):
    """Only the first of the requests are run here, and the last ones are of a category of their own."""
    trace = of_categories(documents(), [at >= 500 for at in range(600)])
    target = TtftTarget(ttft_s=0.8, category="batch")
    fit = fitted(case_study, trace)

    def first(*args):
        found = TraceRehearsal.of(*args)
        assert found is not None
        return replace(found, trace=found.trace.head(500))

    plan, free = (outline(site, SLO, rehearse=first) for site in (with_targets(fit, target), with_targets(fit)))
    assert plan.rehearsed_requests == 500
    assert 0 < plan.lambda_slo < free.lambda_slo
    assert plan.targets[0].share_in_time >= target.share - 0.01

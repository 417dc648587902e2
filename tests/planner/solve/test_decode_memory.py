"""Decode batches that are limited by memory: closed forms, and what plans say of them."""

from dataclasses import replace

import pytest

from planner.commands.rendering.text import plan_text
from planner.errors import Infeasible
from planner.model.memory import MemoryProfile
from planner.model.profile import KvSize
from planner.model.traffic import Lengths
from planner.simulator.trials.trial import Trial, TrialSetting, scenario_of
from planner.solve.decode_memory import BatchLimit, decode_of, mean_prompt, memory_of
from planner.solve.fleet import fleet_of
from planner.solve.plan import make_plan
from planner.solve.problem import SolveOptions, best_cut, pose, staged_bytes

PD = "h20x8"
GB = 1e9


def with_memory(site, room_bytes, kv_copies=1.0):
    """The case study whose decode instances have so much room for KVCache."""
    memory = MemoryProfile(
        gpus=8,
        hbm_bytes_per_gpu=room_bytes / 8 / 0.9 + 100 * GB,
        weights_bytes=720 * GB,
        kv_copies=kv_copies,
        provenance="measured: made up",
    )
    assert memory.kv_bytes == pytest.approx(room_bytes)
    return replace(site, profile=replace(site.profile, memory={PD: memory}))


@pytest.fixture(scope="module")
def coarse(case_study):
    lengths = case_study.workload.lengths.thinned(500)
    return replace(case_study, workload=replace(case_study.workload, lengths=lengths))


def context_bytes(site):
    """S_kv of the mean prompt and half the answer."""
    tokens = float(site.workload.lengths.weights @ site.workload.lengths.tokens) + 1024 / 2
    return site.profile.kv_size()(tokens)


def test_a_batch_is_what_fits_and_rates_follow(coarse):
    site = with_memory(coarse, 7.5 * context_bytes(coarse))
    decode = decode_of(site, PD)
    assert decode.max_running == 7
    plan = make_plan(site, SolveOptions())
    assert plan.theta_pd_d == pytest.approx(plan.num_decode * 7 / (decode.at(7) * 1024))
    assert plan.decode_batch_limit is BatchLimit.MEMORY
    assert (plan.to_json()["decode_batch"], plan.to_json()["decode_batch_limit"]) == (7, "memory")
    assert plan.lambda_max < make_plan(coarse, SolveOptions()).lambda_max


def test_a_plan_says_that_memory_binds(coarse):
    site = with_memory(coarse, 7.5 * context_bytes(coarse))
    plan = make_plan(site, SolveOptions())
    assert "decode batch          7, by memory" in plan_text(plan)
    warning = next(each for each in plan.warnings if "memory of h20x8" in each)
    assert warning.startswith("memory of h20x8 limits decode batches to 7 requests, max_running is 20: ")
    assert f"for a mean context of {mean_prompt(site.workload) + 512:,.0f} tokens" in warning


@pytest.mark.parametrize("options", [SolveOptions(), SolveOptions.as_in_paper()])
def test_memory_that_does_not_bind_changes_nothing(coarse, options):
    roomy = with_memory(coarse, 100 * context_bytes(coarse))
    plan, as_before = make_plan(roomy, options), make_plan(coarse, options)
    assert plan.provenance == {**as_before.provenance, "memory h20x8": "measured: made up"}
    assert plan.to_json() == as_before.to_json() | {"provenance": plan.provenance}
    assert plan_text(plan) == plan_text(as_before)
    assert as_before.decode_batch_limit is BatchLimit.PROFILE


def test_prompts_that_cross_the_line_hold_rate_times_transfer_time(coarse):
    problem = pose(coarse, SolveOptions())
    found = replace(best_cut(problem, SolveOptions()), share=0.0)
    sent = slice(found.cut, None)
    lengths, sizes = problem.lengths, problem.kv.of(problem.lengths.tokens)
    transfer_s = sizes * 8 / 100e9
    expected = found.rate * sum(lengths.weights[sent] * transfer_s[sent] * sizes[sent]) / found.num_decode
    assert staged_bytes(problem, found) == pytest.approx(expected)
    assert staged_bytes(problem, replace(found, num_decode=0)) == 0


def test_what_crosses_the_line_leaves_less_room(coarse):
    """With room for 7 contexts and nothing else, the seventh does not fit beside what is landing."""
    site = with_memory(coarse, 7.0001 * context_bytes(coarse))
    problem = pose(site, SolveOptions())
    assert decode_of(site, PD).max_running == 7
    assert problem.decode.max_running == 6
    memory = problem.memory
    assert memory.staged_bytes == pytest.approx(staged_bytes(problem, best_cut(problem, SolveOptions())), rel=0.3)
    assert memory.most_running == int((memory.room_bytes - memory.staged_bytes) / memory.context_bytes) == 6
    assert "held by prompts that cross the line" in str(memory)


def test_a_larger_room_never_serves_less(coarse):
    rates = [
        make_plan(with_memory(coarse, n * context_bytes(coarse)), SolveOptions()).lambda_max for n in (2, 5, 9, 15, 30)
    ]
    assert rates == sorted(rates)


def test_copies_of_kvcache_take_room_and_states_do_not(coarse):
    kv = KvSize(fixed_bytes=1 * GB, bytes_per_token=1e5)
    site = replace(coarse, profile=replace(coarse.profile, kv=kv))
    tokens = mean_prompt(site.workload) + 512
    found = memory_of(with_memory(site, 200 * GB, kv_copies=4), PD)
    assert found.context_bytes == pytest.approx(4 * 1e5 * tokens + 1 * GB)


def test_cached_tokens_are_part_of_a_context(coarse):
    tokens = coarse.workload.lengths.tokens[:4]
    known = replace(coarse.workload, lengths=Lengths.of(tokens, cached=tokens * 3))
    by_ratio = replace(coarse.workload, lengths=Lengths.of(tokens), hit_ratio=0.75)
    assert mean_prompt(known) == pytest.approx(4 * tokens.mean()) == mean_prompt(by_ratio)


def test_a_context_that_does_not_fit_is_refused(coarse):
    with pytest.raises(
        Infeasible, match=r"memory of h20x8: .* for a mean context of .* tokens; give an instance more GPUs"
    ):
        make_plan(with_memory(coarse, 0.9 * context_bytes(coarse)), SolveOptions())


def test_simulations_and_plans_of_several_clusters_know_it_too(coarse):
    site = with_memory(coarse, 7.5 * context_bytes(coarse))
    scenario = scenario_of(site, TrialSetting(19_400, 0.0, 3, 5), Trial())
    assert [pool.decode.max_running for pool in scenario.pools if pool.decode is not None] == [7]
    assert fleet_of(site).decode_s[0] == pytest.approx(decode_of(site, PD).at(7) * 1024 / 7)

"""The oracles of the case study, the edges, and that brute force never finds better."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.model.profile import KvSize, PrefillCurve
from planner.model.queueing import erlang_b
from planner.model.traffic import Lengths
from planner.solve.goals import ServiceTime, TieBreak
from planner.solve.plan import outline
from planner.solve.problem import SolveOptions, pose
from planner.solve.search import (
    TIE,
    WORTH_A_SHARE,
    Bottleneck,
    Capacity,
    Loads,
    build_loads,
    cuts_of,
    interval_of,
    rate_at,
    rates,
    solve,
    stage_rates,
    threshold_of,
)
from tests.properties import examples

GBPS = 1e9 / 8


def at(problem, threshold: float, num_prefill: int = 3, **changes) -> float:
    cut = int(cuts_of(problem.loads, np.array([threshold]))[0])
    return rate_at(problem.loads, replace(problem.capacity, **changes), num_prefill, cut)


def best(problem, **changes):
    return solve(problem.loads, replace(problem.capacity, **changes))


def test_the_published_plan(of_mean):
    cut = int(cuts_of(of_mean.loads, np.array([19_400.0]))[0])
    limits = stage_rates(of_mean.loads, of_mean.capacity, 3, cut)
    p = float(of_mean.loads.offloaded[cut])
    assert at(of_mean, 19_400) == pytest.approx(3.2406, rel=1e-3)
    assert p * limits[Bottleneck.PRFAAS] == pytest.approx(1.6064, rel=1e-3)
    assert (1 - p) * limits[Bottleneck.PD_P] == pytest.approx(1.6431, rel=1e-3)
    assert limits[Bottleneck.PD_D] == pytest.approx(3.909, rel=1e-3)
    assert 3.2406 * of_mean.loads.egress_bytes[cut] / GBPS == pytest.approx(12.347, rel=1e-3)


@pytest.mark.parametrize(("threshold", "rate"), [(19_000, 3.2145), (19_684, 3.1942), (25_000, 2.3483)])
def test_around_the_published_plan(of_mean, threshold, rate):
    assert at(of_mean, threshold) == pytest.approx(rate, rel=1e-3)


def test_splits_at_the_published_threshold(of_mean):
    found = [at(of_mean, 19_400, split) for split in range(1, 8)]
    assert found == pytest.approx([1.086, 2.172, 3.241, 3.127, 2.345, 1.564, 0.782], rel=1e-3)


def test_the_best_threshold_of_each_split(of_mean):
    found = [solve(of_mean.loads, of_mean.capacity, num_prefill=split).rate for split in range(1, 8)]
    assert found == pytest.approx([2.75, 3.00, 3.24, 3.127, 2.345, 1.564, 0.782], rel=5e-3)


def test_all_thresholds(of_mean):
    found = best(of_mean)
    assert (found.num_prefill, found.num_decode) == (3, 5)
    assert found.rate == pytest.approx(3.2446, rel=1e-3)
    assert threshold_of(of_mean.loads, found) == pytest.approx(19_460, abs=20)
    assert of_mean.loads.offloaded[found.cut] == pytest.approx(0.4945, abs=5e-4)


def test_all_thresholds_with_exact_service_times(exact):
    found = best(exact)
    assert (found.num_prefill, found.rate) == (3, pytest.approx(3.1820, rel=1e-3))
    assert threshold_of(exact.loads, found) == pytest.approx(19_684, abs=20)
    assert at(exact, 19_400) == pytest.approx(3.163, rel=1e-3)


@pytest.mark.parametrize(
    ("gbps", "rate", "num_prefill", "threshold"),
    [
        (15, 3.245, 3, 19_460),
        (12, 3.176, 3, 19_766),
        (10, 3.037, 4, 25_644),
        (8, 2.632, 4, 29_027),
        (5, 2.260, 5, 42_277),
        (2, 1.620, 5, 65_595),
        (0.5, 1.522, 6, 105_402),
    ],
)
def test_less_egress(of_mean, gbps, rate, num_prefill, threshold):
    found = best(of_mean, egress_bytes_per_s=gbps * GBPS)
    assert (found.rate, found.num_prefill) == (pytest.approx(rate, rel=2e-3), num_prefill)
    assert threshold_of(of_mean.loads, found) == pytest.approx(threshold, rel=2e-3)


@pytest.mark.parametrize("change", [{"egress_bytes_per_s": 0.0}, {"num_prfaas": 0}])
def test_without_prfaas(of_mean, change):
    found = best(of_mean, **change)
    assert (found.rate, found.num_prefill) == (pytest.approx(1.407, rel=1e-3), 6)
    assert of_mean.loads.offloaded[found.cut] == 0


def test_a_threshold_above_every_length_is_the_same(of_mean):
    assert at(of_mean, 131_072, 6) == pytest.approx(1.407, rel=1e-3)


@pytest.mark.parametrize(
    ("num_prfaas", "rate", "num_prefill"),
    [
        (1, 1.802, 5),
        (2, 2.345, 5),
        (3, 2.850, 4),
        (4, 3.245, 3),
        (5, 3.873, 3),
        (6, 4.250, 2),
        (8, 5.227, 1),
        (12, 6.254, 0),
        (16, 6.254, 0),
    ],
)
def test_prfaas_instances(of_mean, num_prfaas, rate, num_prefill):
    found = best(of_mean, num_prfaas=num_prfaas)
    assert (found.rate, found.num_prefill) == (pytest.approx(rate, rel=2e-3), num_prefill)


@pytest.mark.parametrize(("num_pd", "rate", "num_prefill"), [(7, 3.127, 3), (9, 3.484, 4)])
def test_pd_instances(of_mean, num_pd, rate, num_prefill):
    found = best(of_mean, num_pd=num_pd)
    assert (found.rate, found.num_prefill) == (pytest.approx(rate, rel=2e-3), num_prefill)


@pytest.mark.parametrize(
    ("tokens", "rate", "num_prefill"),
    [(256, 3.956, 6), (512, 3.721, 5), (1024, 3.245, 3), (2048, 2.736, 1), (4096, 1.564, 0)],
)
def test_answer_lengths(of_mean, tokens, rate, num_prefill):
    found = best(of_mean, decode_s=of_mean.capacity.decode_s * tokens / 1024)
    assert (found.rate, found.num_prefill) == (pytest.approx(rate, rel=2e-3), num_prefill)


@pytest.mark.parametrize(
    ("scale", "decode", "resolved", "num_prefill", "kept"),
    [
        ({"remote": 0.9}, 1.0, 3.524, 3, 3.258),
        ({"remote": 1.1}, 1.0, 3.127, 4, 2.946),
        ({"local": 0.9}, 1.0, 3.325, 3, 3.241),
        ({"local": 1.1}, 1.0, 3.179, 3, 2.962),
        ({}, 0.9, 3.245, 3, 3.241),
        ({}, 1.1, 3.440, 4, 3.241),
    ],
)
def test_sensitivity(of_mean, scale, decode, resolved, num_prefill, kept):
    changed = replace(of_mean, loads=of_mean.loads.scaled(**scale))
    decode_s = of_mean.capacity.decode_s / decode
    found = best(changed, decode_s=decode_s)
    assert (found.rate, found.num_prefill) == (pytest.approx(resolved, rel=2e-3), num_prefill)
    assert at(changed, 19_400, decode_s=decode_s) == pytest.approx(kept, rel=1e-3)


def test_a_plateau_is_an_interval_and_the_second_goal_decides(of_mean):
    found = solve(of_mean.loads, of_mean.capacity, num_prefill=4)
    plateau = interval_of(of_mean.loads, of_mean.capacity, found)
    assert found.rate == pytest.approx(3.127, rel=1e-3)
    assert (plateau.low_tokens, plateau.high_tokens) == (pytest.approx(17_650, abs=400), pytest.approx(25_000, abs=100))
    assert threshold_of(of_mean.loads, found) == pytest.approx(plateau.high_tokens, rel=1e-3)  # least egress
    quick = solve(of_mean.loads, of_mean.capacity, num_prefill=4, tie_break=TieBreak.TTFT)
    assert plateau.low_tokens <= threshold_of(of_mean.loads, quick) <= plateau.high_tokens
    assert of_mean.loads.ttft_s[quick.cut] <= of_mean.loads.ttft_s[found.cut]


def test_near_optimal_thresholds(of_mean):
    near = interval_of(of_mean.loads, of_mean.capacity, best(of_mean), 0.01)
    assert near.low_tokens == pytest.approx(19_000, abs=50)
    assert near.high_tokens == pytest.approx(19_600, abs=50)


def test_nobody_decodes_or_nobody_prefills_short_ones(of_mean):
    assert at(of_mean, 19_400, 8) == 0
    assert at(of_mean, 19_400, 0) == 0


def test_dense_attention_does_not_fit_the_link(case_study):
    dense = KvSize(bytes_per_token=253_952)
    profile = case_study.profile
    loads = build_loads(
        case_study.workload.lengths, profile.prefill_on("h20x8"), profile.prefill_on("h200x8"), dense,
        egress_bytes_per_s=12.5e9, service=ServiceTime.OF_MEAN,
    )  # fmt: skip
    cut = int(cuts_of(loads, np.array([19_400.0]))[0])
    assert 3.24 * loads.egress_bytes[cut] / GBPS == pytest.approx(147, rel=0.01)
    assert loads.offloaded[cut] * 12.5e9 / loads.egress_bytes[cut] == pytest.approx(1.09, rel=0.01)


def test_equal_lengths_are_split_by_share(case_study):
    profile = case_study.profile
    loads = build_loads(
        Lengths.of(np.full(7, 27_486.0)), profile.prefill_on("h20x8"), profile.prefill_on("h200x8"), profile.kv_size(),
        egress_bytes_per_s=12.5e9,
    )  # fmt: skip
    capacity = Capacity(num_prfaas=4, num_pd=8, egress_bytes_per_s=12.5e9, decode_s=1 / 0.7818)
    pure = [max(rates(loads, capacity, split)[cut] for split in range(9)) for cut in (0, 1)]
    assert pure == pytest.approx([2.463, 1.407], rel=1e-3)
    found = solve(loads, capacity)
    assert (found.rate, found.num_prefill) == (pytest.approx(3.167, rel=1e-3), 3)
    assert 1 - found.share == pytest.approx(0.778, abs=1e-3)  # the share that goes remote
    assert threshold_of(loads, found) == 27_486


# Brute force

CURVES = [(0.1, 1e-4, 0.0), (0.5, 1e-4, 2e-9), (0.02, 3e-4, 1e-9), (0.0, 2e-5, 5e-9)]


@st.composite
def small_problems(draw):
    lengths = Lengths.of(np.array(draw(st.lists(st.integers(1, 5000), min_size=1, max_size=7)), dtype=float))
    local, remote = (PrefillCurve(coefficients=draw(st.sampled_from(CURVES)), valid_tokens=(0, 1e9)) for _ in range(2))
    kv = KvSize(fixed_bytes=draw(st.sampled_from([0.0, 1e6])), bytes_per_token=draw(st.sampled_from([10.0, 1e3])))
    capacity = Capacity(
        num_prfaas=draw(st.integers(0, 3)),
        num_pd=draw(st.integers(1, 4)),
        egress_bytes_per_s=draw(st.sampled_from([0.0, 1e5, 1e7])),
        decode_s=draw(st.sampled_from([0.0, 0.05, 0.5])),
    )
    return lengths, local, remote, kv, capacity


def by_hand(lengths, local, remote, kv, capacity, num_prefill, kept, service) -> float:
    """Λ from the definition: `kept[i]` is the share of length i that stays local."""
    local_w, remote_w = kept * lengths.weights, (1 - kept) * lengths.weights
    if service is ServiceTime.EXACT:
        loads = [float(local_w @ local.of(lengths.tokens)), float(remote_w @ remote.of(lengths.tokens))]
        egress = float(remote_w @ kv.of(lengths.tokens))
    else:
        loads, egress = [0.0, 0.0], 0.0
        if local_w.sum():
            loads[0] = local_w.sum() * local(local_w @ lengths.tokens / local_w.sum())
        if remote_w.sum():
            mean = remote_w @ lengths.tokens / remote_w.sum()
            loads[1], egress = remote_w.sum() * remote(mean), remote_w.sum() * kv(mean)
    needs = [
        (loads[0], num_prefill),
        (loads[1], capacity.num_prfaas),
        (egress, capacity.egress_bytes_per_s),
        (capacity.decode_s, capacity.num_pd - num_prefill),
    ]
    if any(need > 1e-15 and not have for need, have in needs):
        return 0.0
    return min((have / need for need, have in needs if need > 1e-15), default=float("inf"))


@settings(max_examples=examples(60), deadline=None)
@given(problem=small_problems(), service=st.sampled_from(list(ServiceTime)))
def test_brute_force_never_finds_better(problem, service):
    lengths, local, remote, kv, capacity = problem
    loads = build_loads(lengths, local, remote, kv, egress_bytes_per_s=capacity.egress_bytes_per_s, service=service)
    found = solve(loads, capacity, worth_a_share=TIE)
    shares = np.linspace(0, 1, 11) if service is ServiceTime.EXACT else [0.0]
    top = 0.0
    for num_prefill, cut, share in itertools.product(
        range(capacity.num_pd + 1), range(len(lengths.tokens) + 1), shares
    ):
        kept = np.where(np.arange(len(lengths.tokens)) < cut, 1.0, 0.0)
        if cut < len(lengths.tokens):
            kept[cut] = share
        top = max(top, by_hand(lengths, local, remote, kv, capacity, num_prefill, kept, service))
    assert found.rate >= top * (1 - 1e-9)
    kept = np.where(np.arange(len(lengths.tokens)) < found.cut, 1.0, 0.0)
    if found.share:
        kept[found.cut] = found.share
    own = by_hand(lengths, local, remote, kv, capacity, found.num_prefill, kept, service)
    assert found.rate == pytest.approx(own, rel=1e-6)


def test_one_request_and_unsorted_input():
    loads = build_loads(
        Lengths.of(np.array([3000.0])), PrefillCurve(coefficients=(0, 1e-3, 0), valid_tokens=(0, 1e9)),
        PrefillCurve(coefficients=(0, 5e-4, 0), valid_tokens=(0, 1e9)), KvSize(bytes_per_token=1), egress_bytes_per_s=1e9,
    )  # fmt: skip
    assert isinstance(loads, Loads)
    found = solve(loads, Capacity(num_prfaas=1, num_pd=2, egress_bytes_per_s=1e9, decode_s=0.1))
    assert found.rate == pytest.approx(1 / 1.5 + 1 / 3)  # both prefill: two thirds and a third per second


def test_prompts_on_decode_nodes_take_decode_time_and_nothing_else(exact):
    """Half of the short ones are held; what is left goes where it went, and decode does the rest."""
    plain = Lengths(np.array([500.0, 4_000.0, 30_000.0]), np.array([0.5, 0.3, 0.2]))
    lengths = replace(plain, held=np.array([0.5, 0.0, 0.0]))
    whole, part = (exact.loads_for(each, ServiceTime.EXACT) for each in (plain, lengths))
    alone_s = exact.local(500) - exact.local(0)
    assert part.held_s == pytest.approx(0.25 * alone_s)
    assert part.local_s - whole.local_s == pytest.approx([0, *[-0.25 * exact.local(500)] * 3])
    assert part.offloaded == pytest.approx([0.75, 0.5, 0.2, 0.0])
    assert part.egress_bytes[1:] == pytest.approx(whole.egress_bytes[1:])
    decode = stage_rates(part, exact.capacity, 3, 2)[Bottleneck.PD_D]
    assert decode == pytest.approx(5 / (exact.capacity.decode_s + part.held_s))
    assert exact.scaled(local=2).loads_for(lengths, ServiceTime.EXACT).held_s == pytest.approx(2 * part.held_s)


def test_a_prompt_is_computed_after_what_is_cached(exact):
    lengths = Lengths(np.array([2_000.0]), np.array([1.0]), cached=np.array([60_000.0]))
    loads = exact.loads_for(lengths, ServiceTime.EXACT)
    assert loads.local_s[1] == pytest.approx(exact.local.with_prefix(62_000, 60_000))
    assert loads.remote_s[0] == pytest.approx(exact.remote.with_prefix(62_000, 60_000))
    assert loads.egress_bytes[0] == pytest.approx(exact.kv(2_000))


def test_what_is_compared_with_t_may_be_more_than_is_computed(exact):
    """PrfaaS holds the rest: for t below 40,000 it is sent there, where 1,000 tokens are computed."""
    lengths = Lengths(np.array([10_000.0, 40_000.0]), np.array([0.5, 0.5]), computed=np.array([10_000.0, 1_000.0]))
    loads = exact.loads_for(lengths, ServiceTime.EXACT)
    assert loads.offloaded[1] == 0.5
    assert loads.remote_s[1] == pytest.approx(0.5 * exact.remote(1_000))
    assert cuts_of(loads, np.array([20_000.0]))[0] == 1


@pytest.mark.parametrize("cold_load", [None, 0.8, 1.0])
def test_with_prompts_on_decode_nodes_brute_force_never_finds_better(exact, cold_load):
    """With cold caches all prompts are prefilled; the load that is run then keeps nothing busier than 90 %."""
    rng = np.random.default_rng(1)
    tokens = np.sort(rng.choice(np.arange(1, 100_000), 12, replace=False)).astype(float)
    lengths = Lengths(tokens, rng.dirichlet(np.ones(12)), held=rng.random(12), cached=rng.random(12) * 1e4)
    loads = replace(exact, cold_load=cold_load).loads_for(lengths, ServiceTime.EXACT)
    found = solve(loads, exact.capacity)
    decode_s = exact.capacity.decode_s + loads.held_s
    prefilled = lengths.weights * (1 - lengths.held)
    total = lengths.cached + tokens
    local_s = exact.local.of(total) - exact.local.of(lengths.cached) + exact.local(0)
    remote_s = exact.remote.of(total) - exact.remote.of(lengths.cached) + exact.remote(0)
    for cut, split in itertools.product(range(13), range(1, 8)):
        near, far = prefilled[:cut] @ local_s[:cut], prefilled[cut:] @ remote_s[cut:]
        size = prefilled[cut:] @ exact.kv.of(tokens[cut:])
        if cold_load is not None:
            near = max(near, lengths.weights[:cut] @ local_s[:cut] * cold_load / 0.9)
            far = max(far, lengths.weights[cut:] @ remote_s[cut:] * cold_load / 0.9)
            size = max(size, lengths.weights[cut:] @ exact.kv.of(tokens[cut:]) * cold_load / 0.9)
        limits = [
            (8 - split) / decode_s,
            split / near if near else np.inf,
            exact.capacity.num_prfaas / far if far else np.inf,
            exact.capacity.egress_bytes_per_s / size if size else np.inf,
        ]
        assert found.rate >= min(limits) * (1 - 1e-9)
        assert rate_at(loads, exact.capacity, split, cut) == pytest.approx(min(limits))
        for share in np.linspace(0, 1, 8) if cut < 12 else ():
            assert found.rate >= rate_at(loads, exact.capacity, split, cut, share) * (1 - WORTH_A_SHARE)


def test_with_cold_caches_decode_nodes_compute_nothing_and_lack_all_attention(exact):
    lengths = Lengths(
        np.array([500.0, 30_000.0]), np.array([0.6, 0.4]), held=np.array([1.0, 0.5]), cached=np.array([9_000.0, 2_000.0]),
        landed=np.array([9_000.0, 1_500.0]),
    )  # fmt: skip
    loads = exact.loads_for(lengths, ServiceTime.EXACT)
    assert loads.local_s == pytest.approx([0, 0, 0.2 * exact.local.after(30_000, 2_000)])
    assert loads.cold.local_s[1] == pytest.approx(0.6 * exact.local.with_prefix(9_500, 9_000))
    assert loads.cold.remote_s[1] == pytest.approx(0.4 * exact.remote.with_prefix(32_000, 2_000))
    assert loads.egress_bytes[1] == pytest.approx(0.2 * exact.kv(30_500))
    assert loads.cold.egress_bytes[1] == pytest.approx(0.4 * exact.kv(32_000))
    limits = stage_rates(loads, exact.capacity, 3, 1)
    assert limits[Bottleneck.COLD] == pytest.approx(
        0.9 / 0.8 * min(4 / loads.cold.remote_s[1], 3 / loads.cold.local_s[1])
    )
    assert Bottleneck.COLD not in stage_rates(exact.warm().loads_for(lengths, ServiceTime.EXACT), exact.capacity, 3, 1)


def test_the_fuller_decode_nodes_are_the_fewer_prompts_they_compute(case_study):
    lengths = Lengths(np.array([500.0, 30_000.0]), np.array([0.6, 0.4]), held=np.array([1.0, 0.0]))
    site = replace(case_study, workload=replace(case_study.workload, lengths=lengths))
    problem = pose(site, SolveOptions())
    full = erlang_b(problem.decode.max_running, problem.decode.max_running)
    assert problem.lengths.held_share == pytest.approx(0.6 * (1 - full))
    assert problem.at_rate(1e-6, 5).lengths.held_share == pytest.approx(0.6)
    busy = problem.at_rate(3.0, 5).lengths.held_share
    assert problem.lengths.held_share < busy < 0.6
    assert problem.at_rate(1e9, 5).lengths.held_share == pytest.approx(problem.lengths.held_share)


def test_a_plan_says_who_goes_where_at_the_rate_that_is_asked_for(case_study):
    lengths = Lengths(np.array([500.0, 30_000.0]), np.array([0.6, 0.4]), held=np.array([1.0, 0.0]))
    site = replace(case_study, workload=replace(case_study.workload, lengths=lengths))
    plan = outline(site, SolveOptions(rate_req_per_s=1.0))
    assert plan.held_fraction < plan.asked_held_fraction <= 0.6
    assert plan.asked_egress_gbps == pytest.approx(plan.asked_offload_fraction * site.profile.kv_size()(30_000) * 8e-9)


def test_attention_that_decode_nodes_hold_is_not_sent(exact):
    """It saves bytes whether there is a state with it or not; what is computed is the same."""
    lengths = Lengths(np.array([30_000.0]), np.array([1.0]), cached=np.zeros(1), landed=np.array([20_000.0]))
    loads = exact.loads_for(lengths, ServiceTime.EXACT)
    assert loads.egress_bytes[0] == pytest.approx(exact.kv(10_000))
    assert loads.remote_s[0] == pytest.approx(exact.remote(30_000))

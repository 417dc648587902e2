"""Which systems are looked at, and what the verdict rests on."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from math import ceil, inf
from typing import Any

import numpy as np
import pytest

from planner.commands.rendering.purchases import purchases_json, verdict
from planner.errors import InputError
from planner.model.market import Commitment, Demand, HardwareOffer, LineOffer, Market
from planner.model.queueing import Station, Wait, mgk_wait
from planner.model.site import Site
from planner.model.traffic import Lengths
from planner.solve.buying.advice import Advice, advise, month_price
from planner.solve.buying.systems import (
    QUEUE_BINS,
    Contender,
    Sought,
    colocated,
    even_cuts,
    homogeneous,
    late,
    with_prfaas,
)
from planner.solve.goals import Objective
from planner.solve.loaded import loaded_ttft
from planner.solve.problem import SolveOptions, pose
from planner.solve.search import Cut, rate_at
from planner.solve.targets import everybody_within

FAR, NEAR = "h200x8", "h20x8"
TARGET_S = 14.0  # P90 TTFT, which the PD cluster alone keeps, too


@pytest.fixture(scope="module")
def sought(case_study: Site) -> Sought:
    """A target that the PD cluster alone keeps, too."""
    site = replace(case_study, workload=replace(case_study.workload, lengths=case_study.workload.lengths.thinned(300)))
    site = replace(site, slo=replace(site.slo, ttft_p90_s=TARGET_S, tbt_s=None))
    problem = pose(site, SolveOptions(objective=Objective.SLO))
    return Sought(problem=problem, output_tokens=site.workload.output_tokens, goals=everybody_within(TARGET_S))


def carries(sought: Sought, gbps: float, cut: int, far: int, near: int, decode: int, rate: float) -> bool:
    problem = sought.problem.with_capacity(num_prfaas=far, num_pd=near + decode, egress_bytes_per_s=gbps * 1.25e8)
    split = Cut(rate=rate, num_prefill=near, num_decode=decode, cut=cut)
    if rate_at(problem.loads, problem.capacity, near, cut) <= rate:
        return False
    stations = loaded_ttft(problem, split, sought.output_tokens, problem.lengths.thinned(QUEUE_BINS)).stations
    service_s = problem.decode.full_step_s * sought.output_tokens
    wait = mgk_wait(rate, decode * problem.decode.max_running, service_s, service_s**2)
    return sum(late(each, rate, wait, TARGET_S) for each in stations) <= 0.1


def test_requests_are_late_by_both_of_their_waits() -> None:
    """Against draws of a wait for prefill, a prompt, and a wait for decode."""
    rng, draws = np.random.default_rng(0), 400_000
    prompts_s, weights = np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.3, 0.2])
    station = Station(weights=weights, prefill_s=prompts_s, after_s=np.zeros(3), servers=3)
    decode = Wait(0.3, 2.0)
    queue = station.wait(1.2)
    total = rng.choice(prompts_s, draws, p=weights)
    for wait in (queue, decode):
        total += (rng.random(draws) < wait.chance) * rng.exponential(wait.mean_if_s, draws)
    for seconds in (3.0, 5.0, 7.0):
        assert late(station, 1.2, decode, seconds) == pytest.approx(float((total > seconds).mean()), abs=0.01)


def test_colocated_nodes_stand_still_no_longer_than_tbt_allows(sought: Sought) -> None:
    """By trying all counts: the queue for prompts, and the longest tenth of the intervals between tokens."""
    problem, rate = sought.problem, 1.1
    lengths, step_s = problem.asked.thinned(QUEUE_BINS), problem.decode.full_step_s
    prompts_s = problem.local.after(lengths.uncached, lengths.cached)
    compute_s = float(lengths.weights @ prompts_s)

    def is_enough(nodes: int, tbt_s: float | None) -> bool:
        busy = rate * compute_s / nodes
        if busy + rate * problem.capacity.decode_s / nodes >= 1:
            return False
        if tbt_s is not None and step_s * (1 + 10 * busy / (1 - busy)) > tbt_s:
            return False
        station = Station(weights=lengths.weights, prefill_s=prompts_s, after_s=0 * prompts_s, servers=nodes)
        stay_s = step_s * sought.output_tokens + compute_s * problem.decode.max_running
        wait = mgk_wait(rate, nodes * problem.decode.max_running, stay_s, stay_s**2)
        return late(station, rate, wait, TARGET_S) <= 0.1

    for tbt_s in (None, 0.1):
        (found,) = colocated(replace(sought, tbt_s=tbt_s), rate)
        assert found.num_decode == next(nodes for nodes in itertools.count(1) if is_enough(nodes, tbt_s))


def test_colocated_nodes_may_run_smaller_batches_with_shorter_steps(sought: Sought) -> None:
    steps = replace(sought.problem.decode, max_running=20, step_s=0.01, step_s_per_request=0.0015)
    bounded = replace(sought, problem=replace(sought.problem, decode=steps), tbt_s=0.05)
    (found,) = colocated(bounded, 1.1)
    full = replace(steps, step_s=steps.full_step_s, step_s_per_request=0.0)  # less time is left for prompts
    (crowded,) = colocated(replace(bounded, problem=replace(bounded.problem, decode=full)), 1.1)
    assert found.num_decode < crowded.num_decode < 1000


def test_without_a_target_stages_are_busy_for_four_fifths(sought: Sought) -> None:
    free = replace(sought, goals=())
    problem = free.problem
    for each in with_prfaas(free, 3.0, LineOffer(gbps=100)):
        busy = {name: share for name, share in each.busy if name != "egress"}
        assert max(busy.values()) <= 0.8 + 1e-9
        assert each.num_decode == ceil(3.0 * problem.capacity.decode_s / 0.8)
        counts = {"prfaas_compute": each.num_prfaas, "pd_prefill": each.num_prefill, "pd_decode": each.num_decode}
        assert all(busy[name] * count > 0.8 * (count - 1) for name, count in counts.items() if count)


@pytest.mark.parametrize("rate", [0.4, 1.1])
def test_systems_are_the_smallest_that_keep_the_target(sought: Sought, rate: float) -> None:
    found = list(with_prfaas(sought, rate, LineOffer(gbps=40)))
    for cut in even_cuts(sought.problem)[:-1:6]:
        sent = float(sought.problem.loads.egress_bytes[cut])
        sizes = {(each.num_prfaas, each.num_pd) for each in found if each.sent_bytes == sent}
        able = {
            (far, near + decode)
            for far, near, decode in itertools.product(range(1, 6), range(8), range(1, 5))
            if carries(sought, 40, cut, far, near, decode, rate)
        }
        smallest = {
            one for one in able if not any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in able)
        }
        assert {each for each in sizes if each[0] < 6 and each[1] < 9} == smallest


def test_the_pd_cluster_alone_is_as_small_as_it_can_be(sought: Sought) -> None:
    (alone,) = homogeneous(sought, 0.6)
    size = len(sought.problem.lengths.tokens)
    assert carries(sought, 0, size, 0, alone.num_prefill, alone.num_decode, 0.6)
    for near in range(1, alone.num_pd - 1):
        assert not carries(sought, 0, size, 0, near, alone.num_pd - 1 - near, 0.6)


def market(**fields: Any) -> Market:
    rents = {FAR: 4.2, NEAR: 2.1}
    offers = tuple(HardwareOffer(hardware=name, gpus=8, rent_per_gpu_hour=rent) for name, rent in rents.items())
    defaults: Mapping[str, Any] = {
        "schema": 1, "demand": Demand(months=2, rate_req_per_s=1.0, growth_per_month=0.3), "hardware": offers,
        "lines": (LineOffer(gbps=40, per_gb=0.001),),
    }  # fmt: skip
    return Market(**{**defaults, **fields})


@pytest.fixture(scope="module")
def lenient(case_study: Site) -> Site:
    workload = replace(case_study.workload, lengths=case_study.workload.lengths.thinned(300))
    return replace(case_study, workload=workload, slo=replace(case_study.slo, ttft_p90_s=TARGET_S, tbt_s=None))


def tariff_of(found: Advice) -> float | None:
    assert found.break_even is not None
    return found.break_even.per_gb


def test_the_tariff_decides(lenient: Site) -> None:
    cheap = advise(lenient, market(), SolveOptions())
    assert cheap.is_offloading
    assert cheap.saving is not None
    assert cheap.saving > 0
    assert {Contender.HOMOGENEOUS, Contender.COLOCATED, Contender.BIGGER_LOCAL} <= cheap.ways.keys()
    tariff = tariff_of(cheap)
    assert tariff is not None
    for factor, is_offloading in ((0.97, True), (1.03, False)):
        priced = market(lines=(LineOffer(gbps=40, per_gb=tariff * factor),))
        assert advise(lenient, priced, SolveOptions()).is_offloading == is_offloading
        assert tariff_of(advise(lenient, priced, SolveOptions())) == pytest.approx(tariff)
    dear = advise(lenient, market(lines=(LineOffer(gbps=40, per_month=1e9),)), SolveOptions())
    assert not dear.is_offloading
    assert tariff_of(dear) is None


def test_a_tariff_says_how_many_months_offload_at_it(lenient: Site) -> None:
    """Demand shrinks: dear gigabytes are sent in the months that send few."""
    site = replace(lenient, slo=replace(lenient.slo, tbt_s=0.04))
    rents = tuple(HardwareOffer(hardware=name, gpus=8, rent_per_gpu_hour=r) for name, r in ((FAR, 1.0), (NEAR, 40.0)))
    demand = Demand(months=5, rate_req_per_s=2.0, growth_per_month=-0.5)

    def sending(per_gb: float) -> tuple[Advice, int]:
        lines = (LineOffer(gbps=100, per_gb=per_gb),)
        found = advise(site, market(demand=demand, hardware=rents, lines=lines), SolveOptions())
        return found, sum(each.num_prfaas > 0 for each in found.purchases.systems)

    found, months = sending(0.0)
    tariff = tariff_of(found)
    assert found.break_even is not None
    assert tariff is not None
    assert found.break_even.months is not None
    assert found.break_even.months < months == 5
    assert sending(tariff * 0.98)[1] == found.break_even.months
    said = f"if all lines charge that; at that price in {found.break_even.months} of 5 months only."
    assert verdict(market(), found)[1].endswith(said)


def test_a_tariff_above_all_prices_is_none(lenient: Site) -> None:
    """It is not one that a line could have."""
    offers = tuple(HardwareOffer(hardware=name, gpus=100_000, rent_per_gpu_hour=1e12) for name in (FAR, NEAR))
    found = advise(lenient, market(hardware=offers), SolveOptions())
    assert found.saving is not None
    assert found.saving > 0
    assert tariff_of(found) == inf
    assert "at every tariff up to $1,000,000,000,000 per GB, in the last month at least" in verdict(market(), found)[1]


def test_a_verdict_is_the_cheapest_of_all_ways(lenient: Site) -> None:
    """One month and rent only: each way's cost is the least over its systems."""
    priced = market(demand=Demand(months=1, rate_req_per_s=1.0))
    found = advise(lenient, priced, SolveOptions())
    problem = pose(lenient, SolveOptions(objective=Objective.SLO))
    sought = Sought(problem=problem, output_tokens=lenient.workload.output_tokens, goals=everybody_within(TARGET_S))
    ways = {
        Contender.HOMOGENEOUS: homogeneous(sought, 1.0),
        Contender.COLOCATED: colocated(sought, 1.0),
        Contender.BIGGER_LOCAL: with_prfaas(sought, 1.0, None, Contender.BIGGER_LOCAL),
        Contender.PRFAAS: with_prfaas(sought, 1.0, priced.lines[0]),
    }
    for contender, systems in ways.items():
        least = min(
            each.num_prfaas * 8 * 4.2 * 730
            + each.num_pd * 8 * 2.1 * 730
            + (each.sent_bytes / 1e9 * 1.0 * 730 * 3600 * 0.001 if each.line else 0.0)
            for each in systems
        )
        assert found.ways[contender].cost == pytest.approx(least, rel=1e-3), contender
    eligible = {name: way.cost for name, way in found.ways.items() if name is not Contender.BIGGER_LOCAL}
    assert found.best == min(eligible, key=lambda name: eligible[name])


def test_bigger_local_prefill_needs_no_line_and_must_be_allowed(lenient: Site) -> None:
    near = {"lines": (LineOffer(gbps=40, per_gb=0.02),)}
    assert advise(lenient, market(**near), SolveOptions()).best is not Contender.BIGGER_LOCAL
    assert advise(lenient, market(**near, fast_at_home=True), SolveOptions()).best is Contender.BIGGER_LOCAL
    assert advise(lenient, market(lines=(), fast_at_home=True), SolveOptions()).best is Contender.BIGGER_LOCAL


def test_what_is_rented_counts_as_headroom(lenient: Site) -> None:
    """As long as a month's instances and its line carry later rates, rented or owned."""
    demand = Demand(months=5, rate_req_per_s=0.5, growth_per_month=0.15)
    found = advise(lenient, market(demand=demand, lines=()), SolveOptions())
    assert found.best is Contender.COLOCATED
    problem = pose(lenient, SolveOptions(objective=Objective.SLO))
    sought = Sought(problem=problem, output_tokens=lenient.workload.output_tokens, goals=everybody_within(TARGET_S))
    sizes = [next(colocated(sought, rate)).num_pd for rate in demand.rates()]
    assert [held[NEAR] for held in found.purchases.held] == sizes
    assert list(found.headroom_months) == [sum(one <= size for one in sizes) - at - 1 for at, size in enumerate(sizes)]
    assert max(found.headroom_months) > 0


def test_one_prompt_breaks_even_where_its_gpu_seconds_and_bytes_cost_the_same(lenient: Site) -> None:
    found = advise(lenient, market(), SolveOptions()).break_even
    profile = lenient.profile
    away, home = profile.prefill_on(FAR), profile.prefill_on(NEAR)

    def is_cheaper_away(tokens: float) -> bool:
        sent = profile.kv_size()(tokens) / 1e9 * 0.001
        return away(tokens) * 4.2 * 8 / 3600 + sent < home(tokens) * 2.1 * 8 / 3600

    assert found is not None
    assert found.tokens is not None
    assert found.hit_ratio is not None
    assert is_cheaper_away(found.tokens)
    assert not is_cheaper_away(found.tokens * 0.95)
    assert 0 < found.hit_ratio < 1


def test_one_prompt_pays_for_bytes_what_the_line_that_is_taken_charges(lenient: Site) -> None:
    taken, dear = LineOffer(gbps=40, per_gb=0.001), LineOffer(gbps=40, per_month=1e9)
    found, alone = (advise(lenient, market(lines=lines), SolveOptions()) for lines in ((dear, taken), (taken,)))
    assert found.purchases.systems[-1].line == taken
    assert found.break_even is not None
    assert alone.break_even is not None
    assert found.break_even.tokens == alone.break_even.tokens
    assert found.break_even.hit_ratio == alone.break_even.hit_ratio


@pytest.mark.parametrize(("ends", "months_paid"), [(False, 3), (True, 12)])
def test_commitments_beyond_the_last_month_count_as_in_the_plan(ends: bool, months_paid: int) -> None:
    """Of those that are cut off by the end, or paid in full, each month that is looked at bears its part."""
    offer = HardwareOffer(hardware=FAR, gpus=8, commitments=(Commitment(months=12, per_gpu_hour=1.5),))
    demand = Demand(months=3, rate_req_per_s=1.0, ends=ends)
    price = month_price(offer, market(demand=demand))
    assert price == pytest.approx(8 * 1.5 * 730 * months_paid / 3)


def test_hardware_may_be_committed_for_longer_than_is_looked_at(lenient: Site) -> None:
    terms = (Commitment(months=12, per_gpu_hour=2.0),)
    offers = tuple(HardwareOffer(hardware=name, gpus=8, commitments=terms) for name in (FAR, NEAR))
    found = advise(lenient, market(hardware=offers), SolveOptions())
    assert found.break_even is not None
    assert found.break_even.tokens is not None


def test_without_a_line_the_cluster_stays_at_home(lenient: Site) -> None:
    found = advise(lenient, market(lines=()), SolveOptions())
    assert not found.is_offloading
    assert found.break_even is None
    assert found.failed[Contender.PRFAAS] == "the market has no [[lines]]"


def test_provenance_does_not_depend_on_what_the_site_has(lenient: Site) -> None:
    found = advise(lenient, market(), SolveOptions())
    empty = replace(lenient, clusters=tuple(replace(each, instances=0) for each in lenient.clusters))
    some, none = (purchases_json(site, market(), found)["provenance"] for site in (lenient, empty))
    assert f"T_prefill {FAR}" in some
    assert none == some


def test_hardware_without_a_price_is_named(lenient: Site) -> None:
    with pytest.raises(InputError, match="h20x8"):
        advise(lenient, market(hardware=()), SolveOptions())


def test_a_target_that_home_cannot_keep_is_said(case_study: Site) -> None:
    found = advise(case_study, market(demand=Demand(months=1, rate_req_per_s=1.0)), SolveOptions())
    assert "9.72 s even without load" in found.failed[Contender.HOMOGENEOUS]
    assert tariff_of(found) == inf
    assert Contender.BIGGER_LOCAL in found.ways  # it keeps the target, too
    said, tariff, _ = verdict(market(), found)
    assert said.endswith("PrfaaS-PD is cheapest; no other way that may be recommended serves")
    assert tariff == "  Offloading all in all pays at every tariff: no other way that may be recommended serves."


def test_a_line_that_is_too_thin_is_named(case_study: Site) -> None:
    """By what is sent on it, not by what home alone would do."""
    lengths = Lengths(np.array([1_000.0, 2_000.0, 8_000.0, 40_000.0]), np.full(4, 0.25))
    site = replace(case_study, workload=replace(case_study.workload, lengths=lengths))
    found = advise(site, market(lines=tuple(LineOffer(gbps=g) for g in (0.3, 0.1)), fast_at_home=True), SolveOptions())
    assert "even without load on the widest line, of 0.3 Gbit/s, 5 s" in found.failed[Contender.PRFAAS]
    least_s, home_s = (float(found.failed[way].split()[3]) for way in (Contender.PRFAAS, Contender.HOMOGENEOUS))
    assert least_s > 1.1 * home_s

"""The Pareto front of cost, rate and P90 TTFT, against brute force over small markets."""

import itertools
from dataclasses import replace
from functools import cache
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InputError
from planner.model.market import Demand, HardwareOffer, LineOffer, Market
from planner.model.queueing import mgk_wait
from planner.model.site import Site
from planner.solve.buying.advice import posed
from planner.solve.buying.pareto import FrontPoint, pareto_front, unbeaten
from planner.solve.buying.systems import QUEUE_BINS, Contender, SizedSystem, even_cuts, late
from planner.solve.loaded import loaded_ttft
from planner.solve.problem import SolveOptions
from planner.solve.search import Cut, rate_at

FAR, NEAR = "h200x8", "h20x8"
HOURS = 730
SYSTEM = SizedSystem(
    contender=Contender.HOMOGENEOUS, num_prfaas=0, num_prefill=1, num_decode=1, line=None, threshold_tokens=inf,
    sent_bytes=0.0, busy=(),
)  # fmt: skip
RATE, RATES = 0.5, (0.5, 1.0)
TARGETS, TARGETS_S = (0.5, 1.0), (8.0, 16.0)
CENT = 0.01
LARGEST = (3, 6, 2)  # instances of each stage that brute force tries

Goals = tuple[float, float, float]


@pytest.fixture(scope="module")
def small(case_study: Site) -> Site:
    site = replace(case_study, workload=replace(case_study.workload, lengths=case_study.workload.lengths.thinned(60)))
    # With this TBT colocated nodes stand almost idle: brute force need not try them.
    return replace(site, slo=replace(site.slo, ttft_p90_s=16.0, tbt_s=0.03))


def market(rng: np.random.Generator) -> Market:
    """Prices of GPUs and a line, none of them out of reach."""
    offers = tuple(
        HardwareOffer(hardware=name, gpus=8, rent_per_gpu_hour=float(rng.uniform(0.5, 6.0)), owned=int(rng.integers(3)))
        for name in (FAR, NEAR)
    )
    line = LineOffer(gbps=40, per_month=float(rng.uniform(0, 20_000)), per_gb=float(rng.uniform(0, 0.02)))
    return Market(schema=1, demand=Demand(months=1, rate_req_per_s=RATE), hardware=offers, lines=(line,))


def every_system(site: Site, of: Market) -> list[Goals]:
    """(cost a month, requests/s, P90 TTFT target) of all small systems that keep it: PrfaaS-PD and homogeneous PD."""
    problem, _ = posed(site, SolveOptions())
    line, output = of.lines[0], site.workload.output_tokens
    service_s = problem.decode.full_step_s * output
    wired = problem.with_capacity(egress_bytes_per_s=line.gbps * 1.25e8)
    found = []
    for cut in even_cuts(problem):
        split = Cut(rate=0, num_prefill=1, num_decode=1, cut=cut)
        stations = loaded_ttft(wired, split, output, wired.lengths.thinned(QUEUE_BINS)).stations

        @cache
        def tardy(at: int, servers: int, decode: int, rate: float, seconds: float, stations=stations) -> float:
            wait = mgk_wait(rate, decode * problem.decode.max_running, service_s, service_s**2)
            return late(replace(stations[at], servers=servers), rate, wait, seconds)

        is_alone = cut == len(problem.lengths.tokens)
        for far, near, decode in itertools.product(*(range(most + 1) for most in LARGEST)):
            if is_alone != (far == 0) or not decode:
                continue
            sized = wired.with_capacity(num_prfaas=far, num_pd=near + decode)
            for rate, seconds in itertools.product((share * RATE for share in RATES), TARGETS_S):
                if rate_at(sized.loads, sized.capacity, near, cut) <= rate:
                    continue
                if tardy(0, near, decode, rate, seconds) + tardy(1, far, decode, rate, seconds) <= 0.1:
                    found.append((_cost(of, far, near + decode, wired.loads.egress_bytes[cut] * rate), rate, seconds))
    return found


def is_beaten(one: Goals, by: Goals) -> bool:
    """Nowhere better by more than rounding, and somewhere worse."""
    (cost, rate, seconds), (less, more, earlier) = one, by
    if less > cost + CENT or more < rate or earlier > seconds:
        return False
    return less < cost - CENT or more > rate or earlier < seconds


def _cost(of: Market, far: int, near: int, bytes_per_s: float) -> float:
    rents = {offer.hardware: offer.rent_per_gpu_hour or 0.0 for offer in of.hardware}
    owned = {offer.hardware: offer.owned for offer in of.hardware}
    instances = sum(max(0, count - owned[name]) * rents[name] * 8 * HOURS for name, count in ((FAR, far), (NEAR, near)))
    line = of.lines[0]
    return instances + (line.per_month + line.per_gb * bytes_per_s * HOURS * 3600 / 1e9 if far else 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_the_front_is_that_of_all_small_systems(small: Site, seed: int) -> None:
    of = market(np.random.default_rng(seed))
    front = pareto_front(small, of, SolveOptions(), rates=RATES, targets=TARGETS)
    able = every_system(small, of)

    wanted = {each for each in able if not any(is_beaten(each, other) for other in able)}
    found = {(point.cost_per_month, point.rate_req_per_s, point.ttft_p90_s) for point in front}
    assert {(round(cost), *goals) for cost, *goals in found} == {(round(cost), *goals) for cost, *goals in wanted}


@given(st.lists(st.tuples(*(st.integers(1, 4) for _ in range(3))), min_size=1, max_size=12))
def test_only_what_is_beaten_is_left_out(goals: list[tuple[int, int, int]]) -> None:
    points = [
        FrontPoint(cost_per_month=cost, rate_req_per_s=rate, ttft_p90_s=seconds, system=SYSTEM)
        for cost, rate, seconds in goals
    ]
    front = unbeaten(points)
    assert len({point.goals for point in front}) == len(front)
    assert not any(one.beats(two) for one in front for two in front)
    for point in points:
        assert any(each.goals == point.goals or each.beats(point) for each in front)


def test_hardware_without_a_price_is_had_only_as_far_as_it_is_owned(small: Site) -> None:
    offers = (
        HardwareOffer(hardware=FAR, gpus=8, owned=1, kw_per_gpu=1.0, per_kwh=0.1),
        HardwareOffer(hardware=NEAR, gpus=8, rent_per_gpu_hour=2.0),
    )
    of = Market(schema=1, demand=Demand(months=1, rate_req_per_s=RATE), hardware=offers, lines=(LineOffer(gbps=40),))
    front = pareto_front(small, of, SolveOptions(), rates=(1.0,), targets=(1.0,))
    assert max(point.system.num_prfaas for point in front) <= 1


def test_a_front_needs_a_target(small: Site) -> None:
    free = replace(small, slo=replace(small.slo, ttft_p90_s=None))
    with pytest.raises(InputError, match="ttft_p90_s"):
        pareto_front(free, market(np.random.default_rng(0)), SolveOptions())

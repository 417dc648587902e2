from dataclasses import replace
from math import exp, lgamma, log

import numpy as np
import pytest

from planner.model.queueing import LoadedStations, Station, Wait, erlang_b, erlang_c, mgk_wait, predict_ttft


def test_erlang_c_of_one_server_is_the_load():
    assert erlang_c(1, 0.7) == pytest.approx(0.7)


@pytest.mark.parametrize(("servers", "offered"), [(10, 8.0), (100, 80.0), (400, 390.0)])
def test_erlang_c_agrees_with_its_definition(servers, offered):
    # a^j / j!, by logarithms: powers and factorials of hundreds overflow.
    terms = [j * log(offered) - lgamma(j + 1) for j in range(servers)]
    last = servers * log(offered) - lgamma(servers + 1) + log(servers / (servers - offered))
    waits = 1 / (1 + sum(exp(term - last) for term in terms))
    assert erlang_c(servers, offered) == pytest.approx(waits, rel=1e-9)


def test_a_full_system_makes_everybody_wait():
    assert erlang_c(2, 2.0) == 1.0


def test_m_m_1_and_m_d_1():
    assert mgk_wait(0.5, 1, 1.0, 2.0).mean_s == pytest.approx(1.0)
    assert mgk_wait(0.5, 1, 1.0, 1.0).mean_s == pytest.approx(0.5)
    assert mgk_wait(1.0, 1, 1.0, 1.0).mean_s == float("inf")


def test_an_empty_system_has_the_services_own_ttft():
    station = Station(weights=np.full(10, 0.1), prefill_s=np.arange(1.0, 11.0), after_s=np.zeros(10), servers=3)
    found = predict_ttft([station], Wait(0.0, 0.0), 1e-9)
    assert (found.mean_s, found.p90_s) == (pytest.approx(5.5), pytest.approx(9.0, abs=1e-6))


def test_an_unstable_queue_never_answers():
    station = Station(weights=np.ones(1), prefill_s=np.ones(1), after_s=np.zeros(1), servers=1)
    assert predict_ttft([station], Wait(0.0, 0.0), 2.0).p90_s == float("inf")


def test_bursts_make_queues_longer_and_parts_of_them_less_so():
    """Allen–Cunneen: deterministic services in ca² = 3 wait as long as three times those of Poisson arrivals."""
    assert mgk_wait(0.5, 1, 1.0, 1.0, 3.0).mean_s == pytest.approx(3 * mgk_wait(0.5, 1, 1.0, 1.0).mean_s)
    whole = Station(weights=np.ones(1), prefill_s=np.ones(1), after_s=np.zeros(1), servers=1, burst_index=3.0)
    half = replace(whole, weights=np.full(1, 0.5))
    assert half.wait(1.0).mean_s == pytest.approx(2 * mgk_wait(0.5, 1, 1.0, 1.0).mean_s)


def test_the_chance_that_all_places_are_taken():
    assert [erlang_b(1, 1.0), erlang_b(2, 1.0), erlang_b(20, 0.0)] == pytest.approx([0.5, 0.2, 0.0])
    assert erlang_b(20, 20.0) == pytest.approx(0.1589, abs=1e-4)


def test_few_requests_that_wait_long_for_decode_are_late() -> None:
    """By its mean of half a second the wait would make no request late."""
    station = Station(weights=np.ones(1), prefill_s=np.ones(1), after_s=np.zeros(1), servers=1)
    loaded = LoadedStations.at([station], Wait(0.1, 5.0), 1e-9)
    assert loaded.late(2.0) == pytest.approx(0.1 * exp(-1 / 5), abs=0.01)

import numpy as np
import pytest

from planner.model.throughput import (
    decode_seconds,
    kv_throughput,
    lambda_max,
    theta,
    theta_pd_d,
    theta_pd_p,
    theta_prfaas,
)


def test_equations_by_hand():
    assert kv_throughput(100.0, 4.0) == 25.0
    assert list(kv_throughput(np.array([100.0, 60.0]), np.array([4.0, 3.0]))) == [25.0, 20.0]
    assert theta_prfaas(4, 2.0, 30.0, 10.0) == 2.0  # compute binds
    assert theta_prfaas(4, 2.0, 10.0, 10.0) == 1.0  # egress binds
    assert theta_pd_p(3, 1.5) == 2.0
    assert theta_pd_d(5, decode_seconds(20, 0.025, 1000)) == pytest.approx(4.0)
    assert lambda_max(1.0 / 0.5, 3.0 / 0.5, 4.0) == 2.0


def test_a_stage_that_is_asked_for_nothing_limits_nothing_and_nobody_serves_nothing():
    assert list(theta(3, np.array([0.0, 2.0]))) == [np.inf, 1.5]
    assert list(theta(0, np.array([0.0, 2.0]))) == [np.inf, 0.0]
    assert lambda_max(theta_prfaas(0, 0.0, 0.0, 0.0), 3.0, 4.0) == 3.0


def test_a_class_that_asks_p_times_as_much_of_every_request_gets_its_rate_over_p():
    p = 0.25
    assert theta_pd_p(3, p * 1.5) == pytest.approx(theta_pd_p(3, 1.5) / p)


def test_the_case_study_from_its_own_numbers(case_study):
    profile, p = case_study.profile, 0.495723
    prfaas = theta_prfaas(4, profile.prefill_on("h200x8")(45_045.6), 12.5e9, profile.kv_size()(45_045.6))
    pd_p = theta_pd_p(3, profile.prefill_on("h20x8")(10_223.6))
    decode = profile.decode_on("h20x8")
    pd_d = theta_pd_d(5, decode_seconds(decode.max_running, decode.full_step_s, 1024))
    assert (prfaas, pd_p, pd_d) == pytest.approx((1.6064, 1.6431, 3.909), rel=1e-3)
    assert lambda_max(prfaas / p, pd_p / (1 - p), pd_d) == pytest.approx(3.2406, rel=1e-3)

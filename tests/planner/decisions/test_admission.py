import pytest

from planner.decisions.admission import (
    ACCEPTED,
    AdmissionLimits,
    AdmissionPolicy,
    DecodeForecast,
    Drain,
    RejectReason,
    admit,
    admit_to_decode,
)

LIMITS = AdmissionLimits(ttft_s=10.0, decode_requests=8)


def decided(policy: AdmissionPolicy, *, ttft_s: float = 1.0, decoding: int = 0, forecast: DecodeForecast | None = None):
    found = admit(
        policy, LIMITS, ttft_s=ttft_s, decoding=decoding, forecast=forecast or DecodeForecast(20.0), now=100.0
    )
    return found.reason


def busy(running: int) -> DecodeForecast:
    forecast = DecodeForecast(20.0)
    forecast.running = running
    return forecast


def test_accept_all_accepts():
    assert decided(AdmissionPolicy.ACCEPT_ALL, ttft_s=1e9, decoding=1000) is None


@pytest.mark.parametrize("policy", [AdmissionPolicy.BASELINE, AdmissionPolicy.EARLY, AdmissionPolicy.PREDICTION])
def test_a_ttft_that_cannot_be_kept_is_refused_at_once(policy):
    assert decided(policy, ttft_s=10.1) is RejectReason.PREFILL_OVERLOAD
    assert decided(policy, ttft_s=9.9) is None


def test_each_policy_looks_at_its_own_decode_load():
    assert decided(AdmissionPolicy.BASELINE, decoding=8, forecast=busy(8)) is None
    assert decided(AdmissionPolicy.EARLY, decoding=8, forecast=busy(0)) is RejectReason.DECODE_OVERLOAD
    assert decided(AdmissionPolicy.EARLY, decoding=7, forecast=busy(8)) is None
    assert decided(AdmissionPolicy.PREDICTION, decoding=8, forecast=busy(0)) is None
    assert decided(AdmissionPolicy.PREDICTION, decoding=0, forecast=busy(8)) is RejectReason.DECODE_OVERLOAD


def test_only_the_baseline_refuses_after_prefill():
    assert admit_to_decode(AdmissionPolicy.EARLY, LIMITS, 8) is ACCEPTED
    assert admit_to_decode(AdmissionPolicy.BASELINE, LIMITS, 7) is ACCEPTED
    refused = admit_to_decode(AdmissionPolicy.BASELINE, LIMITS, 8)
    assert refused.reason is RejectReason.DECODE_OVERLOAD_AFTER_PREFILL


def test_a_refusal_says_when_to_come_back():
    found = admit(AdmissionPolicy.EARLY, LIMITS, ttft_s=14.0, decoding=0, forecast=DecodeForecast(20.0), now=0.0)
    assert found.retry_after_s == pytest.approx(4.0)


def test_the_forecast_fades_and_fills():
    forecast = busy(10)
    assert forecast.running_at(100.0, 100.0) == 10
    assert forecast.running_at(120.0, 100.0) == pytest.approx(10 / 2.71828, rel=1e-4)
    forecast.on_accepted(120.0, 100.0)
    assert forecast.running_at(119.0, 100.0) < forecast.running_at(120.0, 100.0)
    forecast.on_started(120.0)
    assert forecast.running == 11
    forecast.on_ended(80.0, 120.0)
    assert (forecast.running, forecast.decode_s) == (10, pytest.approx(21.0))


def test_a_dropped_request_joins_no_more():
    forecast = busy(0)
    forecast.on_accepted(5.0, 0.0)
    forecast.on_dropped(5.0)
    assert forecast.running_at(10.0, 0.0) == 0


def test_limits_must_leave_room():
    with pytest.raises(ValueError, match="above 0"):
        AdmissionLimits(ttft_s=0, decode_requests=1)


def test_a_line_is_as_slow_as_its_last_turns():
    drain = Drain()
    assert (drain.is_known, drain.wait_s(3)) == (False, 4.0)
    drain.on_line(100.0)
    for at in (102.0, 104.0, 106.0):
        drain.on_turn(at)
    assert (drain.is_known, drain.wait_s(0), drain.wait_s(4)) == (True, 2.0, 10.0)
    drain.on_line(500.0)  # nobody waited for a while: that was no turn
    drain.on_turn(502.0)
    assert drain.wait_s(0) == 2.0
    for at in range(503, 543):
        drain.on_turn(float(at))
    assert drain.wait_s(0) == pytest.approx(1.0, rel=0.01)

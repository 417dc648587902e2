from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.admission.classes import ServiceClass
from planner.decisions.admission.overload import (
    ACCEPTED,
    MOST_RETRY_S,
    SPREAD,
    Admission,
    AdmissionPolicy,
    Expected,
    RejectReason,
    admit,
    admit_to_decode,
    spread_s,
)
from planner.decisions.estimates.decoding import DecodeForecast

PROMISED = ServiceClass(ttft_s=10.0, tbt_s=0.1)
REFUSING = [AdmissionPolicy.BASELINE, AdmissionPolicy.EARLY, AdmissionPolicy.PREDICTION]


def admission(
    policy: AdmissionPolicy,
    expected: Expected,
    *,
    promised: ServiceClass = PROMISED,
    room: float = 8,
    decoding: int = 0,
    forecast: DecodeForecast | None = None,
) -> Admission:
    forecast = forecast or DecodeForecast(20.0)
    return admit(policy, promised, expected, room=room, decoding=decoding, forecast=forecast, now=100.0)


def decided(policy: AdmissionPolicy, *, ttft_s: float = 1.0, **given) -> RejectReason | None:
    return admission(policy, Expected(computed_s=ttft_s), **given).reason


def busy(running: int) -> DecodeForecast:
    forecast = DecodeForecast(20.0)
    forecast.running = running
    return forecast


def test_accept_all_accepts():
    assert decided(AdmissionPolicy.ACCEPT_ALL, ttft_s=1e9, decoding=1000) is None


@pytest.mark.parametrize("policy", list(AdmissionPolicy))
def test_nothing_is_refused_to_a_class_that_is_promised_nothing(policy):
    assert decided(policy, ttft_s=1e9, decoding=1000, forecast=busy(1000), promised=ServiceClass(priority=-3)) is None


@pytest.mark.parametrize("policy", REFUSING)
def test_a_ttft_that_cannot_be_kept_is_refused_at_once(policy):
    assert decided(policy, ttft_s=10.1) is RejectReason.PREFILL_OVERLOAD
    assert decided(policy, ttft_s=9.9) is None


def test_the_stage_that_binds_gives_its_name_and_says_when_to_come_back():
    early = AdmissionPolicy.EARLY
    assert admission(early, Expected(computed_s=14.0, arrived_s=12.0)) == Admission(
        False, RejectReason.PREFILL_OVERLOAD, 4.0
    )
    assert admission(early, Expected(computed_s=3.0, arrived_s=12.0)) == Admission(
        False, RejectReason.LINK_OVERLOAD, 2.0
    )
    # Of 8 places at 20 s each, one comes free every 2.5 s; two too many have to go first.
    assert admission(early, Expected(computed_s=1.0), decoding=9) == Admission(False, RejectReason.DECODE_OVERLOAD, 5.0)


def test_what_has_been_waited_counts():
    assert admission(AdmissionPolicy.EARLY, Expected(computed_s=4.0, waited_s=5.0)) is ACCEPTED
    late = admission(AdmissionPolicy.EARLY, Expected(computed_s=4.0, waited_s=7.0))
    assert late.reason is RejectReason.PREFILL_OVERLOAD


def test_length_is_no_overload():
    alone = Expected(computed_s=25.0, alone_s=24.0)
    assert admission(AdmissionPolicy.EARLY, alone) is ACCEPTED
    queued = Expected(computed_s=35.0, alone_s=24.0)
    assert admission(AdmissionPolicy.EARLY, queued) == Admission(False, RejectReason.PREFILL_OVERLOAD, 1.0)


def test_a_deadline_is_a_deadline_for_long_prompts_too():
    found = admission(
        AdmissionPolicy.PREDICTION, Expected(computed_s=25.0, alone_s=24.0), promised=ServiceClass(deadline_s=20.0)
    )
    assert found == Admission(False, RejectReason.DEADLINE, 5.0)


def test_each_policy_looks_at_its_own_decode_load():
    assert decided(AdmissionPolicy.BASELINE, decoding=8, forecast=busy(8)) is None
    assert decided(AdmissionPolicy.EARLY, decoding=8, forecast=busy(0)) is RejectReason.DECODE_OVERLOAD
    assert decided(AdmissionPolicy.EARLY, decoding=7, forecast=busy(8)) is None
    assert decided(AdmissionPolicy.PREDICTION, decoding=8, forecast=busy(0)) is None
    assert decided(AdmissionPolicy.PREDICTION, decoding=0, forecast=busy(8)) is RejectReason.DECODE_OVERLOAD


def test_a_class_may_have_to_leave_room_for_others():
    modest = ServiceClass(max_load=0.5)
    assert decided(AdmissionPolicy.EARLY, decoding=3, promised=modest) is None
    assert decided(AdmissionPolicy.EARLY, decoding=4, promised=modest) is RejectReason.DECODE_OVERLOAD
    assert decided(AdmissionPolicy.EARLY, decoding=4) is None
    with pytest.raises(ValueError, match=r"max_load=1\.5: must be above 0 and at most 1"):
        ServiceClass(max_load=1.5)


def test_only_the_baseline_refuses_after_prefill():
    def found(policy: AdmissionPolicy, decoding: int, promised: ServiceClass = PROMISED) -> Admission:
        return admit_to_decode(policy, promised, room=8, decoding=decoding, forecast=DecodeForecast(20.0))

    assert found(AdmissionPolicy.EARLY, 8) is ACCEPTED
    assert found(AdmissionPolicy.BASELINE, 7) is ACCEPTED
    assert found(AdmissionPolicy.BASELINE, 8, ServiceClass()) is ACCEPTED
    assert found(AdmissionPolicy.BASELINE, 8) == Admission(False, RejectReason.DECODE_OVERLOAD_AFTER_PREFILL, 2.5)


@given(
    policy=st.sampled_from(list(AdmissionPolicy)),
    seconds=st.tuples(*[st.floats(0, 1e4)] * 4),
    ttft_s=st.floats(0.01, 1e4) | st.just(inf),
    deadline_s=st.floats(0.01, 1e4) | st.just(inf),
    decoding=st.integers(0, 100),
    room=st.floats(1, 50),
)
def test_who_is_refused_is_told_why_and_when_and_more_load_never_helps(
    policy, seconds, ttft_s, deadline_s, decoding, room
):
    computed_s, alone_s, arrived_s, waited_s = seconds
    alone_s = min(alone_s, computed_s)
    promised = ServiceClass(ttft_s=ttft_s, deadline_s=deadline_s)

    def found(queue_s: float, more: int) -> Admission:
        expected = Expected(computed_s=computed_s + queue_s, alone_s=alone_s, arrived_s=arrived_s, waited_s=waited_s)
        forecast = busy(decoding + more)
        return admit(policy, promised, expected, room=room, decoding=decoding + more, forecast=forecast, now=0.0)

    now = found(0.0, 0)
    assert now.accepted == (now.reason is None)
    assert (now.retry_after_s > 0) == (not now.accepted)
    if not now.accepted:
        assert not found(1.0, 0).accepted
        assert not found(0.0, 1).accepted


@given(st.floats(0, 1e6), st.floats(0, 1, exclude_max=True))
def test_those_refused_together_come_back_apart_and_not_too_soon(retry_after_s, tie):
    told_s = spread_s(retry_after_s, tie)
    assert min(retry_after_s, MOST_RETRY_S / (1 + SPREAD)) <= told_s <= MOST_RETRY_S
    assert spread_s(10.0, 0.1) < spread_s(10.0, 0.9)


@pytest.mark.parametrize("field", ["ttft_s", "tbt_s", "deadline_s"])
def test_promises_are_above_nothing(field):
    with pytest.raises(ValueError, match=f"{field}=0: must be above 0"):
        ServiceClass(**{field: 0})


def test_priorities_are_bounded():
    with pytest.raises(ValueError, match="priority=101: must be from -100 to 100"):
        ServiceClass(priority=101)

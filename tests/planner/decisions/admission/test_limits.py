"""Buckets and places: never more than is allowed, never a wait that is not needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.admission.limits import (
    MAX_DEBT_S,
    MINUTE_S,
    Bucket,
    Limit,
    LimitRefusal,
    TenantLimits,
    Used,
    entered,
    left,
    read,
    settled,
    solvent,
)

SIXTY = TenantLimits(requests=Bucket(60))


def let_in(found: Used | LimitRefusal) -> Used:
    assert isinstance(found, Used)
    return found


def refused(found: Used | LimitRefusal) -> LimitRefusal:
    assert isinstance(found, LimitRefusal)
    return found


def test_a_minutes_requests_may_come_at_once_and_then_one_by_one():
    used = Used()
    for _ in range(60):
        used = let_in(entered(SIXTY, used, 1000.0))
    assert refused(entered(SIXTY, used, 1000.0)) == LimitRefusal(Limit.REQUESTS, 1.0)
    assert refused(entered(SIXTY, used, 1000.25)).wait_s == pytest.approx(0.75)
    used = let_in(entered(SIXTY, used, 1001.0))
    assert refused(entered(SIXTY, used, 1001.0)).wait_s == pytest.approx(1.0)


@given(
    per_minute=st.integers(1, 10_000),
    comings=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 3_000)), max_size=60),
)
def test_never_more_than_a_bucket_and_what_has_run_in(per_minute: int, comings: list[tuple[float, int]]):
    """Of requests that fit the bucket; one that waits as told is let in."""
    bucket, full_at, now, taken = Bucket(per_minute), 0.0, 100.0, 0
    for pause_s, amount in comings:
        now += pause_s
        amount = min(amount, per_minute)
        wait_s = bucket.wait_s(amount, full_at, now)
        assert bucket.wait_s(amount, full_at, now + wait_s + 1e-6) == 0
        if not wait_s:
            full_at = bucket.taken(amount, full_at, now)
            taken += amount
        assert taken <= per_minute * (1 + (now - 100.0) / MINUTE_S) + 1e-3


def test_what_an_answer_took_is_owed():
    limits = TenantLimits(tokens=Bucket(600))
    used = let_in(read(limits, let_in(entered(limits, Used(), 0.0)), 500, 1, 0.0))
    used = settled(limits, used, 400, 0.0)
    assert left(Bucket(600), used.tokens_full_at, 0.0) == (600, 0, 90.0)
    assert refused(entered(limits, used, 0.0)).limit is Limit.TOKENS
    assert refused(entered(limits, used, 0.0)).wait_s == pytest.approx(30.1)  # 300 owed, and one to take
    let_in(entered(limits, used, 30.2))


def test_tokens_of_a_request_that_came_to_nothing_are_given_back():
    limits = TenantLimits(tokens=Bucket(600))
    used = let_in(read(limits, Used(), 500, 1, 0.0))
    assert refused(read(limits, used, 500, 1, 0.0)).wait_s == pytest.approx(40.0)
    assert settled(limits, used, -500, 7.0).tokens_full_at == 7.0


def test_a_prompt_longer_than_the_bucket_waits_until_that_is_full():
    limits = TenantLimits(tokens=Bucket(600))
    used = let_in(read(limits, Used(), 6000, 1, 0.0))
    assert used.tokens_full_at == 600.0
    assert refused(read(limits, used, 6000, 1, 590.0)).wait_s == pytest.approx(10.0)


def test_requests_at_once():
    limits = TenantLimits(at_once=2)
    used = let_in(entered(limits, Used(), 0.0))
    assert refused(read(limits, used, 1, 3, 0.0)).limit is Limit.AT_ONCE
    used = let_in(read(limits, used, 1, 2, 0.0))
    assert used.at_once == 2
    assert refused(entered(limits, used, 0.0)) == LimitRefusal(Limit.AT_ONCE, 1.0)


def test_a_limit_that_is_lowered_holds_at_once():
    used = Used()
    for _ in range(30):
        used = let_in(entered(SIXTY, used, 0.0))
    assert used.requests_full_at == 30.0
    assert refused(entered(TenantLimits(requests=Bucket(1)), used, 0.0)).wait_s == 30.0


def test_a_prompt_is_not_read_while_tokens_of_others_are_owed() -> None:
    limits = TenantLimits(tokens=Bucket(60))
    assert solvent(limits, Used(), 0.0) == Used()
    owing = settled(limits, Used(), 90, 0.0)
    assert solvent(limits, owing, 0.0) == LimitRefusal(Limit.TOKENS, 31.0)
    assert solvent(limits, owing, 31.0) == owing
    assert solvent(TenantLimits(at_once=1), Used(at_once=9), 0.0) == Used(at_once=9)


@pytest.mark.parametrize("now", [0.0, 1234.567, 98765.4321, 3e6 + 0.123])
def test_a_bucket_lets_in_what_it_says_whatever_the_time(now: float):
    for per_minute in range(1, 601):
        limits, used, count = TenantLimits(requests=Bucket(per_minute)), Used(), 0
        while isinstance(found := entered(limits, used, now), Used):
            used, count = found, count + 1
        assert count == per_minute
        assert left(Bucket(per_minute), used.requests_full_at, now).remaining == 0


def test_what_was_owed_unknown_is_paid_off_soon():
    limits = TenantLimits(tokens=Bucket(10_000))
    used = Used()
    for _ in range(50):
        used = let_in(read(limits, let_in(entered(limits, used, 0.0)), 10, 1, 0.0))
    for _ in range(50):
        used = settled(limits, used, 8_000, 0.0)
    assert refused(entered(limits, used, 0.0)).wait_s == pytest.approx(MAX_DEBT_S, abs=0.1)


def test_what_an_answer_may_have_is_taken_before_it_begins_and_given_back():
    limits = TenantLimits(tokens=Bucket(10_000))
    used = let_in(read(limits, Used(), 10 + 8_000, 1, 0.0))
    assert refused(read(limits, used, 10 + 8_000, 1, 0.0)).limit is Limit.TOKENS
    used = settled(limits, used, 300 - 8_000, 0.0)
    assert left(Bucket(10_000), used.tokens_full_at, 0.0).remaining == 9_690

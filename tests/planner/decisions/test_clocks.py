"""Every rule that takes `now` says something finite on any clock: after a boot, after years of uptime or of silence."""

from math import inf, isfinite

from hypothesis import given
from hypothesis import strategies as st

from node.process.restarts import MAX_BACKOFF_S, Restarts
from planner.decisions.admission.limits import Bucket, LimitRefusal, TenantLimits, Used, entered, left, read, settled
from planner.decisions.admission.waiting import DrainRate, WaitQueue
from planner.decisions.estimates.coding import CodingEstimate
from planner.decisions.estimates.decoding import DecodeForecast, PrefillShare
from planner.decisions.estimates.durations import LearnedCost, MoveDelays
from planner.decisions.failures.poison import MAX_RETRY_S, TRIAL_S, Poison
from planner.decisions.failures.retries import FailedStage, FailureKind, Next, RetryBudget
from planner.decisions.links.breaker import MAX_RETRY_S as MAX_PROBE_RETRY_S
from planner.decisions.links.breaker import PROBE_S, Breaker, BreakerState
from planner.decisions.links.paths import Paths
from planner.decisions.links.shares import LineSender, SharedBudget
from planner.decisions.views import ClusterKind, NodeView, Role
from tests.clocks import times

NODE = NodeView(node_id="n", cluster="c", kind=ClusterKind.PD, role=Role.PREFILL)


@given(clock=times(), decode_s=st.sampled_from([1e-6, 1.0, 1e6]), ahead_s=st.floats(-1e6, 1e6))
def test_a_forecast_counts_nobody_twice(clock, decode_s, ahead_s):
    forecast = DecodeForecast(decode_s)
    for now in clock:
        forecast.on_accepted(now, now)
        forecast.on_started(now)
        forecast.on_accepted(now + 1.0, now)
        assert 0.0 <= forecast.running_at(now + ahead_s, now) <= 2 * len(clock)
    for now in clock:
        forecast.on_ended(now, clock[-1])
    assert forecast.decode_s > 0


@given(clock=times(min_size=2))
def test_costs_that_were_learned_are_trusted_less_and_stay_finite(clock):
    cost = LearnedCost()
    prior_s = cost.prefill_s(NODE, 4096, 0)
    for now in clock:
        cost.as_of(now)
        cost.tried("n", "c")
        cost.observe("n", "c", 4096, 0, 10 * prior_s)
        assert 0.0 < cost.prefill_s(NODE, 4096, 0) < inf
    cost.as_of(clock[-1] + 1e9)
    assert cost.prefill_s(NODE, 4096, 0) <= 1.01 * prior_s


@given(clock=times())
def test_delays_of_moves_fade(clock):
    delays = MoveDelays()
    for now in clock:
        delays.failed("a", "b", 1.0, 2.0, now)
        assert all(0.0 < each < inf for each in delays.at(now).values())
    assert not delays.at(clock[-1] + 1e9)


@given(clock=times(), seconds=st.floats(0.0, 100.0))
def test_the_share_of_prompts_fades(clock, seconds):
    share = PrefillShare()
    for now in clock:
        share.add(seconds, now)
        assert 0.0 <= share.at(now) <= len(clock) * 100.0
    assert share.at(clock[-1] + 1e9) == 0.0


@given(clock=times(), saved=st.integers(0, 1000))
def test_ratios_of_coding_stay_ratios(clock, saved):
    coding = CodingEstimate()
    for now in clock:
        coding.observe(1000, saved, 1.0, now)
        assert 0.0 <= coding.ratio(now) <= 1.0
    assert coding.ratio(clock[-1] + 1e9) == 1.0


@given(clock=times())
def test_retries_are_bounded_by_their_budget(clock):
    budget = RetryBudget(0.1, 2.0)
    tried = 0
    for now in clock:
        budget.request(now)
        rule = budget.rule_after(now, FailedStage.PREFILL, FailureKind.TROUBLE, tries=1, max_tries=3, deaths=0)
        tried += rule.next is Next.ELSEWHERE
    assert tried >= min(2, len(clock))
    assert budget.rule_after(
        clock[-1] + 1e9, FailedStage.PREFILL, FailureKind.TROUBLE, tries=1, max_tries=3, deaths=0
    ).next is Next.ELSEWHERE  # fmt: skip


@given(clock=times(), kills=st.sampled_from([1, 3, 2000]))
def test_a_shape_that_kills_for_ever_is_tried_again_at_last(clock, kills):
    poison = Poison()
    now = clock[0]
    for _ in range(kills):
        poison.killed("shape", now)
        wait_s = poison.let_in("shape", now)
        assert 0.0 < wait_s <= MAX_RETRY_S + 1e-3
        now += MAX_RETRY_S + 1.0
        assert poison.let_in("shape", now) == 0.0
        assert 0.0 < poison.let_in("shape", now) <= TRIAL_S + 1e-3
    for later in clock:
        poison.answered("shape", now + later)
        assert poison.let_in("shape", now + later) == 0.0


@given(clock=times(), deaths=st.sampled_from([1, 20, 3000]))
def test_an_engine_that_dies_for_ever_is_started_again_as_often_as_is_wanted(clock, deaths):
    restarts = Restarts(max_restarts=10_000)
    for now in (*clock, *(clock[-1] for _ in range(deaths))):
        wait_s = restarts.on_death(now)
        assert wait_s is not None
        assert 0.0 < wait_s <= MAX_BACKOFF_S


@given(clock=times())
def test_a_breaker_probes_soon_whenever_it_opened(clock):
    breaker = Breaker()
    for now in clock:
        breaker.on_failed(now)
        at = breaker.next_probe_time()
        assert at is not None
        assert at - now <= max(MAX_PROBE_RETRY_S, PROBE_S) + 1e-3
        assert breaker.wants_probe(max(at, now)) or breaker.state is BreakerState.OPEN
    breaker.on_arrived(clock[-1])
    assert breaker.up


@given(clock=times())
def test_paths_come_back_whenever_something_arrives(clock):
    paths = Paths()
    for now in clock:
        paths.failed("a", ["b"], "x", "far", now)
        assert not paths.is_up("a", "x", "far")
        paths.lines_to_probe(now)
        paths.arrived("a", "x", "far", now)
        assert paths.is_up("a", "x", "far")


@given(clock=times(), requests=st.integers(1, 1000), tokens=st.integers(1, 100_000))
def test_a_tenant_gets_a_minutes_worth_after_a_minute(clock, requests, tokens):
    limits = TenantLimits(requests=Bucket(requests), tokens=Bucket(tokens))
    used = Used()
    for now in clock:
        got = entered(limits, used, now)
        if not isinstance(got, LimitRefusal):
            used = settled(limits, Used(got.requests_full_at, got.tokens_full_at), 2 * tokens, now)
        else:
            assert 0.0 < got.wait_s <= 120.0 + 1e-3
    later = clock[-1] + 181.0
    for bucket, full_at in ((limits.requests, used.requests_full_at), (limits.tokens, used.tokens_full_at)):
        assert left(bucket, full_at, later).remaining == bucket.per_minute
    assert isinstance(read(limits, used, tokens, 1, later), Used)


@given(clock=times())
def test_a_first_request_is_let_in_on_any_clock(clock):
    limits = TenantLimits(requests=Bucket(1), tokens=Bucket(1), at_once=1)
    for now in clock:
        assert isinstance(entered(limits, Used(), now), Used)


@given(clock=times(), queued=st.lists(st.floats(0.0, 1e12), min_size=2, max_size=4))
def test_shares_of_a_line_never_exceed_it(clock, queued):
    budget = SharedBudget()
    senders = [LineSender(f"s{index}", 1e6, each) for index, each in enumerate(queued)]
    for now in clock:
        for grant in budget.lower(senders, now):
            budget.answered(grant)
        budget.raise_(senders, now)
        assert sum(budget.bound(sender, now) for sender in senders) <= 1.0001e6 * len(senders)
    assert not budget.holds(clock[-1] + 1e9)


@given(clock=times())
def test_a_line_moves_on_any_clock(clock):
    line: WaitQueue[int] = WaitQueue(1000, ageing_s=10.0)
    drain = DrainRate()
    drain.on_line(clock[0])
    for number, now in enumerate(clock):
        line.join(number, now, priority=number % 3)
        assert line.ahead_of(0, inf, now) >= 0
    while (first := line.first(clock[-1])) is not None:
        assert line.serve(first)
        drain.on_turn(clock[-1])
        assert isfinite(drain.wait_s(10))

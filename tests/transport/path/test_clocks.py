"""Pacing, the governor and the monitor of a link work on any clock: after a boot, after years of uptime or of silence."""

from hypothesis import given
from hypothesis import strategies as st

from tests.clocks import times
from tests.transport.path.test_link import info
from transport.coding.choice import Chooser, Situation
from transport.coding.codec import Codec
from transport.path.governor import Governor
from transport.path.link import LinkMonitor
from transport.path.pacing import BudgetShare, DailyBudget, EgressBudget, TokenBucket


@given(clock=times(), busy=st.lists(st.booleans(), min_size=24, max_size=24), rtt=st.sampled_from([0.04, 0.05, 0.2]))
def test_a_governor_has_a_plan_for_every_sample(clock, busy, rtt):
    monitor, governor = LinkMonitor("p"), Governor(4, 64)
    sent = 0
    moments = sorted(
        (now + after, is_busy) for now, is_busy in zip(clock, busy, strict=False) for after in (0, 0.02, 0.3)
    )
    for moment, is_busy in moments:
        sent += 1_000_000
        seen = info(bytes_delivered=sent, bytes_sent=sent, rtt_s=rtt, min_rtt_s=0.04, in_flight_bytes=100_000)
        state = monitor.sample({0: seen}, moment)
        assert 0.0 <= state.utilisation <= 1.0
        assert state.goodput_bytes_per_s < float("inf")
        plan = governor.on_sample(state, moment, busy=is_busy)
        assert 1 <= plan.connections <= 64
        assert plan.pace_bytes_per_s is None or 0 < plan.pace_bytes_per_s < float("inf")


@given(clock=times(), rate=st.floats(1.0, 1e11), size=st.integers(0, 1 << 30))
def test_a_bucket_waits_no_longer_than_its_debt(clock, rate, size):
    bucket = TokenBucket(rate, 1e6)
    for number, now in enumerate(clock):
        bucket.on_sent(size, now)
        assert 0.0 <= bucket.next_send_time(now) - now <= (number + 1) * size / rate + 1e-3
    paid = clock[-1] + len(clock) * (size + 1e6) / rate + 1.0
    assert bucket.next_send_time(paid) == paid


@given(clock=times(), budget=st.sampled_from([1e6, DailyBudget(((0.0, 1e6), (43_200.0, 2e6)))]))
def test_an_egress_keeps_its_budget_on_any_clock(clock, budget):
    egress = EgressBudget(budget)
    for now in clock:
        egress.follow(now)
        egress.take_share(BudgetShare(5e5, 1e6, now + 3.0), now)
        egress.charge(1000, now)
        assert 0.0 <= egress.wait_s(now) <= 1.0
    egress.follow(clock[-1] + 3.1)
    assert egress.bytes_per_s in (1e6, 2e6)


@given(clock=times())
def test_a_codec_is_chosen_on_any_clock(clock):
    chooser = Chooser()
    choices = (Codec.RAW, Codec.ZSTD)
    for now in clock:
        assert chooser.codec_of("kv", choices) in choices
        chooser.on_situation(Situation(link_bytes_per_s=1e6, backlog_bytes=1 << 30, idle_cores=4.0), now)
    assert chooser.codec_of("kv", choices) is Codec.ZSTD

import random
import threading
import time

import pytest

from transport.path.pacing import BULK_LEAVES, BURST_S, BudgetShare, DailyBudget, EgressBudget, TokenBucket


def test_bucket_refills_with_time() -> None:
    bucket = TokenBucket(bytes_per_s=100, burst_bytes=50)
    bucket.on_sent(150, now=0.0)
    assert bucket.next_send_time(0.0) == pytest.approx(1.0)
    assert bucket.next_send_time(1.0) == 1.0


def test_average_holds_whatever_the_sizes() -> None:
    bucket, now, sent = TokenBucket(bytes_per_s=1000, burst_bytes=10), 0.0, 0
    for size in [1, 700, 3, 250, 46] * 20:
        now = bucket.next_send_time(now)
        bucket.on_sent(size, now)
        sent += size
    now = bucket.next_send_time(now)
    assert sent / now == pytest.approx(1000, rel=0.01)


def test_idle_time_earns_no_more_than_the_burst() -> None:
    bucket = TokenBucket(bytes_per_s=100, burst_bytes=50)
    bucket.on_sent(0, now=0.0)
    bucket.on_sent(100, now=1000.0)
    assert bucket.next_send_time(1000.0) == pytest.approx(1000.5)


def test_a_new_rate_holds_from_now_on() -> None:
    bucket = TokenBucket(bytes_per_s=100, burst_bytes=1)
    bucket.on_sent(101, now=0.0)
    bucket.set_rate(1000, now=0.5)
    assert bucket.next_send_time(0.5) == pytest.approx(0.55)


def test_a_clock_that_jumps_back_earns_nothing() -> None:
    bucket = TokenBucket(bytes_per_s=100, burst_bytes=10)
    bucket.on_sent(110, now=50.0)
    assert bucket.next_send_time(10.0) == pytest.approx(11.0)


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0), (-1, 1)])
def test_refuses_what_is_no_rate(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        TokenBucket(rate, burst)


def test_a_daily_budget_holds_from_step_to_step_and_over_midnight() -> None:
    budget = DailyBudget(((8 * 3600, 10e6), (20 * 3600, 50e6)))
    assert [budget.at(h * 3600) for h in (0, 7.99, 8, 19.99, 20, 23.9)] == [50e6, 50e6, 10e6, 10e6, 50e6, 50e6]


@pytest.mark.parametrize("steps", [(), ((5, 1.0), (4, 1.0)), ((0, 0.0),), ((86_400, 1.0),), ((-1, 1.0),)])
def test_refuses_what_is_no_day(steps: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="must"):
        DailyBudget(steps)


def test_what_shares_a_link_shares_its_budget() -> None:
    egress = EgressBudget(1e6)
    start = egress.wait_s(0.0)
    egress.charge(2_000_000, 0.0)
    assert egress.wait_s(0.0) - start == pytest.approx(2.0, abs=0.2)
    egress.set(None, 0.0)
    assert (egress.bytes_per_s, egress.wait_s(0.0)) == (None, 0.0)


def test_a_budget_for_the_whole_day_is_the_one_that_holds_now() -> None:
    assert EgressBudget(DailyBudget(((0.0, 5e6),))).bytes_per_s == 5e6


def shared(leaves: dict[str, float], *, rate: float = 10e6, seconds: float = 20.0) -> dict[str, float]:
    """Bytes per second of senders with always something to send, who wake up to 5 ms late."""
    egress, late, sent = EgressBudget(rate), random.Random(7), dict.fromkeys(leaves, 0)
    ready = dict.fromkeys(leaves, 0.0)
    now = 0.0
    while now < seconds:
        name = min(ready, key=lambda each: ready[each])
        now = ready[name]
        wait_s = egress.wait_s(now, leaves[name])
        if not wait_s:
            egress.charge(int(rate * BURST_S), now)
            sent[name] += int(rate * BURST_S)
        ready[name] = now + wait_s + late.uniform(0.0, 0.005)
    return {name: size / seconds for name, size in sent.items()}


def test_bulk_to_one_peer_waits_for_what_another_one_is_sent() -> None:
    alone = shared({"bulk": BULK_LEAVES})
    assert alone["bulk"] == pytest.approx(10e6, rel=0.01)
    busy = shared({"request": 0.0, "bulk": BULK_LEAVES})
    assert busy["request"] > 0.95 * 10e6
    assert sum(busy.values()) == pytest.approx(10e6, rel=0.01)


def test_what_requests_leave_of_a_budget_is_for_bulk() -> None:
    egress, now, bulk = EgressBudget(10e6), 0.0, 0
    while now < 20.0:
        now += 0.001
        if int(now * 1000) % 100 == 0:
            egress.charge(500_000, now)  # half of the budget
        if not egress.wait_s(now, BULK_LEAVES):
            egress.charge(100_000, now)
            bulk += 100_000
    assert bulk / 20.0 == pytest.approx(5e6, rel=0.05)


def test_a_share_holds_until_it_ends_and_less_whatever_becomes_of_the_budget():
    lent, had = BudgetShare(2.0, 10.0, until=5.0), BudgetShare(18.0, 10.0, until=5.0)
    assert [lent.of(own, 4.0) for own in (10.0, 20.0, 1.0, None)] == [2.0, 2.0, 1.0, None]
    assert [had.of(own, 4.0) for own in (10.0, 20.0, 1.0, None)] == [18.0, 20.0, 1.0, None]
    assert (lent.of(10.0, 5.0), had.of(10.0, 5.0)) == (10.0, 10.0)


def test_a_line_keeps_to_its_share_and_returns_to_its_budget_by_itself():
    egress = EgressBudget(1e6)
    now = time.monotonic()
    egress.take_share(BudgetShare(5e6, 1e6, now + 100.0), now)
    assert egress.bytes_per_s == 5e6
    egress.set(2e6, now)  # another budget: nothing was shared of that
    assert egress.bytes_per_s == 2e6
    egress.take_share(BudgetShare(1e6, 2e6, now + 100.0), now)
    assert egress.bytes_per_s == 1e6
    egress.wait_s(now + 100.0)
    assert egress.bytes_per_s == 2e6


def test_a_share_that_comes_while_another_ends_has_the_last_word():
    """A connection that was working out what holds after the old one must not undo the new one, to which its node has agreed."""
    came, about = threading.Event(), threading.Event()
    now = time.monotonic()

    class Slow(DailyBudget):
        def at(self, second_of_day: float) -> float:
            if threading.current_thread() is sending:
                about.set()
                came.wait(0.05)  # while the lock is held it cannot come
            return 10e6

    sending = threading.Thread(target=lambda: egress.wait_s(now + 2.0))
    egress = EgressBudget(Slow(((0, 10e6),)))
    egress.take_share(BudgetShare(19e6, 10e6, now + 1.0), now)
    sending.start()
    about.wait(20.0)
    egress.take_share(BudgetShare(2.5e6, 10e6, now + 5.0), now + 2.0)
    came.set()
    sending.join(20.0)
    assert egress.bytes_per_s == 2.5e6

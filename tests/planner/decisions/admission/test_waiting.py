import time
import weakref
from collections.abc import Callable
from math import ceil, inf
from statistics import median, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from planner.decisions.admission.waiting import DrainRate, Joined, TenantShare, WaitQueue


def served(line: WaitQueue[str], now: float) -> list[str]:
    order = []
    while (who := line.first(now)) is not None:
        line.leave(who)
        order.append(who)
    return order


def test_equals_come_in_the_order_in_which_they_came():
    line: WaitQueue[str] = WaitQueue(10)
    for at, who in enumerate("abc"):
        line.join(who, float(at))
    assert served(line, 3.0) == ["a", "b", "c"]


def test_priority_then_deadline():
    line: WaitQueue[str] = WaitQueue(10)
    line.join("batch", 0.0, priority=-1, due=5.0)
    line.join("late", 1.0, due=30.0)
    line.join("soon", 2.0, due=20.0)
    line.join("vip", 3.0, priority=5, due=90.0)
    assert served(line, 4.0) == ["vip", "soon", "late", "batch"]


def test_waiting_counts_as_priority():
    line: WaitQueue[str] = WaitQueue(10, ageing_s=10.0)
    line.join("low", 0.0, due=60.0)
    line.join("high", 15.0, priority=2, due=40.0)
    assert line.first(19.0) == "high"
    line.join("later", 22.0, priority=2, due=30.0)
    line.leave("high")
    assert line.first(29.0) == "later"  # two and two: its time is up sooner
    assert line.first(30.0) == "low"  # three and two


def test_a_full_line_gives_the_last_place_to_a_higher_priority():
    line: WaitQueue[str] = WaitQueue(2, ageing_s=10.0)
    line.join("first", 0.0, due=9.0)
    line.join("second", 1.0, due=10.0)
    assert line.join("equal", 2.0) == Joined(False)
    assert line.join("high", 2.0, priority=1) == Joined(True, "second")
    assert "second" not in line
    assert line.join("late", 12.0, priority=1) == Joined(False)  # the last one has waited long enough by now
    assert len(line) == 2


class Waiter:
    """A request that can be seen to be forgotten."""


def test_those_that_have_left_are_forgotten_while_others_stay():
    line: WaitQueue[Waiter] = WaitQueue(10, ageing_s=3600.0)
    alive: weakref.WeakSet[Waiter] = weakref.WeakSet()
    stays = Waiter()
    line.join(stays, 0.0)
    for at in range(2000):
        waiter = Waiter()
        alive.add(waiter)
        line.join(waiter, float(at) / 1000)
        line.leave(waiter)
    assert len(alive) <= 200
    assert line.first(3.0) is stays


def test_who_would_come_before():
    line: WaitQueue[str] = WaitQueue(10)
    line.join("high", 0.0, priority=1, due=5.0)
    line.join("low", 0.0, due=5.0)
    assert [line.ahead_of(priority, 5.0, 1.0) for priority in (2, 1, 0)] == [0, 1, 2]
    assert line.ahead_of(0, 4.0, 1.0) == 1


AGEING_S = 4.0
PRIORITIES = range(-2, 3)


class LineMachine(RuleBasedStateMachine):
    """Whatever happens: bounded, no request forgotten, in order, and none overtaken for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.line: WaitQueue[int] = WaitQueue(6, AGEING_S)
        self.now = 0.0
        self.standing: dict[int, tuple[int, float, float]] = {}
        self.names = 0

    @rule(priority=st.sampled_from(PRIORITIES), patience_s=st.floats(0.1, 50) | st.just(inf))
    def join(self, priority: int, patience_s: float) -> None:
        full = len(self.line) == self.line.limit
        found = self.line.join(self.names, self.now, priority=priority, due=self.now + patience_s)
        assert found.accepted or full
        if found.displaced is not None:
            assert full
            lost, _, since = self.standing.pop(found.displaced)
            assert lost + (self.now - since) // AGEING_S < priority
        if found.accepted:
            self.standing[self.names] = (priority, self.now + patience_s, self.now)
        self.names += 1

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def serve(self) -> None:
        first = self.line.first(self.now)
        if first is None:
            return
        priority, due, since = self.standing[first]
        for other, (other_priority, other_due, other_since) in self.standing.items():
            if other != first and other_priority == priority and other_since == since:
                assert due <= other_due
            # No request that came so much later comes first.
            assert since <= other_since + (max(PRIORITIES) - other_priority + 1) * AGEING_S
        del self.standing[first]
        assert self.line.leave(first)
        assert not self.line.leave(first)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        if self.standing:
            who = data.draw(st.sampled_from(sorted(self.standing)))
            del self.standing[who]
            assert self.line.leave(who)

    @invariant()
    def nobody_is_lost(self) -> None:
        assert len(self.line) == len(self.standing) <= self.line.limit
        assert all(who in self.line for who in self.standing)


TestLine = LineMachine.TestCase


@given(st.lists(st.tuples(st.sampled_from(PRIORITIES), st.floats(0, 100)), max_size=20))
def test_those_who_come_together_are_served_by_priority_and_deadline(waiters):
    line: WaitQueue[int] = WaitQueue(20, AGEING_S)
    for number, (priority, due) in enumerate(waiters):
        line.join(number, 0.0, priority=priority, due=due)
    order = []
    while (who := line.first(3.0)) is not None:
        line.leave(who)
        order.append(who)
    assert order == sorted(range(len(waiters)), key=lambda each: (-waiters[each][0], waiters[each][1], each))


def test_a_line_is_as_slow_as_its_last_turns():
    drain = DrainRate()
    assert (drain.is_known, drain.wait_s(3)) == (False, 4.0)
    drain.on_line(100.0)
    for at in (102.0, 104.0, 106.0):
        drain.on_turn(at)
    assert (drain.is_known, drain.wait_s(0), drain.wait_s(4)) == (True, 2.0, 10.0)
    drain.on_line(500.0)  # no request waited for a while: that was no turn
    drain.on_turn(502.0)
    assert drain.wait_s(0) == 2.0
    for at in range(503, 543):
        drain.on_turn(float(at))
    assert drain.wait_s(0) == pytest.approx(1.0, rel=0.01)


def turns(line: WaitQueue[tuple[str, int]], number: int) -> str:
    order = ""
    for _ in range(number):
        who = line.first(0.0)
        assert who is not None
        line.serve(who)
        order += who[0]
    return order


def crowd(line: WaitQueue[tuple[str, int]], **weights: tuple[int, float]) -> None:
    for flow, (many, weight) in weights.items():
        for number in range(many):
            line.join((flow, number), 0.0, share=TenantShare(flow, weight))


def test_tenants_take_turns_however_many_requests_each_has():
    line: WaitQueue[tuple[str, int]] = WaitQueue(100)
    crowd(line, a=(20, 1.0), b=(3, 1.0))
    assert turns(line, 8) == "abababaa"


def test_a_tenant_of_twice_the_weight_has_twice_the_turns():
    line: WaitQueue[tuple[str, int]] = WaitQueue(100)
    crowd(line, a=(12, 2.0), b=(12, 1.0))
    order = turns(line, 12)
    assert (order.count("a"), order.count("b")) == (8, 4)


def test_a_long_prompt_takes_the_part_of_several_short_ones():
    line: WaitQueue[tuple[str, int]] = WaitQueue(100)
    for number in range(5):
        line.join(("a", number), 0.0, share=TenantShare("a"), cost=4.0)
        line.join(("b", number), 0.0, share=TenantShare("b"), cost=1.0)
    assert turns(line, 6) == "abbbba"


def test_nobody_saves_up_turns():
    line: WaitQueue[tuple[str, int]] = WaitQueue(100)
    crowd(line, a=(10, 1.0))
    assert turns(line, 6) == "aaaaaa"
    crowd(line, b=(10, 1.0))
    order = turns(line, 6)
    assert order.count("a") in (2, 3)


@pytest.mark.parametrize("heavies", [1, 20, 200])
def test_a_light_tenant_waits_no_longer_than_its_share_beside_tenants_that_keep_step(heavies: int):
    """Their requests are ten times as long as its own, which come half as often as it may be served."""
    line: WaitQueue[tuple[str, int]] = WaitQueue(1000)
    for number in range(2 * heavies):
        line.join((f"t{number % heavies}", number), 0.0, share=TenantShare(f"t{number % heavies}"), cost=10.0)
    its_turn = (heavies + 1) / 10
    waits, every, begin = [], ceil(2 * its_turn) + 1, 2 * heavies  # until they are past their first request
    for now in range(begin + 40 * every):
        if now >= begin and (now - begin) % every == 0:
            line.join(("light", now), 0.0, share=TenantShare("light"), cost=1.0)
        first = line.first(0.0)
        assert first is not None
        line.serve(first)
        if first[0] == "light":
            waits.append(now - first[1])
        else:
            line.join((first[0], now + 1000), 0.0, share=TenantShare(first[0]), cost=10.0)
    assert quantiles(waits, n=10)[-1] <= its_turn + 1


def test_a_full_line_is_shared_and_the_tenant_with_most_places_yields():
    line: WaitQueue[tuple[str, int]] = WaitQueue(6)
    crowd(line, a=(6, 1.0))
    for number in range(3):
        displaced = line.join(("b", number), 1.0, share=TenantShare("b")).displaced
        assert displaced == ("a", 5 - number)
    assert line.join(("b", 3), 1.0, share=TenantShare("b")) == Joined(False)
    assert line.join(("a", 9), 1.0, share=TenantShare("a")) == Joined(False)


WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


@given(
    waiting=st.lists(st.tuples(st.sampled_from("abc"), st.floats(1, 9), st.integers(1, 5)), max_size=12),
    served_before=st.integers(0, 4),
    newcomer=st.sampled_from("abc"),
)
def test_how_many_come_before_is_how_many_are_served_before(
    waiting: list[tuple[str, float, int]], served_before: int, newcomer: str
):
    line: WaitQueue[int] = WaitQueue(20)
    for number, (flow, due, cost) in enumerate(waiting):
        line.join(number, 0.0, due=due, share=TenantShare(flow, WEIGHTS[flow]), cost=cost)
    for _ in range(min(served_before, len(line))):
        first = line.first(0.0)
        assert first is not None
        line.serve(first)
    share = TenantShare(newcomer, WEIGHTS[newcomer])
    expected = line.ahead_of(0, 5.0, 0.0, share)
    line.join(-1, 0.0, due=5.0, share=share)
    before = 0
    while (who := line.first(0.0)) != -1:
        assert who is not None
        line.serve(who)
        before += 1
    assert abs(expected - before) <= 2  # turns at the same virtual time go by due time, which is not foreseen


@given(
    waiting=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 5), st.integers(1, 5)), max_size=8
    ),
    served_before=st.integers(0, 3),
    held_back=st.sets(st.sampled_from("abc")),
    priority=st.integers(0, 2),
)
def test_whether_anybody_comes_before_is_whether_any_are_counted(
    waiting: list[tuple[str, int, int, int]], served_before: int, held_back: set[str], priority: int
):
    line: WaitQueue[int] = WaitQueue(20, ageing_s=2.0)
    for number, (flow, rank, due, cost) in enumerate(waiting):
        line.join(number, number / 4, priority=rank, due=due, share=TenantShare(flow, WEIGHTS[flow]), cost=cost)
    for _ in range(min(served_before, len(line))):
        first = line.first(2.0)
        assert first is not None
        line.serve(first)
    for flow in held_back:
        line.hold_back(flow, 3.0)
    for flow in WEIGHTS:
        asked = priority, 3.0, 2.0, TenantShare(flow, WEIGHTS[flow])
        assert line.is_anyone_ahead(*asked) == (line.ahead_of(*asked) > 0)


def test_a_flow_whose_own_part_is_full_holds_nobody_up():
    line: WaitQueue[str] = WaitQueue(10)
    line.join("a1", 0.0, share=TenantShare("a"))
    line.join("a2", 0.0, share=TenantShare("a"))
    line.join("b1", 1.0, share=TenantShare("b"))
    assert line.first(1.0) == "a1"
    line.hold_back("a", 3.0)
    assert line.first(2.0) == "b1"
    assert line.ahead_of(0, inf, 2.0, TenantShare("c")) == 1
    assert line.first(3.0) == "a1"
    assert line.ahead_of(0, inf, 3.0, TenantShare("c")) == 2
    line.leave("b1")
    line.hold_back("a", 9.0)
    assert line.first(4.0) == "a1"  # there is no other request


def test_a_higher_priority_that_is_held_back_holds_nobody_up_either():
    line: WaitQueue[str] = WaitQueue(10)
    line.join("vip", 0.0, priority=9, share=TenantShare("a"))
    line.join("b", 1.0, share=TenantShare("b"))
    line.hold_back("a", 5.0)
    assert line.first(2.0) == "b"
    assert line.first(5.0) == "vip"


def test_holding_back_a_flow_with_nobody_in_line_is_no_harm():
    line: WaitQueue[str] = WaitQueue(10)
    line.hold_back("nobody", 5.0)
    line.join("a", 1.0, share=TenantShare("nobody"))
    assert line.first(1.0) == "a"


MOST_S = 2e-3  # of the processor; four to seven times as much where every request in line is looked at


def test_a_long_line_of_many_tenants_is_quick() -> None:
    line: WaitQueue[int] = WaitQueue(4096, ageing_s=30.0)
    for number in range(line.limit):
        line.join(number, number / 1000, priority=number % 4 == 0, due=40.0, share=tenant(number), cost=number % 97 + 1)
    taken: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], object]) -> None:
        begin = time.thread_time()
        work()
        taken.setdefault(what, []).append(time.thread_time() - begin)

    for number in range(5000, 5030):
        now, share = number / 1000, tenant(number)
        timed("first and served", lambda now=now: line.serve(line.first(now)))
        timed("ahead", lambda now=now, share=share: line.ahead_of(0, 40.0, now, share))
        timed("ahead of urgent ones", lambda now=now, share=share: line.ahead_of(1, 40.0, now, share))
        timed("anyone ahead", lambda now=now, share=share: line.is_anyone_ahead(0, 40.0, now, share))
        timed("join", lambda number=number, now=now, share=share: line.join(number, now, due=40.0, share=share))
        timed("displace", lambda number=number, now=now: line.join(-number, now, due=40.0, share=tenant(-1)))
    assert len(line) == line.limit
    assert {what: median(each) for what, each in taken.items() if median(each) > MOST_S} == {}


def tenant(number: int) -> TenantShare:
    return TenantShare(f"t{number % 1000}" if number >= 0 else "fresh")


def test_other_rules_of_ageing_hold_for_those_in_line() -> None:
    line: WaitQueue[str] = WaitQueue(10)
    line.join("low", 0.0, due=60.0)
    line.join("high", 15.0, priority=2, due=40.0)
    assert line.first(40.0) == "high"
    line.ageing_s = 10.0
    assert line.first(40.0) == "high"  # four and four: its time is up sooner
    line.ageing_s = 5.0
    assert line.first(40.0) == "low"
    line.ageing_s = inf
    assert line.first(41.0) == "high"

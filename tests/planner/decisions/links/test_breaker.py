"""The breaker of a link: opens at the first failure, is probed, closes by itself."""

import itertools

from planner.decisions.links.breaker import (
    MAX_RETRY_S,
    PROBE_S,
    TRANSITIONS,
    Breaker,
    Breakers,
    BreakerState,
    PathEvent,
)


def test_the_first_failure_opens_and_nothing_passes_until_a_probe_has():
    breaker = Breaker()
    breaker.on_failed(10.0)
    assert not breaker.up
    assert not breaker.wants_probe(10.5)
    assert breaker.wants_probe(11.0)
    assert (breaker.state, breaker.up) == (BreakerState.HALF_OPEN, False)
    assert not breaker.wants_probe(11.0)  # one at a time
    breaker.on_arrived(11.1)
    assert breaker.up


def test_retries_become_rarer_up_to_a_limit_and_an_arrival_forgets_them():
    breaker, now, gaps = Breaker(), 0.0, []
    breaker.on_failed(now)
    for _ in range(8):
        wait = breaker.next_probe_time() - now
        gaps.append(wait)
        now += wait
        assert breaker.wants_probe(now)
        breaker.on_failed(now)
    assert gaps == [1, 2, 4, 8, 16, MAX_RETRY_S, MAX_RETRY_S, MAX_RETRY_S]
    breaker.on_arrived(now)
    breaker.on_failed(now)
    assert breaker.next_probe_time() == now + 1


def test_a_probe_of_which_nothing_is_heard_has_failed():
    breaker = Breaker()
    breaker.on_failed(0.0)
    assert breaker.wants_probe(1.0)
    assert not breaker.wants_probe(1.0 + PROBE_S)
    assert breaker.state is BreakerState.OPEN
    assert breaker.wants_probe(breaker.next_probe_time())


def test_failures_of_what_had_left_before_do_not_put_the_probe_off():
    breaker = Breaker()
    for at in (0.0, 0.3, 0.9):
        breaker.on_failed(at)
    assert breaker.wants_probe(1.0)


def test_what_had_left_before_and_arrives_closes():
    breaker = Breaker()
    breaker.on_failed(0.0)
    breaker.on_arrived(0.2)
    assert breaker.up


def test_whatever_is_seen_leads_somewhere():
    seen = (PathEvent.FAILED, PathEvent.ARRIVED, PathEvent.UNASKED)
    assert {(state, event) for state, event in itertools.product(BreakerState, seen)} <= set(TRANSITIONS)
    assert set(TRANSITIONS) - set(itertools.product(BreakerState, seen)) == {(BreakerState.OPEN, PathEvent.WAITED)}


def test_a_failure_is_of_one_line_and_each_of_its_senders_comes_back_alone():
    breakers = Breakers()
    breakers.on_failed("r0", ["r1", "r2"], "west", 0.0)
    assert [breakers.up(sender, "west") for sender in ("r0", "r1", "r2", "s0")] == [False, False, False, True]
    assert breakers.up("r0", "south")
    assert breakers.probes(0.5) == []
    assert breakers.probes(1.0) == [("r0", "west"), ("r1", "west"), ("r2", "west")]
    breakers.on_arrived("r1", "west", 1.1)
    breakers.on_failed("r0", [], "west", 1.2)  # its own probe: the others' are still out
    assert [breakers.state(sender, "west") for sender in ("r0", "r1", "r2")] == [
        BreakerState.OPEN,
        BreakerState.CLOSED,
        BreakerState.HALF_OPEN,
    ]
    assert breakers.probes(2.0) == []
    assert breakers.probes(3.2) == [("r0", "west")]


def test_a_sender_that_is_gone_is_not_probed_for_ever():
    breakers = Breakers()
    breakers.on_failed("r0", ["r1"], "west", 0.0)
    breakers.forget({"r1", "west"})
    assert breakers.probes(1.0) == [("r1", "west")]
    breakers.forget({"r1"})
    assert breakers.not_up() == []


def test_a_sender_that_cannot_probe_has_a_request_try_and_tries_become_rarer():
    breakers, now, gaps = Breakers(), 0.0, []
    for _ in range(7):
        breakers.on_failed("r0", [], "west", now)
        breakers.on_unasked("r0", "west")  # of a probe that was sent before
        assert not breakers.up("r0", "west")
        began = now
        while not breakers.probes(now):
            now += 0.5
        gaps.append(now - began)
        breakers.on_unasked("r0", "west")
        assert breakers.up("r0", "west")
    assert gaps == [1, 2, 4, 8, 16, MAX_RETRY_S, MAX_RETRY_S]
    breakers.on_arrived("r0", "west", now)
    breakers.on_failed("r0", [], "west", now)
    assert breakers.probes(now + 1) == [("r0", "west")]

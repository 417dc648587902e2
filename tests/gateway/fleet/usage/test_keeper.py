"""The sum of a fleet's usage: whatever happens, nothing that was written is lost, and nothing counts twice."""

import asyncio
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.errors import FleetFailed
from gateway.fleet.usage.counts import counts_of, summed
from gateway.fleet.usage.documents import MOST_FOLDED, RunUsage, folded_read, folded_written, run_written
from gateway.fleet.usage.keeper import CYCLE_S, LATE_S, MOST_AT_ONCE, MOST_COUNTS, MOST_PAUSE_S, pause_s
from gateway.fleet.usage.runs import ENDED_S, FOLD_S, RENEW_S, StoredValue, with_folded
from tests.gateway.fleet.usage.worlds import STEP_S, MemoryUsage, UsageFleet
from tests.properties import examples

WHAT = ["count", "look", "follow", "kill", "end", "silence", "renewed", "down", "answer", "request", "up"]
ACME, RIVAL = ("acme", "requests_200", "", ""), ("rival", "requests_200", "", "")
FORGET_S = FOLD_S + 2 * STEP_S


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(WHAT)), max_size=40))
def test_what_lies_in_the_registry_is_what_was_taken(script: list[tuple[int, str]]) -> None:
    fleet = UsageFleet(3)
    for number, what in script:
        gateway = fleet.gateways[number]
        if what == "count":
            gateway.count(("acme", "rival")[number % 2], 1 + number, sent=100)
        elif what == "look":
            gateway.step()
        elif what == "follow":
            gateway.follow()
        elif what == "kill":
            fleet.kill(number)
        elif what == "end":
            fleet.end(number)
        elif what == "silence":
            fleet.passes(FORGET_S, silent=number)
        elif what == "renewed":
            fleet.passes(ENDED_S + RENEW_S)
        else:
            fleet.registry.fails = "none" if what == "up" else what
        assert fleet.stored == fleet.taken
        told = fleet.told(number)
        assert all(told.get(series, 0) >= count for series, count in fleet.gateways[number].counts.items())
    fleet.registry.fails = "none"
    fleet.passes(FORGET_S)
    assert fleet.stored == fleet.taken
    alive = {gateway: gateway.counts for gateway in fleet.gateways}
    assert fleet.taken == summed({**fleet.written, **alive}.values())
    for number, gateway in enumerate(fleet.gateways):
        assert fleet.told(number) == fleet.stored
        assert gateway.usage.report().complete
        assert "folded_unknown" not in gateway.heard.failures
    fleet.passes(4 * len(script) * STEP_S)
    assert len(fleet.registry.found.runs) == 3
    assert fleet.stored == fleet.taken


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([*WHAT, "backup", "restore"])), max_size=40),
)
def test_after_a_restore_nothing_is_counted_twice(script: list[tuple[int, str]]) -> None:
    fleet, counted = UsageFleet(3), dict[tuple[str, str, str, str], int]()
    backup = fleet.registry.found
    for number, what in script:
        gateway = fleet.gateways[number]
        if what == "count":
            gateway.count("acme", 1)
            counted[ACME] = counted.get(ACME, 0) + 1
        elif what == "backup":
            backup = fleet.registry.found
        elif what == "restore":
            fleet.registry.found = backup
        elif what == "kill":
            fleet.kill(number)
        elif what == "end":
            fleet.end(number)
        elif what == "silence":
            fleet.passes(FORGET_S, silent=number)
        else:
            gateway.step()
        assert fleet.stored.get(ACME, 0) <= counted.get(ACME, 0)


def test_living_gateways_heal_a_restored_registry() -> None:
    fleet = UsageFleet(3)
    fleet.gateways[0].count("acme", 5)
    fleet.passes(STEP_S)
    backup = fleet.registry.found
    for gateway in fleet.gateways:
        gateway.count("acme", 10)
    fleet.gateways[2].count("rival", 1)
    fleet.passes(STEP_S)
    fleet.kill(2)  # ends after the backup: what it wrote since then is lost with it
    fleet.gateways[2].count("acme", 100)
    fleet.passes(STEP_S)
    fleet.registry.found = backup
    fleet.passes(STEP_S)
    assert fleet.stored == {ACME: 5 + 10 + 10 + 100}
    fleet.registry.found = type(backup)()  # no backup at all: what was folded is lost, what lives is not
    fleet.passes(STEP_S)
    assert fleet.stored == {ACME: 5 + 10 + 10 + 100}


def test_a_gateway_that_was_cut_off_for_long_goes_on_without_counting_twice() -> None:
    fleet = UsageFleet(2)
    cut_off = fleet.gateways[0]
    cut_off.count("acme", 5)
    cut_off.step()
    fleet.passes(FORGET_S, silent=0)
    assert fleet.stored == {ACME: 5}
    assert len(fleet.registry.found.runs) == 1
    cut_off.count("acme", 2)
    cut_off.follow()
    cut_off.step()
    assert cut_off.heard.failures == ["folded"]
    assert fleet.stored == {ACME: 7}
    assert fleet.told(1) == {ACME: 5}
    fleet.passes(STEP_S)
    assert fleet.told(0) == fleet.told(1) == {ACME: 7}
    fleet.passes(FORGET_S, silent=0)
    cut_off.count("rival", 1)
    fleet.passes(STEP_S)
    assert fleet.told(0) == {ACME: 7, RIVAL: 1}
    assert counts_of(cut_off.usage.own_report().data) == {ACME: 7, RIVAL: 1}


@pytest.mark.parametrize(("lost", "was_taken"), [("answer", True), ("request", False)])
def test_whether_a_lost_write_was_taken_is_known_after_a_fold(lost: str, was_taken: bool) -> None:
    fleet = UsageFleet(2)
    cut_off = fleet.gateways[0]
    cut_off.count("acme", 5)
    cut_off.step()
    cut_off.count("acme", 3)
    fleet.registry.fails = lost
    assert not cut_off.step()
    fleet.registry.fails = "none"
    fleet.passes(FORGET_S, silent=0)
    assert fleet.stored == {ACME: 8 if was_taken else 5}
    cut_off.count("acme", 1)
    cut_off.step()
    assert fleet.stored == {ACME: 9}
    assert cut_off.heard.failures == ["folded"]


def test_a_gateway_that_was_forgotten_does_not_count_twice() -> None:
    fleet = UsageFleet(2)
    cut_off = fleet.gateways[0]
    cut_off.count("acme", 5)
    cut_off.step()
    fleet.passes(FORGET_S, silent=0)
    found = fleet.registry.found
    total = folded_read(found.folded.value)
    ended = {f"r{number}": RunUsage(gateway="g2", since_unix_s=1, number=1, counts={}) for number in range(MOST_FOLDED)}
    data, _ = folded_written(with_folded(total, ended))
    fleet.registry.found = replace(found, folded=StoredValue(data, 10**6))
    cut_off.count("acme", 2)
    cut_off.step()
    assert cut_off.heard.failures == ["folded_unknown"]
    assert fleet.stored == {ACME: 7}


def test_thousands_of_runs_that_were_killed_are_folded() -> None:
    fleet = UsageFleet(1)
    killed = 2000
    one = run_written(RunUsage(gateway="g2", since_unix_s=1, number=1, counts={ACME: 1}))
    runs = {f"r{number}": StoredValue(one, number + 1) for number in range(killed)}
    fleet.registry.found = replace(fleet.registry.found, runs=runs)
    fleet.registry.revision = killed + 1
    fleet.gateways[0].count("acme", 1)
    fleet.passes(FORGET_S)
    looks = -(-killed // MOST_AT_ONCE)
    fleet.passes(looks * STEP_S)
    assert len(fleet.registry.found.runs) == 1
    assert fleet.stored == {ACME: killed + 1}


def test_runs_with_many_counts_are_folded_a_few_at_a_time() -> None:
    fleet = UsageFleet(1)
    counts = {(f"t{number}", "requests_200", "", ""): 1 for number in range(MOST_COUNTS // 2)}
    large = run_written(RunUsage(gateway="g2", since_unix_s=1, number=1, counts=counts, has_ended=True))
    runs = {f"r{number}": StoredValue(large, number + 1) for number in range(4)}
    fleet.registry.found = replace(fleet.registry.found, runs=runs)
    fleet.registry.revision = 5
    fleet.passes(2 * STEP_S)
    assert len(fleet.registry.found.runs) == 2
    fleet.passes(STEP_S)
    assert len(fleet.registry.found.runs) == 1
    assert sum(fleet.stored.values()) == 4 * len(counts)


def test_while_the_registry_is_lost_pages_show_the_last_sums_and_own_counts_go_on() -> None:
    fleet = UsageFleet(2)
    for gateway in fleet.gateways:
        gateway.count("acme", 5)
    fleet.passes(2 * STEP_S)
    lost_at = fleet.now
    fleet.registry.fails = "down"
    fleet.now += CYCLE_S + LATE_S - 1.0
    assert fleet.gateways[0].usage.report().complete
    fleet.now += 2.0
    fleet.gateways[0].count("acme", 1)
    fleet.gateways[1].count("acme", 1)
    report = fleet.gateways[0].usage.report()
    assert not report.complete
    assert report.frozen_since_unix_s == int(1_800_000_000 + lost_at)
    assert counts_of(report.data) == {ACME: 11}
    heard = fleet.gateways[0].heard
    assert (heard.runs, heard.read_unix_s) == (2, 1_800_000_000 + lost_at)
    fleet.registry.fails = "none"
    fleet.passes(2 * STEP_S)
    report = fleet.gateways[0].usage.report()
    assert (report.complete, report.frozen_since_unix_s, report.gateways) == (True, None, 2)
    assert counts_of(report.data) == {ACME: 12}


def test_where_nothing_can_be_written_sums_are_not_complete() -> None:
    fleet = UsageFleet(2)
    fleet.passes(2 * STEP_S)
    fleet.registry.fails = "request"  # as an etcd that is full: it still tells what it has
    for gateway in fleet.gateways:
        gateway.count("acme", 5)
        assert not gateway.step()
    refused_at = 1_800_000_000 + int(fleet.now)
    for _ in range(3):
        report = fleet.gateways[0].usage.report()
        assert (report.complete, report.frozen_since_unix_s) == (False, refused_at)
        fleet.passes(STEP_S)
    fleet.registry.fails = "none"
    fleet.passes(2 * STEP_S)
    assert fleet.gateways[0].usage.report().complete


def test_nobody_is_taken_for_ended_since_the_registry_was_lost() -> None:
    fleet = UsageFleet(3)
    fleet.passes(2 * STEP_S)
    fleet.registry.fails = "down"
    fleet.passes(2 * FOLD_S)
    fleet.registry.fails = "none"
    for _ in range(3):
        fleet.now += CYCLE_S
        fleet.gateways[0].step()
    assert len(fleet.registry.found.runs) == 3


def test_what_cannot_be_read_is_left_and_told_of() -> None:
    fleet = UsageFleet(1)
    fleet.gateways[0].count("acme", 5)
    fleet.passes(STEP_S)
    found = fleet.registry.found
    fleet.registry.found = replace(found, runs={**found.runs, "broken": StoredValue(b"?", 99)})
    fleet.passes(FORGET_S)
    report = fleet.gateways[0].usage.report()
    assert not report.complete
    assert counts_of(report.data) == {ACME: 5}
    assert "broken" in fleet.registry.found.runs
    assert "malformed" in fleet.gateways[0].heard.failures


def test_before_the_first_look_a_page_shows_this_gateways_own() -> None:
    fleet = UsageFleet(1)
    fleet.gateways[0].count("acme", 5)
    report = fleet.gateways[0].usage.report()
    assert (report.complete, report.since_unix_s) == (False, None)
    assert counts_of(report.data) == {ACME: 5}


def test_the_last_process_to_end_writes_all() -> None:
    fleet = UsageFleet(1)
    gateway = fleet.gateways[0]
    gateway.count("acme", 5)
    fleet.stepping = gateway
    asyncio.run(gateway.usage.farewell())
    assert fleet.stored == {ACME: 5}
    assert gateway.heard.failures == []
    fleet.kill(0)
    fleet.passes(ENDED_S + 2 * STEP_S)
    assert len(fleet.registry.found.runs) == 1
    assert fleet.stored == {ACME: 5}


def test_a_process_that_ends_waits_for_the_one_that_writes_its_last() -> None:
    fleet = UsageFleet(1)
    gateway = fleet.gateways[0]
    gateway.count("acme", 5)
    gateway.duty.is_ours = False
    fleet.stepping = gateway

    async def scenario() -> None:
        asyncio.get_running_loop().call_later(0.1, setattr, gateway.duty, "is_ours", True)
        await gateway.usage.farewell()

    asyncio.run(scenario())
    assert fleet.stored == {ACME: 5}
    assert not gateway.duty.is_ours


def test_a_process_that_ends_leaves_the_rest_to_one_that_goes_on() -> None:
    fleet = UsageFleet(1)
    gateway = fleet.gateways[0]
    gateway.duty.is_ours = False
    asyncio.run(gateway.usage.farewell())
    assert fleet.stored == {}
    assert gateway.heard.failures == []


def test_a_last_look_that_is_late_changes_nothing() -> None:
    fleet = UsageFleet(1)
    gateway = fleet.gateways[0]
    gateway.count("acme", 5)
    gateway.step()
    answered = threading.Event()
    fleet.registry.on_read = lambda: answered.wait(10.0)
    looking = gateway.usage
    asyncio.run(looking.farewell())
    assert gateway.heard.failures == ["late"]
    fleet.registry.on_read = lambda: True
    gateway.duty.is_ours = True
    gateway.follow()
    gateway.count("acme", 1)
    gateway.step()
    shown = gateway.board.seen()
    gateway.count("acme", 1)
    answered.set()
    with pytest.raises(FleetFailed, match="another process"):
        looking.step()  # after the late one
    assert gateway.board.seen() == shown
    assert fleet.stored == {ACME: 6}


def test_a_gateway_that_never_served_leaves_nothing_behind() -> None:
    fleet = UsageFleet(1)
    asyncio.run(fleet.gateways[0].usage.farewell())
    assert fleet.registry.found.runs == {}


def test_the_pace_is_bounded_by_bytes() -> None:
    assert pause_s(0, 0) == CYCLE_S
    assert pause_s(0, 160 << 10) == 10.0
    assert pause_s(64 << 20, 1 << 20) == MOST_PAUSE_S


def test_a_gateway_that_does_nothing_says_so_seldom() -> None:
    fleet = UsageFleet(1, MemoryUsage())
    gateway = fleet.gateways[0]
    for _ in range(int(10 * RENEW_S / CYCLE_S)):
        gateway.step()
        fleet.now += CYCLE_S
    assert 9 <= fleet.registry.revision - 1 <= 11

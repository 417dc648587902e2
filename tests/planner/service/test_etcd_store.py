"""Plans in etcd: the same with the double and with a real one."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from membership.etcd.client import EtcdClient
from membership.etcd.settings import EtcdConfig
from planner.errors import Deposed, InputError
from planner.service import etcd_store
from planner.service.etcd_store import PlansInEtcd
from planner.solve.control.ledger import Ledger, LedgerEntry
from tests.membership.etcd.servers import DoubledEtcd, EtcdUnderTest, RealEtcd, needed_binary

LEASE_S = 600.0  # no test takes as long
LAPSING_S = (2.0, 8.0, 30.0)
"""Leases of a test that lets them lapse; a longer one where the machine stood still for as long as a shorter one."""
CALL_S = 60.0
PATIENCE_S = 60.0
LEADER, LEDGER = "/prfaas/plans/state/leader", "/prfaas/plans/state/ledger"
Make = Callable[..., PlansInEtcd]


@pytest.fixture(params=["double", pytest.param("real", marks=pytest.mark.long)])
def etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdUnderTest]:
    server: EtcdUnderTest = DoubledEtcd() if request.param == "double" else RealEtcd(tmp_path, needed_binary())
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def service(etcd: EtcdUnderTest) -> Iterator[Make]:
    made: list[PlansInEtcd] = []

    def make(process: str, lease_s: float = LEASE_S, call_s: float = CALL_S) -> PlansInEtcd:
        config = EtcdConfig(endpoints=(etcd.endpoint,))
        made.append(PlansInEtcd(config, process, EtcdClient(config, call_s=call_s), lease_s, clock_of(etcd)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def clock_of(etcd: EtcdUnderTest) -> Callable[[], float]:
    """By which leases lapse there."""
    if isinstance(etcd, DoubledEtcd):
        clock = etcd.clock
        return lambda: clock.now
    return time.monotonic


def led(ledger: Ledger) -> tuple[Ledger, LedgerEntry]:
    return ledger.led(ledger.term + 1, 0.0, "controller", f"leader {ledger.term + 1}")


def test_one_leads_and_the_others_see_what_it_writes(service: Make) -> None:
    one, other = service("one"), service("other")
    assert one.campaign("http://one") == Ledger()
    assert other.campaign("http://other") is None
    assert one.leads
    assert not other.leads
    ledger, entry = led(Ledger())
    one.write(ledger, entry)
    found = other.look()
    assert found.ledger == ledger
    assert found.leader is not None
    assert found.leader.url == "http://one"
    assert other.last_entries(10) == [entry]
    with pytest.raises(Deposed):
        other.write(ledger, None)


def test_another_leads_once_the_first_resigns(service: Make) -> None:
    one, other = service("one"), service("other")
    assert one.campaign("http://one") is not None
    one.resign()
    assert other.campaign("http://other") is not None


def test_another_leads_once_the_first_is_not_heard_of(etcd: EtcdUnderTest, service: Make) -> None:
    clock = clock_of(etcd)

    def leads_on(one: PlansInEtcd, lease_s: float) -> bool:
        """Whether it does while it renews; False where it came too late for that."""
        began = clock()
        assert one.campaign("http://one") is not None
        for _ in range(2):
            etcd.waited(lease_s * 0.6)
            one.renew()
            leads, now = one.leads, clock()
            if now - began >= lease_s:
                return False
            assert leads
            began = now
        return True

    for lease_s in LAPSING_S:
        one, other = service(f"one, {lease_s:.0f} s", lease_s), service(f"other, {lease_s:.0f} s")
        if not leads_on(one, lease_s):
            with suppress(OSError):  # its lease may have lapsed
                one.resign()
            continue
        etcd.waited(lease_s * 2.5)
        deadline = time.monotonic() + PATIENCE_S
        while other.campaign("http://other") is None:
            assert time.monotonic() < deadline
        one.renew()
        assert not one.leads
        return
    raise AssertionError(f"the machine stood still for {LAPSING_S[-1]:.0f} s")


def test_a_leader_that_others_have_replaced_changes_nothing(etcd: EtcdUnderTest, service: Make) -> None:
    """Its own clock may have stood still."""
    config = EtcdConfig(endpoints=(etcd.endpoint,))
    one = PlansInEtcd(config, "one", EtcdClient(config, call_s=CALL_S), LEASE_S, clock=lambda: 0.0)
    other = service("other")
    ledger, entry = led(one.campaign("http://one") or Ledger())
    one.write(ledger, entry)
    etcd.delete(LEADER)  # as when its lease lapses
    before = other.campaign("http://other")
    assert before == ledger
    assert one.leads
    with pytest.raises(Deposed, match="another service leads"):
        one.write(*led(ledger))
    assert other.look().ledger == ledger
    assert not one.leads
    one.close()


def test_a_change_whose_answer_was_lost_is_not_made_twice(etcd: EtcdUnderTest, service: Make) -> None:
    one = service("one")
    ledger, entry = led(one.campaign("http://one") or Ledger())
    etcd.put(LEDGER, b'{"term": 1, "last_version": 5}')  # as if it had come from this one
    with pytest.raises(Deposed, match="an answer of etcd was lost"):
        one.write(ledger, entry)
    one.resign()
    found = one.campaign("http://one")
    assert found is not None
    assert found.last_version == 5


def test_it_outlives_a_restart_of_etcd(etcd: EtcdUnderTest, service: Make) -> None:
    one = service("one", call_s=3.0)
    ledger, entry = led(one.campaign("http://one") or Ledger())
    one.write(ledger, entry)
    etcd.kill()
    with pytest.raises(OSError, match="does not answer"):
        one.write(*led(ledger))
    etcd.start()
    assert service("other").look().ledger == ledger


def test_the_log_has_a_bound(service: Make) -> None:
    one = service("one")
    ledger, entry = led(one.campaign("http://one") or Ledger())
    most = etcd_store.MOST_ENTRIES
    for term in range(most + 3):
        if term % 50 == 0:
            one.renew()
        one.write(ledger, LedgerEntry(at=term, change=entry.change, version=0, term=1, by="ann"))
    assert [each.at for each in one.last_entries(3)] == [most, most + 1, most + 2]
    assert len(one.last_entries(2 * most)) == most


def test_a_damaged_ledger_is_named(etcd: EtcdUnderTest, service: Make) -> None:
    etcd.put(LEDGER, b"{")
    with pytest.raises(InputError, match="plans/state/ledger: not a ledger"):
        service("one").look()


def test_a_ledger_that_is_too_long_is_refused(service: Make) -> None:
    one = service("one")
    one.campaign("http://one")
    with pytest.raises(OSError, match="etcd takes"):
        one.write(Ledger(conversions={"n": "x" * (1 << 20)}), None)


@pytest.mark.parametrize("name", ["ledger", "leader"])
def test_what_is_nested_too_deeply_is_damaged(etcd: EtcdUnderTest, service: Make, name: str) -> None:
    etcd.put(f"/prfaas/plans/state/{name}", b'{"later": ' + b"[" * 20_000 + b"]" * 20_000 + b"}")
    if name == "ledger":
        with pytest.raises(InputError, match="not a ledger"):
            service("one").look()
    else:
        found = service("one").look().leader
        assert found is not None
        assert found.url == ""


def test_a_log_whose_count_is_none_begins_anew(etcd: EtcdUnderTest, service: Make) -> None:
    etcd.put("/prfaas/plans/state/entries", b"9" * 5000)
    one = service("one")
    ledger, entry = led(one.campaign("http://one") or Ledger())
    one.write(ledger, entry)
    assert one.last_entries(10) == [entry]


def test_one_that_cannot_go_on_with_the_ledger_lets_another_lead_at_once(etcd: EtcdUnderTest, service: Make) -> None:
    etcd.put(LEDGER, b"{")
    one, other = service("one"), service("other")
    with pytest.raises(InputError):
        one.campaign("http://one")
    assert not one.leads
    one.resign()
    etcd.put(LEDGER, b"{}")
    assert other.campaign("http://other") == Ledger()

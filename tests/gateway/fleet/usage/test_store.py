"""Usage in etcd: the same with the double and with a real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.fleet.errors import FleetFailed
from gateway.fleet.usage.keeper import MOST_AT_ONCE
from gateway.fleet.usage.runs import FoundUsage
from gateway.fleet.usage.store import MOST_BYTES, MOST_RUNS, EtcdUsage
from membership.etcd.client import EtcdClient
from membership.etcd.settings import EtcdConfig
from tests.gateway.fleet.usage.worlds import STEP_S, CountingGateway, UsageFleet
from tests.membership.etcd.servers import CALL_S, EtcdUnderTest, RealEtcd, needed_binary

ACME = ("acme", "requests_200", "", "")
LONG = 1 << 20


@pytest.fixture
def store(etcd: EtcdUnderTest) -> Iterator[EtcdUsage]:
    made = store_of(etcd)
    yield made
    made.close()


def store_of(etcd: EtcdUnderTest) -> EtcdUsage:
    config = EtcdConfig(endpoints=(etcd.endpoint,))
    return EtcdUsage(config, EtcdClient(config, call_s=CALL_S), read_s=CALL_S)


def fill(store: EtcdUsage) -> None:
    """Etcd keeps all versions."""
    for _ in range(64):
        assert store.write("one", bytes(LONG), store.read())


def test_a_run_is_written_and_folded_once(store: EtcdUsage) -> None:
    empty = store.read()
    assert empty == FoundUsage()
    assert store.write("one", b"1", empty)
    assert not store.write("one", b"2", empty)
    assert store.write("two", b"1", empty)
    found = store.read()
    assert {name: each.value for name, each in found.runs.items()} == {"one": b"1", "two": b"1"}
    assert store.fold(["one"], b"sum", found)
    assert not store.fold(["one"], b"twice", found)
    assert not store.fold(["two"], b"beside", found)  # the sum is another one now
    assert not store.write("one", b"3", found)
    after = store.read()
    assert after.folded.value == b"sum"
    assert list(after.runs) == ["two"]
    assert store.fold(["two"], b"both", after)
    assert store.read().runs == {}


def test_values_are_as_long_as_they_may_be(store: EtcdUsage) -> None:
    for number in range(17):  # more than one answer may hold
        assert store.write(f"run{number}", bytes(LONG), FoundUsage())
    found = store.read()
    assert found.num_bytes == 17 * LONG
    assert store.fold(["run7"], bytes(LONG), found)


def test_the_sum_is_read_however_many_runs_there_are(etcd: EtcdUnderTest, store: EtcdUsage) -> None:
    etcd.put_all({f"/prfaas/gateways/usage/runs/{number:04}": b"1" for number in range(MOST_RUNS + 1)})
    etcd.put("/prfaas/gateways/usage/folded", b"sum")
    found = store.read()
    assert (found.folded.value, len(found.runs), found.is_cut) == (b"sum", MOST_RUNS, True)


def test_a_run_of_ones_own_is_read_however_many_runs_there_are(etcd: EtcdUnderTest, store: EtcdUsage) -> None:
    etcd.put_all({f"/prfaas/gateways/usage/runs/{number:04}": b"1" for number in range(MOST_RUNS + 1)})
    assert store.write("zoe", b"1", store.read("zoe"))
    found = store.read("zoe")
    assert (found.runs["zoe"].value, len(found.runs), found.is_cut) == (b"1", MOST_RUNS + 1, True)
    assert store.write("zoe", b"2", found)
    assert store.read("zoe").runs["zoe"].value == b"2"


def test_many_runs_are_folded_at_once(etcd: EtcdUnderTest, store: EtcdUsage) -> None:
    names = [f"{number:04}" for number in range(MOST_AT_ONCE)]
    etcd.put_all({f"/prfaas/gateways/usage/runs/{name}": b"1" for name in names})
    found = store.read()
    etcd.put(f"/prfaas/gateways/usage/runs/{names[-1]}", b"2")
    assert not store.fold(names, b"sum", found)  # one of them goes on
    assert len(store.read().runs) == MOST_AT_ONCE
    assert store.fold(names, bytes(LONG), store.read())
    assert store.read().runs == {}


def test_runs_are_read_up_to_a_bound_of_bytes(store: EtcdUsage) -> None:
    for number in range(MOST_BYTES // LONG + 1):
        assert store.write(f"run{number}", bytes(LONG), FoundUsage())
    found = store.read()
    assert (found.num_bytes, found.is_cut) == (MOST_BYTES, True)


def test_an_etcd_that_is_lost_says_so_and_keeps_what_was_written(etcd: EtcdUnderTest, store: EtcdUsage) -> None:
    assert store.write("one", b"1", FoundUsage())
    etcd.kill()
    with pytest.raises(FleetFailed, match="does not answer") as failed:
        store.read()
    assert failed.value.reason == "unreachable"
    etcd.start()
    assert store.read().runs["one"].value == b"1"


@pytest.mark.long
def test_an_etcd_that_is_full_says_so(tmp_path: Path) -> None:
    etcd = RealEtcd(tmp_path, needed_binary(), ["--quota-backend-bytes", str(8 * LONG)])
    etcd.start()
    store = store_of(etcd)
    try:
        with pytest.raises(FleetFailed, match="space exceeded") as failed:
            fill(store)
        assert failed.value.reason == "full"
        assert store.read().num_bytes == LONG
    finally:
        store.close()
        etcd.close()


def test_gateways_add_up_through_etcd(etcd: EtcdUnderTest) -> None:
    fleet = UsageFleet(0)
    stores = [store_of(etcd) for _ in range(3)]
    fleet.gateways = [CountingGateway(f"g{number}", fleet, each) for number, each in enumerate(stores)]
    try:
        for number, gateway in enumerate(fleet.gateways):
            gateway.count("acme", 10 + number)
        for _ in range(2):
            fleet.now += STEP_S
            for gateway in fleet.gateways:
                assert gateway.step()
        assert [fleet.told(number) for number in range(3)] == [{ACME: 33}] * 3
        fleet.gateways[2].step(has_ended=True)
        last = fleet.gateways.pop()
        for _ in range(3):
            fleet.passes(STEP_S)
        assert len(stores[0].read().runs) == 2
        assert fleet.told(0) == fleet.told(1) == {ACME: 33}
        last.count("acme", 100)  # it has not ended after all
        last.step()
        fleet.passes(STEP_S)
        assert fleet.told(0) == {ACME: 133}
    finally:
        for each in stores:
            each.close()

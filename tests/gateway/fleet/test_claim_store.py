"""Claims in etcd: the same with the double and with a real one."""

from collections.abc import Iterator

import pytest

from gateway.fleet.claim_store import EtcdClaims
from gateway.fleet.claims import GatewayClaim
from gateway.fleet.errors import FleetFailed
from gateway.ratelimit.parts import Parts
from membership.etcd.client import EtcdClient
from membership.etcd.settings import EtcdConfig
from tests.gateway.fleet.test_limit_shares import PER_MINUTE, Site, let_in
from tests.membership.etcd.servers import CALL_S, EtcdUnderTest

ONE = GatewayClaim(name="g0", fair=0.5, parts={"acme": Parts(0.9, 0.1, 1.0)}, wanted={"acme": Parts(1.5, 0.0, 0.2)})
OTHER = GatewayClaim(name="g1", fair=0.5)


@pytest.fixture
def store(etcd: EtcdUnderTest) -> Iterator[EtcdClaims]:
    made = store_of(etcd)
    yield made
    made.close()


def store_of(etcd: EtcdUnderTest) -> EtcdClaims:
    config = EtcdConfig(endpoints=(etcd.endpoint,))
    return EtcdClaims(config, EtcdClient(config, call_s=CALL_S))


def test_a_claim_is_changed_only_by_one_that_has_seen_all_others(store: EtcdClaims) -> None:
    empty = store.read()
    assert empty.by_name == {}
    assert store.write(ONE, "p0", empty.turn)
    assert not store.write(OTHER, "p1", empty.turn)
    found = store.read()
    assert {name: (each.claim, each.process) for name, each in found.by_name.items()} == {"g0": (ONE, "p0")}
    assert store.write(OTHER, "p1", found.turn)
    again = store.read()
    assert again.by_name["g0"].revision == found.by_name["g0"].revision < again.by_name["g1"].revision
    assert store.write(OTHER, "p1", again.turn, ["g0"])
    assert list(store.read().by_name) == ["g1"]


def test_what_is_written_outlives_a_restart_of_etcd(etcd: EtcdUnderTest, store: EtcdClaims) -> None:
    assert store.write(ONE, "p0", 0)
    etcd.kill()
    with pytest.raises(FleetFailed, match="does not answer") as failed:
        store.read()
    assert failed.value.reason == "unreachable"
    etcd.start()
    assert store.read().by_name["g0"].claim == ONE


@pytest.mark.parametrize(
    "value",
    [b"{", b'{"process": "p", "fair": 1.5}', b'{"process": "p", "fair": 0.1, "parts": {"a": [2, 0, 0]}}', b"\xff"],
)
def test_a_claim_that_cannot_be_is_named(etcd: EtcdUnderTest, store: EtcdClaims, value: bytes) -> None:
    etcd.put("/prfaas/gateways/limits/claims/broken", value)
    with pytest.raises(FleetFailed, match="gateway broken claims") as failed:
        store.read()
    assert failed.value.reason == "malformed"


def test_too_many_gateways_are_refused(etcd: EtcdUnderTest, store: EtcdClaims) -> None:
    etcd.put_all({f"/prfaas/gateways/limits/claims/g{number}": b"{}" for number in range(66)})
    with pytest.raises(FleetFailed, match="more than 64 gateways"):
        store.read()


def test_gateways_divide_a_limit_through_etcd(etcd: EtcdUnderTest) -> None:
    stores = [store_of(etcd) for _ in range(3)]
    site = Site(3, stores)
    try:
        site.settle(4.0)
        assert [each.part for each in site.gateways] == pytest.approx([1 / 3] * 3)
        let_in(site, 10.0, iter([0] * 1000))
        assert let_in(site, 12.0, iter([0] * 1000)) == pytest.approx(PER_MINUTE / 5, rel=0.05)
    finally:
        site.close()

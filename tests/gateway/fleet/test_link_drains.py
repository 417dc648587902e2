"""Links drained at one gateway are drained at all."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.cluster.drained_links import Link, LocalDrainedLinks
from gateway.fleet.drain_store import EtcdDrains
from gateway.fleet.errors import FleetFailed
from gateway.fleet.link_drains import LinkDrains
from membership.etcd.client import EtcdClient
from membership.etcd.settings import EtcdConfig
from tests.membership.etcd.servers import CALL_S, EtcdUnderTest
from tests.properties import examples

EAST, WEST = ("east", "west"), ("we/st 1", "éast")


class MemoryDrains:
    """As etcd has them."""

    def __init__(self) -> None:
        self.drained: set[Link] = set()
        self.is_up = True

    def links(self) -> frozenset[Link]:
        self._check()
        return frozenset(self.drained)

    def set(self, link: Link, is_drained: bool) -> None:
        self._check()
        (self.drained.add if is_drained else self.drained.discard)(link)

    def close(self) -> None:
        """Others go on."""

    def _check(self) -> None:
        if not self.is_up:
            raise FleetFailed("unreachable", "it does not answer")


def drains_of(store: MemoryDrains | EtcdDrains) -> tuple[LocalDrainedLinks, LinkDrains]:
    own = LocalDrainedLinks()
    return own, LinkDrains(own, store, lambda about, reason: None)


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["drain", "use", "look", "restart", "lose", "find"])), max_size=30
    )
)
def test_in_whatever_order_all_gateways_come_to_say_the_same(script: list[tuple[int, str]]) -> None:
    registry, loop = MemoryDrains(), asyncio.new_event_loop()
    fleet = [drains_of(registry) for _ in range(3)]

    def look(number: int) -> None:
        try:
            loop.run_until_complete(fleet[number][1].step())
        except FleetFailed:
            assert not registry.is_up

    last: dict[str, bool] = {}
    for number, what in script:
        if what in ("drain", "use"):
            fleet[number][0].set(EAST, what == "drain")
            for each in (number, 0, 1, 2) if registry.is_up else ():
                look(each)
            last = {"east": what == "drain"} if registry.is_up else {}
        elif what == "look":
            look(number)
        elif what == "restart":
            fleet[number] = drains_of(registry)
            look(number)  # before it listens
        else:
            registry.is_up = what == "find"
            for each in (0, 1, 2, 0, 1, 2):  # until all have heard what one tells
                look(each)
            last = last if registry.is_up else {}
    registry.is_up = True
    for number in (0, 1, 2, 0, 1, 2):
        look(number)
    loop.close()
    assert len({own.links() for own, _ in fleet} | {registry.links()}) == 1
    if last:
        assert (EAST in registry.drained) == last["east"]


@pytest.mark.parametrize("is_drained", [True, False])
def test_what_is_changed_while_the_registry_is_lost_is_told_when_it_is_back(is_drained: bool) -> None:
    registry = MemoryDrains()
    (one, first), (other, second) = drains_of(registry), drains_of(registry)
    one.set(EAST, not is_drained)
    asyncio.run(first.step())
    asyncio.run(second.step())
    registry.is_up = False
    one.set(EAST, is_drained)
    with pytest.raises(FleetFailed):
        asyncio.run(first.step())
    registry.is_up = True
    asyncio.run(first.step())
    asyncio.run(second.step())
    assert (EAST in other.links()) is is_drained


def test_drains_lie_in_etcd_and_outlive_everybodys_restart(etcd: EtcdUnderTest) -> None:
    config = EtcdConfig(endpoints=(etcd.endpoint,))
    store = EtcdDrains(config, "g0", EtcdClient(config, call_s=CALL_S))
    try:
        for link in (EAST, WEST):
            store.set(link, True)
        etcd.kill()
        with pytest.raises(FleetFailed, match="does not answer"):
            store.links()
        etcd.start()
        assert store.links() == {EAST, WEST}
        own, drains = drains_of(store)
        asyncio.run(drains.step())
        assert own.links() == {EAST, WEST}
        own.set(WEST, False)
        asyncio.run(drains.step())
        assert store.links() == {EAST}
    finally:
        store.close()

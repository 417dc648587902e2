"""The last places go to tenants within their part, and all others are used."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.decisions.admission.places import Entry, TenantPlaces, entry, is_turn, kept_places, most_places, part_of

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 0.25}
tenants = st.sampled_from(sorted(WEIGHTS))


class Places:
    """Tenants' requests in flight, and those that wait."""

    def __init__(self, limit: int, weights: dict[str, float] | None = None) -> None:
        self.limit = limit
        self.weights = weights or WEIGHTS
        self.held: Counter[str] = Counter()
        self.waits: list[str] = []

    def own(self, tenant: str) -> int:
        return self.held[tenant] + self.waits.count(tenant)

    def claims(self, tenant: str) -> TenantPlaces:
        others = [each for each in self.weights if each != tenant and self.own(each)]
        return TenantPlaces(self.own(tenant), self.weights[tenant], sum(self.weights[each] for each in others))

    def part(self, tenant: str) -> float:
        return part_of(self.limit, self.claims(tenant))

    def come(self, tenant: str) -> Entry:
        decision = entry(self.limit, self.held.total(), len(self.waits), self.claims(tenant))
        if decision is Entry.TAKES:
            self.held[tenant] += 1
        elif decision is Entry.WAITS:
            self.waits.append(tenant)
        return decision

    def go(self, tenant: str) -> None:
        """A request of the tenant ends; one that waits has its place."""
        self.held[tenant] -= 1
        if self.waits and self.held.total() < self.limit:
            self.held[self.waits.pop(0)] += 1


def test_a_tenant_that_is_alone_has_all_places_but_a_few() -> None:
    for limit, most in ((1, 1), (2, 2), (31, 31), (32, 31), (1024, 992)):
        places = Places(limit)
        assert [places.come("a") for _ in range(limit + 1)].count(Entry.TAKES) == most == most_places(limit)


def test_a_light_tenant_finds_a_place_and_then_has_each_that_becomes_free_until_it_has_its_part() -> None:
    places = Places(1024)
    while places.come("a") is Entry.TAKES:
        pass
    assert [places.come("b") for _ in range(kept_places(1024))] == [Entry.TAKES] * 32
    assert [places.come("b") for _ in range(481)] == [Entry.WAITS] * 480 + [Entry.REFUSED]
    for _ in range(480):
        places.go("a")
        assert places.come("a") is Entry.REFUSED
    assert places.held == {"a": 512, "b": 512}


@pytest.mark.parametrize("heavies", [1, 20, 200])
def test_beside_any_number_of_full_tenants_a_light_one_has_a_place_at_once(heavies: int) -> None:
    places = Places(1024, {str(number): 1.0 for number in range(heavies + 1)})
    for _ in range(1024 // heavies + 2):
        for number in range(heavies):
            places.come(str(number))
    waited = 0
    for number in range(40):
        waited += places.come(str(heavies)) is not Entry.TAKES
        places.go(str(number % heavies))
        places.come(str(number % heavies))
        places.go(str(heavies))
    assert waited == 0


def test_where_no_other_tenant_has_a_place_none_is_waited_for() -> None:
    assert entry(4, 4, 0, TenantPlaces(1, 1.0, 0.0)) is Entry.REFUSED
    assert entry(4, 4, 0, TenantPlaces(1, 1.0, 1.0)) is Entry.WAITS


def test_the_first_that_has_waited_longest_has_the_next_place_and_others_those_beyond_it() -> None:
    firsts = [30, 0, 10, 20]  # none waits in line 1
    assert [is_turn(4, 4, firsts, own) for own in (0, 2, 3)] == [False, False, False]
    assert [is_turn(4, 3, firsts, own) for own in (0, 2, 3)] == [False, True, False]
    assert [is_turn(4, 2, firsts, own) for own in (0, 2, 3)] == [False, True, True]
    assert [is_turn(4, 1, firsts, own) for own in (0, 2, 3)] == [True, True, True]
    assert [is_turn(1, 0, [5, 5, 5], own) for own in range(3)] == [True, False, False]


@given(
    limit=st.integers(1, 6),
    steps=st.lists(st.tuples(st.sampled_from(("joins", "ends", "asks", "leaves")), st.integers(0, 3)), max_size=150),
)
def test_lines_of_workers_share_places_by_the_time_that_their_firsts_have_waited(
    limit: int, steps: list[tuple[str, int]]
) -> None:
    lines: list[list[int]] = [[] for _ in range(4)]
    held = [0] * 4

    def firsts() -> list[int]:
        return [min(line, default=0) for line in lines]

    def ask(own: int) -> bool:
        if not lines[own] or not is_turn(limit, sum(held), firsts(), own):
            return False
        overtaken = sum(0 < first < lines[own][0] for first in firsts())
        assert limit - sum(held) > overtaken, "each that has waited longer finds a place when it asks"
        held[own] += 1
        lines[own].pop(0)
        return True

    for now, (step, own) in enumerate(steps, start=1):
        if step == "joins":
            lines[own].append(now)
        elif step == "ends" and held[own]:
            held[own] -= 1
            ask(own)
        elif step == "asks":
            ask(own)
        elif step == "leaves" and lines[own]:
            lines[own].pop(0)
        assert sum(held) <= limit
    while any(ask(own) for own in range(4)):
        pass
    assert sum(held) == limit or not any(lines), "no place stays free while one waits"


@given(limit=st.integers(1, 80), steps=st.lists(st.tuples(tenants, st.booleans()), max_size=200))
def test_whatever_comes_and_goes(limit: int, steps: list[tuple[str, bool]]) -> None:
    places = Places(limit)
    for tenant, comes in steps:
        if not comes:
            if places.held[tenant]:
                places.go(tenant)
            continue
        before, part, free = places.own(tenant), places.part(tenant), limit - places.held.total() - len(places.waits)
        decision = places.come(tenant)
        assert places.held.total() <= limit
        is_within = before == 0 or before + 1 <= part
        if free > kept_places(limit):
            assert decision is Entry.TAKES
        elif not is_within:
            assert decision is Entry.REFUSED
        else:
            assert decision is not Entry.REFUSED
        if decision is Entry.WAITS:
            total = sum(weight for each, weight in WEIGHTS.items() if places.own(each))
            assert any(places.own(each) > limit * WEIGHTS[each] / total for each in WEIGHTS if each != tenant)

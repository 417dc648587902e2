"""Claims on tenants' limits: whatever happens in whatever order, all gateways together never give out more than all."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.claims import (
    FORGET_S,
    LOST_S,
    RENEWED_WITHIN_S,
    GatewayClaim,
    OtherGateways,
    Sightings,
    next_claim,
)
from gateway.ratelimit.parts import FAIR_S, HOLD_S, Parts, Standing, all_of, smaller
from tests.properties import examples

T, PLACES = "acme", 7
OLD_S = 4.0
TOLERANCE = 1e-7


@dataclass
class Registry:
    """What etcd holds."""

    turn: int = 0
    revision: int = 0
    claims: dict[str, tuple[GatewayClaim, int]] = field(default_factory=dict)

    def put(self, claim: GatewayClaim, turn: int, forgotten: tuple[str, ...]) -> bool:
        if turn != self.turn:
            return False
        self._put(claim)
        self.turn = self.revision
        for name in forgotten:
            self.claims.pop(name, None)
        return True

    def renew(self, claim: GatewayClaim, revision: int) -> bool:
        if self.claims.get(claim.name, (None, 0))[1] != revision:
            return False
        self._put(claim)
        return True

    def _put(self, claim: GatewayClaim) -> None:
        self.revision += 1
        self.claims[claim.name] = claim, self.revision


@dataclass(frozen=True)
class Plan:
    """What a gateway has decided by what it read, and will write."""

    claim: GatewayClaim
    turn: int
    revision: int
    forgotten: tuple[str, ...]
    began: float
    renews: bool


class ModelGateway:
    """One gateway by a clock of its own: it reads and decides at one moment, and writes at another."""

    def __init__(self, name: str, offset_s: float) -> None:
        self.name, self.offset_s = name, offset_s
        self.wanted = all_of(0.0)
        self.start()

    def start(self) -> None:
        self.sightings = Sightings()
        self.standing = Standing(at_start=0.0)
        self.held: Parts | None = None
        self.planned: Plan | None = None
        self.is_up = True
        self.has_handed_over = False

    def hand_over(self) -> None:
        """To another worker, once in a while."""
        if not self.has_handed_over:
            self.sightings, self.planned, self.has_handed_over = Sightings(), None, True

    def in_force(self, time: float) -> Parts:
        return self.standing.parts(self.held, time + self.offset_s) if self.is_up else all_of(0.0)

    def read(self, registry: Registry, time: float) -> None:
        now = time + self.offset_s
        own, revision = registry.claims.get(self.name, (GatewayClaim(name=self.name), 0))
        if not self.standing.renewed_at or self.standing.is_lapsed(now):
            own = replace(own, parts={t: smaller(parts, all_of(own.fair)) for t, parts in own.parts.items()})
        found = {name: each for name, each in registry.claims.items() if name != self.name}
        others = self.sightings.look(found, now, now)
        claim = next_claim(own, others, {T: self.wanted}, {T: PLACES})
        if self.standing.renewed_at:
            self.hold(smaller(own.of(T), claim.of(T)), min(own.fair, claim.fair), self.standing.renewed_at)
        is_recent = self.standing.renewed_at and now - self.standing.renewed_at < RENEWED_WITHIN_S
        renews = bool(is_recent) and not others.forgotten and not claim.grows_from(own)
        self.planned = Plan(claim, registry.turn, revision, others.forgotten, now, renews)

    def hold(self, parts: Parts, fair: float, renewed_at: float) -> None:
        self.held, self.standing = parts, replace(self.standing, fair=fair, renewed_at=renewed_at)

    def write(self, registry: Registry, time: float, is_answered: bool) -> None:
        plan, self.planned = self.planned, None
        if plan is None or time + self.offset_s - plan.began > OLD_S:
            return
        if plan.renews:
            has_written = registry.renew(plan.claim, plan.revision)
        else:
            has_written = registry.put(plan.claim, plan.turn, plan.forgotten)
        if has_written and is_answered:
            self.hold(plan.claim.of(T), plan.claim.fair, plan.began)


parts = st.builds(Parts, *[st.sampled_from([0.0, 0.1, 0.5, 1.0, 5.0])] * 3)
steps = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 3)),
    st.tuples(st.just("write"), st.integers(0, 3)),
    st.tuples(st.just("cycle"), st.integers(0, 3)),
    st.tuples(st.just("cycles"), st.integers(1, 40)),
    st.tuples(st.just("unanswered"), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 3.0, HOLD_S, LOST_S, FAIR_S])),
    st.tuples(st.just("kill"), st.integers(0, 3)),
    st.tuples(st.just("start"), st.integers(0, 3)),
    st.tuples(st.just("hand over"), st.integers(0, 3)),
    st.tuples(st.just("cut off"), st.integers(0, 3)),
    st.tuples(st.just("joined again"), st.integers(0, 3)),
    st.tuples(st.just("want"), st.integers(0, 3), parts),
)


@settings(max_examples=examples(300))
@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4), st.lists(steps, max_size=60))
def test_all_parts_together_are_never_above_one(offsets: list[float], script: list[tuple[object, ...]]) -> None:
    registry, time = Registry(), 1.0
    fleet = [ModelGateway(f"g{number}", 2e6 + offset) for number, offset in enumerate(offsets)]
    cut_off = set[int]()

    def look() -> None:
        given_out = [each.in_force(time) for each in fleet]
        assert all(sum(kind) <= 1.0 + TOLERANCE for kind in zip(*given_out, strict=True)), given_out

    def cycle(number: int) -> None:
        if number not in cut_off and fleet[number].is_up:
            fleet[number].read(registry, time)
            look()
            fleet[number].write(registry, time, True)

    for what, *about in script:
        number = about[0]
        if what == "wait":
            time += min(number, FORGET_S - time)  # type: ignore[call-overload]
        elif what == "cycles":
            for _ in range(number):  # type: ignore[call-overload]
                for each in range(len(fleet)):
                    cycle(each)
                    look()
                time += min(0.5, FORGET_S - time)
        else:
            gateway = fleet[number]  # type: ignore[call-overload]
            if what == "want":
                gateway.wanted = about[1]  # type: ignore[assignment]
            elif what == "kill":
                gateway.is_up = False
            elif what == "start" and not gateway.is_up:
                gateway.start()
            elif what == "hand over":
                gateway.hand_over()
            elif what == "cut off":
                cut_off.add(number)  # type: ignore[arg-type]
            elif what == "joined again":
                cut_off.discard(number)  # type: ignore[arg-type]
            elif number in cut_off or not gateway.is_up:
                pass
            elif what == "read":
                gateway.read(registry, time)
            elif what == "cycle":
                cycle(number)  # type: ignore[arg-type]
            else:
                gateway.write(registry, time, what == "write")
        look()


def fleet_of(number: int) -> tuple[Registry, list[ModelGateway]]:
    registry, fleet = Registry(), [ModelGateway(f"g{each}", 100.0 * each) for each in range(number)]
    turns(registry, fleet, 0.0, 8)
    return registry, fleet


def turns(registry: Registry, fleet: list[ModelGateway], time: float, number: int) -> float:
    for _ in range(number):
        for each in fleet:
            each.read(registry, time)
            each.write(registry, time, True)
        time += 0.5
    return time


def test_gateways_that_are_asked_nothing_have_equal_parts() -> None:
    _, fleet = fleet_of(4)
    assert [each.in_force(4.0) for each in fleet] == [all_of(0.25)] * 4


def test_parts_go_where_they_are_asked_for_within_four_looks_and_come_back() -> None:
    registry, fleet = fleet_of(3)
    fleet[0].wanted = Parts(2.0, 2.0, 2.0)
    time = turns(registry, fleet, 4.0, 4)
    given_out = fleet[0].in_force(time)
    assert given_out.requests > 0.98
    assert given_out.tokens > 0.98
    assert given_out.at_once == 1.0
    fleet[0].wanted = all_of(0.0)
    time = turns(registry, fleet, time, 4)
    assert all(each.in_force(time) == pytest.approx(all_of(1 / 3), abs=1e-5) for each in fleet)


def test_a_limit_that_all_ask_for_is_used_as_a_whole() -> None:
    registry, fleet = fleet_of(3)
    for each, wanted in zip(fleet, (1.5, 1.0, 0.5), strict=True):
        each.wanted = all_of(wanted)
    time = turns(registry, fleet, 4.0, 12)
    given_out = [each.in_force(time) for each in fleet]
    assert [each.requests for each in given_out] == pytest.approx([0.5, 1 / 3, 1 / 6], abs=0.02)
    assert sum(each.requests for each in given_out) > 0.97
    assert sum(round(each.at_once * PLACES) for each in given_out) == PLACES


def test_one_of_many_gateways_has_nearly_all_where_the_others_are_asked_nothing() -> None:
    registry, fleet = fleet_of(16)
    fleet[3].wanted = all_of(1.2)
    time = turns(registry, fleet, 8.0, 6)
    assert fleet[3].in_force(time).requests > 0.98


def test_parts_that_are_nearly_right_stay_and_nothing_is_left_over() -> None:
    registry, fleet = fleet_of(3)
    time = 4.0
    for wanted in ((0.4, 0.4, 0.4), (0.42, 0.39, 0.38), (0.39, 0.41, 0.42), (0.4, 0.38, 0.41)):
        for each, asked in zip(fleet, wanted, strict=True):
            each.wanted = all_of(asked)
        time = turns(registry, fleet, time, 3)
        assert [each.in_force(time).requests for each in fleet] == pytest.approx([1 / 3] * 3, abs=0.001)
    fleet[1].wanted = all_of(0.8)
    time = turns(registry, fleet, time, 6)
    assert fleet[1].in_force(time).requests == pytest.approx(0.5, abs=0.05)
    assert sum(each.in_force(time).requests for each in fleet) > 0.997


def test_a_gateway_that_is_asked_late_gets_its_part_of_many_that_are_a_little_above_theirs() -> None:
    registry, fleet = fleet_of(16)
    for each in fleet[:15]:
        each.wanted = all_of(0.1)
    time = turns(registry, fleet, 8.0, 8)
    assert fleet[15].in_force(time).requests < 0.01
    fleet[15].wanted = all_of(0.1)
    time = turns(registry, fleet, time, 6)
    assert fleet[15].in_force(time).requests > 0.05


def test_a_gateway_that_joins_has_its_part_within_four_looks() -> None:
    registry, fleet = fleet_of(3)
    fleet.append(ModelGateway("g3", -50.0))
    time = turns(registry, fleet, 4.0, 4)
    assert [each.in_force(time).requests for each in fleet] == [0.25] * 4


def test_a_killed_gateway_keeps_its_fair_part_until_it_is_forgotten() -> None:
    registry, fleet = fleet_of(2)
    fleet[0].wanted = all_of(1.0)
    fleet[1].is_up = False
    time = turns(registry, fleet[:1], 4.0, 40)
    assert fleet[0].in_force(time).requests == pytest.approx(0.5, abs=0.01)
    time = turns(registry, fleet[:1], time, int(2 * FORGET_S))
    assert fleet[0].in_force(time).requests == 1.0
    assert list(registry.claims) == ["g0"]


def test_a_gateway_that_leaves_is_soon_forgotten() -> None:
    registry, fleet = fleet_of(2)
    claim, _ = registry.claims["g1"]
    registry.put(replace(claim, is_leaving=True), registry.turn, ())
    time = turns(registry, fleet[:1], 4.0, int(2 * LOST_S) + 4)
    assert fleet[0].in_force(time).requests == 1.0


def test_a_lost_registry_leaves_each_gateway_its_fair_part() -> None:
    registry, fleet = fleet_of(2)
    fleet[0].wanted = all_of(1.0)
    time = turns(registry, fleet, 4.0, 6)
    assert fleet[1].in_force(time).requests < 0.02
    assert [each.in_force(time + HOLD_S).requests for each in fleet] == pytest.approx([0.5, 0.01], abs=0.01)
    assert [each.in_force(time + FAIR_S).requests for each in fleet] == [0.5, 0.5]


def test_places_are_dealt_as_a_whole() -> None:
    own, other = GatewayClaim(name="a", fair=0.5), GatewayClaim(name="b", fair=0.5)
    others = OtherGateways(alive=(replace(other, parts={T: all_of(0.0)}),))
    claim = next_claim(own, others, {T: Parts(0.0, 0.0, 1.0)}, {T: 1})
    assert claim.of(T).at_once == 1.0

"""Several gateways and one etcd: what tenants get of all of them together, by a clock that tests move."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import pytest

from gateway.auth.keyring import Tenant
from gateway.errors import TenantLimited
from gateway.fleet.claim_documents import FoundClaim, FoundClaims, read, written
from gateway.fleet.claims import GatewayClaim
from gateway.fleet.errors import FleetFailed
from gateway.fleet.limit_shares import CYCLE_S, OLD_S, RENEW_S, ClaimStore, LimitShares
from gateway.ratelimit.limiter import TenantLimiter, TenantLimiters
from gateway.ratelimit.parts import FAIR_S, HOLD_S, LEAST_PART, Parts, Standing
from planner.decisions.admission.limits import Bucket, TenantLimits
from tests.membership.etcd.servers import Clock

PER_MINUTE, PLACES = 600.0, 6
ACME = Tenant("acme", limits=TenantLimits(requests=Bucket(PER_MINUTE)))
TOKENS = Tenant("tokens", limits=TenantLimits(tokens=Bucket(100_000.0)))
FEW = Tenant("few", limits=TenantLimits(at_once=PLACES))
TENANTS = {each.name: each for each in (ACME, TOKENS, FEW)}
STEP_S = 0.1
MOST_OVER = 1.02


class MemoryClaims:
    """As etcd has them."""

    def __init__(self) -> None:
        self.turn = self.revision = 0
        self.claims: dict[str, FoundClaim] = {}
        self.is_up = True

    def read(self) -> FoundClaims:
        self._check()
        return FoundClaims(self.turn, dict(self.claims))

    def write(self, claim: GatewayClaim, process: str, turn: int, forgotten: Sequence[str] = ()) -> bool:
        self._check()
        if turn != self.turn:
            return False
        self._put(claim, process)
        self.turn = self.revision
        for name in forgotten:
            self.claims.pop(name, None)
        return True

    def renew(self, claim: GatewayClaim, process: str, revision: int) -> bool:
        self._check()
        known = self.claims.get(claim.name)
        if known is None or known.revision != revision:
            return False
        self._put(claim, process)
        return True

    def _put(self, claim: GatewayClaim, process: str) -> None:
        self.revision += 1
        stored, by = read(claim.name, written(claim, process))
        self.claims[claim.name] = FoundClaim(stored, self.revision, by)

    def close(self) -> None:
        """Others go on."""

    def _check(self) -> None:
        if not self.is_up:
            raise FleetFailed("unreachable", "it does not answer")


class HeardTelemetry:
    def __init__(self) -> None:
        self.failures: list[tuple[str, str]] = []
        self.gateways = 0

    def fleet_failed(self, about: str, reason: str) -> None:
        self.failures.append((about, reason))

    def fleet_seen(self, gateways: int) -> None:
        self.gateways = gateways


class OneGateway:
    """What a gateway has of its fleet."""

    def __init__(self, name: str, store: ClaimStore, clock: Callable[[], float], process: str = "one") -> None:
        self.heard = HeardTelemetry()
        self.limiters = TenantLimiters(clock)
        self.limiters.stand(Standing(at_start=0.5))
        self.shares = LimitShares(
            name,
            process,
            store,
            self.limiters,
            lambda: {each.name: each.limits for each in TENANTS.values()},
            clock,
            self.heard,
        )

    def asked(self, tenant: Tenant) -> TenantLimiter | None:
        try:
            return self.limiters.enter(tenant)
        except TenantLimited:
            return None

    def read(self, tokens: int) -> bool:
        """A request for so many tokens of the tenant with such a limit."""
        try:
            entered = self.limiters.enter(TOKENS)
            entered.read(tokens, 1)
        except TenantLimited:
            return False
        entered.leave()
        return True

    @property
    def part(self) -> float:
        standing = self.limiters.standing
        assert standing is not None
        return standing.fair


class Site:
    """Gateways beside each other, which look twice a second."""

    def __init__(self, number: int, stores: Sequence[ClaimStore] = ()) -> None:
        self.clock = Clock()
        self.clock.now = 1000.0
        self.registry = MemoryClaims()
        self.gateways = [
            OneGateway(f"g{each}", stores[each] if stores else self.registry, self.clock) for each in range(number)
        ]
        self._due = self.clock.now

    def step(self) -> None:
        """All look where it is time; a gateway without etcd goes on."""
        self.clock.now += STEP_S
        if self.clock.now >= self._due:
            self._due += CYCLE_S
            asyncio.run(self._look())

    def steps(self, seconds: float) -> Iterator[None]:
        for _ in range(round(seconds / STEP_S)):
            self.step()
            yield

    def settle(self, seconds: float = 61.0) -> None:
        """Until buckets are full."""
        for _ in range(round(seconds / CYCLE_S)):
            self.clock.now += CYCLE_S
            asyncio.run(self._look())
        self._due = self.clock.now + CYCLE_S

    async def _look(self) -> None:
        for each in self.gateways:
            await each.shares.look()

    def close(self) -> None:
        for each in self.gateways:
            each.shares.close()
            each.limiters.close()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site(3)
    yield made
    made.close()


def let_in(site: Site, seconds: float, at: Iterator[int], tenant: Tenant = ACME, per_step: int = 4) -> int:
    """How many requests are let in where every step brings some, each to the next gateway `at`."""
    found = 0
    for _ in site.steps(seconds):
        for _ in range(per_step):
            entered = site.gateways[next(at)].asked(tenant)
            if entered is not None:
                entered.leave()
                found += 1
    return found


def test_three_gateways_let_in_what_one_would(site: Site) -> None:
    site.settle()
    assert [each.part for each in site.gateways] == pytest.approx([1 / 3] * 3, abs=1e-5)
    found = let_in(site, 60.0, cycle(range(3)))
    assert 0.97 * 2 * PER_MINUTE <= found <= MOST_OVER * 2 * PER_MINUTE  # what a full bucket holds, and what runs in


def test_a_tenant_that_speaks_through_one_gateway_gets_nearly_all(site: Site) -> None:
    site.settle()
    let_in(site, 60.0, cycle([0]))
    found = let_in(site, 60.0, cycle([0]))
    assert 0.95 * PER_MINUTE <= found <= MOST_OVER * PER_MINUTE
    let_in(site, 10.0, cycle([2]))  # its clients turn to another one
    assert 0.95 * PER_MINUTE <= let_in(site, 60.0, cycle([2])) <= MOST_OVER * PER_MINUTE


def test_tokens_are_divided_too_and_refused_ones_count_as_wanted(site: Site) -> None:
    site.settle()
    found = 0
    for number, _ in enumerate(site.steps(180.0)):
        if number % 2 == 0:
            found += 5000 * site.gateways[1 if number % 6 else 0].read(5000)
    assert 0.9 * 350_000 <= found <= MOST_OVER * 400_000 + 3 * 5000


def test_places_follow_their_requests_and_none_is_given_twice(site: Site) -> None:
    site.settle()
    held: list[list[TenantLimiter]] = [[], [], []]
    most = 0
    for turn in (0, 1, 2, 0):
        for _ in site.steps(4.0):
            entered = site.gateways[turn].asked(FEW)
            if entered is not None:
                held[turn].append(entered)
            most = max(most, sum(map(len, held)))
        assert len(held[turn]) == PLACES, turn
        for each in held[turn]:
            each.leave()
        held[turn].clear()
    assert most == PLACES


def test_places_of_requests_under_way_stay_where_they_are(site: Site) -> None:
    site.settle()
    held = [site.gateways[0].asked(FEW) for _ in range(2)]
    assert all(held)
    others: list[TenantLimiter] = []
    for _ in site.steps(6.0):
        entered = site.gateways[1].asked(FEW)
        if entered is not None:
            others.append(entered)
    assert len(others) == PLACES - 2


def test_a_lost_registry_lets_in_no_more_and_says_so(site: Site) -> None:
    site.settle()
    let_in(site, 60.0, cycle([0]))
    site.registry.is_up = False
    found = let_in(site, 120.0, cycle(range(3)))
    assert found <= MOST_OVER * 2 * PER_MINUTE + LEAST_PART
    assert ("limits", "lapsed") in site.gateways[0].heard.failures
    assert let_in(site, 60.0, cycle(range(3))) == pytest.approx(PER_MINUTE, rel=0.03)
    site.registry.is_up = True
    let_in(site, 20.0, cycle([1]))
    assert 0.95 * PER_MINUTE <= let_in(site, 60.0, cycle([1])) <= MOST_OVER * PER_MINUTE


def test_a_gateway_that_joins_gives_out_nothing_that_others_may_have_given(site: Site) -> None:
    site.settle()
    let_in(site, 60.0, cycle(range(3)))
    site.gateways.append(OneGateway("g3", site.registry, site.clock))
    asyncio.run(site.gateways[3].shares.step())
    found = let_in(site, 60.0, cycle(range(4)))
    assert found <= MOST_OVER * PER_MINUTE


class BusyClaims(MemoryClaims):
    """Another gateway's claim grows between every look and every write."""

    def read(self) -> FoundClaims:
        found = super().read()
        self.revision += 1
        self.turn = self.revision
        return found


def test_a_claim_is_renewed_however_often_others_change_theirs(site: Site) -> None:
    site.settle()
    (one, *_) = site.gateways
    busy = BusyClaims()
    busy.claims, busy.revision = site.registry.claims, site.registry.revision
    shares = LimitShares(
        "g0", "one", busy, one.limiters, lambda: {each.name: each.limits for each in TENANTS.values()},
        site.clock, one.heard,
    )  # fmt: skip
    for _ in range(60):
        site.clock.now += CYCLE_S
        while one.asked(ACME):
            pass
        asyncio.run(shares.look())
        standing = one.limiters.standing
        assert standing is not None
        assert not standing.is_lapsed(site.clock.now)
    assert one.heard.failures == []


def test_a_process_that_was_late_does_not_say_that_the_registry_is_lost(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.settle()
    site.clock.now += 2 * HOLD_S
    asyncio.run(site.gateways[0].shares.look())
    assert site.gateways[0].heard.failures == [("limits", "late")]
    assert "is lost" not in caplog.text


def test_what_is_written_too_late_is_not_written(site: Site) -> None:
    site.settle()
    read = site.registry.read

    class SlowClaims(MemoryClaims):
        def read(self) -> FoundClaims:
            found = read()
            site.clock.now += OLD_S + 1.0
            return found

    (one, *_) = site.gateways
    site.clock.now += RENEW_S
    shares = LimitShares("g0", "one", SlowClaims(), one.limiters, dict, site.clock, one.heard)
    asyncio.run(shares.look())
    assert ("limits", "late") in one.heard.failures


def test_two_gateways_with_one_name_say_so(site: Site) -> None:
    twin = OneGateway("g0", site.registry, site.clock, process="another")
    site.gateways.append(twin)
    site.settle()
    assert ("limits", "same_name") in twin.heard.failures + site.gateways[0].heard.failures


def test_before_the_first_answer_a_gateway_has_its_part_of_those_that_its_file_names() -> None:
    site = Site(1)
    site.registry.is_up = False
    try:
        found = let_in(site, 1.0, cycle([0]), per_step=40)
        assert found == pytest.approx(PER_MINUTE / 2, rel=0.03)
    finally:
        site.close()


def test_what_is_held_lapses_in_every_worker_by_time_alone(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "allowances"
    clock.now = 50.0
    TenantLimiters.create(path, 2)
    first, second = (TenantLimiters(clock, path, own=number) for number in range(2))
    first.stand(Standing(at_start=0.5, fair=0.25, renewed_at=50.0))
    first.hold({"few": Parts(0.25, 0.25, 1.0)}, 50.0, 0.25)
    assert sum(second_asked(second) for _ in range(8)) == PLACES
    clock.now += HOLD_S
    assert not second_asked(second)
    clock.now += FAIR_S
    assert not second_asked(first)
    for each in (first, second):
        each.close()


def second_asked(limiters: TenantLimiters) -> bool:
    try:
        limiters.enter(FEW)
    except TenantLimited:
        return False
    return True

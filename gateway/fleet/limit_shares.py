"""This gateway's claim on tenants' limits: read, decided, written and put in force, twice a second.

Of several workers one does so for all, and another one when that one is gone. Requests never wait for it: they look at
what is in force, in the file that workers share (`gateway.ratelimit.limiter`). A registry that is lost changes nothing here. What
was claimed lapses by time, in every worker.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

import numpy as np

from gateway.fleet.claim_documents import FoundClaims
from gateway.fleet.claims import RENEWED_WITHIN_S, GatewayClaim, OtherGateways, Sightings, next_claim
from gateway.fleet.demand import TenantDemand
from gateway.fleet.errors import FleetFailed
from gateway.ratelimit.limiter import TenantLimiters
from gateway.ratelimit.parts import FAIR_S, LEAST_PART, Parts, Standing, all_of, smaller
from membership.backoff import Backoff
from planner.decisions.admission.limits import TenantLimits
from transport.threads import in_daemon_thread

log = logging.getLogger("prfaas.gateway.fleet")

CYCLE_S: Final = 0.5
RENEW_S: Final = 2.0  # without a change
OLD_S: Final = 4.0  # of what was read: nothing is decided by it any more
TRIES: Final = 4  # of one change, while others change theirs
MOST_PAUSE_S: Final = 2.0
FAREWELL_S: Final = 2.0


class ClaimStore(Protocol):
    """Where claims lie. Every method may block, and raises FleetFailed."""

    def read(self) -> FoundClaims: ...

    def write(self, claim: GatewayClaim, process: str, turn: int, forgotten: Sequence[str] = ()) -> bool: ...

    def renew(self, claim: GatewayClaim, process: str, revision: int) -> bool: ...

    def close(self) -> None: ...


class FleetTelemetry(Protocol):
    """What hears how that goes."""

    def fleet_failed(self, about: str, reason: str) -> None: ...

    def fleet_seen(self, gateways: int) -> None: ...


class LimitShares:
    """The claim of the gateway `name`, for which the process `process` speaks."""

    def __init__(
        self,
        name: str,
        process: str,
        store: ClaimStore,
        limiters: TenantLimiters,
        limits: Callable[[], Mapping[str, TenantLimits]],
        clock: Callable[[], float],
        telemetry: FleetTelemetry,
        is_on_duty: Callable[[], bool] = lambda: True,
    ) -> None:
        """`limits` are those of all tenants with limits; `is_on_duty` says whether this worker is the one."""
        self._name = name
        self._process = process
        self._store = store
        self._limiters = limiters
        self._limits = limits
        self._clock = clock
        self._telemetry = telemetry
        self._is_on_duty = is_on_duty
        self._sightings = Sightings()
        self._demand = TenantDemand()
        self._pauses = Backoff(np.random.default_rng(), CYCLE_S, MOST_PAUSE_S)
        self._own_revision = 0
        self._is_failing = self._has_lapsed = self._is_doubled = False

    async def run(self) -> None:
        """Until it is cancelled; then it says that this gateway leaves. Another process of it takes that back."""
        try:
            while True:  # noqa: ASYNC110 time is what it waits for
                await asyncio.sleep(await self.look() if self._is_on_duty() else CYCLE_S)
        except asyncio.CancelledError:
            if self._is_on_duty():
                await self._leave()
            raise

    def close(self) -> None:
        """After `run` has ended."""
        self._store.close()

    async def settled(self, patience_s: float) -> None:
        """Waits for a part that is worth something."""
        until = self._clock() + patience_s
        while self._clock() < until:
            standing = self._limiters.standing
            if standing is None or (standing.renewed_at and standing.fair > LEAST_PART):
                return
            await asyncio.sleep(CYCLE_S / 10)

    async def look(self) -> float:
        """Claims what there is to claim; returns after how many seconds to look again."""
        self._limiters.refit()
        if self._standing().is_lapsed(self._clock()) and not self._is_failing:
            self._telemetry.fleet_failed("limits", "late")  # this process was; etcd may be well
        try:
            await self.step()
        except FleetFailed as failure:
            self._telemetry.fleet_failed("limits", failure.reason)
            self._look_at_time()
            if not self._is_failing:
                self._is_failing = True
                log.warning("limits of tenants cannot be divided with other gateways now: %s", failure)
            return self._pauses.failed()
        self._is_failing = False
        self._look_at_time()
        self._pauses.succeeded()
        return CYCLE_S

    async def step(self) -> None:
        """Claims once. Raises FleetFailed."""
        limits = self._limits()
        wanted = self._demand.wanted(self._limiters.asked(limits), limits, self._clock())
        for left in reversed(range(TRIES)):
            if await self._claimed(wanted, limits, may_grow=left > 0):
                return
        self._telemetry.fleet_failed("limits", "contended")

    async def _claimed(self, wanted: Mapping[str, Parts], limits: Mapping[str, TenantLimits], may_grow: bool) -> bool:
        """Whether the claim is what it should be now, or renewed at least; False: others were faster."""
        began = self._clock()
        found = await in_daemon_thread("limits", self._store.read)
        own = self._in_force(self._own(found))
        others = self._sightings.look(
            {name: (each.claim, each.revision) for name, each in found.by_name.items() if name != self._name},
            began,
            self._clock(),
        )
        self._telemetry.fleet_seen(1 + len(others.alive))
        places = {tenant: each.at_once for tenant, each in limits.items()}
        claim = next_claim(own, others, wanted, places)
        standing = self._standing()
        claim = self._lowered(own, claim, places)
        if claim == own and standing.renewed_at and began - standing.renewed_at < RENEW_S and not others.forgotten:
            self._limiters.hold(claim.parts, None, claim.fair)
            return True
        is_recent = standing.renewed_at and began - standing.renewed_at < RENEWED_WITHIN_S
        if is_recent and not may_grow:
            claim = claim.within(own)
        if is_recent and not others.forgotten and not claim.grows_from(own):
            write = partial(self._store.renew, claim, self._process, self._own_revision)
        else:
            write = partial(self._store.write, claim, self._process, found.turn, others.forgotten)
        has_written = await in_daemon_thread("limits", lambda: self._in_time(began, write))
        if not has_written:
            return False
        self._begin(began, others)
        self._limiters.hold(claim.parts, began, claim.fair)
        return True

    def _in_time(self, began: float, write: Callable[[], bool]) -> bool:
        if self._clock() - began > OLD_S:
            raise FleetFailed("late", "etcd answers too late, or this gateway has no processor")
        return write()

    def _own(self, found: FoundClaims) -> GatewayClaim:
        known = found.by_name.get(self._name)
        if known is None:
            self._own_revision = 0
            return GatewayClaim(name=self._name)
        is_anothers = known.process != self._process and 0 < self._own_revision < known.revision
        if is_anothers and not self._is_doubled:
            self._telemetry.fleet_failed("limits", "same_name")
            log.error(
                "another gateway calls itself %s, too: both give out the same part of tenants' limits", self._name
            )
        self._is_doubled = is_anothers
        self._own_revision = known.revision
        return replace(known.claim, is_leaving=False)

    def _in_force(self, own: GatewayClaim) -> GatewayClaim:
        """Of what we once claimed; others may have what has lapsed."""
        standing = self._standing()
        if standing.renewed_at and not standing.is_lapsed(self._clock()):
            return own
        fair = all_of(own.fair)
        return replace(own, parts={tenant: smaller(parts, fair) for tenant, parts in own.parts.items()})

    def _lowered(self, own: GatewayClaim, claim: GatewayClaim, places: Mapping[str, int]) -> GatewayClaim:
        """Has what this claim takes away be in force now; and keeps places for requests that are under way."""
        lower = {tenant: smaller(own.of(tenant), claim.of(tenant)) for tenant in {*own.parts, *claim.parts}}
        if not self._standing().renewed_at:
            return claim
        self._limiters.hold(lower, None, min(own.fair, claim.fair))
        kept = dict(claim.parts)
        for tenant in lower:
            was, will = own.of(tenant).at_once, claim.of(tenant)
            if will.at_once < was and places.get(tenant):
                # Those under way end; no more come, and until then no other gateway has these places.
                taken = min(was, self._limiters.at_once(tenant) / places[tenant])
                kept[tenant] = will._replace(at_once=max(will.at_once, taken))
        return replace(claim, parts=kept)

    def _begin(self, now: float, others: OtherGateways) -> None:
        """The first claim of this gateway: where there are others, they may have given out all that there was."""
        standing = self._standing()
        if not standing.renewed_at:
            self._limiters.stand(replace(standing, renewed_at=now, joined_at=now if others.all else 0.0))

    def _standing(self) -> Standing:
        standing = self._limiters.standing
        assert standing is not None
        return standing

    def _look_at_time(self) -> None:
        has_lapsed = self._standing().is_lapsed(self._clock())
        if has_lapsed and not self._has_lapsed:
            self._telemetry.fleet_failed("limits", "lapsed")
            log.error(
                "the registry is lost: of every tenant's limits this gateway gives at most its fair part, %.3g; "
                "in %g s exactly that", self._standing().fair, FAIR_S,
            )  # fmt: skip
        if self._has_lapsed and not has_lapsed:
            log.info("the registry is back: limits of tenants follow demand again")
        self._has_lapsed = has_lapsed

    async def _leave(self) -> None:
        """Others take its part soon; without a word, they would after a long while."""

        def leave() -> None:
            found = self._store.read()
            known = found.by_name.get(self._name)
            if known is not None and known.process == self._process:
                self._store.renew(replace(known.claim, is_leaving=True), self._process, known.revision)

        try:
            async with asyncio.timeout(FAREWELL_S):
                await in_daemon_thread("limits", leave)
        except (FleetFailed, TimeoutError) as error:
            log.info("other gateways are not told that this one leaves: %s", error or "no answer")

"""One of several plan services with an etcd: it follows until it leads, and again when it leads no more.

One that follows tells the ledger of the one that leads, half a second old, and refuses changes with the address of that one.
Questions for the next plan stay open over a change of leader.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from planner.decisions.plans.live_plan import LivePlan
from planner.errors import ChangeRefused, Deposed, InputError, NothingSeen
from planner.service.announcement import AnnouncedLedger
from planner.service.app import PlanDesk
from planner.service.config import ApplyMode
from planner.service.etcd_store import PlanLeader, PlansFound, PlansInEtcd
from planner.service.keeper import Keeper
from planner.service.status import Status
from planner.solve.control.ledger import Ledger, LedgerEntry
from planner.solve.control.wishes import ScaleWishes
from transport.threads import in_daemon_thread

log = logging.getLogger("prfaas.plan")

LOOK_S: Final = 0.5
LAPSE_LOOK_S: Final = 0.1
UNKNOWN: Final = "?"

Works = Callable[[Keeper], Sequence[Coroutine[Any, Any, None]]]


class FollowingDesk:
    """Answers of a service that follows."""

    def __init__(self, announced: AnnouncedLedger, mode: ApplyMode, store: PlansInEtcd) -> None:
        self.leader: PlanLeader | None = None
        self.problem = "etcd has not been asked yet"
        self._announced = announced
        self._mode = mode
        self._store = store

    @property
    def ledger(self) -> Ledger:
        """As it was last seen."""
        return self._announced.ledger

    def status(self) -> Status:
        ledger, leader = self.ledger, self.leader
        return Status(
            term=ledger.term,
            leader=ledger.leader,
            mode=self._mode,
            paused=ledger.paused,
            superseded=False,
            in_force=ledger.in_force,
            proposal=ledger.proposal,
            found=ledger.found,
            conversions=ledger.conversions,
            diagnosis=self.problem or "the service that leads looks at the gateways",
            seen=None,
            gateways={},
            polls_failed={},
            failures={},
            leads_at=leader.url if leader is not None and leader.url else UNKNOWN,
        )

    def wishes(self) -> ScaleWishes:
        """Raises NothingSeen: only the service that leads looks at gateways."""
        raise NothingSeen(str(self._refused()))

    async def next_plan(self, place: tuple[int, int], wait_s: float, leader: str | None = None) -> LivePlan | None:
        """As `AnnouncedLedger.next_plan`."""
        return await self._announced.next_plan(place, wait_s, leader)

    async def history(self, limit: int) -> list[LedgerEntry]:
        """The last changes, oldest first."""
        return await in_daemon_thread("plans", lambda: self._store.last_entries(limit))

    async def apply(self, by: str, version: int | None = None) -> None:
        """Raises ChangeRefused, as all changes here."""
        raise self._refused()

    async def roll_back(self, by: str) -> None:
        raise self._refused()

    async def pause(self, by: str) -> None:
        raise self._refused()

    async def resume(self, by: str) -> None:
        raise self._refused()

    def _refused(self) -> ChangeRefused:
        at = self.status().leads_at
        if at == UNKNOWN:
            return ChangeRefused("this service follows, and none leads now: ask again in some seconds")
        return ChangeRefused(f"this service follows: {at} leads, ask there")


class PlanMember:
    """One service's part. `desk` is what answers now."""

    def __init__(
        self,
        store: PlansInEtcd,
        announced: AnnouncedLedger,
        mode: ApplyMode,
        keeper: Callable[[], Keeper],
        works: Works,
        first: Callable[[], Ledger],
        wall: Callable[[], float],
    ) -> None:
        """`works` are what a leader does, for ever; `first` is the ledger where etcd has none."""
        self._following = FollowingDesk(announced, mode, store)
        self.desk: PlanDesk = self._following
        self._store = store
        self._announced = announced
        self._keeper = keeper
        self._works = works
        self._first = first
        self._wall = wall

    async def run(self, url: str) -> None:
        """Until it is cancelled; others reach this service at `url`."""
        while True:
            try:
                if (ledger := await self._elected(url)) is not None:
                    await self._lead_and_resign(ledger)
            except Exception as error:
                log.exception("plans in etcd: begins again after an unforeseen error")
                self._has_failed(error)
            await asyncio.sleep(LOOK_S)

    async def _elected(self, url: str) -> Ledger | None:
        """The ledger to go on with; None: this service follows."""
        try:
            found = await in_daemon_thread("plans", self._store.look)
            self._follow(found)
            if found.leader is not None:
                return None
            return await in_daemon_thread("plans", lambda: self._store.campaign(url))
        except (OSError, InputError) as error:
            self._has_failed(error)
            await self._resign()
            return None

    async def _resign(self) -> None:
        with suppress(OSError):  # the lease will end it
            await in_daemon_thread("plans", self._store.resign)

    def _follow(self, found: PlansFound) -> None:
        self._following.leader, self._following.problem = found.leader, ""
        if found.ledger is not None:
            self._announced.say(found.ledger)

    def _has_failed(self, error: Exception) -> None:
        if self._following.problem != str(error):
            log.warning("plans in etcd: %s", error)
        self._following.leader, self._following.problem = None, str(error)

    async def _lead_and_resign(self, ledger: Ledger) -> None:
        try:
            await self._lead(ledger)
        except (OSError, ChangeRefused, InputError) as error:
            self._has_failed(error)
        finally:
            self.desk = self._following
            await self._resign()

    async def _lead(self, ledger: Ledger) -> None:
        """Until its lease has lapsed, or a change is refused. Raises OSError, ChangeRefused, InputError."""
        before = self._first() if ledger == Ledger() else ledger
        led, entry = before.led(before.term + 1, self._wall(), "controller", secrets.token_hex(8))
        await in_daemon_thread("plans", lambda: self._store.write(led, entry))
        self._announced.say(led)
        keeper = self._keeper()
        self.desk = keeper
        log.info("this service leads in term %d", led.term)
        tasks = [asyncio.create_task(work) for work in (*self._works(keeper), self._renewing(), self._lapsed())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            log.warning("this service leads no more: another one may")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _renewing(self) -> None:
        while True:
            await asyncio.sleep(self._store.renew_s)
            try:
                await in_daemon_thread("plans", self._store.renew)
            except OSError as error:
                log.warning("the lease to lead is not renewed: %s", error)

    async def _lapsed(self) -> None:
        while self._store.leads:  # noqa: ASYNC110 time is what it waits for
            await asyncio.sleep(LAPSE_LOOK_S)


async def until_deposed(work: Coroutine[Any, Any, None]) -> None:
    """What a leader does, to the change that tells it that it leads no more."""
    with suppress(Deposed):
        await work

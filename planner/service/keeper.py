"""Keeps the plan: looks at the gateways, has the controller judge, and carries the ledger from one state to the next.

Every change goes the same way: a pure step of the ledger, then the disk, then those that wait for it. So no gateway
hears of a plan that a restart would have forgotten.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Protocol

import aiohttp
from msgspec.structs import replace

from planner.decisions.plans.conversions import NodeStanding, why_not
from planner.decisions.plans.live_plan import LivePlan, PlanInputs, PlanSetting
from planner.decisions.plans.offered import CONVERTING, READY, GatewayLoad
from planner.decisions.views import Role
from planner.errors import ChangeRefused, NothingSeen
from planner.service.announcement import AnnouncedLedger
from planner.service.config import ApplyMode, ServiceConfig
from planner.service.conversions import ConversionFailed, NodeConverter
from planner.service.gateways import Gateways
from planner.service.status import Status
from planner.solve.control.controller import Controller, Effects, RoleMove
from planner.solve.control.ledger import PENDING, Draft, Ledger, LedgerEntry
from planner.solve.control.readings import Readings, quietest
from planner.solve.control.wishes import ScaleWishes, site_wishes

log = logging.getLogger("prfaas.plan")

LOOKS_KEPT: Final = 3  # ticks, after which a look says nothing of the load any more
ITSELF: Final = "controller"
FROM: Final = {RoleMove.TO_PREFILL: Role.DECODE, RoleMove.TO_DECODE: Role.PREFILL}
TO: Final = {RoleMove.TO_PREFILL: Role.PREFILL, RoleMove.TO_DECODE: Role.DECODE}

Change = Callable[[Ledger], tuple[Ledger, LedgerEntry | None]]


class LedgerStore(Protocol):
    """What outlives the service. Methods block, and raise OSError; `write` raises Deposed where another service leads."""

    def write(self, ledger: Ledger, entry: LedgerEntry | None) -> None: ...

    def last_entries(self, limit: int) -> list[LedgerEntry]: ...


class Keeper:
    """One leader's work. `clock` is monotonic, `wall` seconds since the epoch; `failures` are unforeseen errors."""

    def __init__(
        self,
        config: ServiceConfig,
        store: LedgerStore,
        announced: AnnouncedLedger,
        gateways: Gateways,
        converter: NodeConverter,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.gateways = gateways
        self.superseded = False
        self.failures: Counter[str] = Counter()
        self._config = config
        self._store = store
        self._announced = announced
        self._converter = converter
        self._clock = clock
        self._wall = wall
        self._readings = Readings(config.units)
        self._controller = Controller(config.ruled, config.model(), clock())
        self._nodes = self._readings.nodes()
        self._looked_at: float | None = None  # by `wall`
        self._looked_s = 0.0  # by `clock`
        self._seen: PlanInputs | None = None
        self._diagnosis = "nothing has been seen yet"
        self._one_change = asyncio.Lock()
        self._to_convert = asyncio.Event()

    # What others ask

    @property
    def ledger(self) -> Ledger:
        """The newest that is written down."""
        return self._announced.ledger

    def status(self) -> Status:
        ledger = self.ledger
        return Status(
            term=ledger.term,
            leader=ledger.leader,
            mode=self._config.mode,
            paused=ledger.paused,
            superseded=self.superseded,
            in_force=ledger.in_force,
            proposal=ledger.proposal,
            found=ledger.found,
            conversions=ledger.conversions,
            diagnosis=self._diagnosis,
            seen=self._seen,
            gateways=dict(self.gateways.answers),
            polls_failed=dict(self.gateways.failed),
            failures=dict(self.failures),
        )

    def wishes(self) -> ScaleWishes:
        """How many nodes each site should have, by the latest look. Raises NothingSeen."""
        if self.superseded:
            raise NothingSeen("another service leads: ask that one")
        if self._looked_at is None:
            raise NothingSeen(self._diagnosis)
        age_s = self._clock() - self._looked_s
        if age_s > LOOKS_KEPT * self._config.controller.tick_s + self._config.poll_timeout_s:
            raise NothingSeen(f"the gateways were last seen {age_s:.0f} s ago: {self._diagnosis}")
        return ScaleWishes(
            at=self._looked_at, reason=self._diagnosis, sites=site_wishes(self._nodes, self._config.scale)
        )

    async def next_plan(self, place: tuple[int, int], wait_s: float, leader: str | None = None) -> LivePlan | None:
        """As `AnnouncedLedger.next_plan`."""
        return await self._announced.next_plan(place, wait_s, leader)

    async def history(self, limit: int) -> list[LedgerEntry]:
        """The last changes, oldest first."""
        return await asyncio.to_thread(self._store.last_entries, limit)

    # What others want

    async def apply(self, by: str, version: int | None = None) -> None:
        """Raises ChangeRefused."""
        await self._change(lambda ledger: ledger.apply(self._wall(), by, version))
        self._to_convert.set()

    async def roll_back(self, by: str) -> None:
        """Raises ChangeRefused."""
        await self._change(lambda ledger: ledger.roll_back(self._wall(), by))
        self._to_convert.set()

    async def pause(self, by: str) -> None:
        await self._change(lambda ledger: ledger.pause(self._wall(), by))

    async def resume(self, by: str) -> None:
        await self._change(lambda ledger: ledger.resume(self._wall(), by))

    async def _change(self, step: Change) -> None:
        """Raises ChangeRefused, and OSError when it cannot be written down: then nothing has changed."""
        async with self._one_change:
            if self.superseded:
                raise ChangeRefused("another service leads: gateways follow a plan of a later term or leader")
            ledger, entry = step(self.ledger)
            if ledger == self.ledger and entry is None:
                return
            # A caller that leaves meanwhile must not leave the files ahead of what is said.
            await _whole(self._keep(ledger, entry))

    async def _keep(self, ledger: Ledger, entry: LedgerEntry | None) -> None:
        await asyncio.to_thread(self._store.write, ledger, entry)
        self._announced.say(ledger)
        if entry is not None:
            log.info("%s version=%d by=%s %s", entry.change, entry.version, entry.by, entry.reason)

    # What it does by itself

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Looks once every tick, for ever."""
        while True:
            await self.tick(http)
            await asyncio.sleep(self._config.controller.tick_s)

    async def tick(self, http: aiohttp.ClientSession) -> None:
        """One look, and what follows from it."""
        loads = await self.gateways.poll(http, self._readings)
        if not loads:
            self._diagnosis = "no gateway answers"
            return
        self._nodes, self._looked_at, self._looked_s = self._readings.nodes(), self._wall(), self._clock()
        await self._heed(loads)
        if PENDING in self.ledger.conversions.values():
            self._to_convert.set()
        setting = self.ledger.setting
        if self.superseded or setting is None:
            self._diagnosis = "another service leads"
            return
        observation, self._seen = self._readings.observe(self._clock(), setting)
        effects = await asyncio.to_thread(self._controller.on_tick, observation)
        self._diagnosis = effects.diagnosis
        await self._follow_up(effects, setting, self._seen)

    async def _heed(self, loads: list[GatewayLoad]) -> None:
        """What gateways follow already: it may be later than anything that is known here."""
        plans = [load.follows for load in loads if load.follows]
        followed = max(plans, key=lambda plan: (plan.rank, plan.version), default=None)
        was, self.superseded = self.superseded, False
        # One with less memory, or that goes before the leader of a plan of a later version, would be refused as stale for ever.
        if followed is not None and (self.ledger.last_version == 0 or followed.rank < self.ledger.rank):
            await self._change(lambda ledger: ledger.adopted(followed, self._wall(), ITSELF))
        self.superseded = followed is not None and followed.rank > self.ledger.rank
        if followed is not None and self.superseded and not was:
            log.error(
                "gateways follow a plan of term %d of leader %s, this is term %d of leader %s: another service leads, "
                "this one changes nothing",
                *followed.rank, *self.ledger.rank,
            )  # fmt: skip
        if not self.superseded and (found := self._readings.found()) is not None:
            await self._change(lambda ledger: (ledger.observed(found), None))

    async def _follow_up(self, effects: Effects, setting: PlanSetting, seen: PlanInputs) -> None:
        draft = self._draft(effects, setting, seen)
        limits = self._config.limits
        if draft is not None:
            await self._change(lambda ledger: ledger.propose(draft, limits, self._wall()))
        elif effects.judged and effects.gain <= 0:
            await self._change(lambda ledger: ledger.withdraw(self._wall(), effects.diagnosis))
        proposal = self.ledger.proposal
        if draft is None or self._config.mode is not ApplyMode.AUTO:
            return  # one that stands from before is for people: no look has found it better since
        if proposal and self.ledger.may_apply_itself(limits, self._wall()):
            with suppress(ChangeRefused):  # a person was faster
                await self.apply(ITSELF, proposal.version)

    def _draft(self, effects: Effects, setting: PlanSetting, seen: PlanInputs) -> Draft | None:
        threshold, roles = setting.threshold_tokens, dict(setting.roles)
        tie_share = setting.tie_share
        if effects.threshold_tokens is not None:
            tie_share = 1.0 if effects.tie_share is None else effects.tie_share
            threshold = self._config.units.threshold(effects.threshold_tokens, tie_share)
        if effects.convert is not None:
            standing = self.ledger.proposal.setting.roles if self.ledger.proposal is not None else {}
            node = quietest(self._nodes, FROM[effects.convert], standing)
            if node is None:
                return None
            roles[node.node_id] = TO[effects.convert]
        elif effects.threshold_tokens is None:
            return None
        return Draft(
            setting=PlanSetting(threshold_tokens=threshold, tie_share=tie_share, roles=roles),
            reason=effects.diagnosis,
            gain=effects.gain,
            seen=seen,
        )

    async def convert_nodes(self) -> None:
        """Has nodes take the roles of the plan in force, one at a time, for ever."""
        while True:
            await self._to_convert.wait()
            self._to_convert.clear()
            while (found := self._next_conversion()) is not None:
                await self._convert(*found)

    def _next_conversion(self) -> tuple[LivePlan, str, Role] | None:
        plan = self.ledger.in_force
        if plan is None or self.superseded:
            return None
        if not self._nodes:  # the next look will tell
            return None
        roles = plan.setting.roles
        waiting = [name for name, state in self.ledger.conversions.items() if state == PENDING]
        # Of two that change places, one can go first: the other would leave a role without a node.
        waiting.sort(key=lambda name: bool(self._obstacle(name, roles[name])))
        return (plan, waiting[0], roles[waiting[0]]) if waiting else None

    def _obstacle(self, node_id: str, role: Role) -> str:
        """What speaks against it; "" nothing. One that is converting already may have been told so by the leader before."""
        standings = [
            NodeStanding(
                node_id=node.node_id,
                cluster=node.cluster,
                kind=node.kind,
                role=node.role,
                is_ready=node.state == READY or (node.node_id == node_id and node.state == CONVERTING),
            )
            for node in self._nodes
        ]
        return why_not(node_id, role, standings)

    async def _convert(self, plan: LivePlan, node_id: str, role: Role) -> None:
        failure = self._obstacle(node_id, role)
        if not failure:
            node = next(node for node in self._nodes if node.node_id == node_id)
            self._controller.converted(self._clock())
            try:
                await self._converter.convert(node, role, plan)
                self._nodes = [replace(each, role=role) if each.node_id == node_id else each for each in self._nodes]
            except ConversionFailed as error:
                failure = str(error)
        if failure:
            log.warning("%s does not become a %s node: %s", node_id, role, failure)

        def noted(ledger: Ledger) -> tuple[Ledger, LedgerEntry | None]:
            if ledger.in_force is None or ledger.in_force.version != plan.version:
                return ledger, None  # another plan has come meanwhile, and asks anew
            return ledger.converted(self._wall(), node_id, failure)

        with suppress(ChangeRefused):  # another service leads now, and asks the node itself
            await self._change(noted)


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Waits for `work` to its end, even when the caller is cancelled; then raises the cancellation."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise

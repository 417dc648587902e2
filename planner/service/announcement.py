"""The ledger as it is told to those who wait for the next plan, whether this service leads or follows."""

import asyncio

from planner.decisions.plans.live_plan import LivePlan
from planner.solve.control.ledger import Ledger


class AnnouncedLedger:
    """The newest ledger that is written down."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._changed = asyncio.Event()

    def say(self, ledger: Ledger) -> None:
        """Another one counts from now on."""
        if ledger != self.ledger:
            self.ledger = ledger
            self._changed.set()
            self._changed = asyncio.Event()

    async def next_plan(self, place: tuple[int, int], wait_s: float, leader: str | None = None) -> LivePlan | None:
        """The plan in force, as soon as it is another one than that at `place` of `leader` (None: of any); None: too late."""
        try:
            async with asyncio.timeout(wait_s):
                while (plan := self.ledger.in_force) is None or (plan.place == place and leader in (None, plan.leader)):
                    await self._changed.wait()
                return plan
        except TimeoutError:
            return None

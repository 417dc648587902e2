"""The life of plans: proposed → applied → rolled back. Values in, values out; its keeper writes them down.

    propose       another setting than the one in force, with a reason; a proposal that says the same stands as it is
    withdraw      nothing is to be gained any more
    apply         the proposal is in force: gateways follow it; what was in force before is what a rollback goes back to
    roll_back     a new version with the setting before; nothing changes by itself until resumed
    pause, resume whether anything is proposed, or changes by itself

Versions never repeat: a proposal has the next one and keeps it when it is applied, a rollback has the next one after that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from planner.decisions.plans.live_plan import LivePlan, Mode, PlanInputs, PlanSetting
from planner.errors import ChangeRefused

MAX_KEPT: Final = 64  # settings to go back to
MAX_KEPT_BYTES: Final = 256 * 1024  # as JSON: roles of a thousand nodes are 20 KB
PENDING: Final = "pending"
DONE: Final = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """What plans may say, and how often one may be applied by itself. `settle_s`: seconds between two such changes.

    Thresholds that differ by less than `resolution` (relative) are one.
    """

    min_threshold_tokens: float = 0.0
    max_threshold_tokens: float = float("inf")
    settle_s: float = 60.0
    resolution: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.min_threshold_tokens <= self.max_threshold_tokens:
            raise ValueError(
                f"min_threshold_tokens={self.min_threshold_tokens}, max_threshold_tokens={self.max_threshold_tokens}: "
                "need 0 <= min <= max"
            )

    def within(self, setting: PlanSetting) -> PlanSetting:
        """`setting`, with a threshold that may be; one that was moved is no atom."""
        threshold = min(max(setting.threshold_tokens, self.min_threshold_tokens), self.max_threshold_tokens)
        if threshold == setting.threshold_tokens:
            return setting
        return replace(setting, threshold_tokens=threshold, tie_share=1.0)

    def same(self, one: PlanSetting, other: PlanSetting) -> bool:
        """Whether it makes no difference which of them is in force."""
        apart = abs(one.threshold_tokens - other.threshold_tokens)
        near = apart <= self.resolution * max(one.threshold_tokens, other.threshold_tokens)
        # A share belongs to exactly its length.
        exact = one.tie_share == other.tie_share == 1 or (not apart and abs(one.tie_share - other.tie_share) < 0.05)
        return near and exact and dict(one.roles) == dict(other.roles)


class PlanEvent(StrEnum):
    """An event in a plan's life."""

    PROPOSED = "proposed"
    WITHDRAWN = "withdrawn"
    APPLIED = "applied"
    ROLLED_BACK = "rolled_back"
    PAUSED = "paused"
    RESUMED = "resumed"
    LED = "led"  # a leader has begun
    ADOPTED = "adopted"  # from a gateway that followed a plan which this service does not remember
    CONVERTED = "converted"
    NOT_CONVERTED = "not_converted"


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the audit log: what changed, when (seconds since the epoch), from what to what, why, and who asked."""

    at: float
    change: PlanEvent
    version: int
    term: int
    by: str
    reason: str = ""
    gain: float = 0.0
    before: PlanSetting | None = None
    after: PlanSetting | None = None
    seen: PlanInputs | None = None


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that seems better, before it has a version."""

    setting: PlanSetting
    reason: str
    gain: float = 0.0
    seen: PlanInputs = PlanInputs()


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """All that must be remembered. `found` is what gateways did before any plan, `back_to` the settings before, oldest first.

    `conversions` says of each node that the plan in force places what became of it: PENDING, DONE, or why not. `leader` is the
    random id of the leader of `term`.
    """

    term: int = 0
    leader: str = ""
    last_version: int = 0
    in_force: LivePlan | None = None
    proposal: LivePlan | None = None
    found: PlanSetting | None = None
    back_to: tuple[PlanSetting, ...] = ()
    paused: bool = False
    conversions: Mapping[str, str] = {}
    changed_at: float | None = None  # when something was last applied or rolled back

    @property
    def setting(self) -> PlanSetting | None:
        """The state in force, as far as known."""
        return self.found if self.in_force is None else held(self.in_force.setting, self.conversions)

    # Who leads

    @property
    def rank(self) -> tuple[int, str]:
        """As `LivePlan.rank`."""
        return self.term, self.leader

    def led(self, term: int, at: float, by: str, leader: str = "") -> tuple["Ledger", LedgerEntry]:
        """A leader of a later term goes on with what is in force. Raises ChangeRefused for a term that has been."""
        if term <= self.term:
            raise ChangeRefused(f"term {term} is over: it is {self.term}")
        ledger = replace(
            self,
            term=term,
            leader=leader,
            in_force=_of_leader(self.in_force, term, leader),
            proposal=_of_leader(self.proposal, term, leader),
        )
        return ledger, self._entry(at, PlanEvent.LED, by, term=term)

    def adopted(self, plan: LivePlan, at: float, by: str) -> tuple["Ledger", LedgerEntry | None]:
        """Goes on with a plan that a gateway follows, if it is later than all that are remembered.

        The leader that made it has asked its nodes: no conversions are known here, and none wait.
        """
        if plan.version <= self.last_version:
            return self, None
        ours = replace(plan, term=max(self.term, plan.term + 1), leader=self.leader)
        ledger = replace(
            self, term=ours.term, last_version=ours.version, in_force=ours, proposal=None, conversions={}, changed_at=at,
            back_to=self.back_to if self.in_force is None else self._with_way_back(ours),
        )  # fmt: skip
        return ledger, ledger._entry(at, PlanEvent.ADOPTED, by, plan=ours, before=self.setting)

    # What is to be

    def observed(self, found: PlanSetting) -> "Ledger":
        """What gateways do now; as long as there is no plan, that is what a first one is measured by."""
        return self if self.in_force is not None or self.found == found else replace(self, found=found)

    def propose(self, draft: Draft, limits: PlanLimits, at: float) -> tuple["Ledger", LedgerEntry | None]:
        """Makes `draft` the proposal, within the limits, unless it says nothing new."""
        if self.paused:
            return self, None
        setting = limits.within(draft.setting)
        if self.setting is not None and limits.same(setting, self.setting):
            return self.withdraw(at, "the limits leave nothing of it")
        if self.proposal is not None and limits.same(setting, self.proposal.setting):
            return self, None
        plan = LivePlan(
            version=self.last_version + 1, term=self.term, made_at=at, setting=setting, reason=draft.reason,
            gain=draft.gain, seen=draft.seen, leader=self.leader,
        )  # fmt: skip
        ledger = replace(self, last_version=plan.version, proposal=plan)
        return ledger, ledger._entry(at, PlanEvent.PROPOSED, plan.by, plan=plan, before=self.setting)

    def withdraw(self, at: float, reason: str) -> tuple["Ledger", LedgerEntry | None]:
        """Nothing is to be gained any more."""
        if self.proposal is None:
            return self, None
        gone = replace(self.proposal, reason=reason, gain=0.0)
        return replace(self, proposal=None), self._entry(at, PlanEvent.WITHDRAWN, gone.by, plan=gone)

    def may_apply_itself(self, limits: PlanLimits, at: float) -> bool:
        """Whether the proposal may be applied without anybody being asked."""
        settled = self.changed_at is None or at >= self.changed_at + limits.settle_s
        return self.proposal is not None and not self.paused and settled

    # What changes

    def apply(self, at: float, by: str, version: int | None = None) -> tuple["Ledger", LedgerEntry]:
        """The proposal is in force. Raises ChangeRefused without one, and for another `version` than that of the proposal."""
        if self.proposal is None:
            raise ChangeRefused("there is no proposal to apply")
        if version is not None and version != self.proposal.version:
            raise ChangeRefused(f"version {version} is not proposed; the proposal is version {self.proposal.version}")
        plan = replace(self.proposal, mode=Mode.APPLIED, by=by, term=self.term, leader=self.leader)
        ledger = replace(
            self, in_force=plan, proposal=None, conversions=self._conversions_for(plan), changed_at=at,
            back_to=self._with_way_back(plan),
        )  # fmt: skip
        return ledger, ledger._entry(at, PlanEvent.APPLIED, by, plan=plan, before=self.setting)

    def roll_back(self, at: float, by: str) -> tuple["Ledger", LedgerEntry]:
        """The setting before is in force again, and nothing changes by itself until `resume`.

        Raises ChangeRefused without one.
        """
        if self.in_force is None or not self.back_to:
            raise ChangeRefused("there is nothing to roll back to")
        *earlier, setting = self.back_to
        plan = LivePlan(
            version=self.last_version + 1, term=self.term, made_at=at, setting=setting, by=by, mode=Mode.APPLIED,
            reason=f"rollback of version {self.in_force.version}", leader=self.leader,
        )  # fmt: skip
        ledger = replace(
            self, last_version=plan.version, in_force=plan, proposal=None, back_to=tuple(earlier), paused=True,
            conversions=self._conversions_for(plan), changed_at=at,
        )  # fmt: skip
        return ledger, ledger._entry(at, PlanEvent.ROLLED_BACK, by, plan=plan, before=self.setting)

    def pause(self, at: float, by: str) -> tuple["Ledger", LedgerEntry]:
        """Nothing is proposed and nothing changes by itself; a proposal that stands may still be applied."""
        return replace(self, paused=True), self._entry(at, PlanEvent.PAUSED, by)

    def resume(self, at: float, by: str) -> tuple["Ledger", LedgerEntry]:
        return replace(self, paused=False), self._entry(at, PlanEvent.RESUMED, by)

    def converted(self, at: float, node_id: str, failure: str = "") -> tuple["Ledger", LedgerEntry]:
        """A node has the role that the plan in force gives it, or has not got it: with the reason."""
        change = PlanEvent.NOT_CONVERTED if failure else PlanEvent.CONVERTED
        ledger = replace(self, conversions={**self.conversions, node_id: failure or DONE})
        reason = f"{node_id}: {failure}" if failure else node_id
        return ledger, replace(self._entry(at, change, "controller", plan=self.in_force), reason=reason)

    def _conversions_for(self, plan: LivePlan) -> dict[str, str]:
        """What `plan` asks of nodes: nothing of one that has been given its role before."""
        before = self.in_force.setting.roles if self.in_force is not None else {}
        done = {node for node, role in before.items() if self.conversions.get(node) == DONE}
        return {
            node: DONE if node in done and before[node] is role else PENDING
            for node, role in plan.setting.roles.items()
        }

    def _with_way_back(self, plan: LivePlan) -> tuple[PlanSetting, ...]:
        before = self.setting
        if before is None:
            return self.back_to
        # The first plan to place a node is undone by the role that the node was found in.
        roles = {node: role for node, role in plan.seen.roles.items() if node in plan.setting.roles}
        return _newest((*self.back_to, replace(before, roles={**roles, **before.roles})))

    def _entry(
        self,
        at: float,
        change: PlanEvent,
        by: str,
        *,
        plan: LivePlan | None = None,
        before: PlanSetting | None = None,
        term: int | None = None,
    ) -> LedgerEntry:
        shown = plan or self.in_force
        return LedgerEntry(
            at=at,
            change=change,
            version=shown.version if shown is not None else 0,
            term=self.term if term is None else term,
            by=by,
            reason=plan.reason if plan is not None else "",
            gain=plan.gain if plan is not None else 0.0,
            before=before,
            after=plan.setting if plan is not None else None,
            seen=plan.seen if plan is not None else None,
        )


def held(setting: PlanSetting, conversions: Mapping[str, str]) -> PlanSetting:
    """`setting` without the roles that nodes have not taken: a plan that gives them again is another one."""
    roles = {node: role for node, role in setting.roles.items() if conversions.get(node, DONE) in (PENDING, DONE)}
    return replace(setting, roles=roles)


def _of_leader(plan: LivePlan | None, term: int, leader: str) -> LivePlan | None:
    return None if plan is None else replace(plan, term=term, leader=leader)


def _newest(kept: tuple[PlanSetting, ...]) -> tuple[PlanSetting, ...]:
    """As many of the last ones as may be kept; the last one always."""
    size, start = 0, len(kept)
    while start > max(0, len(kept) - MAX_KEPT):
        size += len(msgspec.json.encode(kept[start - 1]))
        if size > MAX_KEPT_BYTES and start < len(kept):
            break
        start -= 1
    return kept[start:]

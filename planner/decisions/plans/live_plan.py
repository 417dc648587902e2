"""The plan that gateways follow: what the long timescale has decided, as data with a version.

A plan has no end: a follower keeps it until a newer one comes, whatever becomes of the service that made it. A plan of
an earlier term, or of an earlier version, than the one that is followed is stale and refused: a leader begins with the plans of
the one before, so no later term has an earlier version. Two services that do not share a directory may both lead in a term: the
random ids of leaders order them, for gateways and for the services themselves, so that one of the two gives way.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from planner.decisions.views import Role


class Mode(StrEnum):
    """Whether anybody is to follow it."""

    ADVISORY = "advisory"
    APPLIED = "applied"


class PlanSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions of a plan. `tie_share` of the requests of exactly t tokens stay local; `roles` by node of the PD
    cluster."""

    threshold_tokens: float
    tie_share: float = 1.0
    roles: Mapping[str, Role] = {}

    def __post_init__(self) -> None:
        if not 0 <= self.threshold_tokens < float("inf"):
            raise ValueError(f"threshold_tokens={self.threshold_tokens}: must be at least 0 and finite")
        if not 0 <= self.tie_share <= 1:
            raise ValueError(f"tie_share={self.tie_share}: must be in [0, 1]")


class PlanInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The observations behind a plan: rates in requests/s, lengths in tokens, loads as means over nodes, bandwidth in
    bytes/s (None: as configured), and what the nodes of the PD cluster did."""

    requests: int = 0
    offered_req_per_s: float = 0.0
    mean_uncached_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    num_prfaas: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    prefill_load: float = 0.0
    decode_load: float = 0.0
    egress_bytes_per_s: float | None = None
    gateways: int = 0
    roles: Mapping[str, Role] = {}


class LivePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan. `term` counts the leaders that there were, `leader` is the random id of its own ("" in an earlier release);
    `made_at` is seconds since the epoch; `gain` is relative, in Λ. `model` is the one that it is for, as clients call it; ""
    where its service is not told."""

    version: int
    term: int
    made_at: float
    setting: PlanSetting
    reason: str
    gain: float = 0.0
    by: str = "controller"
    mode: Mode = Mode.ADVISORY
    seen: PlanInputs = PlanInputs()
    leader: str = ""
    model: str = ""

    @property
    def rank(self) -> tuple[int, str]:
        """Of two leaders, the one of the higher rank is followed."""
        return self.term, self.leader

    @property
    def place(self) -> tuple[int, int]:
        """Term and version: where it stands among all plans of a leader and its forerunners."""
        return self.term, self.version


class PlanRefusal(StrEnum):
    """The reason why a plan is not followed."""

    STALE_TERM = "stale_term"
    STALE_LEADER = "stale_leader"  # of the same term, and another one goes before it
    STALE_VERSION = "stale_version"
    NOT_APPLIED = "not_applied"


def refusal_of(offered: LivePlan, followed: LivePlan | None) -> PlanRefusal | None:
    """The reason why `offered` must not replace `followed`; None: it may. The one that is followed is never refused."""
    if offered.mode is not Mode.APPLIED:
        return PlanRefusal.NOT_APPLIED
    if followed is None:
        return None
    if offered.term < followed.term:
        return PlanRefusal.STALE_TERM
    if offered.rank < followed.rank:
        return PlanRefusal.STALE_LEADER
    return PlanRefusal.STALE_VERSION if offered.version < followed.version else None

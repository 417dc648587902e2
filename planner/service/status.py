"""The service's status: `GET /status`."""

from collections.abc import Mapping

import msgspec

from planner.decisions.plans.live_plan import LivePlan, PlanInputs, PlanSetting


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How things stand. `found` is what gateways did before any plan; `diagnosis` what the last look at the system came to.

    `gateways` says of each what its last answer came to: the version that it follows, or why there was none. `superseded` is
    set while gateways follow a plan of a later term, or of a leader that goes before this one, which then changes nothing.
    `leads_at` is where the service answers that leads, where this one follows; "?" none does now.
    `failures` counts unexpected errors by what was being done; each is in the log.
    `turned_away` counts connections to this service that it ended, by reason: crowded, crowded_holder, handshake.
    """

    term: int
    mode: str
    paused: bool
    superseded: bool
    in_force: LivePlan | None
    proposal: LivePlan | None
    found: PlanSetting | None
    conversions: Mapping[str, str]
    diagnosis: str
    seen: PlanInputs | None
    gateways: Mapping[str, str]
    polls_failed: Mapping[str, int]
    failures: Mapping[str, int]
    leader: str = ""
    leads_at: str = ""
    turned_away: Mapping[str, int] = {}

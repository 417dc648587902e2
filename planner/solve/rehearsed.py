"""What a plan does under the requests that it was fitted to, where routing itself has been asked: closed forms cannot know it.

A command that solves may bring such a rehearsal; without one, `loaded.py` and `replay.py` say what they can.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from planner.model.queueing import Ttft
from planner.model.site import Site
from planner.solve.problem import Problem
from planner.solve.search import Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """Who went where at a rate, and what requests waited. `in_time` is the share of each target's requests, by the target's name,
    that it was kept for; targets whose requests did not take part are not in it.
    """

    offload_fraction: float
    held_fraction: float
    egress_gbps: float
    ttft: Ttft
    in_time: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRate:
    """The largest rate at which a site's targets for TTFT are kept, else 0, and shares in time at it."""

    rate: float
    in_time: Mapping[str, float]


class PlanRehearsal(Protocol):
    """A plan that can be rehearsed at any rate."""

    @property
    def requests(self) -> int:
        """How many take part."""
        ...

    def at(self, rate: float) -> Rehearsed:
        """What is so at a rate."""
        ...

    def highest_rate(self, near: float, limit: float) -> KeptRate:
        """The largest rate up to `limit` at which all targets of the site are kept, looked for from `near` on."""
        ...


Rehearse: TypeAlias = Callable[[Site, Problem, Cut, float], PlanRehearsal | None]
"""Of a site, its problem, a cut of it, and the threshold that this is: None where the workload does not say enough."""

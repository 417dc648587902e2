"""What a plan does under the requests that it was fitted to, where routing itself has been asked: closed forms cannot know it.

A command that solves may bring such a rehearsal; without one, `loaded.py` and `replay.py` say what they can.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from planner.model.queueing import Ttft
from planner.model.site import Site
from planner.solve.problem import Problem
from planner.solve.search import Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """Who went where at a rate, and what requests waited."""

    offload_fraction: float
    held_fraction: float
    egress_gbps: float
    ttft: Ttft


class PlanRehearsal(Protocol):
    """A plan that can be rehearsed at any rate."""

    @property
    def requests(self) -> int:
        """How many take part."""
        ...

    def at(self, rate: float) -> Rehearsed:
        """What is so at a rate."""
        ...

    def highest_rate(self, near: float, limit: float, ttft_p90_s: float) -> float:
        """The largest rate up to `limit` whose P90 TTFT is within the target, looked for from `near` on; 0 if none is."""
        ...


Rehearse: TypeAlias = Callable[[Site, Problem, Cut, float], PlanRehearsal | None]
"""Of a site, its problem, a cut of it, and the threshold that this is: None where the workload does not say enough."""

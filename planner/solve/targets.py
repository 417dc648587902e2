"""The targets for TTFT of one workload: which of its requests each is of, and how many of them may be late."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from planner.errors import InputError
from planner.model.demand.slo import TtftTarget
from planner.model.profile import Floats
from planner.model.site import Workload
from planner.model.trace_files.arrivals import KeptArrivals
from planner.model.traffic import Lengths
from planner.solve.problem import Problem, ttfts
from planner.solve.search import weighted_quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A target, and the place of its category among the workload's; None: of all categories."""

    target: TtftTarget
    category: int | None = None

    @classmethod
    def of(cls, target: TtftTarget, workload: Workload) -> Self:
        """Raises InputError for a category that the workload does not have."""
        if target.category is None:
            return cls(target=target)
        if target.category not in workload.categories:
            known = ", ".join(workload.categories) or "none: fit a trace that says them"
            raise InputError(f"slo: category {target.category!r} is not in workload {workload.name}; it has {known}")
        return cls(target=target, category=workload.categories.index(target.category))

    def times(self, factor: float) -> Self:
        """The same where so many times the seconds are in time."""
        return replace(self, target=replace(self.target, ttft_s=self.target.ttft_s * factor))

    @property
    def is_of_all(self) -> bool:
        return self.target.name == TtftTarget(ttft_s=self.target.ttft_s).name

    @property
    def ttft_s(self) -> float:
        return self.target.ttft_s

    @property
    def late(self) -> float:
        """The share of its requests that may be late."""
        return 1.0 - self.target.share

    def members(self, lengths: Lengths) -> Floats:
        """The share of the requests of each length that it is of. A length counts by the mean of its whole prompts."""
        found = self.target.has(lengths.prompts).astype(np.float64)
        if self.category is None or lengths.categories is None:
            return np.asarray(found, dtype=np.float64)
        return np.asarray(found * lengths.categories[:, self.category], dtype=np.float64)

    def reached(self, arrivals: KeptArrivals, ttfts_s: Floats) -> float:
        """The TTFT within which the share of its requests is; 0 where it is of none."""
        own = self._own(arrivals, ttfts_s)
        return float(np.quantile(own, self.target.share)) if len(own) else 0.0

    def in_time(self, arrivals: KeptArrivals, ttfts_s: Floats) -> float:
        """The share of its requests whose first token is there in time; 1 of none."""
        own = self._own(arrivals, ttfts_s)
        return float((own <= self.ttft_s).mean()) if len(own) else 1.0

    def _own(self, arrivals: KeptArrivals, ttfts_s: Floats) -> Floats:
        has = self.target.has(arrivals.prompts)
        if self.category is not None and arrivals.category is not None:
            has = has & (arrivals.category == self.category)
        return np.asarray(ttfts_s[has], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutlook:
    """How a target is kept at a rate: `of_all` is the share of all requests that it is of."""

    requests: str
    of_all: float
    ttft_s: float
    asked_share: float
    share_in_time: float
    at_req_per_s: float


def everybody_within(ttft_p90_s: float) -> tuple[Goal, ...]:
    """P90 TTFT of all requests."""
    return (Goal(target=TtftTarget(ttft_s=ttft_p90_s)),)


def are_kept(goals: Sequence[Goal], arrivals: KeptArrivals, ttfts_s: Floats) -> bool:
    """Whether all goals are kept by requests that had these TTFTs."""
    return all(goal.reached(arrivals, ttfts_s) <= goal.ttft_s for goal in goals)


def nearest_s(problem: Problem, goal: Goal, cuts: Sequence[int]) -> float:
    """The least TTFT within which the share of a goal's requests is without load, by any of these cuts; 0 of no requests."""
    return min(_without_load_s(problem, goal, cut) for cut in cuts)


def _without_load_s(problem: Problem, goal: Goal, cut: int) -> float:
    seconds, shares = ttfts(problem, cut)
    members = goal.members(problem.lengths)
    if problem.lengths.held is not None:
        members = np.concatenate([members, members])
    shares = shares * members
    return weighted_quantile(seconds, shares / shares.sum(), goal.target.share) if shares.sum() else 0.0

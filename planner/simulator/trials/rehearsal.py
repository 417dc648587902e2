"""Plans under their own requests, by the code that decides live.

A workload keeps its requests in order, and which blocks they share. Where a gateway sends each depends on what each node holds,
and on how full it is at that moment: on the state that one decode node has while another is chosen, on late answers, on caches
that are empty at first. No closed form knows that, so a plan is run with these requests before it promises anything.

Of many requests the first `MOST` are run. What is so of them goes for all; their TTFT, and the rate that keeps the targets, are
scaled by what the coarse replay of all says beside its replay of these. Of sessions so many are run that `MOST` requests come at
Λ. They are not scaled: a replay has them faster. A target whose requests are not among those that are run is left to the replay.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np

from planner.decisions.views import ClusterKind
from planner.model.demand.slo import members
from planner.model.fitting import arrivals_of
from planner.model.profile import Floats
from planner.model.queueing import Ttft
from planner.model.sessions import at_factor
from planner.model.site import Site
from planner.model.trace_files.arrivals import KeptArrivals
from planner.model.trace_files.categories import CategorySource, RequestCategories
from planner.model.workload import Trace
from planner.simulator.outcome import SimulationOutcome
from planner.simulator.scenario import Scenario
from planner.simulator.trials.hits import pd_prefixes
from planner.simulator.trials.trial import DEPLOYED_TRIAL, TrialSetting, scenario_of
from planner.simulator.world import simulate
from planner.solve.problem import Problem
from planner.solve.rehearsed import KeptRate, Rehearsed
from planner.solve.replay import Replay
from planner.solve.search import Cut
from planner.solve.targets import Goal, everybody_within

MOST: Final = 6_000  # requests of a rehearsal
LEAST: Final = 100
STRIDE: Final = 1.12  # between rates, until one keeps the targets and one does not
WITHIN: Final = 0.01  # of each other, the two rates between which the largest lies
FARTHEST: Final = 40  # strides down, to an eightieth
SEED: Final = 0
NO_RATE: Final = KeptRate(rate=0.0, in_time=MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRehearsal:
    """A plan as it is run, its requests at their own rate, and coarse replays of all of them and of those that are run.

    `goals` are the site's targets of some requests, beside `ttft_p90_s` of all.
    """

    scenario: Scenario
    trace: Trace
    rate_req_per_s: float  # at which `trace` comes as it is
    ttft_p90_s: float | None
    goals: tuple[Goal, ...]
    whole: Replay
    part: Replay | None = None  # None where all are run, and of sessions

    @classmethod
    def of(cls, site: Site, problem: Problem, found: Cut, threshold_tokens: float) -> Self | None:
        """Of a plan for a site with one PD cluster. None where its workload does not say which blocks prompts share."""
        arrivals = site.workload.arrivals
        if arrivals is None or not found.num_decode or found.rate <= 0:
            return None
        in_sessions, rate = arrivals.sessions is not None, arrivals.rate_req_per_s
        most = int(MOST * rate / found.rate) if in_sessions else MOST
        trace = kept_trace(arrivals, site.workload.name, max(most, LEAST), site.workload.categories)
        if trace is None:
            return None
        setting = TrialSetting(threshold_tokens, found.share, found.num_prefill, found.num_decode)
        scenario = scenario_of(site, setting, DEPLOYED_TRIAL)
        pools = [
            replace(pool, decode=problem.decode) if pool.kind is ClusterKind.PD else pool for pool in scenario.pools
        ]
        part: Replay | None = None
        if in_sessions:
            rate = rate if len(trace) == len(arrivals) else len(trace) / trace.span_s
        elif len(trace) < len(arrivals):
            prefixes = pd_prefixes(trace, site, DEPLOYED_TRIAL.increment_tokens)
            sample = arrivals_of(trace, prefixes, trace.categories)
            if sample is not None:
                part = Replay.of(problem, found, replace(sample, rate_req_per_s=arrivals.rate_req_per_s))
        return cls(
            # Shares in time are counted here: of a part of the requests, some targets may be of none.
            scenario=replace(scenario, pools=pools, targets=replace(scenario.targets, some=())),
            trace=trace,
            rate_req_per_s=rate,
            ttft_p90_s=site.slo.ttft_p90_s,
            goals=tuple(Goal.of(target, site.workload) for target in site.slo.targets),
            whole=Replay.of(problem, found, arrivals),
            part=part,
        )

    @property
    def requests(self) -> int:
        return len(self.trace)

    def at(self, rate: float) -> Rehearsed:
        trace, outcome = self._run(rate)
        report = outcome.report()
        routes = report["routes"]
        mean_s, p90_s, longer = report["ttft_mean_s"], report["ttft_p90_s"], dict[str, float]()
        if self.part is not None:
            of_all, of_part = self.whole.ttfts_s(rate), self.part.ttfts_s(rate)
            mean_s *= float(of_all.mean() / of_part.mean())
            p90_s *= float(np.quantile(of_all, 0.9) / np.quantile(of_part, 0.9))
            for goal in self.goals:
                all_s, part_s = goal.reached(self.whole.arrivals, of_all), goal.reached(self.part.arrivals, of_part)
                longer[goal.target.name] = all_s / part_s if part_s else 1.0
        return Rehearsed(
            offload_fraction=report["offload_fraction"],
            held_fraction=routes.get("decode held", 0) / max(1, sum(routes.values())),
            egress_gbps=report["egress_mean_gbps"],
            ttft=Ttft(mean_s=mean_s, p90_s=p90_s),
            in_time=self._in_time(trace, outcome, longer),
        )

    def highest_rate(self, near: float, limit: float) -> KeptRate:
        unseen = [goal for goal in self.goals if not members(goal.target, *_told_apart(self.trace)).any()]
        if unseen:
            limit = self.whole.highest_rate(limit, unseen)
        if self.part is None:
            return self._highest(near, limit)
        everybody = () if self.ttft_p90_s is None else everybody_within(self.ttft_p90_s)
        of_part = self.part.highest_rate(limit, (*everybody, *self.goals))
        by_part = self._highest(of_part, limit)
        return replace(by_part, rate=min(limit, near * by_part.rate / of_part)) if of_part else by_part

    def _highest(self, near: float, limit: float) -> KeptRate:
        """By steps from `near`, then by bisection."""
        high = min(near, limit)
        if high <= 0:
            return NO_RATE
        kept = self._kept(high)
        if kept is not None:
            while kept.rate < limit:
                high = min(limit, kept.rate * STRIDE)
                further = self._kept(high)
                if further is None:
                    break
                kept = further
            else:
                return kept
        else:
            for _ in range(FARTHEST):
                kept = self._kept(high / STRIDE)
                if kept is not None:
                    break
                high /= STRIDE
            else:
                return NO_RATE
        while high > kept.rate * (1 + WITHIN):
            middle = (kept.rate + high) / 2
            found = self._kept(middle)
            high, kept = (middle, kept) if found is None else (high, found)
        # The middle is nearest. With targets, shares in time are told of the very rate.
        return kept if self.goals else replace(kept, rate=(kept.rate + high) / 2)

    def _kept(self, rate: float) -> KeptRate | None:
        """None where a target is missed; as `saturate` has it."""
        trace, outcome = self._run(rate)
        in_time = self._in_time(trace, outcome, {})
        late = self.ttft_p90_s is not None and outcome.report()["ttft_p90_s"] > self.ttft_p90_s
        if late or any(in_time.get(goal.target.name, 1.0) < goal.target.share for goal in self.goals):
            return None
        return KeptRate(rate=rate, in_time=in_time)

    def _in_time(self, trace: Trace, outcome: SimulationOutcome, longer: Mapping[str, float]) -> dict[str, float]:
        """The share of each target's requests that it was kept for, their TTFTs so many times longer; refused ones are late."""
        found = {}
        for goal in self.goals:
            name, own = goal.target.name, members(goal.target, *_told_apart(trace))
            if own.any():
                found[name] = float((outcome.ttft_s[own] * longer.get(name, 1.0) <= goal.ttft_s).mean())
        return found

    def _run(self, rate: float) -> tuple[Trace, SimulationOutcome]:
        trace = at_factor(self.trace, rate / self.rate_req_per_s, SEED)
        return trace, simulate(self.scenario, trace, SEED)


def _told_apart(trace: Trace) -> tuple[Floats, Any]:
    """By what targets tell requests apart."""
    return trace.prompt_tokens, None if trace.categories is None else trace.categories.of_requests


def kept_trace(arrivals: KeptArrivals, name: str, most: int = MOST, categories: tuple[str, ...] = ()) -> Trace | None:
    """The first of the requests that a workload keeps, at the rate of the whole trace. `categories` are the workload's.

    None where it does not say which blocks they share, and something is cached all the same.
    """
    blocks = arrivals.shared_blocks
    if blocks is None and (arrivals.cached.any() or arrivals.held.any()):
        return None
    kept = slice(0, most)
    return Trace(
        name=name,
        arrival_s=arrivals.at(arrivals.rate_req_per_s)[kept],
        prompt_tokens=np.round((arrivals.computed + arrivals.cached)[kept]),
        output_tokens=arrivals.output[kept],
        blocks=None if blocks is None else blocks.head(most).names(),
        block_size=512 if blocks is None else blocks.block_tokens,
        categories=None if arrivals.category is None or not categories
        else RequestCategories(categories, arrivals.category[kept].astype(np.uint8), CategorySource.TRACE),
        sessions=None if arrivals.sessions is None else arrivals.sessions[kept],
    )  # fmt: skip

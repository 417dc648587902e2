"""Plans under their own requests, by the code that decides live.

A workload keeps its requests in order, and which blocks they share. Where a gateway sends each depends on what each node holds,
and on how full it is at that moment: on the state that one decode node has while another is chosen, on late answers, on caches
that are empty at first. No closed form knows that, so a plan is run with these requests before it promises anything.

Of many requests the first `MOST` are run. What is so of them goes for all; their TTFT, and the rate that keeps a target, are
scaled by what the coarse replay of all says beside its replay of these. Of sessions so many are run that `MOST` requests come at
Λ. They are not scaled: a replay has them faster.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from planner.decisions.views import ClusterKind
from planner.model.fitting import arrivals_of
from planner.model.queueing import Ttft
from planner.model.sessions import at_factor
from planner.model.site import Site
from planner.model.trace_files.arrivals import KeptArrivals
from planner.model.workload import Trace
from planner.simulator.scenario import Scenario
from planner.simulator.trials.hits import pd_prefixes
from planner.simulator.trials.trial import DEPLOYED_TRIAL, TrialSetting, scenario_of
from planner.simulator.world import simulate
from planner.solve.problem import Problem
from planner.solve.rehearsed import Rehearsed
from planner.solve.replay import Replay
from planner.solve.search import Cut

MOST: Final = 6_000  # requests of a rehearsal
LEAST: Final = 100
STRIDE: Final = 1.12  # between rates, until one keeps the target and one does not
WITHIN: Final = 0.01  # of each other, the two rates between which the largest lies
FARTHEST: Final = 40  # strides down, to an eightieth
SEED: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRehearsal:
    """A plan as it is run, its requests at their own rate, and coarse replays of all of them and of those that are run."""

    scenario: Scenario
    trace: Trace
    rate_req_per_s: float  # at which `trace` comes as it is
    whole: Replay | None = None  # None where all are run
    part: Replay | None = None

    @classmethod
    def of(cls, site: Site, problem: Problem, found: Cut, threshold_tokens: float) -> Self | None:
        """Of a plan for a site with one PD cluster. None where its workload does not say which blocks prompts share."""
        arrivals = site.workload.arrivals
        if arrivals is None or not found.num_decode or found.rate <= 0:
            return None
        in_sessions, rate = arrivals.sessions is not None, arrivals.rate_req_per_s
        most = int(MOST * rate / found.rate) if in_sessions else MOST
        trace = kept_trace(arrivals, site.workload.name, max(most, LEAST))
        if trace is None:
            return None
        setting = TrialSetting(threshold_tokens, found.share, found.num_prefill, found.num_decode)
        scenario = scenario_of(site, setting, DEPLOYED_TRIAL)
        pools = [
            replace(pool, decode=problem.decode) if pool.kind is ClusterKind.PD else pool for pool in scenario.pools
        ]
        whole: Replay | None = None
        part: Replay | None = None
        if in_sessions:
            rate = rate if len(trace) == len(arrivals) else len(trace) / trace.span_s
        elif len(trace) < len(arrivals):
            prefixes = pd_prefixes(trace, site, DEPLOYED_TRIAL.increment_tokens)
            sample = arrivals_of(trace, prefixes)
            if sample is not None:
                whole = Replay.of(problem, found, arrivals)
                part = Replay.of(problem, found, replace(sample, rate_req_per_s=arrivals.rate_req_per_s))
        return cls(
            scenario=replace(scenario, pools=pools), trace=trace, rate_req_per_s=rate,
            whole=whole, part=part,
        )  # fmt: skip

    @property
    def requests(self) -> int:
        return len(self.trace)

    def at(self, rate: float) -> Rehearsed:
        report = simulate(self.scenario, self._trace_at(rate), SEED).report()
        routes = report["routes"]
        mean_s, p90_s = report["ttft_mean_s"], report["ttft_p90_s"]
        if self.whole is not None and self.part is not None:
            of_all, of_part = self.whole.at(rate), self.part.at(rate)
            mean_s, p90_s = mean_s * of_all.mean_s / of_part.mean_s, p90_s * of_all.p90_s / of_part.p90_s
        return Rehearsed(
            offload_fraction=report["offload_fraction"],
            held_fraction=routes.get("decode held", 0) / max(1, sum(routes.values())),
            egress_gbps=report["egress_mean_gbps"],
            ttft=Ttft(mean_s=mean_s, p90_s=p90_s),
        )

    def highest_rate(self, near: float, limit: float, ttft_p90_s: float) -> float:
        if self.whole is None or self.part is None:
            return self._highest(near, limit, ttft_p90_s)
        of_part = self.part.highest_rate(limit, ttft_p90_s)
        if not of_part:
            return 0.0
        by_part = self._highest(of_part, limit, ttft_p90_s)
        return min(limit, near * by_part / of_part)

    def _highest(self, near: float, limit: float, ttft_p90_s: float) -> float:
        """By steps from `near`, then by bisection."""

        def is_kept(rate: float) -> bool:
            report = simulate(self.scenario, self._trace_at(rate), SEED).report()
            return bool(report["ttft_p90_s"] <= ttft_p90_s)

        low = high = min(near, limit)
        if is_kept(low):
            while high < limit:
                high = min(limit, high * STRIDE)
                if not is_kept(high):
                    break
                low = high
            else:
                return low
        else:
            for _ in range(FARTHEST):
                low /= STRIDE
                if is_kept(low):
                    break
                high = low
            else:
                return 0.0
        while high > low * (1 + WITHIN):
            middle = (low + high) / 2
            low, high = (middle, high) if is_kept(middle) else (low, middle)
        return (low + high) / 2

    def _trace_at(self, rate: float) -> Trace:
        return at_factor(self.trace, rate / self.rate_req_per_s, SEED)


def kept_trace(arrivals: KeptArrivals, name: str, most: int = MOST) -> Trace | None:
    """The first of the requests that a workload keeps, at the rate of the whole trace.

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
        sessions=None if arrivals.sessions is None else arrivals.sessions[kept],
    )

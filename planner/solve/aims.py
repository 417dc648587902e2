"""What plans are compared by: the rate they carry, or the rate they carry within a target for TTFT."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Final

import numpy as np

from planner.errors import Infeasible, InputError
from planner.model.profile import Floats
from planner.model.site import Site
from planner.model.trace_files.arrivals import KeptArrivals
from planner.model.traffic import Lengths
from planner.solve.goals import Objective
from planner.solve.loaded import QUEUE_BINS, LoadedTtft, loaded_ttft
from planner.solve.problem import Problem, SolveOptions, best_cut
from planner.solve.replay import STEPS, Replay
from planner.solve.search import Cut, cuts_of, rate_at, threshold_of
from planner.solve.targets import Goal, nearest_s

RUNGS: Final = 40  # of the ladder of thresholds that is tried first, for every split
LADDER_REACH: Final = 0.75  # of what finer steps could be worth is on the ladder
CANDIDATE_BINS: Final = 500  # of lengths, by which queues of many candidates are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The rate that counts. With `goals` it is the highest one at which all of them are kept, queues included.

    Problems are compared as `thinned` gives them: many of them, and each with queues, are looked at.
    """

    options: SolveOptions
    output_tokens: float
    goals: tuple[Goal, ...] = ()
    arrivals: KeptArrivals | None = None

    @classmethod
    def of(cls, site: Site, options: SolveOptions) -> "Aim":
        """Raises InputError where an SLO plan is asked for and the site has no target."""
        targets = () if options.objective is Objective.THROUGHPUT else site.slo.ttft_targets
        if options.objective is Objective.SLO and not targets:
            raise InputError("slo: ttft_p90_s and targets are missing; --objective slo needs one of them")
        goals = tuple(Goal.of(target, site.workload) for target in targets)
        arrivals = site.workload.arrivals if goals else None
        return cls(options=options, output_tokens=site.workload.output_tokens, goals=goals, arrivals=arrivals)

    def thinned(self, problem: Problem) -> Problem:
        if not self.goals:
            return problem
        return replace(problem, loads=problem.loads_for(problem.lengths.thinned(QUEUE_BINS), self.options.service))

    def rate(self, problem: Problem, found: Cut) -> float:
        """What a plan is worth."""
        limit = rate_at(problem.loads, problem.capacity, found.num_prefill, found.cut, found.share)
        if not self.goals or limit <= 0:
            return limit
        return self._queues(problem, found, _compared(problem)).highest_rate(limit)

    def best(self, problem: Problem, *, known: Cut | None = None, above: float = 0.0) -> Cut | None:
        """The plan that is worth most, if it is worth more than `above`, and at least as much as one that is `known`.

        With a target, every split is tried with a ladder of thresholds, and then finer steps around the best.
        """
        if not self.goals:
            found = best_cut(problem, self.options)
            return found if found.rate > above else None
        best = None
        if known is not None and (rate := self.rate(problem, known)) > above:
            best = replace(known, rate=rate)
        size = len(problem.lengths.tokens)
        step = max(1, size // RUNGS)
        ladder: Sequence[int] = ladder_of(problem.lengths.weights, step)
        if (pinned := problem.variant.threshold_tokens) is not None:
            ladder = [int(cuts_of(problem.loads, np.array([pinned]))[0])]
        is_refined = step > 1 and len(ladder) > 1
        least = LADDER_REACH * above if is_refined else above  # finer steps may be worth more than the whole ladder
        split = problem.variant.num_prefill
        splits = range(problem.capacity.num_pd) if split is None else [split]
        compared = _compared(problem)
        best = self._best_of(problem, compared, best, least, ((each, cut) for each in splits for cut in ladder))
        while best is not None and is_refined and step > 1:
            centre, step = best, max(1, step // 4)
            finer = range(max(0, centre.cut - 4 * step), min(size, centre.cut + 4 * step) + 1, step)
            best = self._best_of(problem, compared, best, least, ((centre.num_prefill, cut) for cut in finer))
        return best if best is not None and best.rate > above else None

    def _best_of(
        self,
        problem: Problem,
        compared: Lengths,
        best: Cut | None,
        above: float,
        candidates: Iterable[tuple[int, int]],
    ) -> Cut | None:
        """The best of candidates (split and cut), and of one that is the best so far.

        Those that could be worth most come first: few of the others need queues then.
        """
        limits = [(rate_at(problem.loads, problem.capacity, *each), *each) for each in candidates]
        for limit, num_prefill, cut in sorted(limits, key=lambda each: -each[0]):
            beaten = best.rate if best else above
            if limit <= beaten:
                break
            num_decode = problem.capacity.num_pd - num_prefill
            candidate = Cut(rate=limit, num_prefill=num_prefill, num_decode=num_decode, cut=cut)
            queues = self._queues(problem, candidate, compared)
            if beaten and not queues.meets(beaten):
                continue
            rate = queues.highest_rate(limit, beaten)
            best = replace(candidate, rate=rate) if rate > beaten else best
        return best

    def _queues(self, problem: Problem, found: Cut, compared: Lengths) -> LoadedTtft:
        return loaded_ttft(problem, found, self.output_tokens, compared, self.goals)

    def carries(self, problem: Problem, found: Cut, rate: float) -> bool:
        """Whether all goals are kept at a rate under the arrivals of the trace, where there are any."""
        if self.arrivals is None:
            return True
        return any(
            Replay.of(problem, each, self.arrivals).keeps(rate, self.goals) for each in self._near(problem, found)
        )

    def _near(self, problem: Problem, found: Cut) -> Iterator[Cut]:
        """The plan found, and the best ones with a prefill node more or less."""
        yield found
        if problem.variant.num_prefill is None:
            for split in (found.num_prefill - 1, found.num_prefill + 1):
                if 0 <= split < problem.capacity.num_pd and (other := self.best(problem.pinned(split))) is not None:
                    yield other

    def replayed(self, problem: Problem, found: Cut) -> tuple[Cut, float]:
        """The plan that is worth most under the arrivals of the trace, and that rate. Raises Infeasible where none meets the
        target.
        """
        assert self.arrivals is not None
        best, most = found, 0.0
        for each in self._near(problem, found):
            limit = rate_at(problem.loads, problem.capacity, each.num_prefill, each.cut, each.share)
            replay = Replay.of(problem, each, self.arrivals)
            if limit > most and (not most or replay.keeps(most, self.goals)):
                rate = replay.highest_rate(limit, self.goals)
                best, most = (each, rate) if rate > most else (best, most)
        if not most:
            raise self.why_none(problem)
        return best, most

    def solved(self, whole: Problem, thin: Problem) -> tuple[Cut, float | None]:
        """The plan of a `thinned` problem, and the rate within its targets, where it has some. Raises Infeasible."""
        best = self.best(thin)
        if best is None:
            raise self.why_none(whole)
        if self.arrivals is not None:
            return self.replayed(thin, best)
        return best, best.rate if self.goals else None

    def is_kept(self, whole: Problem, thin: Problem, rate: float) -> bool:
        """Whether the plan of a problem keeps all goals at a rate as plans judge themselves, by all lengths."""
        if not self.goals:
            return True
        best, _ = self.solved(whole, thin)
        return self._keeps(whole, self.in_full(whole, thin, best), self.goals, rate)

    def kept_rate(
        self, problem: Problem, found: Cut, goals: Sequence[Goal], limit: float, known: float = 0.0
    ) -> float:  # fmt: skip
        """The largest rate up to `limit` at which the plan's `outlook` keeps all of these goals, 0 if none does.

        Plans are compared with fewer lengths and by the loads of Λ, which is near. What is promised is what the plan says of it.
        At a rate that is `known` it is kept.
        """
        if limit <= known or self._keeps(problem, found, goals, limit):
            return max(limit, known)
        low, high = known, limit
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._keeps(problem, found, goals, middle) else (low, middle)
        return low

    def _keeps(self, problem: Problem, found: Cut, goals: Sequence[Goal], rate: float) -> bool:
        shares = outlook(problem, found, self.output_tokens, goals, self.arrivals, rate)
        return all(share >= goal.target.share for goal, share in zip(goals, shares, strict=True))

    def in_full(self, problem: Problem, thin: Problem, found: Cut) -> Cut:
        """The plan of a `thinned` problem, of all lengths."""
        if not self.goals:
            return found
        threshold = np.array([threshold_of(thin.loads, found)])
        return replace(found, cut=int(cuts_of(problem.loads, threshold)[0]))

    def why_none(self, problem: Problem) -> Infeasible:
        """No plan of a problem that could serve something meets the target."""
        ends = (0, len(problem.lengths.tokens))
        missed = [(goal, nearest_s(problem, goal, ends)) for goal in self.goals]
        goal, nearest = next((each for each in missed if each[1] > each[0].ttft_s), missed[0])
        what = f"ttft_p90_s={goal.ttft_s}" if goal.is_of_all else f"{goal.ttft_s:g} s for {goal.target.name}"
        if nearest <= goal.ttft_s:
            return Infeasible("slo: no plan meets all targets at once, even without load")
        return Infeasible(f"slo: {what}: no plan meets it even without load; the nearest is {nearest:.2f} s")


def ladder_of(weights: Floats, step: int) -> list[int]:
    """Cuts at every so many lengths. Where many requests lie between two of them, they are cut there as well.

    So few requests take another way from one cut to the next, but for those of one length.
    """
    size = len(weights)
    rungs = {*range(0, size + 1, step), size}
    if step > 1:
        below = np.concatenate(([0.0], np.cumsum(weights)))
        shares = np.arange(1, RUNGS) / RUNGS * below[-1]
        for after in np.searchsorted(below, shares).tolist():
            start = (after - 1) // step * step
            if below[min(start + step, size)] - below[start] > 2 / RUNGS * below[-1]:
                rungs |= {after - 1, after}
    return sorted(rungs)


def _compared(problem: Problem) -> Lengths:
    """The lengths by which queues of its plans are compared."""
    return problem.lengths.thinned(CANDIDATE_BINS)


def outlook(
    problem: Problem,
    found: Cut,
    output_tokens: float,
    goals: Sequence[Goal],
    arrivals: KeptArrivals | None,
    rate: float,
) -> list[float]:
    """The share of each goal's requests whose first token is there in time at a rate, with the loads of that rate."""
    problem = problem.at_rate(rate, found.num_decode)
    loaded = loaded_ttft(problem, found, output_tokens, goals=goals)
    if arrivals is None or not isfinite(loaded.at(rate).mean_s):
        return loaded.in_time(rate)
    seconds = Replay.of(problem, found, arrivals).ttfts_s(rate)
    return [goal.in_time(arrivals, seconds) for goal in goals]

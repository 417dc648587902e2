"""Which part of a site to pay for, and which rate meets an SLO: plans whose goal is not the highest Λ."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.errors import Infeasible, InputError
from planner.model.site import BYTES_PER_S_PER_GBPS, Site
from planner.solve.loaded import QUEUE_BINS, loaded_ttft
from planner.solve.problem import Problem, SolveOptions, best_cut, ttft_by_length
from planner.solve.search import Cut, cuts_of, rate_at, threshold_of, weighted_quantile


def cost_per_hour(problem: Problem) -> float:
    """What the site costs, in the unit of its prices."""
    capacity = problem.capacity
    total = problem.pd.price_per_hour * capacity.num_pd
    if problem.prfaas is not None:
        total += problem.prfaas.price_per_hour * capacity.num_prfaas
    if problem.link is not None:
        gbps = capacity.egress_bytes_per_s / BYTES_PER_S_PER_GBPS
        total += problem.link.price_per_hour_per_gbps * gbps
    return total


def cheapest(problem: Problem, site: Site, options: SolveOptions) -> Problem:
    """The part of the site worth paying for: least cost per request at the rate it can serve (or at the rate asked for).

    With a TTFT target the rate is the one that meets it. Tries every count of instances up to what the site has.
    """
    if problem.pd.price_per_hour <= 0:
        raise InputError(f"cluster {problem.pd.name}: price_per_hour={problem.pd.price_per_hour}: cost needs a price")
    thin = _thinned(problem, options)
    best: tuple[float, Problem] | None = None
    for num_prfaas in range(int(problem.capacity.num_prfaas) + 1):
        for num_pd in range(1, problem.capacity.num_pd + 1):
            smaller = thin.with_capacity(num_prfaas=num_prfaas, num_pd=num_pd)
            rate = _served_rate(smaller, site, options)
            if rate <= 0 or (options.rate_req_per_s and rate < options.rate_req_per_s):
                continue
            price = cost_per_hour(smaller) / (options.rate_req_per_s or rate)
            if best is None or price < best[0] * (1 - 1e-12):
                best = (price, problem.with_capacity(num_prfaas=num_prfaas, num_pd=num_pd))
    if best is None:
        most = _served_rate(thin, site, options)
        raise Infeasible(
            f"rate_req_per_s={options.rate_req_per_s}: the whole site serves {most:.3f} req/s; ask for at most that, "
            f"or add instances"
        )
    return best[1]


def _thinned(problem: Problem, options: SolveOptions) -> Problem:
    return replace(problem, loads=problem.loads_for(problem.lengths.thinned(QUEUE_BINS), options.service))


def _served_rate(problem: Problem, site: Site, options: SolveOptions) -> float:
    found = best_cut(problem, options)
    if found.rate <= 0 or site.slo.ttft_p90_s is None:
        return found.rate
    return loaded_ttft(problem, found, site.workload.output_tokens, 300).highest_rate(found.rate, site.slo.ttft_p90_s)


def best_slo_cut(problem: Problem, site: Site, options: SolveOptions) -> Cut:
    """The cut whose rate, queues included, still meets the P90 TTFT target; `rate` is that rate.

    Tries every split with a ladder of thresholds, then finer steps around the best.
    """
    target = site.slo.ttft_p90_s
    if target is None:
        raise InputError("slo: ttft_p90_s is missing; --objective slo needs a target")
    thin = _thinned(problem, options)
    size = len(thin.lengths.tokens)
    best: Cut | None = None
    step = max(1, size // 40)
    ladder: Sequence[int] = range(0, size + 1, step)
    if problem.variant.threshold_tokens is not None:
        ladder = [int(cuts_of(thin.loads, np.array([problem.variant.threshold_tokens]))[0])]
    splits = range(problem.capacity.num_pd) if problem.variant.num_prefill is None else [problem.variant.num_prefill]
    for num_prefill in splits:
        for cut in ladder:
            best = _better_slo(thin, site, best, num_prefill, cut, target)
    while best is not None and step > 1 and len(ladder) > 1:
        centre, step = best, max(1, step // 4)
        for cut in range(max(0, centre.cut - 4 * step), min(size, centre.cut + 4 * step) + 1, step):
            best = _better_slo(thin, site, best, centre.num_prefill, cut, target)
    if best is None:
        floor = min(
            weighted_quantile(ttft_by_length(problem, c), problem.lengths.weights, 0.9)
            for c in (0, len(problem.lengths.tokens))
        )
        raise Infeasible(f"slo: ttft_p90_s={target}: no plan meets it even without load; the nearest is {floor:.2f} s")
    cut = int(cuts_of(problem.loads, np.array([threshold_of(thin.loads, best)]))[0])
    return replace(best, cut=cut)


def _better_slo(thin: Problem, site: Site, best: Cut | None, num_prefill: int, cut: int, target: float) -> Cut | None:
    limit = rate_at(thin.loads, thin.capacity, num_prefill, cut)
    if limit <= (best.rate if best else 0.0):
        return best
    candidate = Cut(rate=limit, num_prefill=num_prefill, num_decode=thin.capacity.num_pd - num_prefill, cut=cut)
    queues = loaded_ttft(thin, candidate, site.workload.output_tokens, 500)
    if best and queues.at(best.rate).p90_s > target:
        return best
    rate = queues.highest_rate(limit, target)
    return replace(candidate, rate=rate) if rate > (best.rate if best else 0.0) else best

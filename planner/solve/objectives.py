"""What a site costs, what its requests cost to carry, and which part of it to pay for."""

from dataclasses import replace
from math import floor
from typing import Final

from membership.lines import BYTES_PER_S_PER_GBPS
from planner.errors import Infeasible, InputError
from planner.solve.aims import Aim
from planner.solve.problem import Problem, best_cut
from planner.solve.search import Cut, mixed

SAME_COST: Final = 1e-12
BYTES_PER_GB: Final = 1e9
S_PER_HOUR: Final = 3600.0


def traffic_per_request(problem: Problem, found: Cut) -> float:
    """What a mean request's bytes over the line cost, by the price of a gigabyte."""
    if problem.link is None or not problem.capacity.num_prfaas:
        return 0.0
    sent_bytes = mixed(problem.loads.egress_bytes, found.cut, found.share)
    return problem.link.price_per_gb * sent_bytes / BYTES_PER_GB


def spend_per_hour(problem: Problem, found: Cut, rate: float) -> float:
    """What the site and its traffic cost at a rate."""
    return cost_per_hour(problem) + traffic_per_request(problem, found) * rate * S_PER_HOUR


def cost_per_hour(problem: Problem) -> float:
    """What the site costs before a byte crosses a line, in the unit of its prices. A line's rent is paid where there is
    something at its far end.
    """
    capacity = problem.capacity
    total = problem.pd.price_per_hour * capacity.num_pd
    if problem.prfaas is not None:
        total += problem.prfaas.price_per_hour * capacity.num_prfaas
    if problem.link is not None and capacity.num_prfaas:
        gbps = capacity.egress_bytes_per_s / BYTES_PER_S_PER_GBPS
        total += problem.link.price_per_hour_per_gbps * gbps
    return total


def cheapest(problem: Problem, aim: Aim, whole: Problem) -> Problem:
    """The part of the site worth paying for: least cost at the rate asked for, or else least cost per request.

    The rate is the one that `aim` counts. Tries every count of instances up to what the site has, each with the plan that
    serves most; of equally cheap ones the one with the highest rate is kept. `problem` is `whole` as the aim thins it: a part
    whose plan misses a target at the rate asked for, by all lengths, is not worth anything. Raises Infeasible.
    """
    if problem.pd.price_per_hour <= 0:
        raise InputError(f"cluster {problem.pd.name}: price_per_hour={problem.pd.price_per_hour}: cost needs a price")
    asked = aim.options.rate_req_per_s
    found = _at_rate(problem, aim, whole, asked) if asked else _per_request(problem, aim)
    if found is not None:
        return found
    if not asked:
        raise aim.why_none(problem)
    best, most = aim.solved(whole, problem)
    if most is not None:
        most = aim.kept_rate(whole, aim.in_full(whole, problem, best), aim.goals, most)
        if not most:
            raise aim.why_none(whole)
    raise too_much(asked, best.rate if most is None else most, aim)


def too_much(asked: float, most: float, aim: Aim) -> Infeasible:
    """More is asked for than the site carries, or carries within its targets."""
    serves = (
        f"{floor(most * 1000) / 1000:.3f} req/s{' within its targets' if aim.goals else ''}"  # no more than it does
    )
    return Infeasible(f"rate_req_per_s={asked}: the whole site serves {serves}; ask for at most that, or add instances")


def _parts(problem: Problem) -> list[Problem]:
    return [
        problem.with_capacity(num_prfaas=num_prfaas, num_pd=num_pd)
        for num_prfaas in range(int(problem.capacity.num_prfaas) + 1)
        for num_pd in range(1, problem.capacity.num_pd + 1)
    ]


def _at_rate(problem: Problem, aim: Aim, whole: Problem, asked: float) -> Problem | None:
    best: tuple[float, float, Problem] | None = None
    for part in sorted(_parts(problem), key=cost_per_hour):
        least = cost_per_hour(part)
        if best is not None and least > best[0] * (1 + SAME_COST):
            break
        if best_cut(part, aim.options).rate < asked:
            continue  # it would not carry that much even without a target
        # One that costs as much before any traffic can only be better by its rate.
        is_level = best is not None and least >= best[0] * (1 - SAME_COST)
        at_least = best[1] if best is not None and is_level else asked * (1 - SAME_COST)
        found = aim.best(part, above=at_least)
        if found is None:
            continue
        cost = spend_per_hour(part, found, asked)
        if best is not None and (cost, -found.rate) >= (best[0] * (1 + SAME_COST if is_level else 1), -best[1]):
            continue
        in_full = replace(whole, capacity=part.capacity)
        if aim.carries(part, found, asked) and aim.is_kept(in_full, part, asked):
            best = (cost, found.rate, part)
    return best[2] if best else None


def _per_request(problem: Problem, aim: Aim) -> Problem | None:
    """By the least that each part can cost per request, so that most need no queues."""
    parts = [(part, best_cut(part, aim.options).rate) for part in _parts(problem)]
    bounds = sorted(((cost_per_hour(part) / rate, at) for at, (part, rate) in enumerate(parts) if rate > 0))
    best: tuple[float, Problem] | None = None
    for bound, at in bounds:
        part, cost = parts[at][0], cost_per_hour(parts[at][0])
        if best is not None and bound >= best[0]:
            break
        found = aim.best(part, above=cost / best[0] * (1 + SAME_COST) if best else 0.0)
        if found is None:
            continue
        whole = cost / found.rate + traffic_per_request(part, found) * S_PER_HOUR
        if best is None or whole < best[0]:
            best = (whole, part)
    return best[1] if best else None

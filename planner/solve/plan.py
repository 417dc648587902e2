"""From a site to a plan: solve, then say what binds, what one more of anything would bring, and how sure this is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Final

import numpy as np

from membership.lines import BYTES_PER_S_PER_GBPS
from planner.decisions.defaults import DEPLOYED
from planner.errors import Infeasible
from planner.model.profile import provenance_kind
from planner.model.queueing import Ttft
from planner.model.site import Deployment, Site
from planner.solve.aims import Aim, outlook
from planner.solve.decode_memory import BatchLimit
from planner.solve.goals import Objective, ServiceTime
from planner.solve.loaded import loaded_ttft
from planner.solve.objectives import cheapest, spend_per_hour, too_much
from planner.solve.problem import Problem, SolveOptions, best_cut, pose, threshold_for, ttfts
from planner.solve.rehearsed import PlanRehearsal, Rehearse
from planner.solve.replay import Replay
from planner.solve.search import (
    RECOMMENDED_LOAD,
    TIE,
    Bottleneck,
    Cut,
    Loads,
    cold_rates,
    interval_of,
    mixed,
    rate_at,
    stage_rates,
    weighted_quantile,
)
from planner.solve.sensitivity.judgement import (
    NEAR_OPTIMAL,
    Alternative,
    Sensitivity,
    advantage_rises,
    flat_alternative,
    sensitivity,
    shadow_prices,
)
from planner.solve.targets import Goal, TargetOutlook
from planner.version import tool_version

SAME: Final = 1e-6  # limits this close bind together
MOSTLY_HELD: Final = 0.05  # of the requests, that decode nodes may compute where the plan offloads them


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of `solve`. Rates in requests/s, lengths in tokens; `to_json` has the published key names.

    `lambda_max` is where it saturates, `lambda_slo` what it serves within a target for TTFT, where it was solved for one;
    `rate_req_per_s` the rate that was asked for, and `asked_*` what is so at it. Where decode nodes compute prompts,
    `lambda_warm` is Λ of the best plan that counts on what they hold. `cold_utilisation` is this plan's at Λ while they
    hold nothing. What is so at a rate, and `lambda_slo`, were rehearsed with `rehearsed_requests`, where that is not 0.
    """

    site: str
    workload: str
    deployment: str
    service: ServiceTime
    objective: Objective
    threshold_tokens: float
    threshold_interval_tokens: tuple[float, float]
    near_optimal_tokens: tuple[float, float]
    tie_share: float
    num_prfaas: int
    num_prefill: int
    num_decode: int
    theta_prfaas: float
    theta_pd_p: float
    theta_pd_d: float
    lambda_max: float
    lambda_other_service: float
    offload_fraction: float
    held_fraction: float
    mean_offloaded_tokens: float
    mean_local_tokens: float
    egress_gbps: float
    egress_capacity_gbps: float
    ttft_mean_s: float
    ttft_p90_s: float
    loaded_ttft_mean_s: float
    loaded_ttft_p90_s: float
    bottleneck: Bottleneck
    utilisation: Mapping[str, float]
    cost_per_hour: float
    decode_batch: int = 0
    decode_batch_limit: BatchLimit = BatchLimit.PROFILE
    lambda_slo: float | None = None
    rehearsed_requests: int = 0
    rate_req_per_s: float | None = None
    asked_offload_fraction: float | None = None
    asked_held_fraction: float | None = None
    asked_egress_gbps: float | None = None
    asked_ttft_mean_s: float | None = None
    asked_ttft_p90_s: float | None = None
    lambda_warm: float | None = None
    cold_utilisation: Mapping[str, float] = field(default_factory=dict)
    shadow_prices: Mapping[str, float] = field(default_factory=dict)
    sensitivity: Sequence[Sensitivity] = ()
    alternative: Alternative | None = None
    targets: Sequence[TargetOutlook] = ()
    warnings: Sequence[str] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    input_hash: str = ""
    seed: int = 0

    @property
    def paid_rate(self) -> float:
        """The rate by which costs are divided: what was asked for, else what is promised, else Λ."""
        return self.rate_req_per_s or self.lambda_slo or self.lambda_max

    @property
    def cost_per_1000_requests(self) -> float | None:
        return self.cost_per_hour / 3.6 / self.paid_rate if self.paid_rate else None

    def to_json(self) -> dict[str, Any]:
        """A plan file: plain JSON types, units in the keys."""
        return {
            "schema": 1,
            "prfaas_version": tool_version(),
            "input_hash": self.input_hash,
            "seed": self.seed,
            "site": self.site,
            "workload": self.workload,
            "deployment": self.deployment,
            "objective": str(self.objective),
            "service": str(self.service),
            "threshold_tokens": tidy(self.threshold_tokens),
            "threshold_interval_tokens": [tidy(t) for t in self.threshold_interval_tokens],
            "threshold_within_1_percent_tokens": [tidy(t) for t in self.near_optimal_tokens],
            "tie_share": self.tie_share,
            "num_prfaas": self.num_prfaas,
            "num_prefill": self.num_prefill,
            "num_decode": self.num_decode,
            "theta_prfaas_req_per_s": self.theta_prfaas,
            "theta_pd_p_req_per_s": self.theta_pd_p,
            "theta_pd_d_req_per_s": self.theta_pd_d,
            "lambda_max_req_per_s": self.lambda_max,
            f"lambda_max_{'of_mean' if self.service is ServiceTime.EXACT else 'exact'}_req_per_s": self.lambda_other_service,
            "lambda_slo_req_per_s": self.lambda_slo,
            "rehearsed_requests": self.rehearsed_requests,
            "offload_fraction": self.offload_fraction,
            "held_fraction": self.held_fraction,
            "mean_offloaded_tokens": self.mean_offloaded_tokens,
            "mean_local_tokens": self.mean_local_tokens,
            "egress_gbps": self.egress_gbps,
            "egress_capacity_gbps": self.egress_capacity_gbps,
            "ttft_mean_s": self.ttft_mean_s,
            "ttft_p90_s": self.ttft_p90_s,
            "ttft_mean_at_80_percent_s": self.loaded_ttft_mean_s,
            "ttft_p90_at_80_percent_s": self.loaded_ttft_p90_s,
            "bottleneck": str(self.bottleneck),
            "utilisation": dict(self.utilisation),
            "decode_batch": self.decode_batch,
            "decode_batch_limit": str(self.decode_batch_limit),
            "lambda_with_warm_caches_req_per_s": self.lambda_warm,
            "utilisation_with_cold_caches": dict(self.cold_utilisation),
            "cost_per_hour": self.cost_per_hour,
            "cost_per_1000_requests": self.cost_per_1000_requests,
            "cost_at_req_per_s": self.paid_rate,
            "rate_req_per_s": self.rate_req_per_s,
            "offload_fraction_at_rate": self.asked_offload_fraction,
            "held_fraction_at_rate": self.asked_held_fraction,
            "egress_at_rate_gbps": self.asked_egress_gbps,
            "ttft_mean_at_rate_s": self.asked_ttft_mean_s,
            "ttft_p90_at_rate_s": self.asked_ttft_p90_s,
            "shadow_prices_req_per_s": dict(self.shadow_prices),
            "sensitivity": [_plain(entry) for entry in self.sensitivity],
            "robust_alternative": _plain(self.alternative) if self.alternative else None,
            "targets": [_plain(entry) for entry in self.targets],
            "warnings": list(self.warnings),
            "provenance": dict(self.provenance),
        }


def tidy(tokens: float) -> float | int | None:
    """A token count for JSON: whole where it is, None where it has no end."""
    if not np.isfinite(tokens):
        return None
    return int(tokens) if tokens == int(tokens) else tokens


def _plain(entry: Any) -> dict[str, Any]:
    return {
        name: tidy(value) if "tokens" in name else value for name in entry.__slots__ for value in [getattr(entry, name)]
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """A cut that was found, and what it was found for; `thin` is the problem as the aim compares it, `thin_cut` its cut."""

    site: Site
    problem: Problem
    found: Cut
    aim: Aim
    thin: Problem
    thin_cut: Cut
    deployment: str
    lambda_slo: float | None
    rehearsal: PlanRehearsal | None
    in_time: Mapping[str, float]  # at `lambda_slo`, as rehearsed


def make_plan(
    site: Site, options: SolveOptions, deployment: str | None = None, rehearse: Rehearse | None = None
) -> Plan:
    """Solves a site with one PD cluster and at most one PrfaaS cluster. What it says of a rate is rehearsed, where it can be.

    Raises InputError for inputs that make no sense, Infeasible when nothing can be served.
    """
    solved = _solve(site, options, deployment, rehearse)
    problem, found, aim = solved.problem, solved.found, solved.aim
    plan = replace(
        _outline(solved),
        shadow_prices=shadow_prices(solved.thin, solved.thin_cut, aim),
        sensitivity=sensitivity(solved.thin, solved.thin_cut, aim),
        # Where a split saturates says nothing of what it serves within a target.
        alternative=flat_alternative(problem, found, options) if not aim.goals else None,
    )
    return replace(plan, warnings=warnings_of(plan, solved.site, problem))


def outline(site: Site, options: SolveOptions, deployment: str | None = None, rehearse: Rehearse | None = None) -> Plan:
    """The plan that `make_plan` makes, without judgement: no prices, no sensitivity, no alternative, no warnings."""
    return _outline(_solve(site, options, deployment, rehearse))


def _solve(site: Site, options: SolveOptions, deployment: str | None, rehearse: Rehearse | None) -> _Solved:
    variant = Deployment()
    if deployment is not None:
        site, variant = site.deployed(deployment)
    problem, aim = pose(site, options, variant), Aim.of(site, options)
    if site.slo.tbt_s is not None and options.objective is not Objective.THROUGHPUT:
        problem = problem.within_tbt(site.slo.tbt_s, site.workload.output_tokens)
    thin = aim.thinned(problem)
    if best_cut(thin, options).rate <= 0:
        raise Infeasible(_why_nothing(problem))
    if options.objective is Objective.COST:
        thin = cheapest(thin, aim, problem)
        problem = replace(problem, capacity=thin.capacity)
    best, slo_rate = aim.solved(problem, thin)
    found = aim.in_full(problem, thin, best)
    # With a target for TTFT the plan's own Λ is where it saturates, not the rate that meets the target.
    found = replace(found, rate=rate_at(problem.loads, problem.capacity, found.num_prefill, found.cut, found.share))
    rehearsal = None
    # A part of a site that is bought, and the paper's assumptions, are not what would be run.
    if rehearse is not None and options.objective is not Objective.COST and options.service is ServiceTime.EXACT:
        rehearsal = rehearse(site, problem, found, threshold_for(problem, found, options))
    in_time: Mapping[str, float] = {}
    if rehearsal is not None and slo_rate is not None:
        # Caches are cold when a rehearsal begins, so how a start is carried is known, and limits nothing before.
        warm = problem.warm()
        limit = rate_at(warm.loads, warm.capacity, found.num_prefill, found.cut, found.share)
        kept = rehearsal.highest_rate(slo_rate, limit)
        slo_rate, in_time = kept.rate, kept.in_time
        if not slo_rate:
            raise aim.why_none(problem)
        found = replace(found, rate=max(found.rate, slo_rate))
    if slo_rate is not None:
        # What was not rehearsed is promised as the plan judges it.
        judged = [
            each for each in aim.goals if rehearsal is None or not (each.is_of_all or each.target.name in in_time)
        ]
        known = options.rate_req_per_s if options.objective is Objective.COST else None
        kept_rate = aim.kept_rate(problem, found, judged, slo_rate, known or 0.0)
        if not kept_rate:
            raise aim.why_none(problem)
        if kept_rate < slo_rate and rehearsal is not None:
            in_time = rehearsal.at(kept_rate).in_time
        slo_rate = kept_rate
    carried = best.rate if slo_rate is None else slo_rate
    if options.rate_req_per_s and carried < options.rate_req_per_s * (1 - TIE):
        raise too_much(options.rate_req_per_s, carried, aim)
    return _Solved(
        site=site,
        problem=problem,
        found=found,
        aim=aim,
        thin=thin,
        thin_cut=best,
        deployment=deployment or "prfaas-pd",
        lambda_slo=slo_rate,
        rehearsal=rehearsal,
        in_time=in_time,
    )


def _why_nothing(problem: Problem) -> str:
    capacity = problem.capacity
    if not capacity.num_pd:
        return f"cluster {problem.pd.name}: instances=0 serves nothing; give it at least 1"
    if problem.variant.num_prefill == capacity.num_pd:
        return f"num_prefill={capacity.num_pd} leaves no decode instance; try {capacity.num_pd - 1}"
    return "no split serves any request: one instance must both prefill and decode; add an instance or a PrfaaS cluster"


def _outline(solved: _Solved) -> Plan:
    site, problem, found, options = solved.site, solved.problem, solved.found, solved.aim.options
    loads, capacity = problem.loads, problem.capacity
    limits = stage_rates(loads, capacity, found.num_prefill, found.cut, found.share)
    warm = {stage: limit for stage, limit in limits.items() if stage is not Bottleneck.COLD}
    cold = cold_rates(loads, capacity, found.num_prefill, found.cut, found.share)
    mix = _Mix.of(loads, found)
    interval = interval_of(loads, capacity, found)
    near = interval_of(loads, capacity, found, NEAR_OPTIMAL)
    ttft, shares = ttfts(problem, found.cut)
    loaded = _at_rate(solved, RECOMMENDED_LOAD * found.rate)
    asked = _at_rate(solved, options.rate_req_per_s) if options.rate_req_per_s else None
    binding = min(limits, key=lambda stage: limits[stage])
    egress = capacity.egress_bytes_per_s
    return Plan(
        site=site.name,
        workload=site.workload.name,
        deployment=solved.deployment,
        service=options.service,
        objective=options.objective,
        threshold_tokens=threshold_for(problem, found, options),
        threshold_interval_tokens=(interval.low_tokens, interval.high_tokens),
        near_optimal_tokens=(near.low_tokens, near.high_tokens),
        tie_share=found.share,
        num_prfaas=int(capacity.num_prfaas),
        num_prefill=found.num_prefill,
        num_decode=found.num_decode,
        theta_prfaas=_share_rate(mix.offloaded, min(limits[Bottleneck.PRFAAS], limits[Bottleneck.EGRESS])),
        theta_pd_p=_share_rate(1 - mix.held - mix.offloaded, limits[Bottleneck.PD_P]),
        theta_pd_d=limits[Bottleneck.PD_D],
        lambda_max=found.rate,
        lambda_other_service=_other_service(problem, found, options),
        offload_fraction=mix.offloaded,
        held_fraction=mix.held,
        mean_offloaded_tokens=mix.mean_offloaded,
        mean_local_tokens=mix.mean_local,
        egress_gbps=found.rate * mix.egress_bytes / BYTES_PER_S_PER_GBPS,
        egress_capacity_gbps=egress / BYTES_PER_S_PER_GBPS,
        ttft_mean_s=float(shares @ ttft),
        ttft_p90_s=weighted_quantile(ttft, shares, 0.9),
        loaded_ttft_mean_s=loaded.ttft.mean_s,
        loaded_ttft_p90_s=loaded.ttft.p90_s,
        # Where a share of an atom is chosen two stages bind, and with warm caches another plan would serve more.
        bottleneck=Bottleneck.COLD if limits.get(Bottleneck.COLD, np.inf) <= found.rate * (1 + SAME) else binding,
        utilisation={str(stage): found.rate / limit for stage, limit in warm.items()},
        lambda_warm=best_cut(problem.warm(), options).rate if cold else None,
        cold_utilisation={str(stage): found.rate / limit for stage, limit in cold.items()},
        cost_per_hour=spend_per_hour(problem, found, options.rate_req_per_s or solved.lambda_slo or found.rate),
        decode_batch=problem.decode.max_running,
        decode_batch_limit=problem.batch_limit(site.profile.decode_on(problem.pd.hardware)),
        lambda_slo=solved.lambda_slo,
        rehearsed_requests=0 if solved.rehearsal is None else solved.rehearsal.requests,
        rate_req_per_s=options.rate_req_per_s,
        asked_offload_fraction=asked.offloaded if asked else None,
        asked_held_fraction=asked.held if asked else None,
        asked_egress_gbps=asked.egress_gbps if asked else None,
        asked_ttft_mean_s=asked.ttft.mean_s if asked else None,
        asked_ttft_p90_s=asked.ttft.p90_s if asked else None,
        targets=_targets(solved, loaded if asked is None else asked),
        provenance=site.provenances(),
        input_hash=site.input_hash,
    )


@dataclass(frozen=True, slots=True)
class _Mix:
    """Who goes where under one cut."""

    offloaded: float
    held: float
    mean_offloaded: float
    mean_local: float
    egress_bytes: float

    @classmethod
    def of(cls, loads: Loads, found: Cut) -> "_Mix":
        tokens, weights = loads.lengths.tokens, loads.lengths.prefilled
        kept = weights.copy()
        kept[found.cut :] = 0.0
        if found.share:
            kept[found.cut] = weights[found.cut] * found.share
        sent = weights - kept
        p = min(1.0, float(sent.sum())) if found.cut < len(tokens) else 0.0
        held = loads.lengths.held_share
        near = 1 - held - p
        return cls(
            p,
            held,
            float(sent @ loads.lengths.uncached) / p if p else 0.0,
            float(kept @ loads.lengths.uncached) / near if near > 0 else 0.0,
            mixed(loads.egress_bytes, found.cut, found.share),
        )


@dataclass(frozen=True, slots=True)
class _AtRate:
    """Who goes where at some rate, and what requests wait."""

    offloaded: float
    held: float
    egress_gbps: float
    ttft: Ttft
    in_time: Mapping[str, float]  # as rehearsed


def _at_rate(solved: _Solved, rate: float) -> _AtRate:
    found = solved.found
    if solved.rehearsal is not None:
        seen = solved.rehearsal.at(rate)
        return _AtRate(seen.offload_fraction, seen.held_fraction, seen.egress_gbps, seen.ttft, seen.in_time)
    problem = solved.problem.at_rate(rate, found.num_decode)
    mix = _Mix.of(problem.loads, found)
    arrivals = solved.site.workload.arrivals
    ttft = loaded_ttft(problem, found, solved.site.workload.output_tokens).at(rate)
    if arrivals is not None and isfinite(ttft.mean_s):
        ttft = Replay.of(problem, found, arrivals).at(rate)
    return _AtRate(mix.offloaded, mix.held, rate * mix.egress_bytes / BYTES_PER_S_PER_GBPS, ttft, {})


def _targets(solved: _Solved, seen: _AtRate) -> list[TargetOutlook]:
    """How the site's targets are kept, at the rate that was asked for, else that is promised, else at 80 % of Λ.

    `seen` is what is so at the first or last of these.
    """
    site, found = solved.site, solved.found
    goals = [Goal.of(target, site.workload) for target in site.slo.targets]
    if not goals:
        return []
    asked = solved.aim.options.rate_req_per_s
    rate = asked or solved.lambda_slo or RECOMMENDED_LOAD * found.rate
    rehearsed = seen.in_time if asked or not solved.lambda_slo else solved.in_time
    lengths, workload = solved.problem.asked, site.workload
    shares = outlook(solved.problem, found, workload.output_tokens, goals, workload.arrivals, rate)
    return [
        TargetOutlook(
            requests=goal.target.name, of_all=float(lengths.weights @ goal.members(lengths)), ttft_s=goal.ttft_s,
            asked_share=goal.target.share, share_in_time=rehearsed.get(goal.target.name, share), at_req_per_s=rate,
        )
        for goal, share in zip(goals, shares, strict=True)
    ]  # fmt: skip


def _share_rate(share: float, limit: float) -> float:
    """Θ of a stage from its share of the requests and the rate it allows the whole; 0 when nothing passes it."""
    return share * limit if np.isfinite(limit) else 0.0


def _other_service(problem: Problem, found: Cut, options: SolveOptions) -> float:
    """Λ of the same plan under the other of T(E[L]) and E[T(L)]."""
    other = ServiceTime.OF_MEAN if options.service is ServiceTime.EXACT else ServiceTime.EXACT
    loads = problem.loads_for(problem.lengths, other)
    return rate_at(loads, problem.capacity, found.num_prefill, found.cut, found.share)


def warnings_of(plan: Plan, site: Site, problem: Problem) -> tuple[str, ...]:
    """What a reader should not overlook."""
    found = []
    weak = [what for what, text in plan.provenance.items() if provenance_kind(text) in ("fitted", "unverified")]
    if weak:
        found.append(f"not measured, only fitted or unverified: {', '.join(weak)}")
    low, high = plan.near_optimal_tokens
    if plan.num_prfaas and 0 < high - low < 0.2 * plan.threshold_tokens:
        found.append(f"Λ is within 1 % of the optimum only for {low:.0f} ≤ t ≤ {high:.0f}")
    if plan.service is ServiceTime.OF_MEAN:
        found.append(f"T(E[L]) overrates the plan: with E[T(L)] its Λ is {plan.lambda_other_service:.3f}")
    if plan.utilisation[Bottleneck.EGRESS] > 0.7:
        found.append(f"the egress link is {plan.utilisation[Bottleneck.EGRESS]:.0%} busy at Λ; bursts will queue")
    batch, tbt_s = site.profile.decode_on(problem.pd.hardware), site.slo.tbt_s
    if plan.decode_batch_limit is BatchLimit.MEMORY:
        found.append(
            f"memory of {problem.pd.hardware} limits decode batches to {plan.decode_batch} requests, max_running is "
            f"{batch.max_running}: {problem.memory}"
        )
    if tbt_s is not None and problem.decode.full_step_s > tbt_s:
        found.append(f"a decode step of a full batch takes {batch.full_step_s:g} s, longer than tbt_s={tbt_s:g}")
    if plan.decode_batch_limit is BatchLimit.TBT:
        found.append(f"decode batches of at most {problem.decode.max_running} requests keep tbt_s={tbt_s:g}")
    if plan.num_prfaas and not advantage_rises(problem):
        found.append("T_PD/T_PrfaaS does not rise with length everywhere: a threshold may not be the best rule")
    lengths, short = site.workload.lengths, DEPLOYED.increment_tokens
    held = lengths.share_above(plan.threshold_tokens) - lengths.share_above(max(plan.threshold_tokens, short))
    if plan.num_prfaas and site.workload.hit_ratio and lengths.held is None and held > MOSTLY_HELD:
        found.append(
            f"{held:.0%} of the requests are offloaded with at most {short} uncached tokens: decode nodes that hold the rest "
            "compute them themselves, and less crosses the line than planned; how many, a trace says (see fit)"
        )
    if site.workload.hit_ratio is None:
        found.append("lengths are taken as uncached: prefix hits, which are not known, would lower them (see fit)")
    return tuple(found)

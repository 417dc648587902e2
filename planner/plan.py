"""From a site to a plan: solve, then say what binds, what one more of anything would bring, and how sure this is."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np

from planner.errors import Infeasible, InputError
from planner.profile import DecodeProfile, Floats, KvSize, PrefillCurve, provenance_kind
from planner.queueing import Station, Ttft, Wait, mgk_wait, predict_ttft
from planner.robust import Scenario, Worst, most_robust
from planner.search import (
    Capacity,
    Cut,
    Interval,
    Loads,
    Service,
    Stage,
    TieBreak,
    build_loads,
    cuts_of,
    interval_of,
    rate_at,
    solve,
    stage_seconds,
    threshold_of,
    weighted_quantile,
)
from planner.site import BYTES_PER_S_PER_GBPS, Cluster, Deployment, Link, Site
from planner.traffic import Lengths
from planner.views import ClusterKind

PAPER_GRID_TOKENS: Final = 100  # the step that brings Table 6's 19.4K out of a grid search
NEAR_OPTIMAL: Final = 0.01
ALTERNATIVE_COST: Final = 0.05
QUEUE_BINS: Final = 2_000


class Objective(StrEnum):
    """What a plan maximises (or, for cost, minimises)."""

    THROUGHPUT = "throughput"
    COST = "cost"
    SLO = "slo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to solve. `rate_req_per_s` is the load a cost plan must carry."""

    service: Service = Service.EXACT
    objective: Objective = Objective.THROUGHPUT
    tie_break: TieBreak = TieBreak.EGRESS
    grid_tokens: int | None = None
    extrapolate: bool = False
    rate_req_per_s: float | None = None

    @classmethod
    def as_in_paper(cls) -> "Options":
        """T(E[L]) and a threshold grid, as in §4.2."""
        return cls(service=Service.OF_MEAN, grid_tokens=PAPER_GRID_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """One PrfaaS cluster (or none), one PD cluster and a link, ready to be searched."""

    capacity: Capacity
    loads: Loads
    local: PrefillCurve
    remote: PrefillCurve
    kv: KvSize
    decode: DecodeProfile
    prfaas: Cluster | None
    pd: Cluster
    link: Link | None
    variant: Deployment = field(default_factory=Deployment)

    @property
    def lengths(self) -> Lengths:
        return self.loads.lengths

    def with_capacity(self, **changes: Any) -> "Problem":
        return replace(self, capacity=replace(self.capacity, **changes))

    def pinned(self, num_prefill: int) -> "Problem":
        return replace(self, variant=replace(self.variant, num_prefill=num_prefill))


def pose(site: Site, options: Options, variant: Deployment | None = None) -> Problem:
    """The site as a Problem. Raises InputError when it has several clusters of a kind (those are `fleet`'s)."""
    prfaas, pd = site.of_kind(ClusterKind.PRFAAS), site.of_kind(ClusterKind.PD)
    if len(prfaas) > 1 or len(pd) > 1:
        raise InputError(
            f"clusters: {len(prfaas)} prfaas and {len(pd)} pd; this solves one of each, several are for solve --fleet"
        )
    remote_cluster = prfaas[0] if prfaas else None
    link = site.link(remote_cluster.name, pd[0].name) if remote_cluster else None
    local = site.profile.prefill_on(pd[0].hardware)
    remote = site.profile.prefill_on(remote_cluster.hardware) if remote_cluster else local
    decode = site.profile.decode_on(pd[0].hardware)
    workload = site.workload
    for curve, cluster in ((local, pd[0]), (remote, remote_cluster)):
        if cluster is not None and cluster.instances:
            curve.check(workload.lengths.tokens, f"T_prefill on {cluster.hardware}", options.extrapolate)
    egress = link.bytes_per_s if link else 0.0
    capacity = Capacity(
        num_prfaas=remote_cluster.instances if remote_cluster else 0,
        num_pd=pd[0].instances,
        egress_bytes_per_s=egress,
        decode_s=decode.full_step_s * workload.output_tokens / decode.max_running,
    )
    kv = site.profile.kv_size()
    loads = build_loads(workload.lengths, local, remote, kv, egress_bytes_per_s=egress, service=options.service)
    return Problem(
        capacity=capacity, loads=loads, local=local, remote=remote, kv=kv, decode=decode, prfaas=remote_cluster,
        pd=pd[0], link=link, variant=variant or Deployment(),
    )  # fmt: skip


def best_cut(problem: Problem, options: Options) -> Cut:
    """The best plan there is, within what the deployment pins."""
    variant = problem.variant
    thresholds: Floats | None = None
    if variant.threshold_tokens is not None:
        thresholds = np.array([variant.threshold_tokens], dtype=np.float64)
    elif options.grid_tokens:
        top = problem.lengths.tokens[-1] + options.grid_tokens
        thresholds = np.arange(0.0, top, options.grid_tokens)
    return solve(
        problem.loads,
        problem.capacity,
        num_prefill=variant.num_prefill,
        thresholds=thresholds,
        tie_break=options.tie_break,
    )


def threshold_for(problem: Problem, found: Cut, options: Options) -> float:
    """The threshold to configure for a cut; on a grid, the grid's own."""
    if problem.variant.threshold_tokens is not None:
        return problem.variant.threshold_tokens
    threshold = threshold_of(problem.loads, found)
    if options.grid_tokens:
        return float(np.ceil(threshold / options.grid_tokens) * options.grid_tokens)
    return float(round(threshold))


def ttft_by_length(problem: Problem, cut: int) -> Floats:
    """Zero-queue TTFT of every length: prefill, and the transfer after it when remote (as in Table 6)."""
    tokens = problem.lengths.tokens
    head = problem.local.of(tokens[:cut])
    if cut == len(tokens):
        return head
    transfer_s = problem.kv.of(tokens[cut:]) / problem.capacity.egress_bytes_per_s
    return np.concatenate((head, problem.remote.of(tokens[cut:]) + transfer_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTtft:
    """TTFT with queues, as a function of the rate, for one cut."""

    stations: list[Station]
    num_decode: int
    decode: DecodeProfile
    output_tokens: float

    def at(self, rate: float) -> Ttft:
        service_s = self.decode.full_step_s * self.output_tokens
        slots = self.num_decode * self.decode.max_running
        wait = mgk_wait(rate, slots, service_s, service_s**2) if slots else Wait(1.0, float("inf"))
        return predict_ttft(self.stations, wait, rate)

    def highest_rate(self, limit: float, ttft_p90_s: float) -> float:
        """The largest rate below `limit` whose P90 TTFT meets the target, 0 if none does."""
        if self.at(limit * 1e-6).p90_s > ttft_p90_s:
            return 0.0
        low, high = 0.0, limit
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if self.at(middle).p90_s <= ttft_p90_s else (low, middle)
        return low


def loaded_ttft(problem: Problem, found: Cut, output_tokens: float, bins: int = QUEUE_BINS) -> LoadedTtft:
    """The queues of a plan; lengths are thinned to `bins`, which changes a P90 by less than 0.1 %."""
    threshold = threshold_of(problem.loads, found)
    thin = problem.lengths.thinned(bins)
    at = int(np.searchsorted(thin.tokens, threshold, side="right"))
    capacity = problem.capacity
    short = Station(
        weights=thin.weights[:at],
        prefill_s=problem.local.of(thin.tokens[:at]),
        after_s=np.zeros(at),
        servers=found.num_prefill,
    )
    rest = thin.tokens[at:]
    egress = capacity.egress_bytes_per_s
    transfer_s = problem.kv.of(rest) / egress if egress else np.full_like(rest, np.inf)
    far = Station(
        weights=thin.weights[at:],
        prefill_s=problem.remote.of(rest),
        after_s=transfer_s,
        servers=int(capacity.num_prfaas),
    )
    return LoadedTtft(
        stations=[short, far], num_decode=found.num_decode, decode=problem.decode, output_tokens=output_tokens
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What a wrong input does: Λ when the plan is kept, and when it is solved again."""

    what: str
    factor: float
    kept_rate: float
    resolved_rate: float
    resolved_threshold_tokens: float
    resolved_num_prefill: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A split that keeps its Λ within 1 % over a wide range of thresholds."""

    num_prefill: int
    num_decode: int
    low_tokens: float
    high_tokens: float
    lambda_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of `solve`. Rates in requests/s, lengths in tokens; `to_json` has the published key names."""

    site: str
    workload: str
    deployment: str
    service: Service
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
    mean_offloaded_tokens: float
    mean_local_tokens: float
    egress_gbps: float
    egress_capacity_gbps: float
    ttft_mean_s: float
    ttft_p90_s: float
    loaded_ttft_mean_s: float
    loaded_ttft_p90_s: float
    bottleneck: Stage
    utilisation: Mapping[str, float]
    cost_per_hour: float
    lambda_slo: float | None = None
    shadow_prices: Mapping[str, float] = field(default_factory=dict)
    sensitivity: Sequence[Sensitivity] = ()
    alternative: Alternative | None = None
    warnings: Sequence[str] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    input_hash: str = ""
    seed: int = 0

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
            f"lambda_max_{'of_mean' if self.service is Service.EXACT else 'exact'}_req_per_s": self.lambda_other_service,
            "lambda_slo_req_per_s": self.lambda_slo,
            "offload_fraction": self.offload_fraction,
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
            "cost_per_hour": self.cost_per_hour,
            "cost_per_1000_requests": self.cost_per_hour / 3.6 / self.lambda_max if self.lambda_max else None,
            "shadow_prices_req_per_s": dict(self.shadow_prices),
            "sensitivity": [_plain(entry) for entry in self.sensitivity],
            "robust_alternative": _plain(self.alternative) if self.alternative else None,
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


def tool_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("prfaas")
    except PackageNotFoundError:
        return "unknown"


def make_plan(site: Site, options: Options, deployment: str | None = None) -> Plan:
    """Solves a site with one PD cluster and at most one PrfaaS cluster.

    Raises InputError for inputs that make no sense, Infeasible when nothing can be served.
    """
    variant = Deployment()
    if deployment is not None:
        site, variant = site.deployed(deployment)
    problem = pose(site, options, variant)
    if options.objective is Objective.COST:
        problem = cheapest(problem, site, options)
    found = best_slo_cut(problem, site, options) if options.objective is Objective.SLO else None
    lambda_slo = found.rate if found else None
    if found is None:
        found = best_cut(problem, options)
    if found.rate <= 0:
        raise Infeasible(_why_nothing(problem))
    # With a target for TTFT the plan's own Λ is where it saturates, not the rate that meets the target.
    found = replace(found, rate=rate_at(problem.loads, problem.capacity, found.num_prefill, found.cut, found.share))
    return describe(site, problem, found, options, deployment or "prfaas-pd", lambda_slo)


def _why_nothing(problem: Problem) -> str:
    capacity = problem.capacity
    if not capacity.num_pd:
        return f"cluster {problem.pd.name}: instances=0 serves nothing; give it at least 1"
    if problem.variant.num_prefill == capacity.num_pd:
        return f"num_prefill={capacity.num_pd} leaves no decode instance; try {capacity.num_pd - 1}"
    return "no split serves any request: one instance must both prefill and decode; add an instance or a PrfaaS cluster"


def describe(
    site: Site, problem: Problem, found: Cut, options: Options, deployment: str, lambda_slo: float | None = None
) -> Plan:
    """All a reader wants to know about one cut."""
    loads, capacity = problem.loads, problem.capacity
    seconds = stage_seconds(loads, capacity, found.num_prefill, found.cut, found.share)
    mix = _Mix.of(loads, found)
    interval = interval_of(loads, capacity, found)
    near = interval_of(loads, capacity, found, NEAR_OPTIMAL)
    ttft = ttft_by_length(problem, found.cut)
    loaded = loaded_ttft(problem, found, site.workload.output_tokens).at(0.8 * found.rate)
    egress = capacity.egress_bytes_per_s
    plan = Plan(
        site=site.name,
        workload=site.workload.name,
        deployment=deployment,
        service=options.service,
        objective=options.objective,
        threshold_tokens=threshold_for(problem, found, options),
        threshold_interval_tokens=(interval.low_tokens, interval.high_tokens),
        near_optimal_tokens=(near.low_tokens, near.high_tokens),
        tie_share=found.share,
        num_prfaas=int(capacity.num_prfaas),
        num_prefill=found.num_prefill,
        num_decode=found.num_decode,
        theta_prfaas=_share_rate(mix.offloaded, max(seconds[Stage.PRFAAS], seconds[Stage.EGRESS])),
        theta_pd_p=_share_rate(1 - mix.offloaded, seconds[Stage.PD_P]),
        theta_pd_d=1 / seconds[Stage.PD_D],
        lambda_max=found.rate,
        lambda_other_service=_other_service(problem, found, options),
        offload_fraction=mix.offloaded,
        mean_offloaded_tokens=mix.mean_offloaded,
        mean_local_tokens=mix.mean_local,
        egress_gbps=found.rate * mix.egress_bytes / BYTES_PER_S_PER_GBPS,
        egress_capacity_gbps=egress / BYTES_PER_S_PER_GBPS,
        ttft_mean_s=float(loads.lengths.weights @ ttft),
        ttft_p90_s=weighted_quantile(ttft, loads.lengths.weights, 0.9),
        loaded_ttft_mean_s=loaded.mean_s,
        loaded_ttft_p90_s=loaded.p90_s,
        bottleneck=max(seconds, key=lambda stage: seconds[stage]),
        utilisation={str(stage): found.rate * period for stage, period in seconds.items()},
        cost_per_hour=cost_per_hour(problem),
        lambda_slo=lambda_slo,
        shadow_prices=shadow_prices(problem, options),
        sensitivity=sensitivity(problem, found, options),
        alternative=flat_alternative(problem, found, options),
        provenance=site.provenances(),
        input_hash=site.input_hash,
    )
    return replace(plan, warnings=warnings_of(plan, site, problem))


@dataclass(frozen=True, slots=True)
class _Mix:
    """Who goes where under one cut."""

    offloaded: float
    mean_offloaded: float
    mean_local: float
    egress_bytes: float

    @classmethod
    def of(cls, loads: Loads, found: Cut) -> "_Mix":
        tokens, kept = loads.lengths.tokens, loads.lengths.weights.copy()
        kept[found.cut :] = 0.0
        if found.share:
            kept[found.cut] = loads.lengths.weights[found.cut] * found.share
        sent = loads.lengths.weights - kept
        egress = loads.egress_bytes[found.cut]
        if found.share:
            egress += found.share * (loads.egress_bytes[found.cut + 1] - egress)
        p = float(sent.sum()) if found.cut < len(tokens) else 0.0
        return cls(
            p,
            float(sent @ tokens) / p if p else 0.0,
            float(kept @ tokens) / (1 - p) if p < 1 else 0.0,
            float(egress),
        )


def _share_rate(share: float, seconds: float) -> float:
    """Θ of a stage from its share of the requests and its seconds between requests; 0 when nothing passes it."""
    return share / seconds if seconds > 0 else 0.0


def _other_service(problem: Problem, found: Cut, options: Options) -> float:
    """Λ of the same plan under the other of T(E[L]) and E[T(L)]."""
    other = Service.OF_MEAN if options.service is Service.EXACT else Service.EXACT
    loads = build_loads(
        problem.lengths, problem.local, problem.remote, problem.kv,
        egress_bytes_per_s=problem.capacity.egress_bytes_per_s, service=other,
    )  # fmt: skip
    return rate_at(loads, problem.capacity, found.num_prefill, found.cut, found.share)


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


def shadow_prices(problem: Problem, options: Options) -> dict[str, float]:
    """ΔΛ, solved again, for one more PrfaaS instance, one more PD instance, one more Gbit/s."""
    capacity = problem.capacity
    more = {
        "prfaas_instance": problem.with_capacity(num_prfaas=capacity.num_prfaas + 1),
        "pd_instance": problem.with_capacity(num_pd=capacity.num_pd + 1),
        "egress_gbps": problem.with_capacity(egress_bytes_per_s=capacity.egress_bytes_per_s + BYTES_PER_S_PER_GBPS),
    }
    if problem.link is None:
        del more["prfaas_instance"], more["egress_gbps"]
    now = best_cut(problem, options).rate
    return {what: max(0.0, best_cut(bigger, options).rate - now) for what, bigger in more.items()}


FACTORS: Final = (0.9, 1.1)


def sensitivity(problem: Problem, found: Cut, options: Options) -> list[Sensitivity]:
    """Every input 10 % off, one at a time: the tornado."""
    loads, capacity = problem.loads, problem.capacity
    rows = []
    for factor in FACTORS:
        variants = {
            "T_prefill PrfaaS": replace(problem, loads=loads.scaled(remote=factor)),
            "T_prefill PD": replace(problem, loads=loads.scaled(local=factor)),
            "decode rate": problem.with_capacity(decode_s=capacity.decode_s / factor),
            "egress bandwidth": problem.with_capacity(egress_bytes_per_s=capacity.egress_bytes_per_s * factor),
        }
        for what, changed in variants.items():
            again = best_cut(changed, options)
            rows.append(
                Sensitivity(
                    what=what,
                    factor=factor,
                    kept_rate=rate_at(changed.loads, changed.capacity, found.num_prefill, found.cut, found.share),
                    resolved_rate=again.rate,
                    resolved_threshold_tokens=threshold_for(changed, again, options),
                    resolved_num_prefill=again.num_prefill,
                )
            )
    return sorted(rows, key=lambda row: (row.what, row.factor))


def corner_scenarios(problem: Problem, site: Site, options: Options, spread: float) -> list[Scenario]:
    """Every corner of T_PrfaaS, T_PD and T_decode `spread` faster or slower, on each link quantile and workload slice."""
    capacities = [problem.capacity.egress_bytes_per_s]
    if problem.link is not None:
        capacities += [gbps * BYTES_PER_S_PER_GBPS for gbps in problem.link.quantiles_gbps]
    traffics = [("", problem.loads)]
    for index, lengths in enumerate(site.workload.slices, 1):
        loads = build_loads(
            lengths, problem.local, problem.remote, problem.kv,
            egress_bytes_per_s=problem.capacity.egress_bytes_per_s, service=options.service,
        )  # fmt: skip
        traffics.append((f" slice {index}", loads))
    return [
        Scenario(
            name=f"PrfaaS×{remote:g} PD×{local:g} decode×{decode:g} {egress / BYTES_PER_S_PER_GBPS:g} Gbit/s{label}",
            loads=loads.scaled(remote=remote, local=local),
            capacity=replace(problem.capacity, egress_bytes_per_s=egress, decode_s=problem.capacity.decode_s * decode),
        )
        for label, loads in traffics
        for egress in capacities
        for remote, local, decode in itertools.product((1 - spread, 1 + spread), repeat=3)
    ]


def robust_report(site: Site, options: Options, spread: float, worst: Worst, deployment: str | None) -> dict[str, Any]:
    """The plan with the best worst case, next to the one that is best if every number is right."""
    variant = Deployment()
    if deployment is not None:
        site, variant = site.deployed(deployment)
    problem = pose(site, options, variant)
    found = best_cut(problem, options)
    scenarios = corner_scenarios(problem, site, options, spread)
    robust = most_robust(scenarios, problem.loads, plan=found, worst=worst)
    cut = replace(
        found,
        rate=rate_at(problem.loads, problem.capacity, robust.num_prefill, robust.cut),
        num_prefill=robust.num_prefill,
        num_decode=problem.capacity.num_pd - robust.num_prefill,
        cut=robust.cut,
        share=0.0,
    )
    return {
        "spread": spread,
        "worst_case_of": str(worst),
        "scenarios": len(scenarios),
        "threshold_tokens": threshold_for(problem, cut, options),
        "num_prefill": cut.num_prefill,
        "num_decode": cut.num_decode,
        "lambda_max_req_per_s": cut.rate,
        "worst_ratio": robust.worst_ratio,
        "worst_lambda_req_per_s": robust.worst_rate,
        "worst_scenario": robust.worst_scenario,
        "plan_worst_ratio": robust.plan_worst_ratio,
        "plan_worst_lambda_req_per_s": robust.plan_worst_rate,
        "regret": [
            {"scenario": name, "optimum": best, "robust": chosen, "plan": planned}
            for name, best, chosen, planned in robust.regrets
        ],
    }


def flat_alternative(problem: Problem, found: Cut, options: Options) -> Alternative | None:
    """The split that forgives the widest range of thresholds, if it costs at most 5 % of Λ and is not the plan's own."""
    if problem.variant.threshold_tokens is not None or problem.variant.num_prefill is not None:
        return None
    if problem.capacity.num_prfaas == 0:
        return None
    cuts = [best_cut(problem.pinned(split), options) for split in range(problem.capacity.num_pd)]
    good = [cut for cut in [*cuts, found] if cut.rate >= found.rate * (1 - ALTERNATIVE_COST)]
    ranges = {cut: interval_of(problem.loads, problem.capacity, cut, NEAR_OPTIMAL) for cut in good}
    flattest = max(good, key=lambda cut: _width(ranges[cut]))
    if flattest.num_prefill == found.num_prefill:
        return None
    return Alternative(
        num_prefill=flattest.num_prefill,
        num_decode=flattest.num_decode,
        low_tokens=ranges[flattest].low_tokens,
        high_tokens=ranges[flattest].high_tokens,
        lambda_max=flattest.rate,
    )


def _width(interval: Interval) -> float:
    # The ratio, not the difference: a threshold is missed by a factor.
    return min(interval.high_tokens, 1e9) / max(interval.low_tokens, 1.0)


def cheapest(problem: Problem, site: Site, options: Options) -> Problem:
    """The part of the site worth paying for: least cost per request at the rate it can serve (or at the rate asked for).

    With a TTFT target the rate is the one that meets it. Tries every count of instances up to what the site has.
    """
    if problem.pd.price_per_hour <= 0:
        raise InputError(f"cluster {problem.pd.name}: price_per_hour={problem.pd.price_per_hour}: cost needs a price")
    thin = replace(problem, loads=_thin_loads(problem, options))
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


def _thin_loads(problem: Problem, options: Options) -> Loads:
    return build_loads(
        problem.lengths.thinned(QUEUE_BINS), problem.local, problem.remote, problem.kv,
        egress_bytes_per_s=problem.capacity.egress_bytes_per_s, service=options.service,
    )  # fmt: skip


def _served_rate(problem: Problem, site: Site, options: Options) -> float:
    found = best_cut(problem, options)
    if found.rate <= 0 or site.slo.ttft_p90_s is None:
        return found.rate
    return loaded_ttft(problem, found, site.workload.output_tokens, 300).highest_rate(found.rate, site.slo.ttft_p90_s)


def best_slo_cut(problem: Problem, site: Site, options: Options) -> Cut:
    """The cut whose rate, queues included, still meets the P90 TTFT target; `rate` is that rate.

    Tries every split with a ladder of thresholds, then finer steps around the best.
    """
    target = site.slo.ttft_p90_s
    if target is None:
        raise InputError("slo: ttft_p90_s is missing; --objective slo needs a target")
    thin = replace(problem, loads=_thin_loads(problem, options))
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


def warnings_of(plan: Plan, site: Site, problem: Problem) -> tuple[str, ...]:
    """What a reader should not overlook."""
    found = []
    weak = [what for what, text in plan.provenance.items() if provenance_kind(text) in ("fitted", "unverified")]
    if weak:
        found.append(f"not measured, only fitted or unverified: {', '.join(weak)}")
    low, high = plan.near_optimal_tokens
    if plan.num_prfaas and 0 < high - low < 0.2 * plan.threshold_tokens:
        found.append(f"Λ is within 1 % of the optimum only for {low:.0f} ≤ t ≤ {high:.0f}")
    if plan.service is Service.OF_MEAN:
        found.append(f"T(E[L]) overrates the plan: with E[T(L)] its Λ is {plan.lambda_other_service:.3f}")
    if plan.utilisation[Stage.EGRESS] > 0.7:
        found.append(f"the egress link is {plan.utilisation[Stage.EGRESS]:.0%} busy at Λ; bursts will queue")
    if plan.num_prfaas and not _advantage_rises(problem):
        found.append("T_PD/T_PrfaaS does not rise with length everywhere: a threshold may not be the best rule")
    if site.workload.hit_ratio is None:
        found.append("lengths are taken as uncached: prefix hits would lower them (see fit)")
    return tuple(found)


def _advantage_rises(problem: Problem) -> bool:
    tokens = problem.lengths.tokens
    probe = np.linspace(tokens[0], tokens[-1], 200)
    return bool((np.diff(problem.local.of(probe) / problem.remote.of(probe)) >= -1e-9).all())

"""Plans on trial: a site and a plan become a scenario, a scenario is run over several seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.admission import AdmissionPolicy
from planner.controller import ControllerConfig
from planner.errors import InputError
from planner.placement import PlacementPolicy
from planner.plan import Plan
from planner.progress import busy
from planner.routing import RoutingPolicy
from planner.simulator.outcome import Outcome, over_seeds
from planner.simulator.scenario import Pool, Scenario, Targets, Wire
from planner.simulator.world import simulate
from planner.site import BYTES_PER_S_PER_GBPS, Site
from planner.views import ClusterKind
from planner.workload import Trace, diurnal, poisson


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How to run a plan. What is None is the site's; `capacity` are steps (from s, bytes/s) for its links."""

    placer: str = "kvcache_centric"
    admission: AdmissionPolicy = AdmissionPolicy.ACCEPT_ALL
    cache_gb: float | None = None
    fetch_gbps: float | None = None
    eviction: str = "lru"
    tail_share: float = 1.0
    controller: ControllerConfig | None = None
    capacity: Sequence[tuple[float, float]] | None = None
    ttft_s: float | None = None
    tbt_s: float | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """The four numbers of a plan that a system is configured with."""

    threshold_tokens: float
    tie_share: float
    num_prefill: int
    num_decode: int

    @classmethod
    def of(cls, plan: Plan) -> "Setting":
        return cls(plan.threshold_tokens, plan.tie_share, plan.num_prefill, plan.num_decode)


def scenario_of(site: Site, setting: Setting, trial: Trial) -> Scenario:
    """One PD cluster split as the setting says, all PrfaaS clusters, and the links between them."""
    pd = site.of_kind(ClusterKind.PD)
    if len(pd) != 1:
        raise InputError(f"clusters: {len(pd)} of kind pd; a trial takes one")
    if not setting.num_decode:
        raise InputError("num_decode=0: nobody would answer; give at least 1")
    profile = site.profile
    pools = [
        Pool(
            name=cluster.name,
            kind=cluster.kind,
            num_prefill=setting.num_prefill if cluster is pd[0] else cluster.instances,
            num_decode=setting.num_decode if cluster is pd[0] else 0,
            prefill=profile.prefill_on(cluster.hardware),
            decode=profile.decode_on(cluster.hardware) if cluster is pd[0] else None,
            cache_bytes=(cluster.cache_gb if trial.cache_gb is None else trial.cache_gb) * 1e9,
        )
        for cluster in site.clusters
    ]
    wires = [
        Wire(
            source=link.source,
            destination=link.destination,
            capacity=tuple(trial.capacity) if trial.capacity else ((0.0, link.bytes_per_s),),
        )
        for link in site.links
        if next(c for c in site.clusters if c.name == link.source).instances and link.bytes_per_s > 0
    ]
    fetch_gbps = pd[0].fetch_gbps if trial.fetch_gbps is None else trial.fetch_gbps
    placement = PlacementPolicy(fetch_bytes_per_s=fetch_gbps * BYTES_PER_S_PER_GBPS)
    return Scenario(
        pools=[pool for pool in pools if pool.num_prefill or pool.num_decode],
        wires=wires,
        kv=profile.kv_size(),
        routing=RoutingPolicy(
            threshold_tokens=setting.threshold_tokens,
            # Without an atom to split, L = t is local like everything below it.
            tie_share=setting.tie_share or 1.0,
            placement=placement,
        ),
        placer=trial.placer,
        admission=trial.admission,
        targets=Targets(
            ttft_s=trial.ttft_s or site.slo.ttft_p90_s or 30.0,
            tbt_s=trial.tbt_s or site.slo.tbt_s or 0.1,
        ),
        tail_share=trial.tail_share,
        eviction=trial.eviction,
        controller=trial.controller,
    )


Source = Callable[[int], Trace]


def from_trace(trace: Trace, rate_scale: float = 1.0) -> Source:
    """The trace for every seed; seeds only spread the ticks of its clock."""
    return lambda seed: trace.spread(np.random.default_rng(seed)).faster(rate_scale)


def from_workload(site: Site, rate_req_per_s: float, requests: int) -> Source:
    """Poisson arrivals of the site's workload."""
    workload = site.workload
    return lambda seed: poisson(
        workload.lengths, workload.output_tokens, rate_req_per_s, requests, np.random.default_rng(seed)
    )


def from_day(site: Site, rates_req_per_s: Sequence[float], bin_s: float) -> Source:
    """The site's workload with a rate per bin: the shape of a day."""
    workload, bins = site.workload, len(rates_req_per_s)
    lengths, outputs = [workload.lengths] * bins, [workload.output_tokens] * bins
    return lambda seed: diurnal(lengths, outputs, rates_req_per_s, bin_s, np.random.default_rng(seed))


def run(scenario: Scenario, source: Source, seeds: Sequence[int]) -> list[Outcome]:
    """One outcome per seed."""
    with busy("simulating"):
        return [simulate(scenario, source(seed), seed) for seed in seeds]


def judged(scenario: Scenario, source: Source, seeds: Sequence[int]) -> dict[str, Any]:
    """The report over all seeds, with confidence intervals; what the controller did is the first seed's."""
    outcomes = run(scenario, source, seeds)
    report = over_seeds([outcome.report() for outcome in outcomes])
    if scenario.controller is not None:
        report["timeline"] = list(outcomes[0].timeline)
    return report

"""Plans on trial: a site and a plan become a scenario, a scenario is run over several seeds."""

import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from math import inf
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Final

import numpy as np

from hybrid_cache.eviction.choice import DEFAULT
from membership.lines import BYTES_PER_S_PER_GBPS
from planner.decisions.admission.overload import AdmissionPolicy
from planner.decisions.defaults import DEPLOYED
from planner.decisions.routing.policy import PlacementPolicy, RoutingPolicy
from planner.decisions.views import ClusterKind
from planner.errors import InputError
from planner.model.reading import RATE, SHARE, TOKENS, named, number, placed, read_json
from planner.model.sessions import at_factor
from planner.model.site import INSTANCES, Cluster, Site
from planner.model.workload import Trace, diurnal, poisson
from planner.simulator.outcome import SimulationOutcome, over_seeds
from planner.simulator.policies import Estimates
from planner.simulator.scenario import FlipTimes, Outage, Pool, Scenario, Targets, Wire
from planner.simulator.world import simulate
from planner.solve.control.controller import ControllerConfig
from planner.solve.decode_memory import decode_of
from planner.solve.plan import Plan
from transport.control.settings import require, require_table, require_tables

WORTH_PROCESSES: Final = 20_000  # requests: fewer take no longer than a process needs to start


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How to run a plan. What is None is the site's; `capacity` are steps (from s, bytes/s) for its links, before outages.

    These are the paper's assumptions: caches and moves where a site asks for them, KVCache that leaves after the prefill.
    `DEPLOYED_TRIAL` is what deployments do; `unsaid_*` is what a site that says nothing has.
    """

    placer: str = "kvcache_centric"
    admission: AdmissionPolicy = AdmissionPolicy.ACCEPT_ALL
    cache_gb: float | None = None
    fetch_gbps: float | None = None
    unsaid_cache_gb: float = 0.0
    unsaid_fetch_gbps: float = 0.0
    eviction: str = "lru"
    tail_share: float = 1.0
    increment_tokens: int = 0
    cross_cluster_cache: bool = False
    estimates: Estimates = Estimates.LEARNED
    controller: ControllerConfig | None = None
    capacity: Sequence[tuple[float, float]] | None = None
    outages: Sequence[Outage] = ()
    flips: FlipTimes = field(default_factory=FlipTimes)
    ttft_s: float | None = None
    tbt_s: float | None = None


DEPLOYED_TRIAL: Final = Trial(
    placer=DEPLOYED.placement,
    unsaid_cache_gb=inf,
    unsaid_fetch_gbps=DEPLOYED.fetch_bytes_per_s / BYTES_PER_S_PER_GBPS,
    eviction=DEFAULT,
    tail_share=DEPLOYED.tail_share,
    increment_tokens=DEPLOYED.increment_tokens,
    cross_cluster_cache=DEPLOYED.cross_cluster_cache,
)


def said(value: float | None, unsaid: float) -> float:
    """What a site says, or what is so where it says nothing."""
    return unsaid if value is None else value


@dataclass(frozen=True, slots=True)
class TrialSetting:
    """The numbers of a plan that a system is configured with. `splits` are (prefill, decode) nodes by PD cluster, where there
    are several; the counts are then those of all.
    """

    threshold_tokens: float
    tie_share: float
    num_prefill: int
    num_decode: int
    splits: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.threshold_tokens >= 0:
            raise InputError(f"threshold_tokens={self.threshold_tokens}: must be at least 0")
        if not 0 <= self.tie_share <= 1:
            raise InputError(f"tie_share={self.tie_share}: must be in [0, 1]")
        for name in ("num_prefill", "num_decode"):
            if getattr(self, name) < 0 or getattr(self, name) != int(getattr(self, name)):
                raise InputError(f"{name}={getattr(self, name)}: must be a count")

    @classmethod
    def of(cls, plan: Plan) -> "TrialSetting":
        return cls(plan.threshold_tokens, plan.tie_share, plan.num_prefill, plan.num_decode)

    @classmethod
    def of_fleet(cls, table: Mapping[str, Any]) -> "TrialSetting":
        """Of a plan for several clusters, as `solve` writes it: its splits, and the threshold that one gateway can follow."""
        splits = {each["name"]: (each["num_prefill"], each["num_decode"]) for each in table["pd_clusters"]}
        prefills, decodes = (sum(split[part] for split in splits.values()) for part in (0, 1))
        return cls(table["one_threshold"]["threshold_tokens"], 0.0, prefills, decodes, splits)

    def split_of(self, cluster: str) -> tuple[int, int]:
        """Prefill and decode nodes of a PD cluster. Raises InputError for one that the plan does not know."""
        if not self.splits:
            return self.num_prefill, self.num_decode
        if cluster not in self.splits:
            raise InputError(f"plan: PD cluster {cluster!r} is not in it; it has {', '.join(self.splits)}")
        return self.splits[cluster]


def read_plan(path: Path) -> tuple[TrialSetting, float]:
    """The setting of a plan file, and its Λ in requests/s. Raises InputError naming the file."""
    with named(f"plan {path}"):
        table = read_json(path)
        if "pd_clusters" in table:
            one = require_table(table.get("one_threshold"), "one_threshold")
            return _fleet_setting(table, one), RATE.above_low("lambda_max_req_per_s", one.get("lambda_max_req_per_s"))
        setting = TrialSetting(
            number(table, "threshold_tokens", TOKENS),
            SHARE.of("tie_share", table.get("tie_share", 0.0)),
            int(number(table, "num_prefill", INSTANCES)),
            int(number(table, "num_decode", INSTANCES)),
        )
        return setting, RATE.above_low("lambda_max_req_per_s", table.get("lambda_max_req_per_s"))


def _fleet_setting(table: Mapping[str, Any], one: Mapping[str, Any]) -> TrialSetting:
    for at, each in enumerate(require_tables(table["pd_clusters"], "pd_clusters")):
        with placed(f"pd_clusters[{at}]"):
            require(isinstance(each.get("name"), str), "name", each.get("name"), "a string")
            for part in ("num_prefill", "num_decode"):
                number(each, part, INSTANCES)
    with placed("one_threshold"):
        number(one, "threshold_tokens", TOKENS)
    return TrialSetting.of_fleet(table)


def scenario_of(site: Site, setting: TrialSetting, trial: Trial) -> Scenario:
    """PD clusters split as the setting says, all PrfaaS clusters, and the links between them."""
    pd = site.of_kind(ClusterKind.PD)
    if len(pd) > 1 and not setting.splits:
        raise InputError(
            f"clusters: {len(pd)} of kind pd, but the plan is for one; write one with solve -o, or leave it out"
        )
    if not setting.num_decode:
        raise InputError("num_decode=0: no node could answer; give at least 1")
    pools = [_pool(cluster, site, setting, trial) for cluster in site.clusters]
    wires = [
        Wire(
            source=link.source,
            destination=link.destination,
            capacity=tuple(trial.capacity) if trial.capacity else ((0.0, link.bytes_per_s),),
            rtt_s=link.rtt_ms / 1000,
        )
        for link in site.links
        if next(c for c in site.clusters if c.name == link.source).instances and link.bytes_per_s > 0
    ]
    # A gateway has one rate for all clusters, and no better one than the slowest.
    slowest = min(said(cluster.fetch_gbps, trial.unsaid_fetch_gbps) for cluster in pd)
    fetch_gbps = said(trial.fetch_gbps, slowest)
    placement = PlacementPolicy(fetch_bytes_per_s=fetch_gbps * BYTES_PER_S_PER_GBPS)
    return Scenario(
        pools=[pool for pool in pools if pool.num_prefill or pool.num_decode],
        wires=_with_outages(wires, trial.outages),
        kv=site.profile.kv_size(),
        routing=RoutingPolicy(
            threshold_tokens=setting.threshold_tokens,
            # Without an atom to split, L = t is local like everything below it.
            tie_share=setting.tie_share or 1.0,
            placement=placement,
            increment_tokens=trial.increment_tokens,
            cross_cluster_cache=trial.cross_cluster_cache,
        ),
        placer=trial.placer,
        admission=trial.admission,
        targets=Targets(
            ttft_s=trial.ttft_s or site.slo.ttft_p90_s or 30.0,
            tbt_s=trial.tbt_s or site.slo.tbt_s or 0.1,
            some=site.slo.targets,
        ),
        tail_share=trial.tail_share,
        eviction=trial.eviction,
        controller=trial.controller,
        flips=trial.flips,
        estimates=trial.estimates,
        homes=site.homes,
    )


def _pool(cluster: Cluster, site: Site, setting: TrialSetting, trial: Trial) -> Pool:
    decodes = cluster.kind is ClusterKind.PD
    num_prefill, num_decode = setting.split_of(cluster.name) if decodes else (cluster.instances, 0)
    return Pool(
        name=cluster.name,
        kind=cluster.kind,
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill=site.profile.prefill_on(cluster.hardware),
        decode=decode_of(site, cluster.hardware) if decodes else None,
        cache_bytes=said(trial.cache_gb, said(cluster.cache_gb, trial.unsaid_cache_gb)) * 1e9,
    )


def _with_outages(wires: Sequence[Wire], outages: Sequence[Outage]) -> list[Wire]:
    found = list(wires)
    for outage in outages:
        changed = [wire.with_outage(outage) for wire in found]
        if all(old is new for old, new in zip(found, changed, strict=True)):
            known = ", ".join(f"{wire.source}:{wire.destination}" for wire in found) or "none"
            raise InputError(f"link {outage.source}:{outage.destination}: there is no such link; known: {known}")
        found = changed
    return found


Source = Callable[[int], Trace]


def from_trace(trace: Trace, rate_scale: float = 1.0) -> Source:
    """The trace for every seed; seeds spread the ticks of its clock, and draw the sessions that a higher rate has more of."""
    return lambda seed: at_factor(trace.spread(np.random.default_rng(seed)), rate_scale, seed)


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


def run(
    scenario: Scenario, source: Source, seeds: Sequence[int], processes: int = 1, worth: int = WORTH_PROCESSES
) -> list[SimulationOutcome]:
    """One outcome per seed. From `worth` requests on, all seeds together, the seeds are simulated in several processes."""
    traces = [source(seed) for seed in seeds]
    processes = min(processes, len(seeds))
    if processes < 2 or sum(len(trace) for trace in traces) < worth:
        return [simulate(scenario, trace, seed) for trace, seed in zip(traces, seeds, strict=True)]
    # A fork would copy the locks of threads, such as the one that shows progress. Ctrl-C ends the processes at once: as an
    # exception it would end one seed, and they would go on with the next.
    ended = (signal.SIGINT, signal.SIG_DFL)
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=signal.signal, initargs=ended) as pool:
        try:
            # Not `map`, which cancels what is left: Python 3.11's pool breaks at that, with a traceback.
            futures = [pool.submit(simulate, scenario, trace, seed) for trace, seed in zip(traces, seeds, strict=True)]
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            for child in active_children():  # else the pool waits for all seeds
                child.terminate()
            raise


def judged(scenario: Scenario, source: Source, seeds: Sequence[int], processes: int = 1) -> dict[str, Any]:
    """The report over all seeds, with confidence intervals; what the controller did is the first seed's."""
    outcomes = run(scenario, source, seeds, processes)
    report = over_seeds([outcome.report() for outcome in outcomes])
    if scenario.controller is not None:
        report["timeline"] = list(outcomes[0].timeline)
    return report

"""A site as the numbers that are searched: one PrfaaS cluster or none, one PD cluster, the link between them."""

from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from membership.lines import Line
from planner.decisions.views import ClusterKind
from planner.errors import Infeasible, InputError
from planner.model.increments import full_chance
from planner.model.profile import DecodeProfile, Floats, KvSize, PrefillCurve
from planner.model.site import Cluster, Deployment, Site
from planner.model.throughput import decode_seconds
from planner.model.traffic import Lengths
from planner.solve.decode_memory import BatchLimit, DecodeMemory, decode_of, memory_of
from planner.solve.goals import Objective, ServiceTime, TieBreak
from planner.solve.search import RECOMMENDED_LOAD, Capacity, Cut, Loads, build_loads, solve, threshold_of

PAPER_GRID_TOKENS: Final = 100  # the step that brings Table 6's 19.4K out of a grid search


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveOptions:
    """How to solve. `rate_req_per_s` is the load a cost plan must carry."""

    service: ServiceTime = ServiceTime.EXACT
    objective: Objective = Objective.THROUGHPUT
    tie_break: TieBreak = TieBreak.EGRESS
    grid_tokens: int | None = None
    extrapolate: bool = False
    rate_req_per_s: float | None = None
    survives_cold: bool = True  # the load that is run is carried while decode nodes hold nothing, too

    @property
    def cold_load(self) -> float | None:
        """The share of Λ that is carried with cold caches: all of it where the plan is for a rate to run at."""
        if not self.survives_cold:
            return None
        return RECOMMENDED_LOAD if self.objective is Objective.THROUGHPUT else 1.0

    @classmethod
    def as_in_paper(cls) -> "SolveOptions":
        """T(E[L]) and a threshold grid, as in §4.2; all caches are full."""
        return cls(service=ServiceTime.OF_MEAN, grid_tokens=PAPER_GRID_TOKENS, survives_cold=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """One PrfaaS cluster (or none), one PD cluster and a link, ready to be searched.

    `loads` are those at Λ. A decode node without a place is not chosen, whatever it holds: the fuller the nodes are, the fewer
    prompts they compute. `asked` are the lengths of empty nodes. `cold_load` is the share of Λ that must be carried with cold
    caches, None where that does not matter. `memory` is that of a decode instance, None where it is not known.
    """

    capacity: Capacity
    asked: Lengths
    loads: Loads
    local: PrefillCurve
    remote: PrefillCurve
    kv: KvSize
    decode: DecodeProfile
    prfaas: Cluster | None
    pd: Cluster
    link: Line | None
    variant: Deployment = field(default_factory=Deployment)
    burst_index: float = 1.0
    output_spread: float = 0.0
    cold_load: float | None = None
    memory: DecodeMemory | None = None

    @property
    def lengths(self) -> Lengths:
        return self.loads.lengths

    def with_capacity(self, **changes: Any) -> "Problem":
        return replace(self, capacity=replace(self.capacity, **changes))

    def loads_for(self, lengths: Lengths, service: ServiceTime) -> Loads:
        """What other lengths, or another service model, ask of the same hardware."""
        return build_loads(
            lengths, self.local, self.remote, self.kv,
            egress_bytes_per_s=self.capacity.egress_bytes_per_s, service=service, cold_load=self.cold_load,
        )  # fmt: skip

    def warm(self) -> "Problem":
        """Where decode nodes always hold what they hold in the mean."""
        return replace(self, cold_load=None, loads=replace(self.loads, cold=None))

    def at_rate(self, rate: float, num_decode: int) -> "Problem":
        """With the loads of a rate: what decode nodes compute if they are as full as it makes them."""
        if self.asked.held is None or not num_decode:
            return self
        busy = min(1.0, rate * (self.capacity.decode_s + self.loads.held_s) / num_decode)
        lengths = self.asked.less_held(full_chance(self.decode, busy))
        return replace(self, loads=self.loads_for(lengths, self.loads.service))

    def scaled(self, *, local: float = 1.0, remote: float = 1.0, decode: float = 1.0) -> "Problem":
        """The same site where prefill at home, in PrfaaS and decode take these factors as long."""
        return replace(
            self,
            loads=self.loads.scaled(local=local, remote=remote),
            local=self.local.scaled(local),
            remote=self.remote.scaled(remote),
            decode=self.decode.scaled(decode),
            capacity=replace(self.capacity, decode_s=self.capacity.decode_s * decode),
        )

    def within_tbt(self, tbt_s: float, output_tokens: float) -> "Problem":
        """With decode batches whose steps keep a target for TBT. Raises Infeasible where none does."""
        decode = self.decode.within(tbt_s)
        if decode is None:
            raise Infeasible(
                f"slo: tbt_s={tbt_s:g}: a decode step of one request takes {self.decode.at(1):g} s on "
                f"{self.pd.hardware}; ask for at least that"
            )
        return self._decoding(decode, output_tokens)

    def batch_limit(self, profiled: DecodeProfile) -> BatchLimit:
        """What keeps decode batches as small as they are."""
        fitting = profiled if self.memory is None else self.memory.limited(profiled)
        if self.decode.max_running < fitting.max_running:
            return BatchLimit.TBT
        return BatchLimit.PROFILE if fitting is profiled else BatchLimit.MEMORY

    def with_staged(self, staged_bytes: float, output_tokens: float) -> "Problem":
        """While prompts that cross the line hold so much of each decode instance."""
        assert self.memory is not None
        memory = self.memory.with_staged(staged_bytes)
        return replace(self, memory=memory)._decoding(memory.limited(self.decode), output_tokens)

    def _decoding(self, decode: DecodeProfile, output_tokens: float) -> "Problem":
        decode_s = float(decode_seconds(decode.max_running, decode.full_step_s, output_tokens))
        return replace(self, decode=decode, capacity=replace(self.capacity, decode_s=decode_s))

    def pinned(self, num_prefill: int) -> "Problem":
        return replace(self, variant=replace(self.variant, num_prefill=num_prefill))


def pose(site: Site, options: SolveOptions, variant: Deployment | None = None) -> Problem:
    """The site as a Problem. Raises InputError when it has several clusters of a kind (those are `fleet`'s).

    Decode batches fit into memory, where the profile says it: with what prompts hold that cross the line at Λ.
    """
    problem = _posed(site, options, variant)
    while problem.memory is not None:
        staged = staged_bytes(problem, best_cut(problem, options))
        fuller = problem.with_staged(max(problem.memory.staged_bytes, staged), site.workload.output_tokens)
        if fuller.decode.max_running == problem.decode.max_running:
            return fuller
        problem = fuller
    return problem


def _posed(site: Site, options: SolveOptions, variant: Deployment | None) -> Problem:
    prfaas, pd = site.of_kind(ClusterKind.PRFAAS), site.of_kind(ClusterKind.PD)
    if len(prfaas) > 1 or len(pd) > 1:
        raise InputError(
            f"clusters: {len(prfaas)} prfaas and {len(pd)} pd; this command takes one of each; solve and simulate take several"
        )
    remote_cluster = prfaas[0] if prfaas else None
    link = site.link(remote_cluster.name, pd[0].name) if remote_cluster else None
    local = site.profile.prefill_on(pd[0].hardware)
    remote = site.profile.prefill_on(remote_cluster.hardware) if remote_cluster else local
    memory = memory_of(site, pd[0].hardware)
    decode = decode_of(site, pd[0].hardware)
    workload = site.workload
    for curve, cluster in ((local, pd[0]), (remote, remote_cluster)):
        if cluster is not None and cluster.instances:
            curve.check(workload.computed_tokens, f"T_prefill on {cluster.hardware}", options.extrapolate)
    egress = link.bytes_per_s if link else 0.0
    capacity = Capacity(
        num_prfaas=remote_cluster.instances if remote_cluster else 0,
        num_pd=pd[0].instances,
        egress_bytes_per_s=egress,
        decode_s=float(decode_seconds(decode.max_running, decode.full_step_s, workload.output_tokens)),
    )
    kv = site.profile.kv_size()
    lengths = workload.lengths.less_held(full_chance(decode, 1.0))
    loads = build_loads(
        lengths, local, remote, kv, egress_bytes_per_s=egress, service=options.service, cold_load=options.cold_load
    )
    return Problem(
        capacity=capacity, asked=workload.lengths, loads=loads, local=local, remote=remote, kv=kv, decode=decode,
        prfaas=remote_cluster,
        pd=pd[0], link=link, variant=variant or Deployment(), burst_index=workload.burst_index,
        output_spread=workload.output_spread,
        cold_load=options.cold_load, memory=memory,
    )  # fmt: skip


def staged_bytes(problem: Problem, found: Cut) -> float:
    """What prompts that cross the line hold of each decode instance in the mean: rate × transfer time × their KVCache."""
    lengths, egress = problem.lengths, problem.capacity.egress_bytes_per_s
    if not egress or not found.num_decode:
        return 0.0
    sent = np.where(np.arange(len(lengths.tokens)) >= found.cut, lengths.prefilled, 0.0)
    if found.share:
        sent[found.cut] *= 1 - found.share
    sizes, fixed = problem.kv.beyond(*lengths.sent), problem.kv.fixed_bytes
    copies = 1.0 if problem.memory is None else problem.memory.kv_copies
    held = (sizes - fixed) * copies + fixed
    return float(found.rate * (sent @ (sizes / egress * held)) / found.num_decode)


def best_cut(problem: Problem, options: SolveOptions) -> Cut:
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


def threshold_for(problem: Problem, found: Cut, options: SolveOptions) -> float:
    """The threshold to configure for a cut; on a grid, the grid's own."""
    if problem.variant.threshold_tokens is not None:
        return problem.variant.threshold_tokens
    threshold = threshold_of(problem.loads, found)
    if options.grid_tokens:
        return float(np.ceil(threshold / options.grid_tokens) * options.grid_tokens)
    return float(round(threshold))


def ttfts(problem: Problem, cut: int) -> tuple[Floats, Floats]:
    """Zero-queue TTFTs, and their shares of the requests: prefill, and the transfer after it when remote (as in Table 6)."""
    lengths = problem.lengths
    near, far = lengths.part(slice(cut)), lengths.part(slice(cut, None))
    sizes, egress = problem.kv.beyond(*far.sent), problem.capacity.egress_bytes_per_s
    transfer_s = sizes / egress if egress else np.full_like(sizes, np.inf)
    seconds = [
        problem.local.after(near.uncached, near.cached),
        problem.remote.after(far.uncached, far.cached) + transfer_s,
    ]
    shares = [lengths.prefilled]
    if lengths.held is not None:
        seconds.append(problem.local.after(lengths.uncached, lengths.cached))
        shares.append(lengths.weights * lengths.held)
    return np.concatenate(seconds), np.concatenate(shares)

"""One run of a scenario: requests arrive, are routed and admitted by the real code, prefilled, moved, decoded.

    arrival ── route, admit ──► prefill node ──► (egress link) ──► decode node ──► done
       └── refused       ▲                          │   └── refused after prefill (baseline admission)
                         └── another way, at last the decode node's own ◄── lost on a link that failed

Every request ends exactly once, as done or as refused; `run` asserts it.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np

from planner.decisions.admission.classes import ServiceClass
from planner.decisions.failures.retries import FailedStage, Next, failure_of, rule_after
from planner.decisions.links.paths import PATH_FAILED
from planner.decisions.routing.offload import ReadyNodes, Reason, Route, Target, route_among
from planner.decisions.routing.placement import PLACERS
from planner.decisions.views import PrefillCost, RouteRequest
from planner.errors import InputError, NoReadyNode
from planner.model.fitting import categories_of
from planner.model.profile import Floats, KvSize
from planner.model.workload import Trace
from planner.simulator.clusters import RequestClusters, by_link, homes_of
from planner.simulator.gateway.door import Door
from planner.simulator.gateway.estimates import Experience, LearnedTimes, TrueTimes
from planner.simulator.loop import Loop
from planner.simulator.network.egress import SimulatedEgress
from planner.simulator.network.links import SimulatedLinks
from planner.simulator.network.moves import SimulatedMove, SimulatedMoves
from planner.simulator.nodes.caches import layout_of
from planner.simulator.nodes.node import NO_HASHES, PrefillNode, SimulatedRequest
from planner.simulator.nodes.roles import Roles
from planner.simulator.nodes.steering import Steering
from planner.simulator.outcome import SimulationOutcome
from planner.simulator.policies import Estimates
from planner.simulator.scenario import Scenario
from planner.simulator.turns import hashes_of, next_turns


class World:
    """A scenario in motion."""

    def __init__(self, scenario: Scenario, trace: Trace, seed: int = 0) -> None:
        self.scenario = scenario
        self.trace = trace
        self.seed = seed
        self.loop = Loop()
        self.policy = scenario.routing
        # One draw per request, before anything runs: no decision can shift another request's chance.
        self._ties: Floats = np.random.default_rng(seed).random(len(trace))
        self._place = PLACERS[scenario.placer]
        layout = layout_of(scenario.kv, trace.block_size) if _caches(scenario, trace) else None
        self.roles = Roles(
            scenario, layout, self.loop, seed, on_start=self._on_prefill_start, on_prefilled=self._on_prefilled,
            on_first_token=self._on_first_token, on_decoded=self._on_decoded,
        )  # fmt: skip
        self._prefills, self._decodes = self.roles.prefills, self.roles.decodes
        self._layout = layout
        self._following = next_turns(trace) if layout is not None else {}
        self._learned = LearnedTimes(self._prefills, self._decodes)
        self._experience = Experience(scenario.routing.placement, self._learned)
        curves = {pool.name: pool.prefill for pool in scenario.pools}
        self._cost: PrefillCost = (
            self._learned
            if scenario.estimates is Estimates.LEARNED
            else TrueTimes(curves, self._prefills, self._decodes, self.loop)
        )
        self.links = SimulatedLinks(
            scenario, self._prefills, self._decodes, self.loop,
            on_delivered=self._on_delivered, on_lost=self._on_lost, is_over=lambda: self._num_ended == len(trace),
        )  # fmt: skip
        everybody = ServiceClass(ttft_s=scenario.targets.ttft_s, tbt_s=scenario.targets.tbt_s)
        self._door = Door(
            scenario.admission, scenario.classes or {everybody: 1.0}, scenario.line, self._decodes, self.loop,
            consider=self._consider, refuse=self._refuse,
            decode_s=next(iter(self._decodes.values())).profile.full_step_s * float(trace.output_tokens.mean()),
            draws=np.random.default_rng((seed, 1)).random(len(trace)),
        )  # fmt: skip
        self.roles.on_changed = self._door.count_room
        size = len(trace)
        self._ttft, self._tbt, self._e2e, self._wait = (array("d", [nan]) * size for _ in range(4))
        self._cached, self._remote = (array("d", [0.0]) * size for _ in range(2))
        self._ended = bytearray(size)
        self._num_ended = 0
        self._fallbacks: Counter[str] = Counter()
        self._moves = SimulatedMoves(self.loop, trace.block_size, self._on_late_move)
        self._homes = homes_of(scenario, size, seed)
        self._ways = RequestClusters(scenario, size) if RequestClusters.are_several(scenario) else None
        self._rejects: Counter[str] = Counter()
        self._routes: Counter[tuple[str, str]] = Counter()
        self._steering = None if scenario.controller is None else Steering(scenario, scenario.controller, self.roles)

    # A request's life

    def run(self) -> SimulationOutcome:
        """Until every request has ended."""
        if len(self.trace):
            # Arrays, not lists: a list of a million floats costs 32 MB.
            self._arrivals = array("d", self.trace.arrival_s.tobytes())
            self._prompts = array("q", self.trace.prompt_tokens.astype(np.int64).tobytes())
            self._outputs = array("d", self.trace.output_tokens.tobytes())
            self._tie_of = array("d", self._ties.tobytes())
            self.loop.at(self._arrivals[0], self._on_arrival, 0)
            if self._steering is not None:
                self.loop.at(self._steering.tick_s, self._on_tick, self._steering)
        self.loop.run()
        assert all(self._ended), "a request neither ended nor was refused"
        return self._outcome()

    def _on_arrival(self, now: float, index: int) -> None:
        if index + 1 < len(self._arrivals):
            self.loop.at(self._arrivals[index + 1], self._on_arrival, index + 1)
        hashes = hashes_of(self.trace, index) if self._layout is not None else NO_HASHES
        job = SimulatedRequest(index, now, self._prompts[index], self._outputs[index], hashes)
        if hashes:
            job.request_id = str(index)
            job.blocks = hashes[: job.prompt // self.trace.block_size]
        self._consider(now, job)

    def _consider(self, now: float, job: SimulatedRequest) -> None:
        job.route = found = self._route(now, job, self._homes[job.index] if self._homes else None)
        if self._steering is not None and now == job.arrived:
            self._steering.offered.append((found.uncached_tokens, job.output))
        if not self._door.is_open:
            admission = self._door.admission(now, job, found)
            if not admission.accepted:
                self._refuse(now, job, str(admission.reason))
                return
            if not self._door.has_room(now, job, self._decodes[found.decode_node]):
                self._door.stand(now, job)
                return
            self._door.leave(now, job, served=True)
            self._door.accepted(now, job, found)
        self._routes[found.target, found.reason] += 1
        job.decode_node = self._decodes[found.decode_node]
        job.decode_node.assign(1)
        self._dispatch(now, job)

    def _route(
        self, now: float, job: SimulatedRequest, home: str | None = None, exclude: Collection[str] = ()
    ) -> Route:
        """Where a job goes now, by what deciders know."""
        request = RouteRequest(
            num_tokens=max(2, job.prompt), kv_bytes=self.scenario.kv, tie=self._tie_of[job.index], home=home,
            answer_tokens=self._experience.answer_tokens(),
        )  # fmt: skip
        if self.policy.placement is not self._experience.placement:
            self.policy = replace(self.policy, placement=self._experience.placement)
        policy = self.policy
        if self._moves.delays:
            placement = replace(policy.placement, fetch_delays_s=self._moves.delays.at(now))
            policy = replace(policy, placement=placement)
        self._learned.as_of(now)
        ready = self.roles.seen_by(job, now)
        found = route_among(
            _without(ready, exclude) if exclude else ready, request, self.links.views(now), policy,
            place=self._place, cost=self._cost,
        )  # fmt: skip
        if found.prefill_node is not None:
            self._learned.tried(found.prefill_node, self._prefills[found.prefill_node].pool.name)
        return found

    def _dispatch(self, now: float, job: SimulatedRequest) -> None:
        found, decode = job.route, job.decode_node
        job.cached = found.cached_tokens
        if found.prefill_node is None:
            self._compute_at_decode(now, job)
            return
        decode.comes(job, now + max(found.ttft_s, found.link_s))
        self._send_or_wait(now, job)

    def _send_or_wait(self, now: float, job: SimulatedRequest) -> None:
        """What is on its way to the decode node for others, and is to be shared, is waited for."""
        found, decode = job.route, job.decode_node
        assert found.prefill_node is not None
        node = self._prefills[found.prefill_node]
        if found.shared_tokens and (shared := decode.shared_with(job)) is not None:
            shared.first.waiting.append(job)
            node.expect(job)
            return
        if decode.cache is not None:
            job.have = decode.cache.expect(job.request_id, job.hashes, job.prompt, now)
        self._compute_on(now, job, node)

    def _arrived(self, now: float, job: SimulatedRequest) -> None:
        """A job's KVCache is on its way no more."""
        for waiting in job.decode_node.arrived(job):
            self.loop.at(now, self._look_again, waiting)

    def _look_again(self, now: float, job: SimulatedRequest) -> None:
        """A job has waited for another one's KVCache, which has landed, or will not."""
        assert job.route.prefill_node is not None
        self._prefills[job.route.prefill_node].expect_no_more(job)
        self._send_or_wait(now, job)

    def _compute_at_decode(self, now: float, job: SimulatedRequest) -> None:
        decode = job.decode_node
        self._remote[job.index] = 0.0
        if decode.cache is not None:
            job.cached = min(decode.cache.begin(job.request_id, job.hashes, job.prompt, now), job.prompt - 1)
        decode.compute(now, job, self._on_prefilled)

    def _compute_on(self, now: float, job: SimulatedRequest, node: PrefillNode) -> None:
        """A prefill node computes it, after a prefix that it is sent where the route says so."""
        found, decode = job.route, job.decode_node
        job.cached = found.cached_tokens
        self._remote[job.index] = 1.0 if found.target is Target.REMOTE else 0.0
        if found.target is Target.REMOTE:
            job.egress = self.links.between(node.pool.name, decode.pool.name)
            job.unsent = _bytes_to_send(self.scenario.kv, job)
            job.egress.promise(job)
        rate = self.scenario.routing.placement.fetch_bytes_per_s
        source = None if found.fetch_from is None else self.roles.named(found.fetch_from)
        if source is not None and source.pool is not node.pool:
            own = node.match(job.hashes, job.prompt).num_tokens
            # States are sent whatever the node has of attention.
            size = self.scenario.kv(found.cached_tokens) - self.scenario.kv.bytes_per_token * own
            link = self.links.between(source.pool.name, node.pool.name)
            self._moves.fetch(now, job, source, node, link, size)
            return
        if source is not None and rate:
            own = node.match(job.hashes, job.prompt).num_tokens
            moved = self.scenario.kv(found.cached_tokens) - self.scenario.kv(own)
            job.ready_at = now + moved / rate
            self.loop.at(job.ready_at, self._experience.on_moved, (moved, moved / rate))
        node.put(now, job)

    def _on_tick(self, now: float, steering: Steering) -> None:
        self.policy = steering.steer(now, self.policy)
        if now < self._arrivals[-1]:
            self.loop.at(now + steering.tick_s, self._on_tick, steering)

    def _on_prefill_start(self, now: float, job: SimulatedRequest) -> None:
        self._wait[job.index] = now - job.arrived
        if job.egress is not None and self.scenario.tail_share < 1:
            job.flows = 2
            self._send(now, job, 1 - self.scenario.tail_share, job.service_s)

    def _send(self, now: float, job: SimulatedRequest, share: float, over_s: float = 0.0) -> None:
        size = _bytes_to_send(self.scenario.kv, job) * share
        job.unsent -= size
        job.egress.leaves(size)
        job.egress.send(now, size, job, over_s)

    def _on_prefilled(self, now: float, job: SimulatedRequest) -> None:
        if job.is_lost:
            return
        self._cached[job.index] = job.cached
        if (computed_by := job.route.prefill_node) is not None:
            pool = self._prefills[computed_by].pool.name
            self._learned.as_of(now)
            self._learned.observe(computed_by, pool, job.prompt - job.cached, job.cached, job.service_s)
        if job.egress is None:
            self._on_kv_ready(now, job)
        else:
            self._send(now, job, self.scenario.tail_share)

    def _on_delivered(self, now: float, job: SimulatedRequest | SimulatedMove) -> None:
        if isinstance(job, SimulatedMove):
            self._moves.on_delivered(now, job)
            return
        job.flows -= 1
        if not job.flows:
            job.egress.forget(job)
            wire = job.egress.wire
            if not job.failed:
                self._experience.on_arrived((wire.source, wire.destination), job.route.arrives_s, now - job.arrived)
            self.links.arrived(now, job)
            self._on_kv_ready(now, job)

    def _on_lost(self, now: float, items: list[SimulatedRequest | SimulatedMove]) -> None:
        """Their transfers have failed: each goes another way, as gateways have it go (`gateway/pipeline/ticketed.py`)."""
        # One may have two transfers under way.
        lost = list(dict.fromkeys(item for item in items if isinstance(item, SimulatedRequest)))
        for job in lost:
            job.is_lost = True
            job.egress.forget(job)
            self.links.failed(now, job)
        for job in lost:
            self._fallbacks[f"prefill_{PATH_FAILED}"] += 1
            self._take_another_way(now, job.again())
        for item in items:
            if isinstance(item, SimulatedMove):
                self._moves.on_lost(now, item)

    def _on_late_move(self, reason: str) -> None:
        self._fallbacks[reason] += 1

    def _take_another_way(self, now: float, job: SimulatedRequest) -> None:
        decode, failed = job.decode_node, job.failed
        rule = rule_after(
            FailedStage.PREFILL,
            failure_of(PATH_FAILED),
            tries=len(failed),
            max_tries=self.scenario.max_attempts,
            deaths=0,
        )
        other = None
        if rule.next is Next.ELSEWHERE:
            out = {*failed, *self.links.cut_off_from(decode.node_id)}
            with suppress(NoReadyNode):
                other = self._route(now, job, home=decode.pool.name, exclude=out)
        if other is not None and other.prefill_node and self._decodes[other.decode_node].pool is decode.pool:
            job.route = other
            self._compute_on(now, job, self._prefills[other.prefill_node])
            return
        # Its landing is given back, and the decode node computes the prompt itself.
        self._fallbacks["recompute_no_prefill"] += 1
        job.route = Route(
            target=Target.DECODE, reason=Reason.NO_PREFILL, decode_node=decode.node_id, prefill_node=None,
            uncached_tokens=job.prompt, cached_tokens=0, threshold_tokens=self.policy.threshold_tokens,
        )  # fmt: skip
        if decode.cache is not None:
            decode.cache.let_go(job.request_id, now)
        self._arrived(now, job)
        self._compute_at_decode(now, job)

    def _on_kv_ready(self, now: float, job: SimulatedRequest) -> None:
        if not self._door.is_open and not (admission := self._door.to_decode(job)).accepted:
            job.decode_node.assign(-1)
            if job.decode_node.cache is not None:
                job.decode_node.cache.let_go(job.request_id, now)
            self._arrived(now, job)
            self._refuse(now, job, str(admission.reason))
            self._door.let_in(now)
            return
        if job.decode_node.cache is not None:
            job.decode_node.cache.fill(job.request_id, job.prompt, now)
        self._arrived(now, job)
        job.decode_node.put(now, job)

    def _on_first_token(self, now: float, job: SimulatedRequest) -> None:
        first_s = job.decode_node.first_token_s if self.scenario.counts_first_step else 0.0
        self._ttft[job.index] = now - job.arrived + first_s
        if not self._door.is_open:
            self._door.started(job)

    def _on_decoded(self, now: float, job: SimulatedRequest) -> None:
        if not self._door.is_open:
            self._door.ended(now, job)
        if self._following:
            self._keep_answer(now, job)
        self._experience.on_answered(job.output)
        self._learned.learn_steps(now, job)
        self._e2e[job.index] = now - job.arrived
        self._tbt[job.index] = job.service_s
        if self._ways is not None:
            self._ways.note(job)
        self._end(job.index)
        if not self._door.is_open:
            self._door.let_in(now)

    def _keep_answer(self, now: float, job: SimulatedRequest) -> None:
        """Blocks of the answer become prefix cache like those of the prompt, and the last of them has a state."""
        cache, size = job.decode_node.cache, self.trace.block_size
        if cache is None or (following := self._following.get(job.index)) is None:
            return
        end = int(job.prompt + job.output) // size * size
        if end <= job.prompt:
            return
        hashes = hashes_of(self.trace, following)[: end // size]
        if len(hashes) * size == end:
            cache.begin(f"answer {job.request_id}", hashes, end, now)
            cache.end(f"answer {job.request_id}", end, now)

    def _refuse(self, now: float, job: SimulatedRequest, reason: str) -> None:
        self._door.leave(now, job, served=False)
        self._ttft[job.index] = nan
        self._rejects[reason] += 1
        self._end(job.index)

    def _end(self, index: int) -> None:
        assert not self._ended[index], "a request ended twice"
        self._ended[index] = 1
        self._num_ended += 1

    # Results

    def _outcome(self) -> SimulationOutcome:
        horizon = max(self.trace.span_s, 1e-9) if len(self.trace) > 1 else max(self.loop.now, 1e-9)
        busy = self.roles.busy(horizon)
        utilisation = _by_stage(busy)
        windows = {w: _sent(self.links.all, w, horizon) for w in (1.0, 10.0)}
        capacity = sum(link.wire.capacity[0][1] for link in self.links.all)
        if capacity:
            utilisation["egress"] = float(windows[1.0].sum()) / horizon / capacity
        start = self.trace.arrival_s[0] if len(self.trace) else 0.0
        return SimulationOutcome(
            arrival_s=self.trace.arrival_s - start,
            ttft_s=np.frombuffer(self._ttft),
            tbt_s=np.frombuffer(self._tbt),
            e2e_s=np.frombuffer(self._e2e),
            prefill_wait_s=np.frombuffer(self._wait),
            prompt_tokens=self.trace.prompt_tokens,
            cached_tokens=np.frombuffer(self._cached),
            remote=np.frombuffer(self._remote),
            rejects=dict(sorted(self._rejects.items())),
            wasted_prefill_s=self._door.wasted_s,
            fallbacks=dict(sorted(self._fallbacks.items())),
            link_failures={f"{source} to {to}": count for (source, to), count in sorted(self.links.failures.items())},
            moved_bytes=dict(sorted(self._moves.moved_bytes.items())),
            routes={f"{target} {reason}": count for (target, reason), count in sorted(self._routes.items())},
            utilisation=utilisation,
            egress_bytes=windows,
            sent_bytes=sum(link.sent_bytes for link in self.links.all),
            horizon_s=horizon,
            targets=self.scenario.targets,
            categories=_categories(self.scenario, self.trace),
            seed=self.seed,
            events=self.loop.events,
            timeline=tuple(self._steering.timeline) if self._steering is not None else (),
            conversions=dict(sorted(self.roles.conversions.items())),
            ways={} if self._ways is None else self._ways.counts(),
            clusters={} if self._ways is None else self._ways.by_cluster(np.frombuffer(self._ttft), busy),
            links={} if self._ways is None else by_link(self.links.all, horizon),
            classes=self._door.classes,
            class_of=self._door.class_of,
            errors=self._experience.errors(),
        )


def _bytes_to_send(kv: KvSize, job: SimulatedRequest) -> float:
    """What the decode node lacks: states and windows are sent whatever it holds of attention."""
    return kv(job.prompt) - kv.bytes_per_token * job.have


def _without(ready: ReadyNodes, exclude: Collection[str]) -> ReadyNodes:
    """The nodes that are left; no list is empty."""
    left = {name: [node for node in nodes if node.node_id not in exclude] for name, nodes in ready.prefills.items()}
    return ReadyNodes({name: nodes for name, nodes in left.items() if nodes}, ready.decodes)


def _categories(scenario: Scenario, trace: Trace) -> Any:
    """The category of each request, where a target asks. Raises InputError for one that no request is of."""
    asked = [target.category for target in scenario.targets.some if target.category is not None]
    found = categories_of(trace) if asked else None
    for name in asked if found is not None else []:
        if found is not None and name not in found.names:
            raise InputError(f"slo: category {name!r}: no request is of it; there are {', '.join(found.names)}")
    return None if found is None else found.of_requests


def _caches(scenario: Scenario, trace: Trace) -> bool:
    return trace.blocks is not None and any(pool.cache_bytes for pool in scenario.pools)


def _sent(links: Sequence[SimulatedEgress], window_s: float, horizon_s: float) -> Floats:
    parts = [link.sent_per_window(window_s, horizon_s) for link in links]
    return np.sum(parts, axis=0) if parts else np.zeros(max(1, int(np.ceil(horizon_s / window_s))))


def _by_stage(busy: Mapping[tuple[str, str], tuple[float, float]]) -> dict[str, float]:
    """Busy over available time, all clusters together."""
    totals: dict[str, tuple[float, float]] = {}
    for (_, stage), (busy_s, available_s) in busy.items():
        done = totals.get(stage, (0.0, 0.0))
        totals[stage] = (done[0] + busy_s, done[1] + available_s)
    return {stage: busy_s / available_s for stage, (busy_s, available_s) in sorted(totals.items()) if available_s}


def simulate(scenario: Scenario, trace: Trace, seed: int = 0) -> SimulationOutcome:
    """Runs `trace` through `scenario`. The same arguments give the same result, to the bit."""
    return World(scenario, trace, seed).run()

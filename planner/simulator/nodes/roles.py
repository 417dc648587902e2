"""Which node has which role: the nodes of a scenario, who of them is ready, and their ways from one role to the other.

    ready ──► out of routing ──► drained ──► flipped and verified ──► ready, in the new role, with its cache
                                    └── too late, or unfit: ready, in the old role

A conversion takes what a live one takes (`pd_cluster/conversion.py`): as long as what runs needs to end, and `FlipTimes`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf, log
from typing import Any, Final

import numpy as np

from hybrid_cache.layout.layout import ModelLayout
from planner.decisions.plans.conversions import NodeStanding, why_not
from planner.decisions.routing.offload import ReadyNodes
from planner.decisions.views import ClusterKind, NodeView, Role
from planner.simulator.loop import Loop
from planner.simulator.nodes.caches import SimulatedCache, cache_of, pages_within
from planner.simulator.nodes.node import DecodeNode, PrefillNode, SimulatedRequest
from planner.simulator.scenario import Pool, Scenario
from planner.solve.control.controller import RoleMove

POLL_S: Final = 0.01  # how often a node that drains looks whether it has (`pd_cluster/converter.py`)

Z_P90: Final = 1.2815515655446004  # of the normal distribution

Node = PrefillNode | DecodeNode
TO: Final = {RoleMove.TO_PREFILL: Role.PREFILL, RoleMove.TO_DECODE: Role.DECODE}
Told = Callable[[float, SimulatedRequest], None]


class Roles:
    """All nodes of a scenario, by name and role. `on_changed()` is called when the ready ones are others than before."""

    def __init__(
        self,
        scenario: Scenario,
        layout: ModelLayout | None,
        loop: Loop,
        seed: int,
        *,
        on_start: Told,
        on_prefilled: Told,
        on_first_token: Told,
        on_decoded: Told,
    ) -> None:
        """Prefill nodes tell `on_start` and `on_prefilled` of each prompt, decode nodes the other two of each answer."""
        self._scenario = scenario
        self._layout = layout
        if layout is not None:
            finite = [pool for pool in scenario.pools if pool.cache_bytes < inf]
            pages_within(layout, sum(pool.cache_bytes * (pool.num_prefill + pool.num_decode) for pool in finite))
        self._loop = loop
        self._on_start, self._on_prefilled = on_start, on_prefilled
        self._on_first_token, self._on_decoded = on_first_token, on_decoded
        self.prefills = {
            name: self._prefill(name, pool, self._cache(pool))
            for pool in scenario.pools
            for name in (f"{pool.name}-p{index}" for index in range(pool.num_prefill))
        }
        self.decodes = {
            name: self._decode(name, pool, self._cache(pool))
            for pool in scenario.pools
            for name in (f"{pool.name}-d{index}" for index in range(pool.num_decode))
        }
        self.on_changed: Callable[[], None] = lambda: None
        self._flips = np.random.default_rng((seed, 2))
        self.converting = 0
        self.conversions: Counter[str] = Counter()  # by how they ended, as nodes call it
        self._retired: dict[tuple[str, str], tuple[float, float]] = {}
        self._sort()

    def _prefill(self, node_id: str, pool: Pool, cache: SimulatedCache | None) -> PrefillNode:
        return PrefillNode(node_id, pool, self._loop, cache, self._on_start, self._on_prefilled)

    def _decode(self, node_id: str, pool: Pool, cache: SimulatedCache | None) -> DecodeNode:
        return DecodeNode(
            node_id, pool, self._loop, self._on_first_token, self._on_decoded, cache, self._may_compute(pool)
        )

    def _may_compute(self, pool: Pool) -> bool:
        """Whether decode nodes of a cluster may have to compute prompts: short increments, or what no other node can."""
        if self._scenario.routing.increment_tokens > 0:
            return True
        wires = [wire for wire in self._scenario.wires if wire.destination == pool.name]
        return not (pool.num_prefill or wires) or any(rate <= 0 for wire in wires for _, rate in wire.capacity)

    def _cache(self, pool: Pool) -> SimulatedCache | None:
        if self._layout is None or not pool.cache_bytes:
            return None
        return cache_of(self._layout, pool.cache_bytes, self._scenario.eviction)

    # Who is ready

    def _sort(self) -> None:
        """Notes which nodes are ready; to be called when one becomes so or ceases to be."""
        self._ready_prefills: dict[str, list[PrefillNode]] = {}
        for node in self.prefills.values():
            if node.ready:
                self._ready_prefills.setdefault(node.pool.name, []).append(node)
        self._ready_decodes = [node for node in self.decodes.values() if node.ready]
        # What a prompt sees that can have nothing cached.
        self._blank_prefills: dict[str, list[NodeView]] = {
            name: [node.view(0) for node in nodes] for name, nodes in self._ready_prefills.items()
        }

    def seen_by(self, job: SimulatedRequest, now: float) -> ReadyNodes:
        """The ready nodes as a job sees them."""
        hashes, prompt = job.hashes, job.prompt
        if not hashes:
            return ReadyNodes(self._blank_prefills, [node.seen or node.view() for node in self._ready_decodes])
        prefills = {name: [node.view_for(job) for node in nodes] for name, nodes in self._ready_prefills.items()}
        return ReadyNodes(prefills, [node.view_for(hashes, prompt, now) for node in self._ready_decodes])

    def named(self, node_id: str) -> Node | None:
        """The node of that name, whatever its role."""
        return self.prefills.get(node_id) or self.decodes.get(node_id)

    def ready_pd_prefills(self) -> list[PrefillNode]:
        return [node for node in self.prefills.values() if node.pool.kind is ClusterKind.PD and node.ready]

    def ready_decodes(self) -> list[DecodeNode]:
        return self._ready_decodes

    # From one role to the other

    def convert(self, now: float, move: RoleMove) -> bool:
        """Has the node that is soonest drained change its role; False if none may."""
        candidates: Sequence[Node] = self.ready_pd_prefills() if move is RoleMove.TO_DECODE else self._ready_decodes
        node = min(candidates, key=lambda each: (each.num_jobs, each.node_id), default=None)
        if node is None or why_not(node.node_id, TO[move], self._standings()):
            return False
        node.ready = False
        self._sort()
        self.on_changed()
        self.converting += 1
        self._drain(now, (node, now + self._scenario.flips.drain_timeout_s))
        return True

    def _standings(self) -> Iterator[NodeStanding]:
        for role, nodes in ((Role.PREFILL, self.prefills), (Role.DECODE, self.decodes)):
            for node in nodes.values():
                yield NodeStanding(
                    node_id=node.node_id, cluster=node.pool.name, kind=node.pool.kind, role=role, is_ready=node.ready
                )

    def _drain(self, now: float, draining: tuple[Node, float]) -> None:
        node, deadline = draining
        if not node.num_jobs:
            self._loop.at(now + self._flip_s(), self._verified, node)
        elif now >= deadline:
            self._restore(node, "drain_timeout")
        else:
            self._loop.at(now + POLL_S, self._drain, draining)

    def _flip_s(self) -> float:
        flips = self._scenario.flips
        spread = log(flips.p90_s / flips.median_s) / Z_P90
        return flips.median_s * float(np.exp(spread * self._flips.standard_normal()))

    def _verified(self, now: float, node: Node) -> None:
        if self._flips.random() < self._scenario.flips.failing:
            self._restore(node, "verify_failed")
            return
        self._retire(node, now)
        if isinstance(node, PrefillNode):
            del self.prefills[node.node_id]
            self.decodes[node.node_id] = self._decode(node.node_id, node.pool, node.cache)
        else:
            del self.decodes[node.node_id]
            self.prefills[node.node_id] = self._prefill(node.node_id, node.pool, node.cache)
        self._ended("converted")

    def _restore(self, node: Node, outcome: str) -> None:
        node.ready = True
        self._ended(outcome)

    def _ended(self, outcome: str) -> None:
        self.conversions[outcome] += 1
        self.converting -= 1
        self._sort()
        self.on_changed()

    # How busy they were

    def _retire(self, node: Node, until: float) -> None:
        stage, busy_s, slots = _work_of(node)
        done = self._retired.get((node.pool.name, stage), (0.0, 0.0))
        available_s = max(0.0, until - node.since) * slots
        self._retired[node.pool.name, stage] = (done[0] + busy_s, done[1] + available_s)

    def busy(self, horizon: float) -> dict[tuple[str, str], tuple[float, float]]:
        """Busy and available seconds by cluster and stage; what changed its role counts while it had it."""
        nodes: list[Any] = [*self.prefills.values(), *self.decodes.values()]
        for node in nodes:
            self._retire(node, horizon)
        return self._retired


def _work_of(node: Node) -> tuple[str, float, int]:
    """Its stage, the seconds that it was busy, and how many of them it can be busy at once."""
    if isinstance(node, DecodeNode):
        return "pd_decode", node.slot_s, node.profile.max_running
    return "prfaas_compute" if node.pool.kind is ClusterKind.PRFAAS else "pd_prefill", node.busy_s, 1

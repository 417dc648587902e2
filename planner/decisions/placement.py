"""Which node inside a cluster: Mooncake's Algorithm 1 for prefill, load and the prefix already there for decode.

Four ways to place a prefill, by name, so that they can be compared:

    random           any ready node, drawn by the request's own `tie`
    least_loaded     the shortest queue
    cache_aware      the shortest predicted TTFT, counting only a node's own prefix
    kvcache_centric  the same, but a much longer prefix elsewhere in the cluster may be fetched first
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Final

import msgspec

from planner.decisions.views import NodeView, PrefillCost, RouteRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """Limits of node choice.

    `balancing_ratio`: a prefix elsewhere is fetched only when it is longer than the node's own by this factor
    (Algorithm 1's `kvcache_balancing_threshold`; near 1 copies hot prefixes eagerly, large values compute instead).
    `fetch_bytes_per_s`: rate of a prefix transfer inside a cluster; 0 says that there is none. `fetch_calls_s` is what every
    one takes beside its bytes, and `fetch_delays_s` what is feared beyond that, by (source, target) node: there some failed.
    `decode_load_slack`: how much busier a decode node may be for the sake of a prefix it already holds.
    """

    balancing_ratio: float = 1.5
    fetch_bytes_per_s: float = 0.0
    fetch_calls_s: float = 0.0
    fetch_delays_s: Mapping[tuple[str, str], float] = field(default_factory=dict, hash=False)
    decode_load_slack: float = 0.1

    def __post_init__(self) -> None:
        if self.balancing_ratio < 1:
            raise ValueError(f"balancing_ratio={self.balancing_ratio}: must be at least 1")
        if self.fetch_bytes_per_s < 0:
            raise ValueError(f"fetch_bytes_per_s={self.fetch_bytes_per_s}: must not be negative")

    def fetch_s(self, source: NodeView, target: NodeView, num_bytes: float) -> float:
        """Predicted time until a prefix of `num_bytes` has moved inside a cluster; there must be a rate."""
        return self.fetch_calls_s + num_bytes / self.fetch_bytes_per_s + self.fetch_delay_s(source, target)

    def fetch_delay_s(self, source: NodeView, target: NodeView) -> float:
        return self.fetch_delays_s.get((source.node_id, target.node_id), 0.0)


class PrefillChoice(msgspec.Struct, frozen=True, gc=False):
    """A prefill node, what it will find cached, and the TTFT predicted for it (queue, fetch and compute; no link).

    `fetch_from` names the node whose prefix is fetched first, None when the node's own is used;
    by `fetch_limit_s` the node would have computed as much itself, and a fetch that takes longer is not worth waiting for.
    """

    node: NodeView
    cached_tokens: int
    ttft_s: float
    fetch_from: str | None = None
    fetch_limit_s: float = 0.0


Placer = Callable[[RouteRequest, Sequence[NodeView], Sequence[NodeView], PlacementPolicy, PrefillCost], PrefillChoice]


def _on_own_prefix(request: RouteRequest, node: NodeView, cost: PrefillCost) -> PrefillChoice:
    compute_s = cost.prefill_s(node, request.num_tokens, node.cached_tokens)
    return PrefillChoice(node, node.cached_tokens, cost.queue_s(node) + compute_s)


def place_random(
    request: RouteRequest,
    nodes: Sequence[NodeView],
    holders: Sequence[NodeView],
    policy: PlacementPolicy,
    cost: PrefillCost,
) -> PrefillChoice:
    """Any of `nodes`."""
    return _on_own_prefix(request, nodes[int(request.tie * len(nodes)) % len(nodes)], cost)


def place_least_loaded(
    request: RouteRequest,
    nodes: Sequence[NodeView],
    holders: Sequence[NodeView],
    policy: PlacementPolicy,
    cost: PrefillCost,
) -> PrefillChoice:
    """The node with the shortest queue, whatever it has cached."""
    return _on_own_prefix(request, min(nodes, key=cost.queue_s), cost)


def place_cache_aware(
    request: RouteRequest,
    nodes: Sequence[NodeView],
    holders: Sequence[NodeView],
    policy: PlacementPolicy,
    cost: PrefillCost,
) -> PrefillChoice:
    """The node with the shortest predicted TTFT on its own prefix."""
    return _soonest(request, nodes, cost.queues_s(nodes), cost)


def _soonest(
    request: RouteRequest, nodes: Sequence[NodeView], queues_s: Sequence[float], cost: PrefillCost
) -> PrefillChoice:
    best, best_s = nodes[0], float("inf")
    num_tokens, prefill_s = request.num_tokens, cost.prefill_s
    for node, queue_s in zip(nodes, queues_s, strict=True):
        if queue_s < best_s:
            ttft_s = queue_s + prefill_s(node, num_tokens, node.cached_tokens)
            if ttft_s < best_s:
                best, best_s = node, ttft_s
    return PrefillChoice(best, best.cached_tokens, best_s)


def place_kvcache_centric(
    request: RouteRequest,
    nodes: Sequence[NodeView],
    holders: Sequence[NodeView],
    policy: PlacementPolicy,
    cost: PrefillCost,
) -> PrefillChoice:
    """Mooncake's Algorithm 1 (§4.1): the shortest fetch + queue + compute over all nodes.

    `holders` are all nodes of the cluster whose prefixes can be fetched; the prefill nodes are usually among them.
    Beyond the algorithm, a fetch that takes longer than computing is not made.
    """
    queues_s = cost.queues_s(nodes)
    choice = _soonest(request, nodes, queues_s, cost)
    holder = longest_holder(holders)
    if not policy.fetch_bytes_per_s or request.kv_bytes is None or holder is None:
        return choice
    longest = holder.movable_tokens
    for node, queue_s in zip(nodes, queues_s, strict=True):
        if queue_s >= choice.ttft_s or longest <= (node.cached_tokens or 1) * policy.balancing_ratio:
            continue
        compute_s = cost.prefill_s(node, request.num_tokens, longest)
        if queue_s + compute_s >= choice.ttft_s:
            continue  # however fast the fetch
        # A linear state is fetched whole, so an own prefix saves only what grows with length. The fetch runs while the
        # request waits, so only what outlasts the queue is seen.
        fetch_bytes = request.kv_bytes(longest) - request.kv_bytes(node.cached_tokens)
        ttft_s = max(queue_s, policy.fetch_s(holder, node, fetch_bytes)) + compute_s
        if ttft_s < choice.ttft_s:
            limit_s = queue_s + cost.prefill_s(node, request.num_tokens, node.cached_tokens) - compute_s
            choice = PrefillChoice(node, longest, ttft_s, holder.node_id, limit_s)
    return choice


_movable_tokens = attrgetter("movable_tokens")


def longest_holder(nodes: Sequence[NodeView]) -> NodeView | None:
    """The first of the nodes that can send the longest prefix; None of no nodes."""
    return max(nodes, key=_movable_tokens, default=None)


PLACERS: Final = MappingProxyType[str, Placer](
    {
        "random": place_random,
        "least_loaded": place_least_loaded,
        "cache_aware": place_cache_aware,
        "kvcache_centric": place_kvcache_centric,
    }
)


def choose_decode(nodes: Sequence[NodeView], policy: PlacementPolicy) -> NodeView:
    """The decode node that holds most of the prefix among those hardly busier than the least busy one.

    `nodes` must not be empty. Ties go to the less busy, then to the earlier one.
    """
    best, best_load, warm = nodes[0], float("inf"), False
    for node in nodes:
        load = (node.running + node.waiting) / node.max_running
        if load < best_load:
            best, best_load = node, load
        warm = warm or node.attention_tokens > 0
    return _warmest(nodes, best, best_load + policy.decode_load_slack) if warm else best


def _warmest(nodes: Sequence[NodeView], idlest: NodeView, limit: float) -> NodeView:
    within = [node for node in nodes if node.load <= limit]
    return max(within, key=lambda node: (node.attention_tokens, -node.load), default=idlest)

"""Which node inside a cluster: Mooncake's Algorithm 1 for prefill, predicted TBT and the prefix already there for decode.

Five ways to place, by name, so that they can be compared, live and simulated:

    name             prefill                                              decode
    random           any ready node                                       any: both drawn by the request's own `tie`
    least_loaded     the shortest queue                                   the least load
    cache_aware      the shortest predicted TTFT on a node's own prefix   most of the prefix, of those hardly slower than others
    netkv            the same                                             the least transfer, in seconds, plus load (NetKV)
    kvcache_centric  the same, but a much longer prefix elsewhere in the  as cache_aware, by predicted TBT
                     cluster may be fetched first

`cache_aware` and `kvcache_centric` are the two forms of Algorithm 1.
"""

from collections.abc import Callable, Sequence
from math import inf
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from planner.decisions.routing.policy import PlacementPolicy
from planner.decisions.views import NodeView, PrefillCost, RouteRequest

NOMINAL_STEP_S: Final = 0.025  # of a decode step nothing is known of: 40 tokens per second, the usual SLO
DECODE_CHANCE: Final = 7919  # a prime: which decode node chance names says nothing of the prefill node


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


PrefillPlacer = Callable[
    [RouteRequest, Sequence[NodeView], Sequence[NodeView], PlacementPolicy, PrefillCost], PrefillChoice
]
DecodeChooser = Callable[[RouteRequest, Sequence[NodeView], PlacementPolicy, PrefillCost], NodeView]


class Placer(NamedTuple):
    """A way to place. Neither list of nodes is ever empty."""

    prefill: PrefillPlacer
    decode: DecodeChooser


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
    """The node with the shortest queue; caches do not count."""
    return _on_own_prefix(request, min(nodes, key=cost.queue_s), cost)


def place_cache_aware(
    request: RouteRequest,
    nodes: Sequence[NodeView],
    holders: Sequence[NodeView],
    policy: PlacementPolicy,
    cost: PrefillCost,
) -> PrefillChoice:
    """The node with the shortest predicted TTFT on its own prefix."""
    return _cheapest(request, nodes, cost.queues_s(nodes), 0.0, cost)


def soonest_s(request: RouteRequest, nodes: Sequence[NodeView], cost: PrefillCost) -> float:
    """When the first of `nodes` would have computed the prompt, each from its own prefix on."""
    soonest, num_tokens = inf, request.num_tokens
    for node, queue_s in zip(nodes, cost.queues_s(nodes), strict=True):
        if queue_s < soonest:  # else no prefill is short enough, and predicting it takes longer than all else here
            soonest = min(soonest, queue_s + cost.prefill_s(node, num_tokens, node.cached_tokens))
    return soonest


def _cheapest(
    request: RouteRequest, nodes: Sequence[NodeView], queues_s: Sequence[float], price: float, cost: PrefillCost
) -> PrefillChoice:
    best, best_s, ttft_s = nodes[0], inf, 0.0
    num_tokens, prefill_s = request.num_tokens, cost.prefill_s
    for node, queue_s in zip(nodes, queues_s, strict=True):
        if queue_s < best_s:
            compute_s = prefill_s(node, num_tokens, node.cached_tokens)
            seconds = queue_s + compute_s + price * compute_s
            if seconds < best_s:
                best, best_s, ttft_s = node, seconds, queue_s + compute_s
    return PrefillChoice(best, best.cached_tokens, ttft_s)


def place_kvcache_centric(
    request: RouteRequest,
    nodes: Sequence[NodeView],
    holders: Sequence[NodeView],
    policy: PlacementPolicy,
    cost: PrefillCost,
) -> PrefillChoice:
    """Mooncake's Algorithm 1 (§4.1): the shortest fetch + queue + compute over all nodes.

    `holders` are all nodes of the cluster whose prefixes can be fetched; the prefill nodes are usually among them.
    Beyond the algorithm, a fetch that takes longer than computing is not made, and computing has a price while nodes are busy:
    without it every prompt is computed again wherever that is sooner for itself, until everybody waits.
    """
    queues_s = cost.queues_s(nodes)
    price = policy.compute_price(queues_s)
    choice = _cheapest(request, nodes, queues_s, price, cost)
    if not policy.fetch_bytes_per_s or request.kv_bytes is None:
        return choice
    holder = longest_holder(holders)
    if holder is None or not holder.movable_tokens:
        return choice
    best_s = choice.ttft_s + price * cost.prefill_s(choice.node, request.num_tokens, choice.cached_tokens)
    longest, ratio = holder.movable_tokens, policy.ratio
    longest_bytes = request.kv_bytes(longest)
    for node, queue_s in zip(nodes, queues_s, strict=True):
        if queue_s >= best_s or longest <= (node.cached_tokens or 1) * ratio:
            continue
        compute_s = cost.prefill_s(node, request.num_tokens, longest)
        if queue_s + compute_s + price * compute_s >= best_s:
            continue  # however fast the fetch
        # A linear state is fetched whole, so an own prefix saves only what grows with length. The fetch runs while the
        # request waits, so only what outlasts the queue is seen.
        fetch_bytes = longest_bytes - request.kv_bytes(node.cached_tokens)
        ttft_s = max(queue_s, policy.fetch_s(holder, node, fetch_bytes)) + compute_s
        if ttft_s + price * compute_s < best_s:
            best_s = ttft_s + price * compute_s
            limit_s = queue_s + cost.prefill_s(node, request.num_tokens, node.cached_tokens) - compute_s
            choice = PrefillChoice(node, longest, ttft_s, holder.node_id, limit_s)
    return choice


def longest_holder(nodes: Sequence[NodeView]) -> NodeView | None:
    """The first of the nodes that can send the longest prefix; None of no nodes."""
    best, most = None, -1
    for node in nodes:
        # `movable_tokens`, without a call: all nodes are asked, several times for each request.
        movable = node.cached_tokens - node.immovable_tokens
        if movable > most:
            best, most = node, movable
    return best


def decode_random(
    request: RouteRequest, nodes: Sequence[NodeView], policy: PlacementPolicy, cost: PrefillCost
) -> NodeView:
    """Any of `nodes`."""
    return nodes[int(request.tie * DECODE_CHANCE * len(nodes)) % len(nodes)]


def decode_least_loaded(
    request: RouteRequest, nodes: Sequence[NodeView], policy: PlacementPolicy, cost: PrefillCost
) -> NodeView:
    """The node with the fewest requests for what it can run, whatever it holds."""
    return min(nodes, key=_load)


def decode_netkv(
    request: RouteRequest, nodes: Sequence[NodeView], policy: PlacementPolicy, cost: PrefillCost
) -> NodeView:
    """NetKV's greedy rule (arXiv 2606.03910): the least predicted time of the transfer to the node, plus what its load costs.

    The network's cost is that of the bytes that the node lacks; its load costs the prompt a step of each request ahead.
    """
    rate = policy.fetch_bytes_per_s

    def seconds(node: NodeView) -> float:
        lacks = request.num_tokens - node.due_tokens
        transfer_s = request.kv_bytes(lacks) / rate if rate and request.kv_bytes is not None else float(lacks)
        return transfer_s + node.load * (cost.step_s(node, node.running + node.waiting + 1) or NOMINAL_STEP_S)

    return min(nodes, key=seconds)


def choose_decode(
    request: RouteRequest, nodes: Sequence[NodeView], policy: PlacementPolicy, cost: PrefillCost
) -> NodeView:
    """The decode node that holds most of the prefix, or is about to, among those with hardly more than the least predicted TBT.

    Nodes without a place, or without memory for the prompt and its predicted answer, come last. While no node's TBT is known,
    load stands for it. Ties go to the less busy, then to the earlier one.
    """
    able = able_to_decode(request, nodes)
    steps_s = cost.steps_s(able)
    if 0.0 in steps_s:  # not known of all
        loads = [node.load for node in able]
        limit = min(loads) + policy.decode_load_slack
    else:
        loads = steps_s
        limit = min(loads) * (1.0 + policy.decode_load_slack)
    best, most, least = able[0], -1, inf
    for node, slowness in zip(able, loads, strict=True):
        if slowness > limit:
            continue
        # `due_tokens` and `load`, without calls: all nodes are asked.
        due, landing = node.attention_tokens, node.landing_tokens
        if landing > due:
            due = landing
        if due >= most:
            load = (node.running + node.waiting) / node.max_running
            if due > most or load < least:
                best, most, least = node, due, load
    return best


def able_to_decode(request: RouteRequest, nodes: Sequence[NodeView]) -> Sequence[NodeView]:
    """Those with memory and a place; else with memory, else with a place; else all."""
    num_tokens, answer_tokens = request.num_tokens, request.answer_tokens
    able = [
        node
        for node in nodes
        if node.running + node.waiting < node.max_running
        # `has_memory`, without a call: all nodes are asked.
        and ((room := node.room_tokens) is None or room >= num_tokens - node.attention_tokens + answer_tokens)
    ]
    if able:
        return able
    in_memory = [node for node in nodes if has_memory(node, request)] or nodes
    return [node for node in in_memory if node.running + node.waiting < node.max_running] or in_memory


def has_memory(node: NodeView, request: RouteRequest) -> bool:
    """Whether a decode node has memory for the prompt and its predicted answer, as far as it says."""
    if node.room_tokens is None:
        return True
    return node.room_tokens >= request.num_tokens - node.attention_tokens + request.answer_tokens


_load = attrgetter("load")

PLACERS: Final = MappingProxyType[str, Placer](
    {
        "random": Placer(place_random, decode_random),
        "least_loaded": Placer(place_least_loaded, decode_least_loaded),
        "cache_aware": Placer(place_cache_aware, choose_decode),
        "netkv": Placer(place_cache_aware, decode_netkv),
        "kvcache_centric": Placer(place_kvcache_centric, choose_decode),
    }
)
